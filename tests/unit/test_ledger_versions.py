"""Ledgers of every version that was ever released can be opened and used."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import psycopg
import pytest

from semel.errors import LedgerUnusable, NeedsOperator
from semel.pipeline.positions import Position
from semel.pipeline.states import CycleState, Decision
from semel.pipeline.txn import CycleId, Scope
from semel.postgres.ledger import PostgresLedger
from semel.sql.schema import MIGRATIONS, VERSION
from semel.sql.sqlite import SqliteLedger
from semel.testing.contracts.ledger_world import Driver, offsets

# Frozen: this is what version 1 made, whatever the code says today.
VERSION_1 = """
CREATE TABLE semel_ledger_meta (
    only_row integer PRIMARY KEY CHECK (only_row = 1),
    version bigint NOT NULL,
    ledger_id text NOT NULL
);
CREATE TABLE semel_scope (
    app text NOT NULL,
    query text NOT NULL,
    epoch bigint NOT NULL DEFAULT 0,
    owner text,
    lease_until bigint NOT NULL DEFAULT 0,
    generation bigint NOT NULL DEFAULT 0,
    mark_generation bigint,
    mark_batch bigint,
    mark_attempt text,
    PRIMARY KEY (app, query),
    CHECK ((mark_generation IS NULL) = (mark_attempt IS NULL)),
    CHECK ((mark_batch IS NULL) = (mark_attempt IS NULL))
);
CREATE TABLE semel_generation (
    app text NOT NULL,
    query text NOT NULL,
    number bigint NOT NULL,
    checkpoint text NOT NULL,
    first_batch bigint NOT NULL,
    opened_at bigint NOT NULL,
    PRIMARY KEY (app, query, number)
);
CREATE TABLE semel_attempt (
    app text NOT NULL,
    query text NOT NULL,
    generation bigint NOT NULL,
    batch bigint NOT NULL,
    attempt text NOT NULL,
    seq bigint NOT NULL,
    epoch bigint NOT NULL,
    state text NOT NULL
        CHECK (state IN ('planned', 'prepared', 'committed', 'finished', 'aborted')),
    range_read text,
    tokens text NOT NULL DEFAULT '{}',
    row_counts text NOT NULL DEFAULT '{}',
    reason text NOT NULL DEFAULT '',
    planned_at bigint NOT NULL,
    decided_at bigint,
    finished_at bigint,
    PRIMARY KEY (app, query, generation, batch, attempt),
    UNIQUE (app, query, seq),
    CHECK ((decided_at IS NULL) = (state IN ('planned', 'prepared'))),
    CHECK ((finished_at IS NOT NULL) = (state = 'finished')),
    CHECK (range_read IS NOT NULL OR state NOT IN ('committed', 'finished'))
);
CREATE UNIQUE INDEX semel_attempt_one_commit
    ON semel_attempt (app, query, generation, batch)
    WHERE state IN ('committed', 'finished');
CREATE INDEX semel_attempt_open
    ON semel_attempt (app, query, generation, batch, seq)
    WHERE state IN ('planned', 'prepared', 'committed');
CREATE TABLE semel_position (
    app text NOT NULL,
    query text NOT NULL,
    source text NOT NULL,
    source_partition text NOT NULL,
    ends_at bigint NOT NULL,
    topic_id text NOT NULL,
    generation bigint NOT NULL,
    PRIMARY KEY (app, query, source, source_partition)
);
CREATE TABLE semel_path (
    app text NOT NULL,
    query text NOT NULL,
    source text NOT NULL,
    path text NOT NULL,
    PRIMARY KEY (app, query, source, path)
);
CREATE TABLE semel_act (
    app text NOT NULL,
    query text NOT NULL,
    seq bigint NOT NULL,
    acted_at bigint NOT NULL,
    who text NOT NULL,
    act text NOT NULL,
    why text NOT NULL,
    detail text NOT NULL,
    PRIMARY KEY (app, query, seq)
);
INSERT INTO semel_ledger_meta VALUES (1, 1, 'the-old-ledger');
INSERT INTO semel_scope VALUES ('payments', 'main', 3, NULL, 0, 1, 1, 4, 'won');
INSERT INTO semel_generation VALUES ('payments', 'main', 1, 'checkpoint', 0, 1700000000000000);
INSERT INTO semel_attempt VALUES ('payments', 'main', 1, 4, 'won', 9, 3, 'finished',
    '[{"source":"0","kind":"offsets","spans":{"t/0":[40,50]},"paths":[],"topic_ids":{},"raw":""}]',
    '{"left": {"gid": "x"}}', '{"left": 10}', '', 1700000000000000, 1700000001000000,
    1700000002000000);
