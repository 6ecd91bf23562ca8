"""The messages sink keeps the contract of a sink: its rows are failed attempts here."""

from __future__ import annotations

import pytest
from psycopg.rows import dict_row

from semel.arrow.changes import arrow_schema, to_batch
from semel.messaging.changes import MessageChange, Op, detail_of
from semel.postgres.connect import pool
from semel.postgres.messages import MessagesSink
from tests.contracts.test_postgres_contract import PostgresSinkContract
from tests.unit.postgres.messages.message_place import make_tables

pytestmark = pytest.mark.postgres


class ForEveryScope(MessagesSink):
    """A consumer for each scope: a consumer belongs to one, and the contract has several."""

    def fence(self, scope, epoch):
        self._be_of(scope)
        super().fence(scope, epoch)

    def _bring(self, connection, txn, part):
        self._be_of(txn.scope)
        return super()._bring(connection, txn, part)

    def _table(self, connection):
        return self._wanted.table.table

    def _be_of(self, scope):
        self.consumer = f"{self._wanted.table.table}, {scope.slug}"


@pytest.fixture(scope="module")
def tables(quick_postgres_server):
    make_tables(quick_postgres_server.url)
    yield
    pool().close_all()


class TestMessagesSink(PostgresSinkContract):
    server = "quick_postgres_server"

    @pytest.fixture(autouse=True)
    def messages(self, tables, store):
        """The tables and the books are there."""

    def make_sink(self):
        url = f"postgresql://postgres@127.0.0.1:{self.port}/postgres"
        return ForEveryScope(
            url, self.books, "postgres", password=self.password, bookkeeping_schema=self.books
        )

    def schema(self):
        return arrow_schema()

    def make_batch(self, ids):
        attempts = [MessageChange(Op.ATTEMPT, str(number)) for number in ids]
        for number, change in zip(ids, attempts, strict=True):
            change.detail = detail_of(reason=self.row(number)["text"])
        return to_batch(attempts)

    def visible_rows(self, sink):
        cursor = self.database.cursor(row_factory=dict_row)
        return cursor.execute(
            "SELECT message_id::bigint AS id, reason AS text FROM semel.failed_attempt "
            "WHERE starts_with(consumer, %s)",
            [f"messages of {self.books},"],
        ).fetchall()
