"""The target table as the catalog describes it, and whether rows fit into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from semel.postgres.connect import Connection
from semel.postgres.names import TableName, quoted
from semel.postgres.wires import PgType, Wire, created_type, wire


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the target."""

    name: str
    type: PgType
    is_required: bool
    """Not null, without a default."""

    is_not_null: bool
    is_generated: bool
    """Computed by the server; it cannot be written."""

    is_identity_always: bool
    """Numbered by the server; writing it needs OVERRIDING SYSTEM VALUE."""


@dataclass(frozen=True, slots=True)
class TargetTable:
    """A table with its columns and the keys that ON CONFLICT can use."""

    name: TableName
    columns: tuple[Column, ...]
    keys: tuple[frozenset[str], ...]
    """Columns of each unique index that `ON CONFLICT` may name."""

    is_exclusive: bool
    """Some index, of any kind, is unique or excludes: a row may wait for another transaction."""

    def column(self, name: str) -> Column | None:
        """Return a column by its exact name."""
        return next((column for column in self.columns if column.name == name), None)


@dataclass(frozen=True, slots=True)
class Fitted:
    """One column of the rows, and the target's column for it."""

    column: Column
    wire: Wire

    @property
    def staged_type(self) -> str:
        """The column's type in a staging table."""
        return "text" if self.wire.is_cast else self.column.type.sql


_FIND: Final = """
SELECT c.oid, n.nspname, c.relname, c.relkind
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.oid = to_regclass(%s)
"""

# A domain is resolved to its base type; its own modifier, such as a scale, has precedence.
_COLUMNS: Final = """
WITH RECURSIVE resolved AS (
    SELECT a.attnum, a.atttypid AS typ, a.atttypmod AS modifier
      FROM pg_catalog.pg_attribute a
     WHERE a.attrelid = %(table)s AND a.attnum > 0 AND NOT a.attisdropped
    UNION ALL
    SELECT r.attnum, t.typbasetype, CASE r.modifier WHEN -1 THEN t.typtypmod ELSE r.modifier END
      FROM resolved r JOIN pg_catalog.pg_type t ON t.oid = r.typ AND t.typtype = 'd')
SELECT a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod),
       -- An explicit cast to bit(3) or varchar(3)[] cuts values off; an assignment refuses them.
       CASE WHEN CASE t.typcategory WHEN 'A' THEN e.typcategory ELSE t.typcategory END IN ('S', 'V')
            THEN pg_catalog.format_type(r.typ, -1)
            ELSE pg_catalog.format_type(a.atttypid, a.atttypmod) END,
       CASE WHEN t.typtype = 'e' OR t.typcategory = 'S' THEN 'text' ELSE t.typname END,
       CASE WHEN t.typcategory <> 'A' THEN ''
            WHEN e.typtype = 'e' OR e.typcategory = 'S' THEN 'text' ELSE e.typname END,
       CASE WHEN t.typcategory = 'A' THEN e.oid::bigint ELSE 0 END,
       r.modifier, 'bpchar' IN (t.typname, e.typname),
       a.attnotnull, a.atthasdef OR a.attidentity <> '', a.attgenerated <> '', a.attidentity = 'a'
  FROM resolved r
  JOIN pg_catalog.pg_type t ON t.oid = r.typ AND t.typtype <> 'd'
  JOIN pg_catalog.pg_attribute a ON a.attrelid = %(table)s AND a.attnum = r.attnum
  LEFT JOIN pg_catalog.pg_type e ON e.oid = t.typelem
 ORDER BY a.attnum
"""

# ON CONFLICT cannot use a partial index, an expression index or a deferrable constraint.
_KEYS: Final = """
SELECT array_agg(a.attname::text)
  FROM pg_catalog.pg_index i
  JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
       AND array_position(i.indkey::int2[], a.attnum) < i.indnkeyatts
 WHERE i.indrelid = %s AND i.indisunique AND i.indimmediate AND i.indisvalid
   AND i.indpred IS NULL AND i.indexprs IS NULL
 GROUP BY i.indexrelid
"""

_EXCLUSIVE: Final = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_index i
                WHERE (i.indisunique OR i.indisexclusion)
                  AND (i.indrelid = %(table)s OR i.indrelid IN
                       (SELECT relid FROM pg_catalog.pg_partition_tree(%(table)s))))
