"""The table of Arrow and PostgreSQL types: which pairs fit, and how values are encoded.

A pair that is not here would lose something (digits, an instant, a sign) or
would need a guess.  Strings fit every type: they are staged as text, and the
server casts them in the final transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from semel.errors import require
from semel.postgres import encode
from semel.postgres.encode import Encode

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
