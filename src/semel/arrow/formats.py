"""The file formats: parquet, JSON lines and CSV, written as streams with bounded memory.

The values of JSON lines, which are read back as they were written:

    decimal                  text, all digits           "1.50"
    date, time               text, ISO 8601             "2026-01-31", "12:30:00.000001"
    timestamp                text, ISO 8601; with a     "2026-01-31T12:30:00.000001Z"
                             time zone: UTC and a Z
    duration                 number of its own units    1500000
    bytes                    text, base64               "AAEC"
    NaN, ±infinity           text                       "NaN", "Infinity", "-Infinity"
    list, struct, map        array, object, object

A row has all its columns; one without a value is null.  CSV has a header, quotes every
text, and leaves null empty.
"""

from __future__ import annotations

import base64
import datetime as dt
import gzip
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from enum import StrEnum
from itertools import islice
from typing import Any, Final, Protocol, TypeAlias

from semel.errors import Misuse, Permanent, require
from semel.pipeline.sink import Batch, Schema

pa: Any = require("pyarrow", "files")
csv: Any = require("pyarrow.csv", "files")
pq: Any = require("pyarrow.parquet", "files")

# A reader loads a row group at once, and a writer keeps it in memory.
_ROW_GROUP_ROWS: Final = 131_072
_ROW_GROUP_BYTES: Final = 64 << 20


class Format(StrEnum):
    """The formats of the files."""

    PARQUET = "parquet"
    JSONL = "jsonl"
    CSV = "csv"


_COMPRESSIONS: Final = {
    Format.PARQUET: ("snappy", "zstd", "gzip", "lz4", "none"),
    Format.JSONL: ("none", "gzip", "zstd"),
    Format.CSV: ("none", "gzip", "zstd"),
}
"""The first one is the default."""


class RowFile(Protocol):
    """A file that is being written."""

    def write(self, batch: Batch) -> None:
        """Write rows, now or when enough are collected."""

    def close(self) -> None:
        """Write the remaining rows; the caller closes the file."""


def checked_format(sink: str, format: str) -> Format:
    """Return the format by its name.

    Raises:
        Misuse: there is no such format.
    """
    if format not in tuple(Format):
        raise Misuse(f"{sink}: format {format!r} is not one of {[*map(str, Format)]}")
    return Format(format)


def checked_compression(format: Format, compression: str | None) -> str:
    """Return the compression to use.

    Raises:
        Misuse: the format does not have it.
    """
    known = _COMPRESSIONS[format]
    if compression is None:
        return known[0]
    if compression not in known:
        raise Misuse(f"{format} files cannot be compressed by {compression!r}; use {known}")
    return compression


def extension(format: Format, compression: str) -> str:
    """Return the files' extension, by which readers recognise the format."""
    if format is Format.PARQUET or compression == "none":
        return str(format)
    return f"{format}.{'gz' if compression == 'gzip' else 'zst'}"


def open_rows(format: Format, compression: str, schema: Schema, sink: io.RawIOBase) -> RowFile:
    """Start to write rows of *schema* into *sink*."""
    if format is Format.PARQUET:
        return _ParquetFile(compression, schema, sink)
    if format is Format.CSV:
        return _CsvFile(compression, schema, sink)
    return _JsonLinesFile(compression, sink)


def read_rows(
    source: Any, format: Format, schema: Schema, compression: str | None = None
) -> Iterator[Batch]:
    """Read the rows of one file as they were staged, in pieces.

    *source* is a path or a file of pyarrow; *compression* None: by the path's extension.
    """
    if format is Format.PARQUET:
        with pq.ParquetFile(source) as file:
            for batch in file.iter_batches(batch_size=65_536):
                yield batch if batch.schema.equals(schema) else _cast(batch, schema)
        return
    packed = {None: "detect", "none": None}.get(compression, compression)
    with pa.input_stream(source, compression=packed) as stream:
        if format is Format.CSV:
            yield from _read_csv(stream, schema)
        else:
            lines = io.TextIOWrapper(stream, encoding="utf-8", newline="\n")
            yield from decode_lines(lines, schema)


