"""What an operator types wrongly is named with its exit code, and is never a fault of semel."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from semel.cli import answer as answers
from semel.cli import database as cli_database
from semel.cli.answer import Answer
from semel.cli.app import app
from semel.cli.database import Books
from semel.operate.stores import Act
from tests.stores.deadletters import LETTER

TOO_LARGE = "99999999999999999999"
ON = ("--consumer", "billing")


NO_TEXT = "caf\udce9"
"""How Python reads an argument that is not UTF-8."""


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("dlq", "list", "--consumer", NO_TEXT), "--consumer"),
        (("dlq", "list", "--topic", NO_TEXT), "--topic"),
        (("dlq", "list", "--error-code", NO_TEXT), "--error-code"),
        (("parking", "list", "--label", NO_TEXT), "--label"),
        (("parking", "skip", "m-1", *ON, "--reason", NO_TEXT, "--yes"), "--reason"),
        (("parking", "skip", "m-1", *ON, "--reason", "x", "--actor", NO_TEXT), "--actor"),
        (("replay", "status", NO_TEXT), "NAME"),
        (("outbox", "status", "--outbox", NO_TEXT), "--outbox"),
        (("gaps", "list", "--consumer", NO_TEXT), "--consumer"),
        (("retention", "--consumer", NO_TEXT, "--yes"), "--consumer"),
        (("audit", "completeness", "--consumer", NO_TEXT), "--consumer"),
    ],
)
def test_an_argument_that_is_no_text_is_a_mistake(books, command, option):
    error = books.ask(*command, code=2)["error"]

    assert error.startswith(f"{option}: ")
    assert "is not UTF-8 text" in error


def test_ids_and_keys_may_be_any_bytes_as_those_of_messages(books):
    letter = replace(LETTER, message_id=NO_TEXT, key=NO_TEXT)

    async def bury(world):
        async with world.database.begin() as unit:
            await unit.dead_letters.put(letter)

    books.fill(bury)

    assert books.ask("dlq", "list", "--key", NO_TEXT)["total"] == 1
    assert books.act("dlq", "skip", NO_TEXT, *ON)["messages"][0]["done"]


@pytest.mark.postgres
@pytest.mark.parametrize("command", [("dlq", "list"), ("db", "check"), ("replay", "list")])
def test_a_database_that_its_server_does_not_have_is_a_mistake(books, postgres_server, command):
    url = postgres_server.url_of("nowhere")

    error = books.ask(*command, "--database", url, code=2)["error"]

    assert 'database "nowhere" does not exist' in error
    assert "correct the URL" in error


@pytest.mark.postgres
@pytest.mark.parametrize("command", [("dlq", "list"), ("db", "create")])
def test_a_role_that_its_server_does_not_have_is_a_mistake(books, postgres_url, command):
    _, _, where = postgres_url.partition("@")

    error = books.ask(*command, "--database", f"postgresql://eve:s3cret@{where}", code=2)["error"]

    assert "eve" in error
    assert "s3cret" not in error
    assert "correct the role" in error


@pytest.mark.parametrize("command", [("dlq", "list"), ("db", "check"), ("audit", "verify")])
def test_a_file_that_is_no_database_is_unusable(books, tmp_path, command):
    file = tmp_path / "notes.txt"
    file.write_text("not a database at all, and long enough to be looked at" * 20)

    error = books.ask(*command, "--database", f"sqlite:///{file}", code=4)["error"]

    assert str(file) in error
    assert "name another file" in error


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (("dlq", "list", "--limit", TOO_LARGE), "--limit"),
        (("audit", "list", "--after", TOO_LARGE), "--after"),
        (("audit", "list", "--after", "-1"), "--after"),
        (("parking", "approve", TOO_LARGE, "--yes"), "NUMBER"),
        (("dlq", "list", "--limt", "3"), "--limt"),
        (("dlq", "lst"), "lst"),
        (("dlq", "show", "m1"), "--consumer"),
    ],
)
def test_a_wrong_argument_is_answered_in_json_where_that_was_asked_for(books, typed, said):
    document = books.ask(*typed, code=2)

    assert said in document["error"]
    assert document["format"] == 1
    assert document["command"] == " ".join(typed[:2] if typed[1] != "lst" else typed[:1])


def test_a_wrong_argument_without_json_prints_none(books):
    done = CliRunner().invoke(app, ["dlq", "list", "--limit", TOO_LARGE])

    assert done.exit_code == 2
    assert done.stdout == ""


def test_only_commands_that_can_rehearse_are_told_so(books):
    error = books.ask("erase", "--key", "k", "--reason", "asked", code=2)["error"]

    assert "add --yes" in error
    assert "--dry-run" not in error


def test_a_payload_that_cannot_be_read_is_named(books, tmp_path, monkeypatch):
    file = tmp_path / "fixed.json"
    file.write_text("{}")

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.read_bytes", denied)

    fixing = ("parking", "fix", "m1", *ON, "--payload", file, "--keep-id")
    error = books.act(*fixing, code=2)["error"]

    assert f"{file} cannot be read: Permission denied" in error


def test_a_long_verification_says_how_far_it_is(books, monkeypatch):
    monkeypatch.setattr(answers, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr("semel.operate.audit.PAGE", 2)

    async def acts(world):
        async with world.database.begin() as unit:
            for number in range(3):
                await unit.audit.append(Act("ann", "dlq.inspect", "billing", f"m{number}"))

    books.fill(acts)
    done = CliRunner().invoke(app, ["audit", "verify", "--json"])

    assert "2 of 3 entries are whole so far" in done.stderr
    assert json.loads(done.stdout)["whole"] is True


def test_a_question_that_takes_long_says_that_it_is_still_at_work(books, monkeypatch):
    monkeypatch.setattr(cli_database, "STILL_SECONDS", 0.01)
    told = []

    async def slow(database):
        while not told:
            await asyncio.sleep(0.01)

    answer = Answer("audit list", as_json=True, debug=False)
    monkeypatch.setattr(answer, "tell", lambda far: told.append(far()))
    Books(books.url, answer).ask(slow)

    assert told[0].startswith("still at work")


def test_an_error_of_the_database_shows_no_parameters(books):
    async def forbid(world):
        refuse = "BEFORE INSERT ON audit_entry BEGIN SELECT RAISE(ABORT, 'not here'); END"
        async with world.database.engine.begin() as connection:
            await connection.exec_driver_sql(f"CREATE TRIGGER refuse {refuse}")

    books.fill(forbid)
    typed = ("erase", "--message", "alice-7", "--actor", "ann", "--reason", "asked", "--yes")

    error = books.ask(*typed, code=4)["error"]
    text = books.read(*typed, "--debug", code=4)

    assert "IntegrityError: not here" in error
    assert "remove the triggers, constraints and policies that were added" in error
    assert "IntegrityError: not here" in text
    assert "Traceback" in text
    assert "erase.py" in text
    for shown in (error, text):
        assert "alice-7" not in shown
        assert "parameters: " not in shown


@pytest.mark.parametrize(
    "command",
    [
        ("dlq", "retry", "nobody", *ON),
        ("dlq", "park", "nobody", *ON),
        ("dlq", "skip", "nobody", *ON),
        ("parking", "release", "nobody", *ON),
        ("parking", "release", "--key", "nobody", *ON),
        ("parking", "skip", "nobody", *ON),
        ("outbox", "retry", "nobody"),
        ("outbox", "drop", "nobody"),
        ("replay", "stop", "nobody"),
        ("replay", "abandon", "nobody"),
    ],
)
def test_what_does_not_exist_is_a_mistake_with_and_without_yes(books, command):
    error = books.act(*command, code=2)["error"]
    read = books.read(*command, "--actor", "ann", "--reason", "because", answer="y\n", code=2)

    assert "nobody" in error
    assert "[y/N]" not in read


def test_nothing_is_asked_about_a_message_to_erase_that_nobody_knows(books):
    who = ("--actor", "ann", "--reason", "because")
    read = books.read("erase", "--message", "nobody", *who, answer="y\n", code=2)

    assert "no consumer knows message 'nobody'" in " ".join(read.split())
    assert "[y/N]" not in read
    assert books.act("erase", "--message", "nobody")["dead_letters"] == 0