"""


def find_target(connection: Connection, name: TableName) -> TargetTable | str:
    """Describe the table *name*, or return why it cannot be written to."""
    with connection.transaction():
        row = connection.execute(_FIND, [str(name)]).fetchone()
        if row is None:
            return "does not exist"
        oid, schema, table, kind = row
        if kind not in ("r", "p"):
            return "is not an ordinary or partitioned table"
        # With an empty path, format_type names every type outside pg_catalog with its schema.
        connection.execute("SET LOCAL search_path = pg_catalog")
        columns = connection.execute(_COLUMNS, {"table": oid}).fetchall()
        keys = connection.execute(_KEYS, [oid]).fetchall()
        exclusive = connection.execute(_EXCLUSIVE, {"table": oid}).fetchall()
    return TargetTable(
        TableName(schema, table),
        tuple(_column(*column) for column in columns),
        tuple(frozenset(names) for (names,) in keys),
        exclusive == [(True,)],
    )


def _column(
    name: str,
    type_sql: str,
    cast_sql: str,
    kind: str,
    element_kind: str,
    element_oid: int,
    modifier: int,
    is_padded: bool,
    is_not_null: bool,
    has_default: bool,
    is_generated: bool,
    is_identity_always: bool,
) -> Column:
    precision = scale = length = None
    if "numeric" in (kind, element_kind) and modifier >= 4:
        # https://github.com/postgres/postgres/blob/REL_18_0/src/backend/utils/adt/numeric.c#L926
        precision = ((modifier - 4) >> 16) & 0xFFFF
        scale = (((modifier - 4) & 0x7FF) ^ 1024) - 1024
    if {kind, element_kind} & {"timestamp", "timestamptz", "time"} and modifier >= 0:
        precision = modifier
    if "text" in (kind, element_kind) and modifier >= 4:
        length = modifier - 4
    return Column(
        name,
        PgType(
            type_sql,
            cast_sql,
            kind,
            element_kind,
            element_oid,
            precision,
            scale,
            length,
            is_padded,
        ),
        is_not_null and not has_default and not is_generated,
        is_not_null,
        is_generated,
        is_identity_always,
    )


def fit(target: TargetTable, schema: Any, filled: Sequence[str] = ()) -> list[Fitted] | list[str]:
    """Match every column of *schema* with the target, or list every problem.

    *filled* are columns that semel fills itself.
    """
    fitted: list[Fitted] = []
    problems: list[str] = []
    table = target.name
    for arrow in schema:
        column = target.column(arrow.name)
        if column is None:
            wanted = f"ADD COLUMN {quoted(arrow.name)} {created_type(arrow.type)}"
            near = [c.name for c in target.columns if c.name.lower() == arrow.name.lower()]
            hint = f" (there is {quoted(near[0])}: case matters)" if near else ""
            problems.append(
                f"there is no column {quoted(arrow.name)}{hint}: ALTER TABLE {table} {wanted};"
            )
        elif column.is_generated:
            problems.append(
                f"column {quoted(arrow.name)} is generated by the server: leave it out of rows"
            )
        elif arrow.name in filled:
            problems.append(f"column {quoted(arrow.name)} is filled by semel: leave it out of rows")
        elif (way := wire(arrow.type, column.type)) is None:
            problems.append(
                f"column {quoted(arrow.name)} is {column.type.sql}, which cannot hold every "
                f"{arrow.type}: cast it in rows, or ALTER TABLE {table} ALTER COLUMN "
                f"{quoted(arrow.name)} TYPE {created_type(arrow.type)};"
            )
        else:
            fitted.append(Fitted(column, way))
    given = {*schema.names, *filled}
    for column in target.columns:
        if column.is_required and column.name not in given:
            problems.append(
                f"column {quoted(column.name)} is not null, has no default and is not in rows: "
                f"ALTER TABLE {table} ALTER COLUMN {quoted(column.name)} SET DEFAULT …;"
            )
    return problems or fitted


def create_statement(
    name: TableName, schema: Any, key: Sequence[str], cycle_column: str | None
) -> str:
    """Return the statement that creates a table for *schema*."""
    lines = [
        f"{quoted(field.name)} {created_type(field.type)}"
        + ("" if field.nullable or field.name in key else " NOT NULL")
        for field in schema
    ]
    if cycle_column:
        lines.append(f"{quoted(cycle_column)} text")
    if key:
        lines.append(f"PRIMARY KEY ({', '.join(map(quoted, key))})")
    return f"CREATE TABLE {name} ({', '.join(lines)});"
