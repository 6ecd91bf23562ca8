"""A row count and an order-independent hash of Arrow batches.

    row hash = _scramble(Σ columns: hash of the value, seeded with the column's name and kind)
    tally    = (rows, Σ rows: row hash  mod 2**64)

Equal rows have equal hashes, independent of batches, slices, encodings and the
order of rows and columns.  Rows that are read back must first be cast to the
staged schema: the scale of a decimal and the kind of a column (integer, text, …)
are part of the hash, the width of an integer is not.  No Python step per row.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import json
import math
import weakref
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any, Final, TypeAlias

from semel.errors import require
from semel.pipeline.sink import Batch, Schema, Tally

np: Any = require("numpy", "files")
pa: Any = require("pyarrow", "files")

# The temporary arrays of this many rows fit into a core's cache.
_ROWS_AT_ONCE: Final = 1 << 13


def tally(batch: Batch) -> Tally:
    """Count and hash the rows of a `pyarrow.RecordBatch`.

    A task gives the same batch to one sink after the other: it is hashed for the first.
    """
    global _newest
    counted, total = _newest
    if counted is None or counted() is not batch:
        total = _counted(batch)
        _newest = weakref.ref(batch), total
    return total


_newest: tuple[Callable[[], Batch] | None, Tally] = (None, Tally())


def _counted(batch: Batch) -> Tally:
    rows = batch.num_rows
    hashers = [
        _hasher_of(name, column)
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    total = 0
    for start in range(0, rows, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, rows)
        sums = np.zeros(stop - start, np.uint64)
        for hasher in hashers:
            sums += hasher(start, stop)
        total += int(_scramble(sums).sum(dtype=np.uint64))
    return Tally(rows, total % 2**64)


def tally_all(batches: Iterable[Batch]) -> Tally:
    """Add up the tallies of several batches."""
    return sum((tally(batch) for batch in batches), Tally())


def schema_to_text(schema: Schema) -> str:
    """Return a schema as one line of text for a token."""
    return base64.b64encode(schema.remove_metadata().serialize()).decode()


def schema_from_text(text: str) -> Schema:
    """Read what `schema_to_text` wrote."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))


Hashes: TypeAlias = Any
"""A numpy array of uint64."""

Hasher: TypeAlias = Callable[[int, int], Hashes]
"""Returns new hashes of the values from start to stop."""

# Odd constants with well-spread bits (golden ratio, splitmix64).
_M1: Final = np.uint64(0x9E3779B97F4A7C15)
_M2: Final = np.uint64(0xBF58476D1CE4E5B9)
_M3: Final = np.uint64(0x94D049BB133111EB)
_32: Final = np.uint64(32)
_29: Final = np.uint64(29)
_NAN: Final = np.uint64(0x7FF8000000000000)

# Longer values are hashed one by one: the loop over words would call numpy for
# fewer and fewer rows.
_LONG_BYTES: Final = 1024

_MASKS: Final = np.array([(1 << (8 * n)) - 1 for n in range(9)], np.uint64)


def _scramble(hashes: Hashes) -> Hashes:
    """Mix every bit into all others, in place."""
    hashes ^= hashes >> _32
    hashes *= _M2
    hashes ^= hashes >> _29
    hashes *= _M3
    hashes ^= hashes >> _32
    return hashes


def _hasher_of(name: str, column: Any) -> Hasher:
    """Return a hasher of the values of *column*; a null hashes like a missing value."""
    column = _plain(column)
    kind, hasher = _kind_and_hasher(column)
    seed = _seed(f"{kind}:{name}")
    hash_values = hasher(column, seed)
    if column.null_count == 0:
        return hash_values
    of_null = _seed(f"null:{name}")
    valid = _bits(column.buffers()[0], column.offset, len(column))

    def hash_values_and_nulls(start: int, stop: int) -> Hashes:
        hashes = hash_values(start, stop)
        hashes[~valid[start:stop]] = of_null
        return hashes

    return hash_values_and_nulls


