"""The table that the tests of the PostgreSQL sink write to, and how rows get there."""

from __future__ import annotations

import pickle
from decimal import Decimal
from itertools import count
from urllib.parse import urlsplit

import psycopg
import pyarrow as pa

from semel.pipeline.sink import SinkFatal, SinkOK
from semel.pipeline.txn import CycleId, Scope, SinkTxnId

SCOPE = Scope("ledger-1", "payments", "main")
SCHEMA = pa.schema([("id", pa.int64()), ("amount", pa.decimal128(12, 2)), ("note", pa.string())])
TABLE = "CREATE TABLE entries (id bigint PRIMARY KEY, amount numeric(12,2), note text)"
numbers = count()


def create_role(url: str, role: str, *, attributes: str = "LOGIN") -> str:
    """Create a role with the password in *url*, and return the URL with which it logs in."""
    password = urlsplit(url).password
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"DROP ROLE IF EXISTS {role}")
        connection.execute(f"CREATE ROLE {role} {attributes} PASSWORD '{password}'")
    return as_role(url, role)


def as_role(url: str, role: str) -> str:
    """Return *url* for a role that `create_role` made."""
    return url.replace("//postgres:", f"//{role}:")


def txn(batch: int | None = None) -> SinkTxnId:
    return CycleId(SCOPE, 1, next(numbers) if batch is None else batch).attempt()


def row(number: int, amount: str = "1.00", note: str | None = "x") -> dict:
    return {"id": number, "amount": Decimal(amount), "note": note}


def stage(sink, of, *tasks, schema=SCHEMA):
    receipts = []
    for rows in tasks:
        writer = pickle.loads(pickle.dumps(sink.stager(of))).open(f"task-{next(numbers)}")
        try:
            writer.write(pa.RecordBatch.from_pylist(rows, schema=schema))
            receipts.append(writer.finish())
        except BaseException:
            writer.discard()
            raise
    return receipts


def prepared(sink, of, *tasks, schema=SCHEMA):
    outcome = sink.prepare(of, stage(sink, of, *tasks, schema=schema))
    assert isinstance(outcome, SinkOK), outcome
    return outcome.token


def committed(sink, *tasks, schema=SCHEMA):
    of = txn()
    token = prepared(sink, of, *tasks, schema=schema)
    outcome = sink.commit(of, token)
    assert isinstance(outcome, SinkOK), outcome
    return of, token


def refused(sink, *tasks):
    of = txn()
    outcome = sink.prepare(of, stage(sink, of, *tasks))
    assert isinstance(outcome, SinkFatal), outcome
    assert isinstance(sink.abort(of, None), SinkOK)
    return outcome.reason


def rows_of(database, query="SELECT * FROM entries ORDER BY 1"):
    return database.execute(query).fetchall()


def left_behind(database):
    tables = database.execute("SELECT tablename FROM pg_tables WHERE tablename ~ '^stg_'")
    gids = database.execute("SELECT gid FROM pg_prepared_xacts")
    return [*tables.fetchall(), *gids.fetchall()]
