"""Decimals and integers of any size as PostgreSQL's base-10000 digits, without a Python loop."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from semel.errors import require

np: Any = require("numpy", "postgres")
pa: Any = require("pyarrow", "postgres")
pc: Any = require("pyarrow.compute", "postgres")


Values: TypeAlias = Any

_BASE: Final = 10_000
_NEGATIVE: Final = 0x4000

# Every decimal of up to 18 digits fits a signed 64-bit word.
_WORD_PRECISION: Final = 18


def numeric_parts(column: Any) -> list[tuple[str, Values | int]]:
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
