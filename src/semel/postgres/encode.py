"""Arrow columns in PostgreSQL's binary COPY format, a whole batch at a time.

    header · rows · trailer          row = number of fields, then each field
                                     field = length (-1: null), then its bytes

A column becomes an `EncodedColumn`: parts of fixed width that numpy lays out for all
rows at once, and at most one body of variable length that Arrow joins in.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from semel.errors import require
from semel.postgres.jsontext import json_text
from semel.postgres.numeric import Values, numeric_parts

np: Any = require("numpy", "postgres")
pa: Any = require("pyarrow", "postgres")
pc: Any = require("pyarrow.compute", "postgres")

HEADER: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
TRAILER: Final = b"\xff\xff"

_NULL: Final = pa.scalar(b"\xff\xff\xff\xff", pa.binary())

# PostgreSQL's epoch is 2000-01-01.
_EPOCH_DAYS: Final = 10_957
_EPOCH_MICROSECONDS: Final = _EPOCH_DAYS * 86_400_000_000


@dataclass(frozen=True, slots=True)
class EncodedColumn:
    """One column of a batch, ready to be joined into its rows."""

    parts: Sequence[tuple[str, Values | int]]
    """Numpy type and values of the fixed parts of every row, the length first."""

    body: Any = None
    """A binary array of the variable part; null if the length says null."""

    valid: Any = None
    """Which rows are not null, if some are and there is no body."""


Encode: TypeAlias = Callable[[Any], EncodedColumn]
"""Turns one plain column into a field.

