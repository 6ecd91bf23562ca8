"""The resolution of a stuck cycle: commit what the table accepts, divert the rest.

A cycle is stuck if its decision is COMMIT and its rows are staged, but a constraint
refuses some of them, because another program changed the table after a crash.  The
refused rows go to a reject table, each with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psycopg

from semel.errors import NeedsOperator
from semel.pipeline.txn import SinkTxnId
from semel.postgres.answers import not_prepared, settled
from semel.postgres.books import affected, run
from semel.postgres.connect import Connection
from semel.postgres.database import SinkDatabase
from semel.postgres.faults import is_permanent, words
from semel.postgres.names import TableName, literal, quoted
from semel.postgres.staging import Staging
from semel.postgres.statements import PreparedToken, cycle_text, insert


@dataclass(frozen=True, slots=True)
class Diverted:
    """How many rows of a stuck cycle were committed and diverted."""

    written: int
    diverted: int
    reject_table: str


def divert(
    database: SinkDatabase,
    staging: Staging,
    txn: SinkTxnId,
    promise: PreparedToken,
    reject_table: str,
) -> Diverted:
    """Commit the accepted rows and divert the others, in one transaction.

    Repeatable: a finished cycle is not changed.

    Raises:
        NeedsOperator: the transaction is not held here.
    """
    reject = TableName.parse(reject_table)
    with database.session(txn.scope) as connection:
        known = database.begin(connection, txn, with_cycle=True)
        refused = settled(txn, known) or not_prepared(txn, known, promise)
        if refused is not None:
            connection.execute("ROLLBACK")
            if known.proof is not None and known.proof.attempt == txn.attempt:
                return Diverted(0, 0, str(reject))
            raise NeedsOperator(getattr(refused, "reason", str(txn)))
        run(
            connection,
            [_reject_table(reject), database.books.proof(txn, promise, finished=True)],
        )
        written, lost = _bring(connection, database.books.schema, txn, promise, reject)
        proof = database.books.table("sink_proof")
        where = database.books.where(txn.cycle)
        run(connection, [f"UPDATE {proof} SET diverted = {lost} WHERE {where}", "COMMIT"])
        staging.tidy(connection, txn)
    return Diverted(written, lost, str(reject))


def _reject_table(name: TableName) -> str:
    return (
        f"CREATE TABLE IF NOT EXISTS {name} (sink_table text, cycle text, reason text, "
        f"sqlstate text, rejected jsonb, at timestamptz DEFAULT clock_timestamp())"
    )


def _bring(
    connection: Connection, schema: str, txn: SinkTxnId, promise: PreparedToken, reject: TableName
) -> tuple[int, int]:
    """Insert smaller and smaller groups of rows until the refused rows are single."""
    written = diverted = 0
    for piece in promise.pieces:
        table = f"{quoted(schema)}.{quoted(piece)}"
        rows = [row for (row,) in run(connection, [f"SELECT ctid::text FROM {table}"])[0]]
        groups = [rows] if rows else []
        while groups:
            group = groups.pop()
            error = _try(connection, table, txn, promise, group)
            if error is None:
                written += len(group)
            elif len(group) > 1:
                middle = len(group) // 2
                groups += [group[:middle], group[middle:]]
            else:
                _reject(connection, table, txn, promise, reject, group[0], error)
                diverted += 1
    return written, diverted


def _try(
    connection: Connection, table: str, txn: SinkTxnId, promise: PreparedToken, group: Sequence[str]
) -> psycopg.Error | None:
    listed = ", ".join(literal(row) for row in group)
    where = f" WHERE s.ctid = ANY (ARRAY[{listed}]::tid[])"
    try:
        affected(
            connection,
            [
                "SAVEPOINT part",
                insert(promise, table, txn.cycle, where),
                "SET CONSTRAINTS ALL IMMEDIATE",
                "RELEASE SAVEPOINT part",
            ],
        )
    except psycopg.Error as error:
        if not is_permanent(error):
            raise
        run(connection, ["ROLLBACK TO SAVEPOINT part"])
        return error
    return None


def _reject(
    connection: Connection,
    table: str,
    txn: SinkTxnId,
    promise: PreparedToken,
    reject: TableName,
    row: str,
    error: psycopg.Error,
) -> None:
    values = [promise.target, cycle_text(txn.cycle), words(error), error.sqlstate or ""]
    listed = ", ".join(literal(value) for value in values)
    run(
        connection,
        [
            f"INSERT INTO {reject} (sink_table, cycle, reason, sqlstate, rejected) "
            f"SELECT {listed}, to_jsonb(s) FROM {table} AS s WHERE s.ctid = {literal(row)}::tid"
        ],
    )
