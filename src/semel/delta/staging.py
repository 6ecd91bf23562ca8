"""The data files of tasks, written below the table, with what the table's log says of each."""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from semel.arrow.attempts import folder_of
from semel.arrow.rowfiles import COLLECT_BYTES, RowFiles, Values, split
from semel.arrow.tables import storage_faults
from semel.arrow.tally import tally
from semel.errors import Permanent, require
from semel.pipeline.sink import Batch, Receipt, Schema
from semel.pipeline.txn import SinkTxnId

pa: Any = require("pyarrow", "delta")
pc: Any = require("pyarrow.compute", "delta")
fs: Any = require("pyarrow.fs", "delta")
pq: Any = require("pyarrow.parquet", "delta")
delta_fs: Any = require("deltalake.fs", "delta")

# Longer texts say nothing more in statistics, and the log keeps them for every file.
_LONGEST_STATISTIC: Final = 32


def file_system(uri: str, options: Mapping[str, str]) -> Any:
    """Return the table's folder as an Arrow file system."""
    return fs.PyFileSystem(delta_fs.DeltaStorageHandler(uri, dict(options)))


@dataclass(frozen=True, slots=True)
class DeltaStager:
    """The settings that a task needs to write for one transaction."""

    txn: SinkTxnId
    uri: str
    schema: Schema
    partition_by: tuple[str, ...]
    file_bytes: int
    options: Mapping[str, str] = field(repr=False)
    """How to reach the storage; may hold credentials."""

    def open(self, task: str) -> DeltaWriter:
        return DeltaWriter(self, task)


class DeltaWriter:
    """The files of one task attempt; a task without rows has none."""

    def __init__(self, stager: DeltaStager, task: str) -> None:
        self._stager = stager
        self._task = task
        name = hashlib.sha256(task.encode()).hexdigest()[:16]
        self._folder = f"{folder_of(stager.txn)}/task-{name}"
        self._fs = file_system(stager.uri, stager.options)
        self._begun = 0
        self._done: list[dict[str, Any]] = []
        self._files = RowFiles(
            self._begin,
            self._finish,
            stager.file_bytes,
            lambda batch: split(conform(batch, stager.schema), stager.partition_by),
            min(stager.file_bytes, COLLECT_BYTES),
        )

    def write(self, batch: Batch) -> None:
        """Collect the rows, and write them into a file per partition when there are enough."""
        with self._faults():
            self._files.write(without_empty_texts(batch, self._stager.partition_by))

    def _begin(self, values: Values, schema: Schema) -> tuple[_DataFile, _DataFile]:
        path = f"{self._folder}/part-{self._begun:05d}.parquet"
        self._begun += 1
        file = _DataFile(path, self._fs.open_output_stream(path), schema)
        return file, file

    def _finish(self, file: _DataFile, values: Values, rows: int) -> None:
        named = dict(zip(self._stager.partition_by, values, strict=True))
        self._done.append(
            {
                "path": file.path,
                "size": file.size,
                "values": partition_texts(named),
                "stats": statistics(file.footer),
            }
        )

    def finish(self) -> Receipt:
        with self._faults():
            self._files.close()
        layout = list(self._stager.partition_by)
        return self._files.receipt(self._task, files=self._done, layout=layout)

    def discard(self) -> None:
        """Remove the task's folder, as far as possible."""
        with contextlib.suppress(Exception):
            for file in self._files.abandon():
                file.close()
        with contextlib.suppress(Exception):
            self._fs.delete_dir(self._folder)

    def _faults(self) -> contextlib.AbstractContextManager[None]:
        return storage_faults(f"staging into {self._folder}")


class _DataFile:
    """A file that is being written, and its footer."""

    def __init__(self, path: str, stream: Any, schema: Schema) -> None:
        self.path = path
        self.size = 0
        self._stream = stream
        self._footers: list[Any] = []
        self._writer = pq.ParquetWriter(
            stream, schema, compression="snappy", metadata_collector=self._footers
        )

    @property
    def footer(self) -> Any:
        """The footer of a closed file."""
        return self._footers[0]

    def write(self, batch: Batch) -> None:
        """Write the rows as a row group."""
        self._writer.write_batch(batch)
        self.size = self._stream.tell()

    def close(self) -> None:
        """Write the footer."""
        self._writer.close()
        self.size = self._stream.tell()
        self._stream.close()


