"""The PostgreSQL sink keeps the contract: in every mode, on PostgreSQL 18 and 16."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import ClassVar

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import dict_row

from semel.postgres.connect import pool
from semel.postgres.sink import PostgresSink
from semel.testing import SinkContract
from semel.testing.contracts.sink_world import Capability
from semel.testing.services import PostgresServer

pytestmark = pytest.mark.postgres


NUMBERS = count(1)
PASSWORD = "s3cr:t/p@ss"


class PostgresSinkContract(SinkContract):
    """One database for all tests of a class; every test has its own table and its own books."""

    mode = "staging"
    cannot: ClassVar = {Capability.COMPARE_TOKENS: "tokens are compared in part only"}
    secrets = (PASSWORD, "s3cr%3At%2Fp%40ss")

    @pytest.fixture(autouse=True)
    def store(self, request: pytest.FixtureRequest) -> Iterator[None]:
        server: PostgresServer = request.getfixturevalue(self.server)
        self.port = server.port
        self.books = f"books_{next(NUMBERS)}"
        self.database = psycopg.connect(server.url, autocommit=True)
        self.execute('CREATE SCHEMA {0}; CREATE TABLE {0}."Entries" (id bigint, text text)')
        yield
        pool().close_all()
        for (gid,) in self.execute("SELECT gid FROM pg_prepared_xacts").fetchall():
            self.database.execute(sql.SQL("ROLLBACK PREPARED {}").format(gid))
        self.execute("DROP SCHEMA {0} CASCADE")
        self.database.close()

    def execute(self, statement: str) -> psycopg.Cursor:
        cursor = self.database.cursor(row_factory=dict_row if "SELECT id" in statement else None)
        return cursor.execute(sql.SQL(statement).format(sql.Identifier(self.books)))

    def make_sink(self) -> PostgresSink:
        url = f"postgresql://postgres@127.0.0.1:{self.port}/postgres"
        return PostgresSink(
            url,
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


class TestStagingModeOn16(PostgresSinkContract):
    server = "quick_postgres16_server"


class TestPreparedModeOn16(PostgresSinkContract):
    server = "quick_postgres16_server"
    mode = "prepared"