INSERT INTO semel_attempt VALUES ('payments', 'main', 1, 5, 'open', 10, 3, 'prepared',
    '[{"source":"0","kind":"offsets","spans":{"t/0":[50,60]},"paths":[],"topic_ids":{},"raw":""}]',
    '{}', '{}', '', 1700000000000000, NULL, NULL);
INSERT INTO semel_position VALUES ('payments', 'main', '0', 't/0', 50, 'topic', 1);
INSERT INTO semel_act VALUES ('payments', 'main', 1, 1700000000000000, 'ann', 'adopt', 'y', '{}');
"""


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def store(request, tmp_path):
    """Runs a script in an empty database, and opens the ledger that is in it."""
    if request.param == "sqlite":
        return _Sqlite(tmp_path / "old.ledger")
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


def test_a_ledger_of_version_1_keeps_everything_and_goes_on(store):
    store.run(VERSION_1)
    scope = Scope("the-old-ledger", "payments", "main")
    won = CycleId(scope, 1, 4).attempt("won")

    with store.open() as ledger:
        driver = Driver.of(ledger)

        assert ledger.ledger_id == "the-old-ledger"
        assert driver.lease.epoch == 4
        assert driver.mark() == won
        assert ledger.positions(scope).ends == {("0", "t/0"): Position(50, "topic")}
        assert [act.who for act in ledger.acts(scope)] == ["ann"]
        assert driver.record(won).tokens == {"left": {"gid": "x"}}
        (left_open,) = ledger.open_attempts(scope)
        assert ledger.decide_abort(left_open.txn) is Decision.ABORT
        driver.commit(offsets(50, 60, topic_id="topic"), 5)
        assert driver.end() == 60


def test_an_unknown_attempt_that_version_1_may_have_pruned_is_not_judged(store):
    store.run(VERSION_1)
    scope = Scope("the-old-ledger", "payments", "main")

    with store.open() as ledger:
        with pytest.raises(NeedsOperator):
            ledger.decide_abort(CycleId(scope, 1, 3).attempt())
        assert ledger.decide_abort(CycleId(scope, 1, 6).attempt()) is Decision.ABORT


def test_migrating_happens_once(store):
    store.run(VERSION_1)

    for _ in range(2):
        with store.open() as ledger:
            assert ledger.ledger_id == "the-old-ledger"


def test_a_newer_ledger_is_refused_with_the_way_out_and_left_alone(store):
    store.run(VERSION_1)
    store.run("UPDATE semel_ledger_meta SET version = 999")

    with store.open() as ledger, pytest.raises(LedgerUnusable, match=r"999.*upgrade semel"):
        ledger.scopes()

    store.run("UPDATE semel_ledger_meta SET version = 1")
    with store.open() as ledger:
        assert Driver.of(ledger).state(_won(ledger)) is CycleState.FINISHED


def test_version_1_is_what_this_test_froze():
    frozen = [statement.split() for statement in VERSION_1.split(";") if "CREATE" in statement]

    assert [statement.split() for statement in MIGRATIONS[1]] == frozen
    assert sorted(MIGRATIONS) == list(range(1, VERSION + 1))


def _won(ledger):
    return CycleId(Scope(ledger.ledger_id, "payments", "main"), 1, 4).attempt("won")
