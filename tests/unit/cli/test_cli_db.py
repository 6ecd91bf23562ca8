"""`semel db create | upgrade | check`, on SQLite and on PostgreSQL."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import psycopg
import pytest
from typer.testing import CliRunner

from semel.cli.app import app


def ask(*arguments, code=0):
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file that is not there yet, and that the environment names."""
    path = tmp_path / "shop.db"
    monkeypatch.setenv("SEMEL_DATABASE", f"sqlite:///{path}")
    return path


def harm(file, *statements):
    with closing(sqlite3.connect(file)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def test_tables_are_made_once(file):
    made = ask("db", "create")

    assert (made["before"], made["after"], made["changed"]) == (None, 1, True)
    assert ask("db", "create")["changed"] is False
    assert ask("db", "upgrade")["changed"] is False
    assert ask("db", "check")["problems"] == []


def test_asking_makes_no_file(file):
    for command in ("check", "upgrade"):
        assert "semel db create" in ask("db", command, code=2)["error"]

    assert not file.exists()


def test_what_is_missing_is_printed_with_the_way_out(file):
    ask("db", "create")
    harm(file, "DROP INDEX ix_processed_message_age")

    (problem,) = ask("db", "check", code=1)["problems"]
    printed = CliRunner().invoke(app, ["db", "check"])

    assert problem["what"] == "index ix_processed_message_age of table processed_message is missing"
    assert problem["way_out"].startswith("CREATE INDEX ix_processed_message_age")
    assert printed.exit_code == 1
    assert problem["what"] in printed.stdout
    assert problem["way_out"] in printed.stdout


def test_what_was_done_is_printed(file):
    made = CliRunner().invoke(app, ["db", "create"])
    again = CliRunner().invoke(app, ["db", "create"])
    harm(file, "DELETE FROM semel_messaging")
    adopted = CliRunner().invoke(app, ["db", "upgrade"])
    checked = CliRunner().invoke(app, ["db", "check"])

    assert "made the tables of version 1" in made.stdout
    assert "have version 1 already" in again.stdout
    assert "wrote down that they have version 1" in adopted.stdout
    assert "nothing is missing" in checked.stdout


def test_an_upgrade_makes_the_tables_in_a_database_that_is_there(file):
    file.touch()

    made = ask("db", "upgrade")

    assert (made["before"], made["after"], made["changed"]) == (None, 1, True)
    assert ask("db", "check")["problems"] == []


def test_a_table_of_somebody_elses_is_refused(file):
    harm(file, "CREATE TABLE processed_message (id text)")

    error = ask("db", "create", code=4)["error"]

    assert "processed_message that semel did not make; rename it" in error


def test_tables_of_a_newer_semel_are_refused(file):
    ask("db", "create")
    harm(file, "UPDATE semel_messaging SET version = 99")

    for command in ("create", "upgrade"):
        assert "upgrade semel" in ask("db", command, code=4)["error"]
    assert ask("db", "check", code=1)["problems"][0]["way_out"] == "upgrade semel"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mysql://ann:s3cret@db/shop", "PostgreSQL or SQLite"),
        ("nonsense", "is not the URL of a database"),
        ("sqlite://", "name a file"),
        ("sqlite:////no/such/folder/shop.db", "there is no folder /no/such/folder"),
    ],
)
def test_a_database_that_cannot_be_is_named_as_a_mistake(url, said):
    error = ask("db", "create", "--database", url, code=2)["error"]

    assert said in error
    assert "s3cret" not in error


def test_a_database_that_does_not_answer_may_answer_later_and_its_password_stays_hidden():
    url = "postgresql://ann:s3cret@127.0.0.1:1/shop"

    done = CliRunner().invoke(app, ["db", "create", "--database", url, "--debug"])

    assert done.exit_code == 75
    assert "s3cret" not in done.output + done.stderr


@pytest.mark.postgres
def test_tables_in_postgres_are_made_and_checked(postgres_url):
    made = ask("db", "create", "--database", postgres_url)

    assert made["changed"] is True
    assert ask("db", "check", "--database", postgres_url)["problems"] == []
    with psycopg.connect(postgres_url) as connection:
        connection.execute("ALTER TABLE semel.dead_letter ALTER COLUMN payload TYPE text")
    (problem,) = ask("db", "check", "--database", postgres_url, code=1)["problems"]
    assert problem["what"] == "column payload of table dead_letter has the type TEXT, not BYTEA"


@pytest.mark.postgres
def test_a_database_that_does_not_exist_is_named(postgres_server):
    url = postgres_server.url_of("nowhere")

    error = ask("db", "create", "--database", url, code=2)["error"]

    assert 'database "nowhere" does not exist; create it' in error