def check_schema(format: Format, schema: Schema, reserved: Sequence[str] = ()) -> None:
    """Check that every column can be written and read back.

    Readers get the *reserved* columns from the folders' names.

    Raises:
        Permanent: some cannot; the message names them.
    """
    bad = []
    for column in schema:
        try:
            if format is Format.PARQUET:
                pq.ParquetWriter(io.BytesIO(), pa.schema([column])).close()
            elif format is Format.CSV:
                _check_csv(column.type)
            else:
                _codec(column.type)
        except NotJson as error:
            bad.append(f"{column.name}: {error}")
        except pa.ArrowException as error:
            bad.append(f"{column.name}: {column.type} has no form in parquet ({error}); cast it")
    if len(set(schema.names)) < len(schema.names):
        bad.append("two columns have the same name; rename one")
    for name in schema.names:
        if name.lower() in reserved:
            bad.append(f"{name}: readers get a column of this name from the folders; rename it")
    if bad:
        raise Permanent(f"these columns cannot be written as {format}: {'; '.join(bad)}")


class _ParquetFile:
    def __init__(self, compression: str, schema: Schema, sink: io.RawIOBase) -> None:
        self._schema = schema
        self._writer = pq.ParquetWriter(pa.PythonFile(sink, "w"), schema, compression=compression)
        self._waiting: list[Any] = []
        self._rows = 0
        self._bytes = 0

    def write(self, batch: Batch) -> None:
        self._waiting.append(batch)
        self._rows += batch.num_rows
        self._bytes += batch.nbytes
        if self._rows >= _ROW_GROUP_ROWS or self._bytes >= _ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting, self._schema))
        self._waiting, self._rows, self._bytes = [], 0, 0

    def close(self) -> None:
        self._flush()
        self._writer.close()


class _Lent(io.RawIOBase):
    """The caller's file, for writers that close what they write into."""

    def __init__(self, file: io.RawIOBase) -> None:
        super().__init__()
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._file.write(data) or 0


def _packed(compression: str, sink: io.RawIOBase) -> Any:
    """Return a stream that compresses into *sink*; to close it leaves the sink open."""
    if compression == "gzip":
        # Without a time in the gzip header, equal rows give equal files.
        return gzip.GzipFile(fileobj=sink, mode="wb", mtime=0)
    if compression == "zstd":
        return pa.CompressedOutputStream(pa.PythonFile(_Lent(sink), "w"), "zstd")
    return _Lent(sink)


class _JsonLinesFile:
    def __init__(self, compression: str, sink: io.RawIOBase) -> None:
        self._out = _packed(compression, sink)

    def write(self, batch: Batch) -> None:
        text = "".join(f"{line}\n" for line in encode_lines(batch))
        self._out.write(text.encode())

    def close(self) -> None:
        self._out.close()


class _CsvFile:
    def __init__(self, compression: str, schema: Schema, sink: io.RawIOBase) -> None:
        self._out = _packed(compression, sink)
        self._writer = csv.CSVWriter(pa.PythonFile(_Lent(self._out), "w"), schema)

    def write(self, batch: Batch) -> None:
        self._writer.write_batch(batch)

    def close(self) -> None:
        self._writer.close()
        self._out.close()


