"""The target table as the catalog describes it, and which Arrow types fit into its columns.

A pair of types that is not in the table of wires would lose something (digits, an
instant, a sign) or would need a guess.  Strings fit every type: they are staged as
text, and the server casts them in the final transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from psycopg.rows import dict_row

from semel.errors import Permanent, require
from semel.postgres import encode
from semel.postgres.connect import OWN_PATH, Connection
from semel.postgres.encode import Encode
from semel.postgres.statements import TableName, quoted

pa: Any = require("pyarrow", "postgres")


@dataclass(frozen=True, slots=True)
class PgType:
    """A column's type from the catalog, with domains resolved."""

    sql: str
    """The type in SQL: ``numeric(18,2)``."""

    cast_sql: str
    """The type to which text is cast before the assignment, so that nothing is cut off."""

    kind: str
    """The base type's name: ``int4``; ``text`` for every type that is sent as text."""

    element_kind: str = ""
    element_oid: int = 0
    precision: int | None = None
    scale: int | None = None
    length: int | None = None
    """The maximum length; the server silently cuts off spaces beyond it."""

    is_padded: bool = False
    """Padded with spaces to its length."""


@dataclass(frozen=True, slots=True)
class Wire:
    """How one column's values are encoded."""

    encode: Encode
    is_cast: bool = False
    """Sent as text, and cast by the server."""

    is_exact: bool = True
    """A value that is read back equals the written value."""

    most_characters: int | None = None
    """A longer value is accepted only if the excess is spaces, which the server drops."""


def wire(arrow: Any, column: PgType) -> Wire | None:
    """Return the encoding of *arrow* for *column*; None if they do not fit."""
    arrow = _plain_type(arrow)
    if pa.types.is_null(arrow):
        return Wire(encode.nothing)
    if column.kind in ("json", "jsonb"):
        return _json_wire(arrow, column.kind)
    if column.element_kind:
        return _array_wire(arrow, column) or (_CAST if pa.types.is_string(arrow) else None)
    if column.kind == "numeric" and pa.types.is_decimal(arrow) and _loses_digits(arrow, column):
        return None
    for fits, encoder in _WIRES.get(column.kind, ()):
        if fits(arrow):
            if column.kind in _MOMENTS and column.precision not in (None, 6):
                encoder = encode.unrounded(encoder, column.precision or 0)
            is_respelled = column.kind == "uuid" and pa.types.is_string(arrow)
            is_padded = column.is_padded and column.length is not None
            is_exact = not (is_respelled or is_padded)
            return Wire(encoder, is_exact=is_exact, most_characters=column.length)
    return _CAST if pa.types.is_string(arrow) else None


def created_type(arrow: Any) -> str:
    """Return the type of a new column for *arrow*'s values."""
    arrow = _plain_type(arrow)
    if pa.types.is_decimal(arrow):
        whole, scale = max(arrow.precision, arrow.scale), max(arrow.scale, 0)
        return f"numeric({whole - min(arrow.scale, 0)},{scale})"
    if pa.types.is_timestamp(arrow):
        return "timestamptz" if arrow.tz else "timestamp"
    if _is_list(arrow):
        inner = created_type(arrow.value_type)
        return "jsonb" if inner == "jsonb" or inner.endswith("[]") else f"{inner}[]"
    for fits, name in _CREATED:
        if fits(arrow):
            return name
    return "text"


def _plain_type(arrow: Any) -> Any:
    if isinstance(arrow, pa.BaseExtensionType):
        return _plain_type(arrow.storage_type)
    if pa.types.is_dictionary(arrow) or pa.types.is_run_end_encoded(arrow):
        return _plain_type(arrow.value_type)
    if pa.types.is_large_string(arrow) or pa.types.is_string_view(arrow):
        return pa.string()
    if _is_bytes(arrow):
        return pa.binary()
    return arrow


def _is_bytes(arrow: Any) -> bool:
    kinds = pa.types
    return bool(
        kinds.is_binary(arrow)
        or kinds.is_large_binary(arrow)
        or kinds.is_binary_view(arrow)
        or kinds.is_fixed_size_binary(arrow)
    )


def _is_list(arrow: Any) -> bool:
    kinds = pa.types
    return bool(
        kinds.is_list(arrow) or kinds.is_large_list(arrow) or kinds.is_fixed_size_list(arrow)
    )


