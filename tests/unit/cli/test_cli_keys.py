"""The reference of the JSON documents is printed from the reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from semel.cli.keys import REPORTS, keys_of, page

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "json.md"


def test_the_page_is_the_codes_own():
    # Write it anew with: python -c "from semel.cli.keys import page; print(page(), end='')"
    assert PAGE.read_text() == page()


@pytest.mark.parametrize("command", REPORTS)
def test_no_key_hides_one_of_the_envelopes(command):
    names = {key.name for key in keys_of(REPORTS[command])}

    assert not names & {"command", "format", "exit", "error"}


def test_links_on_the_page_lead_to_its_parts():
    text = page()
    wanted = {part.partition(")")[0] for part in text.split("](#")[1:]}
    headings = {line[3:].lower() for line in text.splitlines() if line.startswith("## ")}

    assert wanted <= headings