def _read_csv(stream: Any, schema: Schema) -> Iterator[Batch]:
    yield from csv.open_csv(
        stream,
        parse_options=csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
        convert_options=csv.ConvertOptions(
            column_types=schema,
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )


def _check_csv(kind: Any) -> None:
    if not any(has_form(kind) for has_form in _IN_CSV):
        raise NotJson(f"{kind} has no form in CSV; cast it, or write parquet")


def _cast(batch: Batch, schema: Schema) -> Batch:
    columns = [batch.column(name).cast(schema.field(name).type) for name in schema.names]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


Codec: TypeAlias = tuple[Callable[[Any], Any], Callable[[Any], Any]] | None
"""Functions that write and read a value that is not null; None if JSON has the type."""

_ROWS_AT_ONCE: Final = 8192


class NotJson(TypeError):
    """A type that has no exact form in JSON lines or CSV."""


def encode_lines(batch: Batch) -> Iterator[str]:
    """Yield each row as one line, without the line end.

    Raises:
        Permanent: a time or a duration is outside the range of ISO 8601 or Python.
    """
    names = batch.schema.names
    columns = [_written(*named) for named in zip(names, batch.columns, strict=True)]
    for row in zip(*columns, strict=True):
        yield _dump(dict(zip(names, row, strict=True)))


def _written(name: str, column: Any) -> list[Any]:
    codec = _codec(column.type)
    try:
        values: list[Any] = column.to_pylist()
        if codec is None:
            return values
        write = codec[0]
        return [None if value is None else write(value) for value in values]
    except OverflowError as error:
        raise Permanent(
            f"column {name} ({column.type}): a value has no form in JSON lines, which keep the "
            f"years 1 to 9999 ({error}); cast it, or write parquet"
        ) from error


def decode_lines(lines: Iterable[str], schema: Schema) -> Iterator[Batch]:
    """Read back what `encode_lines` wrote."""
    reads = {column.name: codec[1] for column in schema if (codec := _codec(column.type))}
    lines = iter(lines)
    while some := list(islice(lines, _ROWS_AT_ONCE)):
        rows = [json.loads(line) for line in some]
        for row in rows:
            for name, read in reads.items():
                if row.get(name) is not None:
                    row[name] = read(row[name])
        yield pa.RecordBatch.from_pylist(rows, schema=schema)


_dump: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def _codec(kind: Any) -> Codec:
    """Return how values of this type are written; raise `NotJson` with advice if they cannot be."""
    types = pa.types
    if types.is_dictionary(kind):
        return _codec(kind.value_type)
    if any(is_plain(kind) for is_plain in _PLAIN):
        return None
    for has_type, codec in _BY_TYPE:
        if has_type(kind):
            return codec
    if types.is_timestamp(kind) and kind.unit != "ns":
        return _timestamp_codec(kind)
    if types.is_time(kind) and kind.unit != "ns":
        return dt.time.isoformat, dt.time.fromisoformat
    if types.is_duration(kind) and kind.unit != "ns":
        unit = dt.timedelta(microseconds=_MICROSECONDS[kind.unit])
        return lambda value: value // unit, lambda number: number * unit
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _list_codec(_codec(kind.value_type))
    if types.is_map(kind) and (types.is_string(kind.key_type)):
        return _map_codec(_codec(kind.item_type))
    if types.is_struct(kind):
        return _struct_codec({child.name: _codec(child.type) for child in kind})
    raise NotJson(_advice(kind))


def _advice(kind: Any) -> str:
    if getattr(kind, "unit", None) == "ns":
        return f"{kind} is finer than the microseconds that JSON lines keep; cast it"
    if pa.types.is_map(kind):
        return f"{kind} has keys that are not text, as those of a JSON object must be; cast them"
    return f"{kind} has no form in JSON lines; cast it, or write parquet"


_PLAIN: Final = (
    pa.types.is_null,
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_string,
    pa.types.is_large_string,
    lambda kind: str(kind) == "string_view",
)


_IN_CSV: Final = (
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_float32,
    pa.types.is_float64,
    pa.types.is_decimal128,
    pa.types.is_date32,
    lambda kind: pa.types.is_timestamp(kind) and kind.tz in (None, "UTC"),
)


def _write_float(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


_FLOAT: Final = (_write_float, float)
_BYTES: Final = (lambda value: base64.b64encode(value).decode(), base64.b64decode)

_BY_TYPE: Final[tuple[tuple[Callable[[Any], bool], Codec], ...]] = (
    (pa.types.is_floating, _FLOAT),
    (pa.types.is_decimal, (lambda value: format(value, "f"), Decimal)),
    (pa.types.is_date, (dt.date.isoformat, dt.date.fromisoformat)),
    (pa.types.is_binary, _BYTES),
    (pa.types.is_large_binary, _BYTES),
    (pa.types.is_fixed_size_binary, _BYTES),
    (lambda kind: str(kind) == "binary_view", _BYTES),
)

_MICROSECONDS: Final = {"s": 1_000_000, "ms": 1_000, "us": 1}


def _timestamp_codec(kind: Any) -> Codec:
    if kind.tz is None:
        return dt.datetime.isoformat, dt.datetime.fromisoformat

    def write(value: dt.datetime) -> str:
        return value.astimezone(dt.UTC).replace(tzinfo=None).isoformat() + "Z"

    return write, dt.datetime.fromisoformat


def _list_codec(inner: Codec) -> Codec:
    if inner is None:
        return None
    write, read = inner

    return (
        lambda values: [None if value is None else write(value) for value in values],
        lambda values: [None if value is None else read(value) for value in values],
    )


def _map_codec(inner: Codec) -> Codec:
    write, read = inner or (_same, _same)
    return (
        lambda pairs: {key: None if value is None else write(value) for key, value in pairs},
        lambda values: [
            (key, None if value is None else read(value)) for key, value in values.items()
        ],
    )


def _struct_codec(inner: dict[str, Codec]) -> Codec:
    changing = {name: codec for name, codec in inner.items() if codec is not None}
    if not changing:
        return None

    def change(row: dict[str, Any], side: int) -> dict[str, Any]:
        return {
            name: changing[name][side](value) if name in changing and value is not None else value
            for name, value in row.items()
        }

    return lambda row: change(row, 0), lambda row: change(row, 1)


def _same(value: Any) -> Any:
    return value
