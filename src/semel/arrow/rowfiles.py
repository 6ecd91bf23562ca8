"""The open files of one task: a next one at the target size, one per partition folder."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

from semel.arrow.formats import RowFile
from semel.arrow.tally import schema_to_text, tally
from semel.errors import Permanent, require
from semel.pipeline.sink import Batch, Receipt, Schema, Tally

pa: Any = require("pyarrow", "files")
pc: Any = require("pyarrow.compute", "files")

# Spark's and Hive's name for the folder of rows without a value.
NULL_FOLDER: Final = "__HIVE_DEFAULT_PARTITION__"

# The characters that Spark escapes, and readers unescape; any other stays as it is.
_UNSAFE: Final = re.compile(r"""[\x00-\x1f\x7f"#%'*/:=?\\{\[\]^]""")

_TASK_NAME_LENGTH: Final = 64

# Each open file keeps a row group and a part in memory.
_OPEN_AT_ONCE: Final = 16

# Of so many bytes of rows the parts of a partition become one row group.
COLLECT_BYTES: Final = 64 << 20

Values: TypeAlias = tuple[Any, ...]
"""The values of the partition columns, as Python values."""


class CountedFile(io.RawIOBase):
    """A file that is being written; subclasses store the bytes and keep `size` up to date."""

    size = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of written bytes."""
        return self.size


class RowFiles:
    """Rows go into files of about *file_bytes* each.

    *split* yields the rows of each partition with its values; *open_file* gets the values and
    the columns, and returns a new file and what writes rows into it; *close_file* gets the file,
    the values and the number of rows, once all of them are written into it.  Of *collect_bytes*
    of rows at a time the parts of a partition are written together.
    """

    def __init__(
        self,
        open_file: Callable[[Values, Schema], tuple[Any, RowFile]],
        close_file: Callable[[Any, Values, int], None],
        file_bytes: int,
        split: Callable[[Batch], Iterable[tuple[Values, Batch]]],
        collect_bytes: int = 0,
    ) -> None:
        self._open_file = open_file
        self._close_file = close_file
        self._file_bytes = file_bytes
        self._split = split
        self._collect_bytes = collect_bytes
        self.schema: Schema = None
        """The columns of the batches; None before the first."""
        self.tally = Tally()
        self._waiting: list[Batch] = []
        self._bytes = 0
        self._open: dict[Values, tuple[Any, RowFile, int]] = {}

    def write(self, batch: Batch) -> None:
        """Write rows, each into its partition's file, now or when enough are collected.

        Raises:
            Permanent: the batch has another schema than the one before.
        """
        if self.schema is None:
            self.schema = batch.schema.remove_metadata()
        if batch.num_rows == 0:
            return
        if not batch.schema.equals(self.schema):
            raise Permanent("a batch has another schema than the one before")
        self.tally += tally(batch)
        self._waiting.append(batch.replace_schema_metadata(None))
        self._bytes += batch.nbytes
        if self._bytes >= self._collect_bytes:
            self._flush()

    def _flush(self) -> None:
        batches, self._waiting, self._bytes = self._waiting, [], 0
        if len(batches) > 1:
            batches = pa.Table.from_batches(batches).combine_chunks().to_batches()
        for batch in batches:
            for values, rows in self._split(batch):
                self._write(values, rows)

    def _write(self, values: Values, batch: Batch) -> None:
        # Taken out and put back: the dictionary's order is that of the last use.
        found = self._open.pop(values, None)
        if found is None:
            if len(self._open) >= _OPEN_AT_ONCE:
                self._close(next(iter(self._open)))
            found = *self._open_file(values, batch.schema), 0
        file, rows, count = found
        self._open[values] = file, rows, count + batch.num_rows
        rows.write(batch)
        if file.size >= self._file_bytes:
            self._close(values)

    def _close(self, values: Values) -> None:
        file, rows, count = self._open.pop(values)
        rows.close()
        self._close_file(file, values, count)

    def close(self) -> None:
        """Write all remaining rows and close every file."""
        self._flush()
        while self._open:
            self._close(next(iter(self._open)))

    def abandon(self) -> list[Any]:
        """Return the files that are still open, and forget their rows."""
        files = [file for file, _, _ in self._open.values()]
        self._open.clear()
        self._waiting.clear()
        return files

    def receipt(self, task: str, **detail: Any) -> Receipt:
        """Return what a task answers after `close`."""
        schema = None if self.schema is None else schema_to_text(self.schema)
        return Receipt(task, self.tally, {**detail, "schema": schema})


def split(batch: Batch, columns: Sequence[str]) -> Iterator[tuple[Values, Batch]]:
    """Yield the rows of each combination of values, without these columns."""
    if not columns:
        yield (), batch
        return
    kept = [name for name in batch.schema.names if name not in columns]
    keys = pa.table([batch.column(name) for name in columns], names=list(columns))
    numbered = keys.append_column("row", pa.array(range(batch.num_rows), pa.int64()))
    groups = numbered.group_by(list(columns), use_threads=False).aggregate([("row", "list")])
    for group in groups.to_batches():
        for at in range(group.num_rows):
            values = tuple(group.column(name)[at].as_py() for name in columns)
            rows = group.column("row_list")[at].values
            yield values, batch.take(rows).select(kept)


def safe_name(task: str) -> str:
    """Return a file name for a task, unique per task."""
    kept = re.sub(r"[^A-Za-z0-9-]", "-", task)[:_TASK_NAME_LENGTH]
    if task and kept == task:
        return task
    return f"{kept}-{hashlib.sha256(task.encode()).hexdigest()[:12]}"


def hive_folder(columns: Sequence[str], values: Values) -> str:
    """Return the folder of a partition as Hive and Spark spell it: ``day=2026-01-31/country=DE``.

    Empty without partition columns.  Like Spark, it has one folder for null and for empty text.
    """
    pairs = zip(columns, values, strict=True)
    return "/".join(f"{_escaped(name)}={_escaped(_text(value))}" for name, value in pairs)


def _text(value: Any) -> str:
    if value is None or value == "":
        return NULL_FOLDER
    return str(value).lower() if isinstance(value, bool) else str(value)


def _escaped(text: str) -> str:
    return _UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", text)
