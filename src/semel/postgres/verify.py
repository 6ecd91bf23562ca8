"""Verification: the visible rows of a cycle, read back and hashed."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Final

import psycopg

from semel.arrow.tally import schema_from_text, tally
from semel.errors import require
from semel.pipeline.sink import Tally
from semel.pipeline.txn import CycleId
from semel.postgres.connect import Connection
from semel.postgres.names import literal, quoted
from semel.postgres.statements import PreparedToken, cycle_text

pa: Any = require("pyarrow", "postgres")

_ROWS_AT_ONCE: Final = 10_000


def read_tally(connection: Connection, promise: PreparedToken, cycle: CycleId) -> Tally | None:
    """Count and hash a cycle's visible rows; None if they cannot be found or compared."""
    if not promise.cycle_column or (promise.rows and not promise.schema):
        return None
    total = Tally()
    if not promise.rows:
        return total
    schema = schema_from_text(promise.schema)
    names = ", ".join(quoted(name) for name in schema.names)
    column = quoted(promise.cycle_column)
    query = f"SELECT {names} FROM {promise.target} WHERE {column} = {literal(cycle_text(cycle))}"
    try:
        with connection.transaction(), connection.cursor(name="semel_verify") as cursor:
            cursor.execute(query.encode())
            while rows := cursor.fetchmany(_ROWS_AT_ONCE):
                total += tally(_batch(rows, schema))
    except psycopg.DataError as error:
        if error.sqlstate is not None:
            raise
        # The rows exist, but Python has no date before year 1 or after 9999.
        return None
    return total


def _batch(rows: Sequence[tuple[Any, ...]], schema: Any) -> Any:
    columns = [
        pa.array(_plain(values, field.type), field.type)
        for values, field in zip(zip(*rows, strict=True), schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _plain(values: Sequence[Any], kind: Any) -> Sequence[Any]:
    """Convert decimals to integers for an integer column: numeric may hold integers."""
    if not pa.types.is_integer(kind):
        return values
    return [int(value) if isinstance(value, Decimal) else value for value in values]
