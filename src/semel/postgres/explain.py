"""The keys of the rows that a constraint refused, looked up in the staging tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import psycopg

from semel.postgres.connect import Connection
from semel.postgres.faults import TWO_ROWS_FOR_ONE_KEY, words
from semel.postgres.names import quoted
from semel.postgres.statements import PreparedToken, repeated_keys, union

_NOT_NULL: Final = "23502"
_CHECK: Final = "23514"


def explained(
    connection: Connection, error: psycopg.Error, promise: PreparedToken, schema: str
) -> str:
    """Return what was refused, with the keys of the first few rows.

    For a unique or foreign key the server's own message names the key.
    """
    tables = [f"{quoted(schema)}.{quoted(piece)}" for piece in promise.pieces]
    said = f"table {promise.target}: {words(error)}"
    if error.sqlstate == TWO_ROWS_FOR_ONE_KEY and promise.key:
        repeated = _ask(connection, repeated_keys(promise, union(promise, tables)))
        if repeated:
            names = ", ".join(promise.key)
            found = "; ".join(f"({names}) = ({key}) {count} times" for key, count in repeated)
            return (
                f"table {promise.target}: a key comes more than once in the batch: {found}; "
                f"give a version_column to say which row wins, or leave one row per key"
            )
    condition = _condition(connection, error)
    if condition and promise.key:
        keys = ", ".join(f"s.{quoted(name)}" for name in promise.key)
        query = (
            f"SELECT concat_ws(', ', {keys}) FROM {union(promise, tables)} AS s "
            f"WHERE {condition} ORDER BY 1 LIMIT 3"
        )
        found = "; ".join(
            f"({', '.join(promise.key)}) = ({key})" for (key,) in _ask(connection, query)
        )
        said += f"; rows {found}" if found else ""
    return said


def _condition(connection: Connection, error: psycopg.Error) -> str:
    """Return the condition under which a staged row is one of the refused."""
    diagnosis = error.diag
    if error.sqlstate == _NOT_NULL and diagnosis.column_name:
        return f"s.{quoted(diagnosis.column_name)} IS NULL"
    if error.sqlstate == _CHECK and diagnosis.constraint_name and diagnosis.table_name:
        place = f"{quoted(diagnosis.schema_name or 'public')}.{quoted(diagnosis.table_name)}"
        checks = _ask(
            connection,
            "SELECT pg_get_expr(conbin, conrelid) FROM pg_catalog.pg_constraint "
            "WHERE conrelid = to_regclass(%s) AND conname = %s",
            [place, diagnosis.constraint_name],
        )
        return f"NOT ({checks[0][0]})" if checks else ""
    return ""


def _ask(
    connection: Connection, query: str, values: Sequence[str] | None = None
) -> list[tuple[str, ...]]:
    try:
        return connection.execute(query.encode(), values).fetchall()
    except psycopg.Error:
        return []  # the refusal must be reported even without an explanation