def decoded(column: Any) -> Any:
    """Decode dictionaries and similar layouts, which do not change the values."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return decoded(column.storage)
    if pa.types.is_dictionary(kind):
        return decoded(column.dictionary_decode())
    if pa.types.is_run_end_encoded(kind):
        return decoded(require("pyarrow.compute", "files").run_end_decode(column))
    return column


def _plain(column: Any) -> Any:
    column = decoded(column)
    # By its text, because older versions of pyarrow have no name for the type.
    match str(column.type):
        case "string_view":
            return column.cast(pa.large_string())
        case "binary_view":
            return column.cast(pa.large_binary())
    return column


_Prepare: TypeAlias = Callable[[Any, Any], Hasher]


def _kind_and_hasher(column: Any) -> tuple[str, _Prepare]:
    kind, types = column.type, pa.types
    if types.is_null(kind):
        return "null", _hash_nothing
    if types.is_integer(kind):
        return "int", _hash_fixed(lambda values: values.astype(np.int64))
    if types.is_boolean(kind):
        return "bool", _hash_booleans
    if types.is_floating(kind):
        return "float", _hash_fixed(_canonical_floats)
    if types.is_decimal(kind):
        return f"decimal {kind.scale}", _hash_decimals
    if types.is_date32(kind):
        return "date", _hash_fixed(lambda values: values.astype(np.int64))
    if types.is_date64(kind):
        return "date", _hash_fixed(lambda values: values // 86_400_000)
    if types.is_timestamp(kind) or types.is_time(kind) or types.is_duration(kind):
        return _KIND_OF_TIME[type(kind)], _hash_fixed(_MICROS[kind.unit])
    if types.is_string(kind) or types.is_large_string(kind):
        return "text", _hash_bytes
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return "bytes", _hash_bytes
    return "nested", _hash_nested


def _hash_nothing(column: Any, seed: Any) -> Hasher:
    return lambda start, stop: np.full(stop - start, seed)


def _hash_fixed(widen: Callable[[Any], Any]) -> _Prepare:
    def prepare(column: Any, seed: Any) -> Hasher:
        values = _fixed(column, _DTYPES[column.type.bit_width, pa.types.is_floating(column.type)])
        if pa.types.is_unsigned_integer(column.type):
            values = values.view(values.dtype.str.replace("i", "u"))

        def hash_values(start: int, stop: int) -> Hashes:
            return _scramble((widen(values[start:stop]).view(np.uint64) ^ seed) * _M1)

        return hash_values

    return prepare


def _hash_booleans(column: Any, seed: Any) -> Hasher:
    values = _bits(column.buffers()[1], column.offset, len(column))
    return lambda start, stop: _scramble((values[start:stop].astype(np.uint64) ^ seed) * _M1)


def _hash_decimals(column: Any, seed: Any) -> Hasher:
    if column.type.bit_width <= 64:
        return _hash_fixed(lambda values: values.astype(np.int64))(column, seed)
    words = column.type.bit_width // 64
    values = _fixed(column, np.int64, words).reshape(-1, words)

    def hash_values(start: int, stop: int) -> Hashes:
        hashes = values[start:stop, 0].view(np.uint64) ^ seed
        for word in range(1, words):
            # Zero where the word only repeats the sign of the one below it: a
            # width of 64, 128 or 256 bits makes no difference.
            sign = values[start:stop, word - 1] >> np.int64(63)
            rest = (values[start:stop, word] ^ sign).view(np.uint64)
            if rest.any():
                hashes += _scramble(rest * _M1) * np.uint64(2 * word + 1)
        return _scramble(hashes * _M1)

    return hash_values


def _hash_bytes(column: Any, seed: Any) -> Hasher:
    """Hash byte strings eight bytes at a time, over the rows that still have bytes left."""
    data, ends = _bytes_and_ends(column)
    valid = None
    if column.null_count:
        valid = _bits(column.buffers()[0], column.offset, len(column))

    def hash_values(start: int, stop: int) -> Hashes:
        begin, end = int(ends[start]), int(ends[stop])
        # Sixteen more bytes, so that the last value can be read in whole words, too.
        padded = np.zeros((end - begin + 23) // 8 * 8, np.uint8)
        padded[: end - begin] = data[begin:end]
        words = padded.view(np.uint64)
        at = (ends[start:stop] - begin).astype(np.int64)
        left = np.diff(ends[start : stop + 1]).astype(np.int64)
        if valid is not None:
            left[~valid[start:stop]] = 0  # the bytes under a null are undefined
        hashes = left.astype(np.uint64) * _M1 + seed
        long = np.flatnonzero(left > _LONG_BYTES)
        for row in long:
            value = padded[at[row] : at[row] + left[row]]
            hashes[row] ^= _digest(value.tobytes())
        left[long] = 0
        _fold(hashes, words, at, left)
        return _scramble(hashes)

    return hash_values


def _fold(hashes: Hashes, words: Any, at: Any, left: Any) -> None:
    """Mix the *left* bytes from *at* on into each hash."""
    rows = None  # all of them
    if not left.all():
        rows = np.flatnonzero(left)
        at, left = at[rows], left[rows]
    while len(left):
        index = at >> 3
        shift = ((at & 7) << 3).astype(np.uint64)
        word = words[index] >> shift
        # Shifted in two steps: a shift by all 64 bits has no defined result.
        word |= (words[index + 1] << (np.uint64(63) - shift)) << np.uint64(1)
        if left.min() < 8:
            word &= _MASKS[np.minimum(left, 8)]
        mixed = (hashes if rows is None else hashes[rows]) ^ word
        mixed *= _M2
        mixed ^= mixed >> _32
        if rows is None:
            hashes[:] = mixed
        else:
            hashes[rows] = mixed
        more = left > 8
        if more.all():
            at, left = at + 8, left - 8
        else:
            rows = np.flatnonzero(more) if rows is None else rows[more]
            at, left = at[more] + 8, left[more] - 8


def _hash_nested(column: Any, seed: Any) -> Hasher:
    def hash_values(start: int, stop: int) -> Hashes:
        texts = [
            json.dumps(_canonical(value), sort_keys=True, separators=(",", ":"))
            for value in column.slice(start, stop - start).to_pylist()
        ]
        digests = np.array([_digest(text.encode()) for text in texts], np.uint64)
        return _scramble((digests ^ seed) * _M1)

    return hash_values


def _canonical(value: Any) -> Any:
    """Return one JSON value for equal values, independent of the order of a map's entries."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return ["float", "nan" if math.isnan(value) else repr(value + 0.0)]
        case Decimal():
            return ["decimal", str(value)]
        case dt.datetime() if value.tzinfo is not None:
            return ["timestamp", value.astimezone(dt.UTC).replace(tzinfo=None).isoformat()]
        case dt.datetime():
            return ["timestamp", value.isoformat()]
        case dt.date() | dt.time():
            return ["time", value.isoformat()]
        case dt.timedelta():
            return ["duration", value // dt.timedelta(microseconds=1)]
        case bytes():
            return ["bytes", base64.b64encode(value).decode()]
        case [tuple(), *_]:  # a map, as pyarrow gives it
            pairs = [[_canonical(key), _canonical(item)] for key, item in value]
            return ["map", sorted(pairs, key=json.dumps)]
        case list():
            return [_canonical(item) for item in value]
        case dict():
            return {key: _canonical(item) for key, item in value.items()}
    return ["other", str(value)]


def _canonical_floats(values: Any) -> Any:
    wide = values.astype(np.float64) + 0.0  # -0.0 + 0.0 is 0.0
    bits = wide.view(np.uint64)
    bits[np.isnan(wide)] = _NAN
    return bits


def _micros_of_nanos(values: Any) -> Any:
    micros, rest = np.divmod(values, 1000)
    return micros + rest * np.int64(0x1E3779B97F4A7C15) if rest.any() else micros


_MICROS: Final = {
    "s": lambda values: values.astype(np.int64) * 1_000_000,
    "ms": lambda values: values.astype(np.int64) * 1_000,
    "us": lambda values: values,
    "ns": _micros_of_nanos,
}

_KIND_OF_TIME: Final = {
    pa.TimestampType: "timestamp",
    pa.Time32Type: "time",
    pa.Time64Type: "time",
    pa.DurationType: "duration",
}

_DTYPES: Final = {
    (8, False): np.int8,
    (16, False): np.int16,
    (32, False): np.int32,
    (64, False): np.int64,
    (16, True): np.float16,
    (32, True): np.float32,
    (64, True): np.float64,
}


def _fixed(column: Any, dtype: Any, per_value: int = 1) -> Any:
    first, count = column.offset * per_value, len(column) * per_value
    buffer = column.buffers()[1]
    if buffer is None:
        return np.zeros(count, dtype)
    return np.frombuffer(buffer, dtype, count, first * np.dtype(dtype).itemsize)


def _bits(buffer: Any, offset: int, count: int) -> Any:
    if buffer is None:
        return np.ones(count, bool)
    packed = np.frombuffer(buffer, np.uint8)[offset // 8 : (offset + count + 7) // 8]
    unpacked = np.unpackbits(packed, bitorder="little")[offset % 8 :][:count]
    return unpacked.view(bool)


def _bytes_and_ends(column: Any) -> tuple[Any, Any]:
    """Return the bytes of all values, and where each begins and the last one ends."""
    buffers, count = column.buffers(), len(column)
    data = np.zeros(0, np.uint8) if buffers[-1] is None else np.frombuffer(buffers[-1], np.uint8)
    if pa.types.is_fixed_size_binary(column.type):
        width = column.type.byte_width
        return data, (np.arange(count + 1) + column.offset) * width
    wide = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    dtype = np.dtype(np.int64 if wide else np.int32)
    if buffers[1] is None or count == 0:
        return data, np.zeros(count + 1, dtype)
    return data, np.frombuffer(buffers[1], dtype, count + 1, column.offset * dtype.itemsize)


def _digest(value: bytes) -> Any:
    digest = hashlib.blake2b(value, digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def _seed(text: str) -> Any:
    return _digest(text.encode())
