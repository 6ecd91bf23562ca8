"""The data files of tasks, written where the table keeps its own, and their form in receipts."""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from semel.arrow.attempts import folder_of
from semel.arrow.rowfiles import COLLECT_BYTES, RowFiles, Values
from semel.arrow.tables import TableWrite, storage_faults
from semel.errors import Permanent, require
from semel.pipeline.sink import Batch, Receipt, Schema
from semel.pipeline.txn import SinkTxnId

pa: Any = require("pyarrow", "iceberg")
pc: Any = require("pyarrow.compute", "iceberg")
pq: Any = require("pyarrow.parquet", "iceberg")
conversions: Any = require("pyiceberg.conversions", "iceberg")
iceberg_io: Any = require("pyiceberg.io", "iceberg")
fileformat: Any = require("pyiceberg.io.fileformat", "iceberg")
arrow_io: Any = require("pyiceberg.io.pyarrow", "iceberg")
manifest: Any = require("pyiceberg.manifest", "iceberg")
metadata: Any = require("pyiceberg.table.metadata", "iceberg")
typedef: Any = require("pyiceberg.typedef", "iceberg")

DataFile = Any
"""A `pyiceberg.manifest.DataFile`."""


def file_system(io: Any, location: str) -> tuple[Any, str]:
    """Return the Arrow file system of a location, and its path there.

    Raises:
        Permanent: the table's files are not reached by Arrow.
    """
    if not isinstance(io, arrow_io.PyArrowFileIO):
        raise Permanent(
            f"{location} is read by {type(io).__name__}, which cannot list files; set the "
            f"catalog's property py-io-impl to pyiceberg.io.pyarrow.PyArrowFileIO"
        )
    scheme, host, path = io.parse_location(location, io.properties)
    return io.fs_by_scheme(scheme, host), path


@dataclass(frozen=True, slots=True)
class IcebergStager:
    """The settings that a task needs to write for one transaction."""

    txn: SinkTxnId
    folder: str
    """The URL of the attempt's folder."""

    file_bytes: int
    metadata: str = field(repr=False)
    """The table's metadata without its history, as JSON."""

    io: Mapping[str, Any] = field(repr=False)
    """How to reach the storage; may hold credentials."""

    write: TableWrite = TableWrite.APPEND
    key: tuple[str, ...] = ()
    """The columns by which a write finds the rows that it replaces or deletes."""

    delete_column: str = ""
    """An upsert deletes the row's key where this column is true."""

    def to_store(self, batch: Batch) -> Batch:
        """Return the rows, and of them the columns, that the table will have."""
        if self.write is TableWrite.DELETE:
            return batch.slice(0, 0)
        if not self.delete_column:
            return batch
        goes = pc.fill_null(batch.column(self.delete_column), False)
        return batch.filter(pc.invert(goes)).drop_columns([self.delete_column])

    def open(self, task: str) -> IcebergWriter:
        return IcebergWriter(self, task)


def stager_of(
    txn: SinkTxnId, table: Any, folder: str, file_bytes: int, **write: Any
) -> IcebergStager:
    """Take what tasks need from a loaded table."""
    text = without_history(table.metadata, refs={}, current_snapshot_id=None)
    settings = {key: value for key, value in table.io.properties.items() if key != "auth.manager"}
    return IcebergStager(txn, folder, file_bytes, text.model_dump_json(), settings, **write)


def without_history(found: Any, *kept: Any, **more: Any) -> Any:
    """Return the metadata of a table with the snapshots *kept* alone, and with *more* values."""
    slim = {"snapshots": list(kept), "snapshot_log": [], "metadata_log": []}
    return found.model_copy(update={**slim, **more})


