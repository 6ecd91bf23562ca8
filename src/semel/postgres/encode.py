"""Arrow columns in PostgreSQL's binary COPY format, a whole batch at a time.

    header · rows · trailer          row = number of fields, then each field
                                     field = length (-1: null), then its bytes

A column becomes an `EncodedColumn`: parts of fixed width that numpy lays out for all
rows at once, and at most one body of variable length that Arrow joins in.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, TypeAlias

from semel.arrow.tally import decoded
from semel.errors import require

np: Any = require("numpy", "postgres")
pa: Any = require("pyarrow", "postgres")
pc: Any = require("pyarrow.compute", "postgres")

HEADER: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
TRAILER: Final = b"\xff\xff"

_NULL: Final = pa.scalar(b"\xff\xff\xff\xff", pa.binary())

# PostgreSQL's epoch is 2000-01-01.
_EPOCH_DAYS: Final = 10_957
_EPOCH_MICROSECONDS: Final = _EPOCH_DAYS * 86_400_000_000


Values: TypeAlias = Any
"""A numpy array."""


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
    column = decoded(column)
    kind = column.type
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
    return EncodedColumn(_numeric_parts(column), valid=_valid(column))


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


def has_longer(column: Any, characters: int, *, spaces: bool = True) -> bool:
    """Return whether a text has more characters than this; *spaces* at its end count, or not."""
    if not spaces:
        column = pc.utf8_rtrim(column, " ")
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
        raise ValueError("a time is before PostgreSQL's range")


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


# A numeric is sent as digits to the base 10,000.
_BASE: Final = 10_000
_NEGATIVE: Final = 0x4000

# Every decimal of up to 18 digits fits a signed 64-bit word.
_WORD_PRECISION: Final = 18


def _numeric_parts(column: Any) -> list[tuple[str, Values | int]]:
    """Return the fixed-width fields of a numeric, its length first, for every row.

    Every row gets as many digits as the largest needs: the server strips leading zeros.
    """
    digits, is_negative, scale = _digits_of(column)
    after_point = -(-scale // 4)
    parts: list[tuple[str, Values | int]] = [
        (">i4", 8 + 2 * len(digits)),
        (">i2", len(digits)),
        (">i2", len(digits) - after_point - 1),
        (">u2", np.where(is_negative, _NEGATIVE, 0)),
        (">i2", scale),
    ]
    return parts + [(">i2", digit) for digit in reversed(digits)]


def _digits_of(column: Any) -> tuple[list[Values], Values, int]:
    kind = column.type
    if pa.types.is_decimal(kind):
        if kind.scale < 0:
            column = column.cast(pa.decimal256(76, 0))
        elif kind.byte_width < 16:
            column = column.cast(pa.decimal128(kind.precision, kind.scale))
        kind = column.type
        words = _view(column, np.uint32, kind.byte_width // 4)
        if kind.precision <= _WORD_PRECISION:
            low = np.ascontiguousarray(words[:, :2]).view(np.int64)[:, 0]
            return *_word_digits(_without_nulls(column, low), kind.scale), kind.scale
        return *_limb_digits(words, kind.scale), kind.scale
    if pa.types.is_uint64(kind):
        pairs = np.zeros((len(column), 3), np.uint32)  # a third limb keeps the sign bit clear
        pairs[:, :2] = _view(column, np.uint32, 2)
        return *_limb_digits(pairs, 0), 0
    word = _view(column.cast(pa.int64()), np.int64, 1)[:, 0]
    return *_word_digits(word, 0), 0


def _view(column: Any, dtype: Any, per_row: int) -> Values:
    """Return a view of a fixed-width column's memory, one line per row."""
    words = np.frombuffer(column.buffers()[1], dtype=dtype)
    begin = column.offset * per_row
    return words[begin : begin + len(column) * per_row].reshape(len(column), per_row)


def _without_nulls(column: Any, values: Values) -> Values:
    """Replace nulls by zeros: under a null, Arrow's memory is undefined."""
    if not column.null_count:
        return values
    return np.where(pc.is_valid(column).to_numpy(zero_copy_only=False), values, 0)


def _word_digits(signed: Values, scale: int) -> tuple[list[Values], Values]:
    # abs() of the smallest 64-bit integer overflows to itself, which is right when unsigned.
    rest = np.abs(signed).view(np.uint64)
    largest = int(rest.max(initial=0))
    digits = []
    if odd := scale % 4:
        rest, largest, digit = _split(rest, largest, 10**odd)
        digits.append(digit * np.uint64(10 ** (4 - odd)))
    while largest or not digits:
        rest, largest, digit = _split(rest, largest, _BASE)
        digits.append(digit)
    return digits, signed < 0


def _split(rest: Values, largest: int, divisor: int) -> tuple[Values, int, Values]:
    if largest < 2**32 and rest.dtype == np.uint64:
        rest = rest.astype(np.uint32)  # half the width is twice the speed
    quotient = rest // rest.dtype.type(divisor)
    return quotient, largest // divisor, rest - quotient * rest.dtype.type(divisor)


def _limb_digits(limbs: Values, scale: int) -> tuple[list[Values], Values]:
    """Divide numbers of several 32-bit limbs, lowest first, in two's complement."""
    is_negative = (limbs[:, -1] >> 31).astype(bool)
    rest = [limbs[:, i].astype(np.uint64) for i in range(limbs.shape[1])]
    carry = is_negative.astype(np.uint64)
    for i, limb in enumerate(rest):
        flipped = np.where(is_negative, limb ^ np.uint64(0xFFFFFFFF), limb) + carry
        rest[i], carry = flipped & np.uint64(0xFFFFFFFF), flipped >> np.uint64(32)
    digits = []
    if odd := scale % 4:
        digits.append(_divide(rest, 10**odd) * np.uint64(10 ** (4 - odd)))
    while any(limb.any() for limb in rest) or not digits:
        pair = _divide(rest, _BASE * _BASE)
        high = pair // np.uint64(_BASE)
        digits += [pair - high * np.uint64(_BASE), high]
    return digits, is_negative


def _divide(limbs: list[Values], divisor: int) -> Values:
    """Divide in place and return the remainder."""
    remainder = np.zeros_like(limbs[0])
    for i in reversed(range(len(limbs))):
        value = (remainder << np.uint64(32)) | limbs[i]
        limbs[i] = value // np.uint64(divisor)
        remainder = value - limbs[i] * np.uint64(divisor)
    return remainder


def json_text(value: Any) -> str:
    """Write *value* as JSON.

    Decimals stay numbers with all their digits; bytes become base64, times ISO 8601;
    numbers that JSON does not have (NaN, infinities) become their names as text.
    """
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return repr(value) if math.isfinite(value) else f'"{value}"'
        case Decimal():
            return format(value, "f")
        case str():
            return json.dumps(value, ensure_ascii=False)
        case bytes():
            return f'"{base64.b64encode(value).decode()}"'
        case dt.datetime() | dt.date() | dt.time():
            return f'"{value.isoformat()}"'
        case dt.timedelta():
            return str(value.total_seconds())
        case Mapping():
            pairs = (f"{_name(key)}:{json_text(item)}" for key, item in value.items())
            return f"{{{','.join(pairs)}}}"
        case list() | tuple():
            return f"[{','.join(map(json_text, value))}]"
    return json.dumps(str(value), ensure_ascii=False)


def _name(key: Any) -> str:
    text = json_text(key)
    return text if text.startswith('"') else json.dumps(text)
