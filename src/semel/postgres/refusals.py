"""Why the server refused staged rows: the column, and the keys of the first few rows.

The server's own detail quotes whole rows, so it is never shown.  The key of a row is
what the sink's `key=` names, or else the table's primary key; no other value is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import psycopg

from semel.postgres.connect import TWO_ROWS_FOR_ONE_KEY, Connection, words
from semel.postgres.statements import PreparedToken, cast, literal, quoted, repeated_keys, union

_NOT_NULL: Final = "23502"
_FOREIGN_KEY: Final = "23503"
_UNIQUE: Final = "23505"
_CHECK: Final = "23514"
_VALUE_CLASS: Final = "22"

_CONSTRAINT: Final = """
SELECT pg_get_expr(c.conbin, c.conrelid), c.confrelid::regclass::text,
       ARRAY(SELECT attname::text FROM unnest(c.conkey) WITH ORDINALITY AS k (number, place)
               JOIN pg_catalog.pg_attribute ON attrelid = c.conrelid AND attnum = number
              ORDER BY place),
       ARRAY(SELECT attname::text FROM unnest(c.confkey) WITH ORDINALITY AS k (number, place)
               JOIN pg_catalog.pg_attribute ON attrelid = c.confrelid AND attnum = number
              ORDER BY place)
  FROM pg_catalog.pg_constraint c WHERE c.conrelid = to_regclass(%s) AND c.conname = %s
"""

# The columns of an index by its name, or of the primary key; a null: it has an expression.
_INDEX: Final = """
SELECT ARRAY(SELECT attname::text FROM unnest(i.indkey) WITH ORDINALITY AS k (number, place)
               LEFT JOIN pg_catalog.pg_attribute ON attrelid = i.indrelid AND attnum = number
              WHERE place <= i.indnkeyatts ORDER BY place)
  FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class x ON x.oid = i.indexrelid
 WHERE i.indrelid = to_regclass(%s) AND CASE %s WHEN '' THEN i.indisprimary ELSE x.relname = %s END
"""

_TYPES: Final = """
SELECT attname::text, format_type(atttypid, atttypmod) FROM pg_catalog.pg_attribute
 WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped
"""


def explained(
    connection: Connection, error: psycopg.Error, promise: PreparedToken, tables: Sequence[str]
) -> str:
    """Return what was refused, with the column and the keys of the first few rows.

    Call it outside of a transaction: each question may fail, and is left out then.
    """
    said = f"table {promise.target}: {words(error)}"
    rows = union(promise, tables)
    if error.sqlstate == TWO_ROWS_FOR_ONE_KEY and promise.key:
        repeated = _ask(connection, repeated_keys(promise, rows))
        if repeated:
            names = ", ".join(promise.key)
            found = "; ".join(f"({names}) = ({key}) {count} times" for key, count in repeated)
            return (
                f"table {promise.target}: a key comes more than once in the batch: {found}; "
                f"give a version_column to say which row wins, or leave one row per key"
            )
    key = _key(connection, promise)
    for columns, condition in _conditions(connection, error, promise, rows):
        refused = _keys_of(connection, key, rows, condition)
        if refused:
            column = f", column {', '.join(map(quoted, columns))}" if columns else ""
            keys = "; ".join(f"({', '.join(key)}) = ({values})" for values in refused)
            return f"{said}{column}{f'; rows {keys}' if key else ''}"
    return said


def _key(connection: Connection, promise: PreparedToken) -> Sequence[str]:
    """Return the columns that name a row; empty if there are none."""
    key: Sequence[str] = promise.key
    if not key:
        primary = _ask(connection, _INDEX, [promise.target, "", ""])
        key = primary[0][0] if primary else ()
    return key if set(key) <= {name for name, _ in promise.columns} else ()


def _keys_of(connection: Connection, key: Sequence[str], rows: str, condition: str) -> list[str]:
    """Return the keys of the first rows for which *condition* holds."""
    keys = ", ".join(f"s.{quoted(name)}" for name in key) or "''"
    query = f"SELECT concat_ws(', ', {keys}) FROM {rows} AS s WHERE {condition} ORDER BY 1 LIMIT 3"
    return [values for (values,) in _ask(connection, query)]


def _conditions(
    connection: Connection, error: psycopg.Error, promise: PreparedToken, rows: str
) -> list[tuple[Sequence[str], str]]:
    """Return what a refused row fulfils, with the columns that are concerned."""
    diagnosis, state = error.diag, error.sqlstate or ""
    if state == _NOT_NULL and diagnosis.column_name:
        return [([], f"s.{quoted(diagnosis.column_name)} IS NULL")]
    if state.startswith(_VALUE_CLASS):
        kinds: dict[str, str] = dict(_ask(connection, _TYPES, [promise.target]))
        return [
            ([name], f"NOT pg_input_is_valid(s.{quoted(name)}::text, {literal(kinds[name])})")
            for name, _ in promise.columns
            if name in kinds
        ]
    if not diagnosis.constraint_name or not diagnosis.table_name:
        return []
    place = f"{quoted(diagnosis.schema_name or 'public')}.{quoted(diagnosis.table_name)}"
    if state == _UNIQUE:
        name = diagnosis.constraint_name
        found = _ask(connection, _INDEX, [place, name, name])
        names = found[0][0] if found else []
        if not names or None in names:
            return []
        alike = " AND ".join(f"t.{quoted(n)} = {cast(promise, n, 's')}" for n in names)
        ours, others = (", ".join(cast(promise, n, alias) for n in names) for alias in "su")
        twice = f"SELECT {others} FROM {rows} AS u GROUP BY {others} HAVING count(*) > 1"
        there = f"EXISTS (SELECT 1 FROM {place} AS t WHERE {alike})"
        return [(names, there), (names, f"({ours}) IN ({twice})")]
    for expression, parent, names, parents in _ask(
        connection, _CONSTRAINT, [place, diagnosis.constraint_name]
    ):
        if state == _CHECK and expression:
            return [([], f"NOT ({expression})")]
        if state == _FOREIGN_KEY:
            staged = [cast(promise, name, "s") for name in names]
            alike = " AND ".join(
                f"t.{quoted(theirs)} = {mine}" for theirs, mine in zip(parents, staged, strict=True)
            )
            given = " AND ".join(f"{mine} IS NOT NULL" for mine in staged)
            absent = f"NOT EXISTS (SELECT 1 FROM {parent} AS t WHERE {alike})"
            return [(names, f"{given} AND {absent}")]
    return []


def _ask(
    connection: Connection, query: str, values: Sequence[str] | None = None
) -> list[tuple[Any, ...]]:
    try:
        return connection.execute(query.encode(), values).fetchall()
    except psycopg.Error:
        return []  # the refusal must be reported even without an explanation
