"""The messaging tables that the tests of the messages sink write to, and how changes get there."""

from __future__ import annotations

import asyncio
from itertools import count

import psycopg

from semel.arrow.changes import to_batch
from semel.messaging.changes import MessageChange, Op, detail_of
from semel.pipeline.sink import SinkOK
from semel.pipeline.txn import CycleId, Scope
from semel.postgres.message_statements import TABLES
from semel.postgres.messages import MessagesSink
from semel.sql.database import SqlDatabase

SCOPE = Scope("ledger-1", "search-indexer", "main")
CONSUMER = "search-indexer"
numbers = count(1)


def make_tables(url, schema=None):
    """Create the messaging tables, as `semel db create` does."""

    asked(url, SqlDatabase.create_tables, schema=schema)


def asked(url, question, **options):
    """Ask in a database of semel's, as a service or a command opens it."""

    async def whole():
        database = SqlDatabase(url, **options)
        try:
            return await question(database)
        finally:
            await database.close()

    return asyncio.run(whole())


def connect(url):
    """Return a connection that finds semel's tables, and those of a user."""
    return psycopg.connect(url, autocommit=True, options="-c search_path=semel,public")


def empty(url, *more):
    """Empty semel's tables and *more*, and the books if there are any; drop what is staged."""
    with connect(url) as connection:
        asked = "SELECT tablename FROM pg_tables WHERE schemaname = 'semel' ORDER BY 1"
        there = [name for (name,) in rows_of(connection, asked)]
        staged = [name for name in there if name.startswith(("stg_", "lean_"))]
        kept = [*TABLES, *(name for name in there if name.startswith("sink_")), *more]
        statements = [f"DROP TABLE {name}" for name in staged]
        statements += [f"DELETE FROM {name}" for name in kept]
        connection.execute("; ".join(statements).encode())


def make_sink(url, **settings):
    sink = MessagesSink(url, CONSUMER, **settings)
    sink.check(None)
    sink.fence(SCOPE, 1)
    return sink


def txn():
    return CycleId(SCOPE, 1, next(numbers)).attempt()


def staged(sink, of, *tasks):
    receipts = []
    for changes in tasks:
        writer = sink.stager(of).open(f"task-{next(numbers)}")
        writer.write(to_batch(changes))
        receipts.append(writer.finish())
    return receipts


def prepared(sink, of, *changes):
    return sink.prepare(of, staged(sink, of, changes))


def committed(sink, *changes):
    of = txn()
    outcome = prepared(sink, of, *changes)
    assert isinstance(outcome, SinkOK), outcome
    outcome = sink.commit(of, outcome.token)
    assert isinstance(outcome, SinkOK), outcome
    return of


def claim(message_id, state="COMPLETED", **more):
    attempts = more.pop("attempts", 1)
    return MessageChange(
        Op.CLAIM, message_id, state=state, attempts=attempts, payload_hash=f"h-{message_id}", **more
    )


def wait(message_id, key=None, offset=0, waits="retry", seen_place=None, **more):
    """A delivered message that begins to wait; with a key it holds it."""
    delay_us = more.pop("delay_us", 0)
    change = MessageChange(
        Op.WAIT,
        message_id,
        key=key,
        payload_hash=f"h-{message_id}",
        place=seen_place,
        topic="events",
        partition=0,
        offset=offset,
        state="held" if key else "",
        attempts=more.pop("attempts", 1),
        delay_us=delay_us,
    )
    change.detail = detail_of(
        waits=waits, held=bool(key), payload=message_id.encode(), headers={}, **more
    )
    return change


def of_waiting(op, seen, state, **more):
    """A change of a waiting message, which compares what was read of it."""
    detail = more.pop("detail", None)
    return MessageChange(
        op,
        seen.message_id,
        key=seen.key,
        place=seen.place,
        payload_hash=seen.payload_hash,
        seen_state=seen.claim_state,
        seen_attempts=seen.attempts,
        seen_waits=seen.waits.value,
        state=state,
        attempts=more.pop("attempts", seen.attempts + 1),
        detail=detail,
        **more,
    )


def rows_of(database: psycopg.Connection, query, *values):
    return database.execute(query, values).fetchall()


def left_behind(database: psycopg.Connection):
    tables = rows_of(database, "SELECT tablename FROM pg_tables WHERE tablename ~ '^stg_'")
    prepared = rows_of(database, "SELECT attempt FROM semel.sink_attempt WHERE state = 'prepared'")
    return [*tables, *prepared]
