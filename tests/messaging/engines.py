"""Consumers that a pipeline on Spark runs, and the records of its cycles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from sqlalchemy import delete, insert

from semel.pipeline.txn import CycleId, Scope, SinkTxnId
from semel.postgres.books import SinkBooks, run
from semel.sql.tables import consumer_engine, cycle_outcome
from semel.sql.types import now_us

SCOPE = Scope("ledger1", "payments", "main")
BOOKS = SinkBooks("books_by_hand", "messages")


async def take_over(database: Any, consumer: str = "billing", scope: Scope = SCOPE) -> None:
    """Write that a pipeline runs the consumer, as its start does."""
    async with database.begin() as unit:
        row = {"scope": scope.slug, "app": scope.app, "query": scope.query, "ledger": scope.ledger}
        more = {"engine": "spark", "epoch": 1, "books": BOOKS.schema, "since": now_us()}
        await unit.session.execute(insert(consumer_engine).values(consumer=consumer, **row, **more))


async def give_back(database: Any, consumer: str = "billing") -> None:
    """Remove that row, as a hand-over does."""
    async with database.begin() as unit:
        mine = consumer_engine.c.consumer == consumer
        await unit.session.execute(delete(consumer_engine).where(mine))


def attempt(batch: int, name: str = "first", scope: Scope = SCOPE) -> SinkTxnId:
    """Return an attempt at a cycle of the pipeline."""
    return CycleId(scope, 1, batch).attempt(name)


async def count(database: Any, batch: int, first: int, last: int, **outcomes: int) -> None:
    """Write what a cycle counted, as its commit does: here each outcome has the same extent."""
    txn = attempt(batch)
    row = {"consumer": "billing", "scope": SCOPE.slug, "cycle": txn.cycle.label}
    row |= {"attempt": txn.attempt, "topic": "payments", "partition": 0}
    async with database.begin() as unit:
        for outcome, total in outcomes.items():
            extent = {"first": first, "last": last, "outcome": outcome, "total": total}
            await unit.session.execute(insert(cycle_outcome).values(**row, **extent, at=now_us()))


class HandMade:
    """The books of the pipeline's sinks, written by hand."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        BOOKS.create(connection)

    def prepare(self, txn: SinkTxnId) -> None:
        """Promise the attempt."""
        self._run(BOOKS.remember(txn, "prepared", "staging", "d", []))

    def abort(self, txn: SinkTxnId) -> None:
        """Give the attempt up."""
        self._run(BOOKS.remember(txn, "aborted", "staging", "d", []))

    def prove(self, txn: SinkTxnId) -> None:
        """Commit the attempt, and keep its record, as before the clean-up."""
        row = {"digest": "d", "rows": 0, "row_hash": 0, "finished": True}
        self._run(BOOKS.insert("sink_proof", txn, **row))

    def _run(self, statement: str) -> None:
        run(self._connection, [statement])


@contextmanager
def hand_made(database: Any) -> Iterator[HandMade]:
    """Open empty books in the database."""
    url = database.engine.url.set(drivername="postgresql")
    with psycopg.connect(url.render_as_string(hide_password=False), autocommit=True) as connection:
        try:
            yield HandMade(connection)
        finally:
            connection.execute("DROP SCHEMA books_by_hand CASCADE")
