"""A ledger is made once, and one of another version is refused and left alone."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import psycopg
import pytest

from semel.errors import LedgerUnusable
from semel.ledger.sqlite import SqliteLedger
from semel.pipeline.ledger import CycleState
from semel.postgres.ledger import PostgresLedger
from semel.testing.contracts.ledger_world import LedgerOwner


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def store(request, tmp_path):
    """Runs a statement in a database, and opens the ledger that is in it."""
    if request.param == "sqlite":
        return _Sqlite(tmp_path / "test.ledger")
    return _Postgres(request.getfixturevalue("postgres_url"))


class _Sqlite:
    def __init__(self, path):
        self.path = path

    def run(self, script):
        with closing(sqlite3.connect(self.path)) as connection:
            connection.executescript(script)

    def open(self):
        return closing(SqliteLedger(self.path))


class _Postgres:
    def __init__(self, url):
        self.url = url

    def run(self, script):
        with psycopg.connect(self.url) as connection:
            connection.execute("CREATE SCHEMA IF NOT EXISTS semel; SET search_path = semel")
            connection.execute(script)

    def open(self):
        return closing(PostgresLedger(self.url))


def test_a_ledger_is_made_once(store):
    ids = []
    for _ in range(2):
        with store.open() as ledger:
            ids.append(ledger.ledger_id)

    assert ids[0] == ids[1]


def test_a_newer_ledger_is_refused_with_the_way_out_and_left_alone(store):
    with store.open() as ledger:
        txn = LedgerOwner.of(ledger).reach(CycleState.FINISHED)
    store.run("UPDATE semel_ledger_meta SET version = 999")

    with store.open() as ledger, pytest.raises(LedgerUnusable, match=r"999.*upgrade semel"):
        ledger.scopes()

    store.run("UPDATE semel_ledger_meta SET version = 1")
    with store.open() as ledger:
        assert ledger.attempt(txn).state is CycleState.FINISHED


def test_a_table_of_somebody_elses_is_refused_and_left_alone(store):
    store.run("CREATE TABLE semel_position (mine text)")

    with store.open() as ledger, pytest.raises(LedgerUnusable, match="semel_position"):
        ledger.scopes()

    store.run("INSERT INTO semel_position VALUES ('x')")
    with pytest.raises((sqlite3.Error, psycopg.Error)):
        store.run("SELECT * FROM semel_scope")