def _is_nested(arrow: Any) -> bool:
    return bool(_is_list(arrow) or pa.types.is_struct(arrow) or pa.types.is_map(arrow))


def _is_whole(arrow: Any) -> bool:
    return bool(pa.types.is_integer(arrow) or (pa.types.is_decimal(arrow) and arrow.scale == 0))


def _is_exact_in_double(arrow: Any) -> bool:
    small = pa.types.is_integer(arrow) and arrow.bit_width <= 32
    return bool(pa.types.is_floating(arrow) or small)


def _is_single(arrow: Any) -> bool:
    return bool(pa.types.is_float32(arrow) or pa.types.is_float16(arrow))


def _loses_digits(arrow: Any, column: PgType) -> bool:
    """Return whether the server would silently round to the column's scale."""
    return column.scale is not None and arrow.scale > column.scale


def _json_wire(arrow: Any, kind: str) -> Wire | None:
    encoder = encode.jsonbs if kind == "jsonb" else encode.jsons
    fits = pa.types.is_string(arrow) or _is_nested(arrow)
    return Wire(encoder, is_exact=False) if fits else None


def _array_wire(arrow: Any, column: PgType) -> Wire | None:
    if not _is_list(arrow):
        return None
    element = replace(column, kind=column.element_kind, element_kind="", element_oid=0)
    inner = wire(arrow.value_type, element)
    if inner is None or inner.is_cast:
        return None
    is_exact = inner.is_exact and inner.most_characters is None
    return Wire(encode.arrays(inner.encode, column.element_oid), is_exact=is_exact)


_MOMENTS: Final = ("timestamp", "timestamptz", "time")

_CAST: Final = Wire(encode.texts, is_cast=True, is_exact=False)

_Rule = tuple[Callable[[Any], bool], Encode]

_WIRES: Final[Mapping[str, tuple[_Rule, ...]]] = {
    # PostgreSQL's type: which Arrow types fit, and their encoding.
    "bool": ((pa.types.is_boolean, encode.booleans),),
    "int2": ((_is_whole, encode.integers(2)),),
    "int4": ((_is_whole, encode.integers(4)),),
    "int8": ((_is_whole, encode.integers(8)),),
    "float4": ((_is_single, encode.floats(4)),),
    "float8": ((_is_exact_in_double, encode.floats(8)),),
    "numeric": ((pa.types.is_integer, encode.numerics), (pa.types.is_decimal, encode.numerics)),
    "text": ((pa.types.is_string, encode.texts),),
    "bytea": ((pa.types.is_binary, encode.bytestrings),),
    "uuid": ((pa.types.is_string, encode.uuids), (pa.types.is_binary, encode.uuids)),
    "date": ((pa.types.is_date, encode.dates),),
    "timestamp": ((pa.types.is_timestamp, encode.timestamps),),
    "timestamptz": ((pa.types.is_timestamp, encode.timestamps),),
    "time": ((pa.types.is_time, encode.times),),
    "interval": ((pa.types.is_duration, encode.intervals),),
}

