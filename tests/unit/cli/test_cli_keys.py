"""The reference of the JSON documents is printed from the reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from docs.json_keys import (
    ADDED,
    REPORTS,
    classes_of,
    keys_of,
    keys_of_command,
    page,
    parts_of,
)
from semel.cli.messages import Payload
from tests import snapshots

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "json.md"

SHOW_PAYLOADS = {"dlq show", "parking show", "replay dry-run"}
"""The first two are audited; the third shows what a handler would send."""

ENVELOPE = {"command", "format", "exit", "error"}


def each(commands: str) -> list[str]:
    """Return ``dlq park`` and ``dlq skip`` for ``dlq park | skip``."""
    first, *others = commands.split(" | ")
    return [first, *(f"{first.rpartition(' ')[0]} {other}" for other in others)]


def kept_documents() -> list[dict[str, Any]]:
    """Return the documents of all commands that the snapshots have, but for errors."""
    files = sorted(snapshots.FOLDER.glob("*.json"))
    every = [one for file in files for one in json.loads(file.read_text()).values()]
    return [one for one in every if isinstance(one, dict) and "error" not in one]


def test_the_page_is_the_codes_own():
    # Write it anew with: make docs
    assert PAGE.read_text() == page()


@pytest.mark.parametrize("command", REPORTS)
def test_no_key_hides_one_of_the_envelopes(command):
    names = [key.name for key in keys_of_command(command)]

    assert len(names) == len(set(names))
    assert not set(names) & ENVELOPE


@pytest.mark.parametrize("commands", ADDED)
def test_the_page_lists_the_keys_that_a_command_adds(commands):
    listed = {key.name for key in keys_of_command(commands)}
    names = each(commands)

    documents = [one for one in kept_documents() if one["command"] in names]

    assert {one["command"] for one in documents} == set(names)
    for document in documents:
        assert set(ADDED[commands]) <= set(document)
        assert set(document) - ENVELOPE <= listed


@pytest.mark.parametrize("command", REPORTS)
def test_bytes_of_a_message_are_only_shown_as_a_payload(command):
    kinds = {REPORTS[command], *parts_of(REPORTS[command])}

    raw = [
        (kind.__name__, key.name)
        for kind in kinds
        for key in keys_of(kind)
        if bytes in classes_of(key.hint)
    ]

    assert raw == []
    assert Payload not in kinds or command in SHOW_PAYLOADS


def test_links_on_the_page_lead_to_its_parts():
    text = page()
    wanted = {part.partition(")")[0] for part in text.split("](#")[1:]}
    headings = {line[3:].lower() for line in text.splitlines() if line.startswith("## ")}

    assert wanted <= headings
