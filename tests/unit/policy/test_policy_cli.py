"""`semel policy` lints, shows and describes policy files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from semel.cli.app import app
from semel.policy.model import policy_schema
from tests.unit.policy.policy_texts import CLEAN_CONSUMER, CLEAN_TOPIC, TEMPLATE, merged, text_of


@pytest.fixture
def template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("policy.yaml").write_text(TEMPLATE)
    return "policy.yaml"


def typed(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["policy", *arguments])
    assert done.exit_code == code, done.output
    return done.output


def asked(*arguments: str, code: int = 0) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(typed(*arguments, "--json", code=code))
    assert document["exit"] == code
    return document


def test_findings_end_the_lint_with_one(template):
    text = typed("lint", template, code=1)

    assert "search-indexer on case-events" in text
    assert "effectively-once for rows in the handler's database" in text
    assert "warn dlq-without-owner (anti-pattern: a DLQ with no owner)" in text
    assert "line 33, deliverySemantics.consumers.notification-sender.dlq.owner" in text
    assert text.endswith("policy.yaml: 0 refusals, 3 warnings\n")


def test_notes_and_open_questions_do_not_count(template):
    text = typed("lint", template, "--consumer", "search-indexer")

    assert "note dead-letter-leaves-hole" in text
    assert "unknown" in text
    assert "notification-sender" not in text


def test_a_warning_counts(tmp_path):
    file = tmp_path / "p.yaml"
    file.write_text(text_of(merged(CLEAN_CONSUMER, {"lagSlo": None}), CLEAN_TOPIC))

    assert typed("lint", str(file), code=1).endswith("0 refusals, 1 warning\n")


def test_topics_that_nobody_reads_are_noted(tmp_path):
    file = tmp_path / "p.yaml"
    file.write_text("deliverySemantics: {topics: {lonely: {}}}")

    assert "no consumer of this file reads topic lonely" in typed("lint", str(file))


def test_the_document_has_everything_that_people_see(template):
    document = asked("lint", template, code=1)

    assert (document["command"], document["refused"], document["warnings"]) == ("policy lint", 0, 3)
    sender = document["reviews"][1]
    assert sender["consumer"] == "notification-sender"
    assert sender["promises"][1]["semantics"] == "effectively-once"
    assert sender["findings"][0]["anti_pattern"] == "a DLQ with no owner"
    assert sender["findings"][0]["line"] == 33
    assert len(sender["answers"]) == 20
    assert sender["answers"][13]["status"] == "warn"


def test_an_invalid_file_ends_with_two_and_every_problem(tmp_path):
    file = tmp_path / "p.yaml"
    file.write_text("deliverySemantics:\n  topic: {}\n  consumers: {c: {mode: lease}}\n")

    for command in ("lint", "show"):
        lines = typed(command, str(file), code=2).splitlines()
        document = asked(command, str(file), code=2)

        assert [line.removeprefix(f"{file}:")[:1] for line in lines] == ["2", "3"]
        assert "did you mean topics?" in lines[0]
        assert [problem["line"] for problem in document["problems"]] == [2, 3]
        assert document["problems"][1]["suggestion"] == "leased"
        assert document["error"] == f"{file}: the policy is invalid"


def test_a_file_that_is_not_there_ends_with_two(tmp_path):
    assert "No such file" in typed("lint", str(tmp_path / "none.yaml"), code=2)


@pytest.mark.parametrize("command", ["lint", "show"])
def test_a_consumer_that_is_not_there_is_named_with_the_nearest(template, command):
    text = typed(command, template, "--consumer", "search-indexr", code=2)

    assert "did you mean search-indexer?" in text


def keys_of(document: dict[str, Any]) -> dict[str, tuple[str, str]]:
    (policy,) = document["policies"]
    return {key["key"]: (key["value"], key["origin"]) for key in policy["keys"]}


def test_every_value_is_shown_with_where_it_comes_from(template):
    found = keys_of(asked("show", template, "--consumer", "search-indexer"))

    assert found["topic key"] == ("caseId", "line 5")
    assert found["ordering"] == ("per-key", "topic, line 6")
    assert found["retry.maxAttempts"] == ("5", "line 17")
    assert found["retry.jitter"] == ("true", "default: as backoff says")
    assert found["mode"] == ("transactional", "default")
    assert found["lease"] == ("-", "default")
    assert found["claims.ttl"][0] == "14d"
    assert found["parking.owner"] == ("search-team", "default: dlq.owner")
    assert found["sideEffects"][0] == "none"


def test_the_winner_is_shown_where_both_speak(tmp_path):
    file = tmp_path / "p.yaml"
    file.write_text(
        text_of(
            {"ordering": "none", "replay": {"allowed": False}},
            {**CLEAN_TOPIC, "ordering": "per-key"},
        )
    )

    found = keys_of(asked("show", str(file)))

    assert found["ordering"] == ("per-key", "topic, line 6, the stronger one")
    assert found["replay.allowed"] == ("false", "consumer, line 13, the one that allows less")
    assert found["guarantee"] == ("at-least-once", "topic, line 4")


def test_side_effects_that_are_implied_are_shown(template):
    found = keys_of(asked("show", template, "--consumer", "notification-sender"))

    assert found["sideEffects"][0] == "{name: notification, idempotencyKey: true}"


def test_what_is_shown_can_be_narrowed_to_a_topic(template):
    text = typed("show", template, "--topic", "case-events")

    assert "search-indexer on case-events" in text
    assert "notification-sender on case-events" in text
    assert "there is no topic 'case-event'" in typed(
        "show", template, "--topic", "case-event", code=2
    )


def test_the_schema_is_printed_as_it_goes_into_a_file():
    assert json.loads(typed("schema")) == policy_schema()
    assert asked("schema")["schema"] == policy_schema()