_CREATED: Final[tuple[tuple[Callable[[Any], bool], str], ...]] = (
    (pa.types.is_boolean, "boolean"),
    (pa.types.is_int8, "smallint"),
    (pa.types.is_int16, "smallint"),
    (pa.types.is_uint8, "smallint"),
    (pa.types.is_int32, "integer"),
    (pa.types.is_uint16, "integer"),
    (pa.types.is_int64, "bigint"),
    (pa.types.is_uint32, "bigint"),
    (pa.types.is_uint64, "numeric(20)"),
    (_is_single, "real"),
    (pa.types.is_floating, "double precision"),
    (pa.types.is_binary, "bytea"),
    (pa.types.is_date, "date"),
    (pa.types.is_time, "time"),
    (pa.types.is_duration, "interval"),
    (_is_nested, "jsonb"),
)


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

    parents: frozenset[TableName] = frozenset()
    """The tables that its foreign keys refer to."""

    @property
    def shortest_key(self) -> tuple[str, ...]:
        """A key that can name a row; empty if there is none."""
        return min((tuple(sorted(key)) for key in self.keys), key=len, default=())

    def takes(self, name: str, cast: str) -> bool:
        """Return whether staged values of a column are written to it, by this cast."""
        column = self.column(name)
        return column is not None and cast in ("", column.type.cast_sql)

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
SELECT a.attname AS name, pg_catalog.format_type(a.atttypid, a.atttypmod) AS sql,
       -- An explicit cast to bit(3) or varchar(3)[] cuts values off; an assignment refuses them.
       -- With its schema, because another role may have a type of this name.
       CASE WHEN CASE t.typcategory WHEN 'A' THEN e.typcategory ELSE t.typcategory END IN ('S', 'V')
                 OR (a.atttypid = r.typ AND a.atttypmod = -1)
            THEN t.typnamespace::regnamespace::text || '.' || quote_ident(t.typname)
            ELSE pg_catalog.format_type(a.atttypid, a.atttypmod) END AS cast_sql,
       CASE WHEN t.typtype = 'e' OR t.typcategory = 'S' THEN 'text' ELSE t.typname END AS kind,
       CASE WHEN t.typcategory <> 'A' THEN ''
            WHEN e.typtype = 'e' OR e.typcategory = 'S' THEN 'text' ELSE e.typname
            END AS element_kind,
       CASE WHEN t.typcategory = 'A' THEN e.oid::bigint ELSE 0 END AS element_oid,
       r.modifier, 'bpchar' IN (t.typname, e.typname) AS is_padded, a.attnotnull AS is_not_null,
       a.atthasdef OR a.attidentity <> '' AS has_default, a.attgenerated <> '' AS is_generated,
       a.attidentity = 'a' AS is_identity_always
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


_PARENTS: Final = """
SELECT DISTINCT n.nspname, c.relname
  FROM pg_catalog.pg_constraint f JOIN pg_catalog.pg_class c ON c.oid = f.confrelid
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE f.conrelid = %s AND f.contype = 'f'
"""


def find_target(connection: Connection, name: TableName) -> TargetTable | str:
    """Describe the table *name*, or return why it cannot be written to."""
    with connection.transaction():
        connection.execute(OWN_PATH)
        row = connection.execute(_FIND, [str(name)]).fetchone()
        if row is None:
            return "does not exist"
        oid, schema, table, kind = row
        if kind not in ("r", "p"):
            return "is not an ordinary or partitioned table"
        # With an empty path, format_type names every type outside pg_catalog with its schema.
        connection.execute("SET LOCAL search_path = pg_catalog")
        cursor = connection.cursor(row_factory=dict_row)
        columns = cursor.execute(_COLUMNS, {"table": oid}).fetchall()
        keys = connection.execute(_KEYS, [oid]).fetchall()
        exclusive = connection.execute(_EXCLUSIVE, {"table": oid}).fetchall()
        parents = connection.execute(_PARENTS, [oid]).fetchall()
    return TargetTable(
        TableName(schema, table),
        tuple(map(_column, columns)),
        tuple(frozenset(names) for (names,) in keys),
        exclusive == [(True,)],
        frozenset(TableName(*parent) for parent in parents),
    )


def _column(row: Mapping[str, Any]) -> Column:
    kinds, modifier = {row["kind"], row["element_kind"]}, row["modifier"]
    precision = scale = length = None
    if "numeric" in kinds and modifier >= 4:
        # https://github.com/postgres/postgres/blob/REL_18_0/src/backend/utils/adt/numeric.c#L926
        precision = ((modifier - 4) >> 16) & 0xFFFF
        scale = (((modifier - 4) & 0x7FF) ^ 1024) - 1024
    if kinds.intersection(_MOMENTS) and modifier >= 0:
        precision = modifier
    if "text" in kinds and modifier >= 4:
        length = modifier - 4
    told = ("sql", "cast_sql", "kind", "element_kind", "element_oid", "is_padded")
    given = {name: row[name] for name in told}
    return Column(
        row["name"],
        PgType(precision=precision, scale=scale, length=length, **given),
        row["is_not_null"] and not row["has_default"] and not row["is_generated"],
        row["is_not_null"],
        row["is_generated"],
        row["is_identity_always"],
    )


def fit(target: TargetTable, schema: Any, filled: Sequence[str] = ()) -> list[Fitted]:
    """Match every column of *schema* with the target; *filled* are columns that semel fills.

    Raises:
        Permanent: they do not fit; the message lists every reason, with the solution.
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
    if problems:
        raise Permanent(f"table {table} does not fit the rows: {'; '.join(problems)}")
    return fitted


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
