"""The file formats: parquet and JSON lines, written as streams with bounded memory."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Final, Protocol

from semel.errors import Misuse, Permanent, require
from semel.files import jsonl
from semel.pipeline.sink import Batch, Schema

pa: Any = require("pyarrow", "files")
pq: Any = require("pyarrow.parquet", "files")

# Readers derive a column from the folders' names, and it hides one of the same name.
PARTITION_COLUMN: Final = "cycle"

# A reader loads a row group at once, and a writer keeps it in memory.
_ROW_GROUP_ROWS: Final = 131_072
_ROW_GROUP_BYTES: Final = 64 << 20


class Format(StrEnum):
    """The formats of the files."""

    PARQUET = "parquet"
    JSONL = "jsonl"


_COMPRESSIONS: Final = {
    Format.PARQUET: ("snappy", "zstd", "gzip", "lz4", "none"),
    Format.JSONL: ("none", "gzip"),
}
"""The first one is the default."""


class RowFile(Protocol):
    """A file that is being written."""

    def write(self, batch: Batch) -> None:
        """Write rows, now or when enough are collected."""
        ...

    def close(self) -> None:
        """Write the remaining rows; the caller closes the file."""
        ...


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
    if format is Format.JSONL and compression == "gzip":
        return "jsonl.gz"
    return str(format)


def open_rows(format: Format, compression: str, schema: Schema, sink: io.RawIOBase) -> RowFile:
    """Start to write rows of *schema* into *sink*."""
    if format is Format.PARQUET:
        return _ParquetFile(compression, schema, sink)
    return _JsonLinesFile(compression, sink)


def read_rows(path: str, format: Format, schema: Schema) -> Iterator[Batch]:
    """Read the rows of one file as they were staged, in pieces."""
    if format is Format.PARQUET:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=65_536):
                yield batch if batch.schema.equals(schema) else _cast(batch, schema)
        return
    open_text = gzip.open if path.endswith(".gz") else open
    with open_text(path, "rt", encoding="utf-8", newline="\n") as lines:
        yield from jsonl.decode(lines, schema)


def check_schema(format: Format, schema: Schema) -> None:
    """Check that every column can be written and read back.

    Raises:
        Permanent: some cannot; the message names them.
    """
    bad = []
    for column in schema:
        try:
            if format is Format.PARQUET:
                pq.ParquetWriter(io.BytesIO(), pa.schema([column])).close()
            else:
                jsonl.check_type(column.type)
        except jsonl.NotJson as error:
            bad.append(f"{column.name}: {error}")
        except pa.ArrowException as error:
            bad.append(f"{column.name}: {column.type} has no form in parquet ({error}); cast it")
    if len(set(schema.names)) < len(schema.names):
        bad.append("two columns have the same name; rename one")
    for name in schema.names:
        if name.lower() == PARTITION_COLUMN:
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


class _JsonLinesFile:
    def __init__(self, compression: str, sink: io.RawIOBase) -> None:
        self._zip = None
        self._out: Any = sink
        if compression == "gzip":
            # Without a time in the gzip header, equal rows give equal files.
            self._zip = gzip.GzipFile(fileobj=sink, mode="wb", mtime=0)
            self._out = self._zip

    def write(self, batch: Batch) -> None:
        text = "".join(f"{line}\n" for line in jsonl.encode(batch))
        self._out.write(text.encode())

    def close(self) -> None:
        if self._zip is not None:
            self._zip.close()


def _cast(batch: Batch, schema: Schema) -> Batch:
    columns = [batch.column(name).cast(schema.field(name).type) for name in schema.names]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