class IcebergWriter:
    """The files of one task attempt; a task without rows has none."""

    def __init__(self, stager: IcebergStager, task: str) -> None:
        self._stager = stager
        self._task = task
        whole = metadata.TableMetadataUtil.parse_raw(stager.metadata)
        self._folder = f"{stager.folder}/task-{hashlib.sha256(task.encode()).hexdigest()[:16]}"
        where = {"write.data.path": self._folder, "write.object-storage.enabled": "false"}
        self._table = whole.model_copy(update={"properties": {**whole.properties, **where}})
        self._io = iceberg_io.load_file_io(dict(stager.io), whole.location)
        self._begun = 0
        self._done: list[DataFile] = []
        self._key_files: list[dict[str, Any]] = []
        self._files = RowFiles(
            self._begin,
            self._finish,
            stager.file_bytes,
            self._split,
            min(stager.file_bytes, COLLECT_BYTES),
        )

    def write(self, batch: Batch) -> None:
        """Collect the rows, and write them into a file per partition when there are enough."""
        with self._faults():
            self._files.write(batch)

    def _split(self, batch: Batch) -> Iterator[tuple[Values, Batch]]:
        if self._stager.key:
            self._write_keys(_keys_of(batch, self._stager.key))
        rows = self._stager.to_store(batch)
        if rows.num_rows == 0:
            return
        schema, spec = self._table.schema(), self._table.spec()
        conformed = conform(rows, schema)
        check_columns(self._table, conformed.schema)
        if spec.is_unpartitioned():
            yield (typedef.Record(), ""), conformed
            return
        whole = pa.Table.from_batches([conformed])
        for part in arrow_io._determine_partitions(spec, schema, whole):
            key = part.partition_key
            for one in part.arrow_table_partition.to_batches():
                yield (key.partition, f"/{key.to_path()}"), one

    def _begin(self, values: Values, schema: Schema) -> tuple[_OpenFile, _OpenFile]:
        path = f"{self._folder}{values[1]}/part-{self._begun:05d}.parquet"
        self._begun += 1
        file = _OpenFile(self._table, self._io.new_output(path))
        return file, file

    def _finish(self, file: _OpenFile, values: Values, rows: int) -> None:
        self._done.append(file.described(values[0]))

    def _write_keys(self, keys: Batch) -> None:
        name = f"keys-{len(self._key_files):05d}.parquet"
        with self._io.new_output(f"{self._folder}/{name}").create() as stream:
            pq.write_table(pa.Table.from_batches([keys]), stream)
            size = stream.tell()
        path = f"{folder_of(self._stager.txn)}{self._below()}/{name}"
        self._key_files.append({"path": path, "size": size})

    def _below(self) -> str:
        return self._folder.removeprefix(self._stager.folder)

    def finish(self) -> Receipt:
        with self._faults():
            self._files.close()
        return self._files.receipt(
            self._task,
            files=[self._described(file) for file in self._done],
            keys=self._key_files,
            layout=self._table.default_spec_id,
        )

    def _described(self, file: DataFile) -> dict[str, Any]:
        inside = file.file_path.removeprefix(self._stager.folder)
        return file_to_json(file, f"{folder_of(self._stager.txn)}{inside}", self._table)

    def _faults(self) -> contextlib.AbstractContextManager[None]:
        return storage_faults(f"staging into {self._folder}")

    def discard(self) -> None:
        """Remove the task's folder, as far as possible."""
        with contextlib.suppress(Exception):
            for file in self._files.abandon():
                file.close()
        with contextlib.suppress(Exception):
            system, path = file_system(self._io, self._folder)
            system.delete_dir(path)


class _OpenFile:
    """A Parquet file that is being written, as pyiceberg writes those of its own."""

    def __init__(self, table: Any, output: Any) -> None:
        self._table = table
        self._output = output
        self._schema = arrow_io.sanitize_column_names(table.schema())
        self._model = fileformat.FileFormatFactory.get(manifest.FileFormat.PARQUET)
        self._writer = self._model.create_writer(output, self._schema, table.properties)

    @property
    def size(self) -> int:
        return int(self._writer._fos.tell())

    def write(self, batch: Batch) -> None:
        """Write the rows as a row group."""
        table = self._table
        theirs = arrow_io.pyarrow_to_schema(
            batch.schema, table.schema().name_mapping, format_version=table.format_version
        )
        rows = arrow_io._to_requested_schema(
            self._schema, theirs, batch, include_field_ids=True, format_model=self._model
        )
        self._writer.write(pa.Table.from_batches([rows]))

    def close(self) -> None:
        """Write the footer."""
        self._writer.close()

    def described(self, partition: Any) -> DataFile:
        """Return the closed file with its statistics."""
        return manifest.DataFile.from_args(
            content=manifest.DataFileContent.DATA,
            file_path=self._output.location,
            file_format=manifest.FileFormat.PARQUET,
            partition=partition,
            file_size_in_bytes=len(self._output),
            sort_order_id=None,
            spec_id=self._table.default_spec_id,
            equality_ids=None,
            key_metadata=None,
            **self._writer.result().to_serialized_dict(),
        )


def _keys_of(batch: Batch, key: tuple[str, ...]) -> Batch:
    keys = batch.select(key)
    for name, column in zip(key, keys.columns, strict=True):
        if column.null_count:
            raise Permanent(f"column {name} is a part of the key, and a row has no value there")
    columns = [_in_utc(column) for column in keys.columns]
    return pa.RecordBatch.from_arrays(columns, names=list(key))


