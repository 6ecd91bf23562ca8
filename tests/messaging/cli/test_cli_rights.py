"""A role without the rights on semel's tables is told which one is missing, and the way out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import psycopg
import pytest

from tests.stores.deadletters import LETTER
from tests.stores.world import DatabaseWorld
from tests.unit.postgres.postgres_place import create_role

pytestmark = pytest.mark.postgres

ROLE = "semel_reader"
ON = ("--consumer", "billing")
WHO = ("--actor", "ann", "--reason", "asked", "--yes")
EVERY_TABLE = "ALL TABLES IN SCHEMA semel"


@pytest.fixture
def role_url(books, postgres_url: str) -> Iterator[str]:
    """The URL of a role that may do nothing yet, in a database with semel's tables."""
    books.ask("db", "create", "--database", postgres_url)
    books.url = postgres_url
    books.fill(_bury)
    created = create_role(postgres_url, ROLE)
    _do(postgres_url, f"GRANT USAGE ON SCHEMA semel TO {ROLE}")
    yield created
    _do(postgres_url, f"DROP OWNED BY {ROLE}", f"DROP ROLE {ROLE}")


async def _bury(world: DatabaseWorld) -> None:
    async with world.database.begin() as unit:
        await unit.dead_letters.put(replace(LETTER, message_id="alice-7"))


def _do(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


@pytest.mark.parametrize(
    "command",
    [
        ("dlq", "list"),
        ("dlq", "show", "alice-7", *ON),
        ("retention", *ON, *WHO),
        ("db", "check"),
    ],
)
def test_a_role_without_any_right_is_a_mistake(books, role_url, command):
    error = books.ask(*command, "--database", role_url, code=2)["error"]

    assert "ProgrammingError: 42501 permission denied for table" in error
    assert "grant the role what is missing" in error


@pytest.mark.parametrize(
    ("command", "table"),
    [
        (("erase", "--message", "alice-7", *WHO), "waiting_message"),
        (("retention", *ON, *WHO), "replay_run"),
        (("dlq", "show", "alice-7", *ON), "audit_head"),
    ],
)
def test_a_role_that_may_only_read_is_told_the_table(books, role_url, postgres_url, command, table):
    _do(postgres_url, f"GRANT SELECT ON {EVERY_TABLE} TO {ROLE}")

    error = books.ask(*command, "--database", role_url, code=2)["error"]
    text = books.read(*command, "--database", role_url, "--debug", code=2)

    assert f"permission denied for table {table}" in error
    assert f"{ROLE}:***@" in error
    assert "grant the role what is missing" in error
    for shown in (error, text):
        assert "alice-7" not in shown
        assert "parameters: " not in shown


def test_the_rights_that_the_error_names_are_enough(books, role_url, postgres_url):
    _do(postgres_url, f"GRANT SELECT, INSERT, UPDATE, DELETE ON {EVERY_TABLE} TO {ROLE}")

    books.ask("dlq", "list", "--database", role_url)
    books.ask("erase", "--message", "alice-7", *WHO, "--database", role_url)

    assert books.ask("audit", "list", "--database", role_url)["entries"]


def test_a_role_that_may_make_no_tables_is_a_mistake(books, role_url, postgres_url):
    _do(postgres_url, "DROP SCHEMA semel CASCADE")

    error = books.ask("db", "create", "--database", role_url, code=2)["error"]

    assert "permission denied for database" in error
    assert "use the URL of another role" in error