Raises `ValueError` (Arrow's own errors are such) for values that the target cannot hold.
"""


def encode_rows(fields: Sequence[EncodedColumn], count: int, last_field: bytes = b"") -> memoryview:
    """Return *count* rows in COPY's format; *last_field*, if given, ends every row."""
    pieces: list[Any] = []
    number = len(fields) + bool(last_field)
    pending: list[tuple[str, Values | int]] = [(">i2", number)]
    for field in fields:
        if field.valid is not None:
            pieces += [_fixed(count, pending)] if pending else []
            pieces.append(pc.if_else(field.valid, _fixed(count, field.parts), _NULL))
            pending = []
            continue
        pending += field.parts
        if field.body is not None:
            pieces += [_fixed(count, pending), field.body]
            pending = []
    if pending:
        pieces.append(_fixed(count, pending))
    if last_field:
        pieces.append(pa.scalar(last_field, pa.binary()))
    return used_bytes(_concatenated(*pieces))


def field_of(value: bytes) -> bytes:
    """Return one field with its length."""
    return len(value).to_bytes(4, "big") + value


def plain(column: Any) -> Any:
    """Return a column without the layouts that kernels do not share: views, dictionaries …"""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return plain(column.storage)
    if pa.types.is_dictionary(kind):
        return plain(column.dictionary_decode())
    if pa.types.is_run_end_encoded(kind):
        return plain(pc.run_end_decode(column))
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return column.cast(pa.string())
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return column.cast(pa.binary())
    if pa.types.is_fixed_size_binary(kind):
        return column.cast(pa.binary())
    return column


def used_bytes(column: Any) -> memoryview:
    """Return the bytes of all values of a binary column, one after the other."""
    _, offsets, content = column.buffers()
    if content is None or not len(column):
        return memoryview(b"")
    ends = np.frombuffer(offsets, np.int32)
    return memoryview(content)[
        int(ends[column.offset]) : int(ends[column.offset + len(column)])
    ].toreadonly()


def nothing(column: Any) -> EncodedColumn:
    """Encode a column of nulls."""
    return EncodedColumn(((">i4", -1),))


def booleans(column: Any) -> EncodedColumn:
    """Encode for boolean."""
    return _number(column.cast(pa.uint8()), np.uint8, ">u1", 1)


def integers(width: int) -> Encode:
    """Encode for smallint, integer or bigint; a value out of range is an error."""
    kind = {2: pa.int16(), 4: pa.int32(), 8: pa.int64()}[width]
    return lambda column: _number(column.cast(kind), kind.to_pandas_dtype(), f">i{width}", width)


def floats(width: int) -> Encode:
    """Encode for real or double precision."""
    kind = {4: pa.float32(), 8: pa.float64()}[width]
    return lambda column: _number(column.cast(kind), kind.to_pandas_dtype(), f">f{width}", width)


def numerics(column: Any) -> EncodedColumn:
    """Encode integers and decimals for numeric."""
    return EncodedColumn(numeric_parts(column), valid=_valid(column))


def dates(column: Any) -> EncodedColumn:
    """Encode for date."""
    days = column.cast(pa.date32()).cast(pa.int32())
    _check_lowest(days, -(2**31) + _EPOCH_DAYS + 1)
    return _number(days, np.int32, ">i4", 4, -_EPOCH_DAYS)


def timestamps(column: Any) -> EncodedColumn:
    """Encode for timestamp and timestamptz: both count microseconds, the latter in UTC."""
    microseconds = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
    _check_lowest(microseconds, -(2**63) + _EPOCH_MICROSECONDS + 1)
    return _number(microseconds, np.int64, ">i8", 8, -_EPOCH_MICROSECONDS)


def times(column: Any) -> EncodedColumn:
    """Encode for time."""
    return _number(column.cast(pa.time64("us")).cast(pa.int64()), np.int64, ">i8", 8)


def unrounded(encode: Encode, digits: int) -> Encode:
    """Refuse times with more than *digits* fractional digits, which the server would round."""
    unit = 10 ** (6 - digits)

    def checked(column: Any) -> EncodedColumn:
        is_time = pa.types.is_time(column.type)
        kind = pa.time64("us") if is_time else pa.timestamp("us", column.type.tz)
        moments = column.cast(kind).cast(pa.int64()).drop_null().to_numpy()
        if (moments % unit).any():
            raise ValueError(f"a time has more than {digits} fractional digits")
        return encode(column)

    return checked


def intervals(column: Any) -> EncodedColumn:
    """Encode a duration for interval: microseconds, no days, no months."""
    microseconds = column.cast(pa.duration("us")).cast(pa.int64())
    field = _number(microseconds, np.int64, ">i8", 16)
    return EncodedColumn((*field.parts, (">i4", 0), (">i4", 0)), valid=field.valid)


def texts(column: Any) -> EncodedColumn:
    """Encode for text, varchar and similar types."""
    body = column.cast(pa.binary())
    content = np.frombuffer(used_bytes(body), np.uint8)
    # A fast check of all bytes first, then an exact one: bytes under a null do not count.
    if content.size and content.min() == 0 and pc.any(pc.match_substring(column, "\0")).as_py():
        raise ValueError("PostgreSQL's text cannot hold the character NUL (U+0000)")
    return _bytes(body)


def has_longer(column: Any, characters: int) -> bool:
    """Return whether a text has more than this number of characters."""
    return bool(pc.any(pc.greater(pc.utf8_length(column), characters)).as_py())


def bytestrings(column: Any) -> EncodedColumn:
    """Encode for bytea."""
    return _bytes(column.cast(pa.binary()))


def uuids(column: Any) -> EncodedColumn:
    """Encode for uuid: its usual spelling, 32 hex digits, or 16 bytes."""
    if pa.types.is_binary(column.type):
        body = column
        if pc.any(pc.not_equal(pc.binary_length(body), 16)).as_py():
            raise ValueError("a uuid must have 16 bytes")
        return _bytes(body)
    digits = pc.fill_null(pc.replace_substring(column, "-", ""), "0" * 32)
    if pc.any(pc.not_equal(pc.binary_length(digits), 32)).as_py():
        raise ValueError("a uuid has 32 hex digits")
    try:
        content = binascii.unhexlify(used_bytes(digits.cast(pa.binary())))
    except binascii.Error as error:
        raise ValueError("a uuid has 32 hex digits") from error
    values = np.frombuffer(content, np.dtype("V16"))
    return EncodedColumn(((">i4", 16), ("V16", values)), valid=_valid(column))


def jsons(column: Any) -> EncodedColumn:
    """Encode for json: strings hold JSON already, everything else is written as JSON."""
    return texts(_as_json(column))


def jsonbs(column: Any) -> EncodedColumn:
    """Encode for jsonb, whose binary form is a version and the text."""
    body = _as_json(column).cast(pa.binary())
    return _bytes(_concatenated(pa.scalar(b"\x01", pa.binary()), body, keep_nulls=True))


def arrays(element: Encode, element_oid: int) -> Encode:
    """Encode lists for a one-dimensional array type."""

    def encode(column: Any) -> EncodedColumn:
        if pa.types.is_fixed_size_list(column.type) or pa.types.is_large_list(column.type):
            column = column.cast(pa.list_(column.type.value_type))
        bounds = np.frombuffer(column.buffers()[1], np.int32)
        bounds = bounds[column.offset : column.offset + len(column) + 1]
        # Only the values of this slice: a sliced array shares its buffers with its neighbours.
        values = plain(column.values.slice(int(bounds[0]), int(bounds[-1] - bounds[0])))
        bounds = bounds - bounds[0]
        encoded = _alone(element(values), len(values))
        ends = np.frombuffer(encoded.buffers()[1], np.int32)[encoded.offset :]
        lengths = np.diff(bounds)
        elements = pa.Array.from_buffers(
            pa.binary(), len(column), [None, pa.py_buffer(ends[bounds]), encoded.buffers()[2]]
        )
        full = _fixed(
            len(column),
            [
                (">i4", 1),
                (">i4", int(values.null_count > 0)),
                (">u4", element_oid),
                (">i4", lengths),
                (">i4", 1),
            ],
        )
        head = pc.if_else(pa.array(lengths > 0), full, _empty_array(element_oid))
        body = _concatenated(head, elements)
        if column.null_count:
            body = pc.if_else(column.is_valid(), body, pa.scalar(None, pa.binary()))
        return _bytes(body)

    return encode


def _number(column: Any, dtype: Any, wire: str, width: int, add: int = 0) -> EncodedColumn:
    values = np.frombuffer(column.buffers()[1], dtype)[column.offset : column.offset + len(column)]
    return EncodedColumn(
        ((">i4", width), (wire, values + add if add else values)), valid=_valid(column)
    )


def _bytes(body: Any) -> EncodedColumn:
    lengths = pc.fill_null(pc.binary_length(body), -1)
    return EncodedColumn(((">i4", lengths.to_numpy(zero_copy_only=False)),), body=body)


def _valid(column: Any) -> Any:
    return column.is_valid() if column.null_count else None


def _check_lowest(column: Any, lowest: int) -> None:
    """Refuse values that would overflow when PostgreSQL's epoch is subtracted."""
    found = pc.min(column).as_py()
    if found is not None and found < lowest:
        raise ValueError(f"{found} is out of PostgreSQL's range")


def _as_json(column: Any) -> Any:
    if pa.types.is_string(column.type):
        return column
    rows = column.to_pylist(maps_as_pydicts="lossy")
    return pa.array([None if row is None else json_text(row) for row in rows], pa.string())


def _alone(field: EncodedColumn, count: int) -> Any:
    """Return a field of its own as a binary array, lengths included."""
    fixed = _fixed(count, field.parts)
    if field.valid is not None:
        return pc.if_else(field.valid, fixed, _NULL)
    return fixed if field.body is None else _concatenated(fixed, field.body)


def _fixed(count: int, parts: Sequence[tuple[str, Values | int]]) -> Any:
    """Lay out *count* rows of fixed width as a binary array."""
    layout = np.dtype([(str(i), kind) for i, (kind, _) in enumerate(parts)])
    rows: Any = np.empty(count, layout)
    for i, (_, values) in enumerate(parts):
        rows[str(i)] = values
    width = layout.itemsize
    ends = np.arange(0, (count + 1) * width, width, dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(rows)])


def _concatenated(*pieces: Any, keep_nulls: bool = False) -> Any:
    handling = "emit_null" if keep_nulls else "replace"
    separator = pa.scalar(b"", pa.binary())
    return pc.binary_join_element_wise(
        *pieces, separator, null_handling=handling, null_replacement=""
    )


def _empty_array(element_oid: int) -> Any:
    head = (0, 0, element_oid)
    return pa.scalar(b"".join(part.to_bytes(4, "big") for part in head), pa.binary())