def without_empty_texts(batch: Batch, columns: Sequence[str]) -> Batch:
    """Return the rows with null in place of empty texts in *columns*.

    A log has one form for both as the value of a partition, and readers take it for null.
    """
    for index, name in enumerate(batch.schema.names):
        column = batch.column(index)
        if name in columns and str(column.type) in ("string", "large_string"):
            empty = pc.fill_null(pc.equal(column, ""), False)
            filled = pc.if_else(empty, pa.scalar(None, column.type), column)
            batch = batch.set_column(index, batch.schema.field(index), filled)
    return batch


def conform(batch: Batch, schema: Schema) -> Batch:
    """Return the rows with the table's types.

    Raises:
        Permanent: a column is unknown to the table, or its values do not fit or would change.
    """
    unknown = set(batch.schema.names) - set(schema.names)
    absent = [one.name for one in schema if not one.nullable and one.name not in batch.schema.names]
    if unknown or absent:
        raise Permanent(
            f"the rows do not fit the table: it has no columns {sorted(unknown)}"
            if unknown
            else f"the rows do not fit the table: it requires the columns {absent}"
        )
    columns, fields = [], []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        wanted = schema.field(name)
        if column.null_count and not wanted.nullable:
            raise Permanent(f"column {name} is required by the table, and a row has no value there")
        wrong = (
            f"the rows do not fit the table: column {name} is {column.type} and not {wanted.type}"
        )
        try:
            columns.append(column.cast(wanted.type))
            same = column.type == wanted.type or _same(column, columns[-1].cast(column.type))
        except pa.ArrowException as error:
            raise Permanent(wrong) from error
        if not same:
            raise Permanent(f"{wrong}, which would change some of its values")
        fields.append(wanted)
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _same(column: Any, again: Any) -> bool:
    """Return whether the values are the same, as `semel verify` compares them."""
    if again.equals(column):  # quick, but no NaN equals another
        return True
    one, other = (tally(pa.RecordBatch.from_arrays([values], [""])) for values in (column, again))
    return one == other


def partition_texts(values: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the values of a partition as the table's log spells them."""
    return {name: _partition_text(value) for name, value in values.items()}


def _partition_text(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    return value.isoformat() if isinstance(value, dt.date) else str(value)


def can_partition(kind: Any) -> bool:
    """Return whether values of the type have one form in the log of a Delta table."""
    types = pa.types
    return any(
        is_kind(kind)
        for is_kind in (types.is_integer, types.is_string, types.is_boolean, types.is_date)
    )


def statistics(footer: Any) -> str:
    """Return what readers skip files by: the number of rows, least and greatest values, nulls."""
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    unknown: set[str] = set()
    for group in range(footer.num_row_groups):
        for index in range(footer.num_columns):
            column = footer.row_group(group).column(index)
            name, found = column.path_in_schema, column.statistics
            if "." in name or found is None:
                continue
            nulls[name] = nulls.get(name, 0) + (found.null_count or 0)
            low, high = _plain(found.min), _plain(found.max)
            if not found.has_min_max or low is None or high is None:
                unknown.add(name)
                continue
            least[name] = min(least.get(name, low), low)
            greatest[name] = max(greatest.get(name, high), high)
    for name in unknown:
        least.pop(name, None)
        greatest.pop(name, None)
    return json.dumps(
        {
            "numRecords": footer.num_rows,
            "minValues": least,
            "maxValues": greatest,
            "nullCount": nulls,
        }
    )


def _plain(value: Any) -> Any:
    """Return the value as the log writes it; None if it has no exact or short form there."""
    if isinstance(value, bool | dt.datetime):
        return None
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value if len(value) <= _LONGEST_STATISTIC else None
    return value if isinstance(value, int) else None
