"""The PostgreSQL sink keeps the contract: in every mode, on PostgreSQL 18 and 16."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import dict_row

from semel.pipeline.sink import Receipt, SinkFatal, SinkOK, SinkRetryable
from semel.pipeline.twophase import in_groups
from semel.postgres.connect import pool
from semel.postgres.sink import PostgresSink
from semel.testing import SinkContract
from semel.testing.services import PostgresServer

pytestmark = pytest.mark.postgres


NUMBERS = count(1)
PASSWORD = "s3cr:t/p@ss"


class PostgresSinkContract(SinkContract):
    """One database for all tests of a class; every test has its own table and its own books.

    The sink's role has few rights: a schema for the books, and INSERT on the table.
    """

    mode = "staging"
    secrets = (PASSWORD, "s3cr%3At%2Fp%40ss")

    @pytest.fixture(autouse=True)
    def store(self, request: pytest.FixtureRequest) -> Iterator[None]:
        server: PostgresServer = request.getfixturevalue(self.server)
        self.port = server.port
        self.books = f"books_{next(NUMBERS)}"
        self.password = server.password
        self.secrets = (*type(self).secrets, server.password)
        self.database = psycopg.connect(server.url, autocommit=True)
        self.database.execute(
            f"DO $$ BEGIN CREATE ROLE payer LOGIN PASSWORD '{PASSWORD}'; "
            "EXCEPTION WHEN duplicate_object THEN NULL; END $$"
        )
        self.execute("CREATE SCHEMA {0} AUTHORIZATION payer")
        self.make_table("Entries")
        yield
        pool().close_all()
        for (gid,) in self.execute("SELECT gid FROM pg_prepared_xacts").fetchall():
            self.database.execute(sql.SQL("ROLLBACK PREPARED {}").format(gid))
        self.execute("DROP SCHEMA {0} CASCADE")
        self.database.close()

    def execute(self, statement: str) -> psycopg.Cursor:
        cursor = self.database.cursor(row_factory=dict_row if "SELECT id" in statement else None)
        return cursor.execute(sql.SQL(statement).format(sql.Identifier(self.books)))

    def make_table(self, name: str) -> None:
        self.execute(
            f'CREATE TABLE IF NOT EXISTS {{0}}."{name}" (id bigint, text text); '
            f'GRANT INSERT ON {{0}}."{name}" TO payer'
        )

    @property
    def url(self) -> str:
        return f"postgresql://payer@127.0.0.1:{self.port}/postgres"

    def make_sink(self) -> PostgresSink:
        return PostgresSink(
            self.url,
            f"{self.books}.Entries",
            mode=self.mode,
            password=PASSWORD,
            bookkeeping_schema=self.books,
        )

    def visible_rows(self, sink):
        return self.execute('SELECT id, text FROM {0}."Entries"').fetchall()

    def leavings(self, sink):
        return [
            *self.tables(),
            *self.execute("SELECT gid FROM pg_prepared_xacts").fetchall(),
            *self.execute("SELECT piece FROM {0}.sink_staged").fetchall(),
            *self.execute("SELECT attempt FROM {0}.sink_attempt WHERE state = 'prepared'"),
        ]

    def tables(self):
        query = "SELECT tablename FROM pg_tables WHERE schemaname = %s AND tablename ~ '^stg_'"
        return self.database.execute(query, [self.books]).fetchall()

    def lose(self, sink, txn):
        for (table,) in self.tables():
            self.execute(f'DROP TABLE {{0}}."{table}"')
        for (gid,) in self.execute("SELECT gid FROM pg_prepared_xacts").fetchall():
            self.database.execute(sql.SQL("ROLLBACK PREPARED {}").format(gid))

    def crash(self, sink):
        pool().close_all()


class TestStagingModeOn18(PostgresSinkContract):
    server = "quick_postgres_server"


class TestPreparedModeOn18(PostgresSinkContract):
    server = "quick_postgres_server"
    mode = "prepared"


class Couple:
    """Two joined sinks, seen as one: what the contract says of a sink holds for a group."""

    def __init__(self, first: PostgresSink, second: PostgresSink) -> None:
        self.sinks = (first, second)
        in_groups(self.sinks)

    def __getattr__(self, name):
        if name.startswith("__") or name == "sinks":
            raise AttributeError(name)  # while it is unpickled
        return getattr(self.sinks[0], name)

    def rename(self, old, new):
        for sink in self.sinks:
            sink.rename(replace(old, sink=sink.name), replace(new, sink=sink.name))

    def visible_tally(self, cycle, token):
        first, second = (sink.visible_tally(cycle, token[sink.name]) for sink in self.sinks)
        assert first == second
        return first

    def stager(self, txn):
        return CoupleStager([sink.stager(txn) for sink in self.sinks])

    def fence(self, scope, epoch):
        for sink in self.sinks:
            sink.fence(scope, epoch)

    def check(self, schema):
        for sink in self.sinks:
            sink.check(schema)

    def prepare(self, txn, receipts):
        of = [_receipts_of(receipts, number) for number in (0, 1)]
        named = {sink.name: own for sink, own in zip(self.sinks, of, strict=True)}
        outcomes = self.sinks[0].prepare_all(txn, named)
        if all(isinstance(outcome, SinkOK) for outcome in outcomes.values()):
            return SinkOK({name: outcome.token for name, outcome in outcomes.items()})
        return _worst(outcomes.values())

    def commit(self, txn, token):
        if {*token} - {sink.name for sink in self.sinks}:
            return SinkFatal("a couple's token is that of its sinks, and nothing more")
        tokens = {sink.name: token.get(sink.name, {}) for sink in self.sinks}
        return _worst(self.sinks[1].commit_all(txn, tokens).values())

    def abort(self, txn, token):
        return _worst([sink.abort(txn, (token or {}).get(sink.name)) for sink in self.sinks])

    def look_up(self, txn, token):
        first, second = (sink.look_up(txn, token) for sink in self.sinks)
        assert first.found == second.found
        return first

    def recover(self, scope):
        first, second = (sink.recover(scope) for sink in self.sinks)
        assert first == second
        return first

    def mark(self, scope):
        first, second = (sink.mark(scope) for sink in self.sinks)
        assert first == second
        return first

    def sweep(self, scope, is_loser):
        first, _ = (sink.sweep(scope, is_loser) for sink in self.sinks)
        return first

    def abort_together(self, txns):
        return set.intersection(*(sink.abort_together(txns) for sink in self.sinks))


@dataclass
class CoupleStager:
    stagers: list

    def open(self, task):
        return CoupleWriter([stager.open(task) for stager in self.stagers])


@dataclass
class CoupleWriter:
    writers: list

    def write(self, batch):
        for writer in self.writers:
            writer.write(batch)

    def finish(self):
        both = [writer.finish() for writer in self.writers]
        detail = {"both": [receipt.to_json() for receipt in both]}
        return Receipt(both[0].task, both[0].tally, detail)

    def discard(self):
        for writer in self.writers:
            writer.discard()


def _receipts_of(receipts, number):
    return [Receipt.from_json(receipt.detail["both"][number]) for receipt in receipts]


def _worst(outcomes):
    order = (SinkOK, SinkRetryable, SinkFatal)
    return max(outcomes, key=lambda outcome: order.index(type(outcome)))


class PostgresGroupContract(PostgresSinkContract):
    """A second sink beside the first one, on a table of its own, in the same transactions."""

    server = "quick_postgres_server"

    def make_sink(self):
        self.make_table("others")
        first = super().make_sink()
        settings = {"mode": self.mode, "password": PASSWORD, "bookkeeping_schema": self.books}
        other = PostgresSink(self.url, f"{self.books}.others", name="others", **settings)
        return Couple(first, other)

    def visible_rows(self, sink):
        rows = super().visible_rows(sink)
        others = self.execute("SELECT id, text FROM {0}.others").fetchall()
        assert Counter(map(str, rows)) == Counter(map(str, others))
        return rows


class TestGroupInStagingMode(PostgresGroupContract):
    pass


class TestGroupInPreparedMode(PostgresGroupContract):
    mode = "prepared"


class TestStagingModeOn16(PostgresSinkContract):
    server = "quick_postgres16_server"


class TestPreparedModeOn16(PostgresSinkContract):
    server = "quick_postgres16_server"
    mode = "prepared"