def check_columns(table: Any, schema: Schema) -> None:
    """Check that rows of *schema* fit the table, column by column.

    Raises:
        Permanent: they do not; the message names the columns.
    """
    try:
        arrow_io._check_pyarrow_schema_compatible(
            table.schema(), provided_schema=schema, format_version=table.format_version
        )
    except (ValueError, TypeError, arrow_io.UnsupportedPyArrowTypeException) as error:
        raise Permanent(f"the rows do not fit the table: {error}") from error


def conform(batch: Batch, schema: Any) -> Batch:
    """Return the rows as Iceberg wants them: times in UTC, no nulls where they are required.

    Raises:
        Permanent: a required column has a null.
    """
    columns, fields = [], []
    for column, name in zip(batch.columns, batch.schema.names, strict=True):
        column = _in_utc(column)
        required = name in schema.column_names and schema.find_field(name).required
        if required and column.null_count:
            raise Permanent(f"column {name} is required by the table, and a row has no value there")
        columns.append(column)
        fields.append(pa.field(name, column.type, nullable=not required))
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def conform_schema(schema: Schema, table: Any) -> Schema:
    """Return the schema that `conform` gives rows of *schema*."""
    empty = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)
    return conform(empty, table.schema()).schema


def _in_utc(column: Any) -> Any:
    kind = _kind_in_utc(column.type)
    return column if kind == column.type else column.cast(kind)


def _kind_in_utc(kind: Any) -> Any:
    """Return the type with UTC in place of other time zones, at any depth."""
    types = pa.types

    def inner(field: Any) -> Any:
        return field.with_type(_kind_in_utc(field.type))

    if types.is_timestamp(kind) and kind.tz not in (None, "UTC"):
        return pa.timestamp(kind.unit, "UTC")
    if types.is_struct(kind):
        return pa.struct([inner(kind.field(n)) for n in range(kind.num_fields)])
    if types.is_list(kind):
        return pa.list_(inner(kind.value_field))
    if types.is_large_list(kind):
        return pa.large_list(inner(kind.value_field))
    if types.is_map(kind):
        return pa.map_(inner(kind.key_field), inner(kind.item_field), kind.keys_sorted)
    return kind


_COUNTS: Final = ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts")
_BOUNDS: Final = ("lower_bounds", "upper_bounds")
_PLAIN: Final = ("record_count", "split_offsets")


def file_to_json(file: DataFile, path: str, table: Any) -> dict[str, Any]:
    """TableWrite a data file with its statistics and partition as JSON."""
    kinds = table.spec().partition_type(table.schema()).fields
    values = [
        None
        if file.partition[i] is None
        else conversions.to_bytes(kind.field_type, file.partition[i])
        for i, kind in enumerate(kinds)
    ]
    return {
        "path": path,
        "size": file.file_size_in_bytes,
        "spec": table.default_spec_id,
        **{name: getattr(file, name) for name in _PLAIN},
        **{name: getattr(file, name) for name in _COUNTS},
        **{name: _texts(getattr(file, name)) for name in _BOUNDS},
        "file_format": file.file_format.value,
        "partition": [None if value is None else _text(value) for value in values],
    }


def file_from_json(content: Mapping[str, Any], root: str, table: Any) -> DataFile:
    """Read what `file_to_json` wrote; *root* is the URL of the folder of data files."""
    kinds = table.specs()[content["spec"]].partition_type(table.schema()).fields
    values = [
        None if text is None else conversions.from_bytes(kind.field_type, base64.b64decode(text))
        for kind, text in zip(kinds, content["partition"], strict=True)
    ]
    return manifest.DataFile.from_args(
        **{name: content[name] for name in _PLAIN},
        **{name: _by_id(content[name]) for name in _COUNTS},
        **{
            name: {key: base64.b64decode(text) for key, text in _by_id(content[name]).items()}
            for name in _BOUNDS
        },
        file_path=f"{root}/{content['path']}",
        file_size_in_bytes=content["size"],
        content=manifest.DataFileContent.DATA,
        file_format=manifest.FileFormat(content["file_format"]),
        partition=typedef.Record(*values),
        sort_order_id=None,
        equality_ids=None,
        key_metadata=None,
    )


def _by_id(values: Mapping[Any, Any] | None) -> dict[int, Any]:
    return {int(key): value for key, value in (values or {}).items()}


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _texts(values: Mapping[int, bytes] | None) -> dict[int, str]:
    return {key: _text(value) for key, value in (values or {}).items()}
