"""The data files of tasks, written where the table keeps its own, and their form in receipts."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from semel.arrow.attempts import folder_of
from semel.arrow.tables import TableWrite, storage_faults
from semel.arrow.tally import schema_to_text, tally
from semel.errors import Permanent, require
from semel.pipeline.sink import Batch, Receipt, Schema, Tally
from semel.pipeline.txn import SinkTxnId

pa: Any = require("pyarrow", "iceberg")
pc: Any = require("pyarrow.compute", "iceberg")
pq: Any = require("pyarrow.parquet", "iceberg")
conversions: Any = require("pyiceberg.conversions", "iceberg")
iceberg_io: Any = require("pyiceberg.io", "iceberg")
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
    slim: dict[str, Any] = {"snapshots": [], "snapshot_log": [], "metadata_log": [], "refs": {}}
    text = table.metadata.model_copy(update={**slim, "current_snapshot_id": None})
    settings = {key: value for key, value in table.io.properties.items() if key != "auth.manager"}
    return IcebergStager(txn, folder, file_bytes, text.model_dump_json(), settings, **write)


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
        self._schema: Any = None
        self._tally = Tally()
        self._waiting: list[Any] = []
        self._bytes = 0
        self._files: list[DataFile] = []
        self._keys: list[Any] = []
        self._key_files: list[dict[str, Any]] = []

    def write(self, batch: Batch) -> None:
        """Collect the rows, and write a file (one per partition) when there are enough."""
        if self._schema is None:
            self._schema = batch.schema.remove_metadata()
        if batch.num_rows == 0:
            return
        if not batch.schema.equals(self._schema):
            raise Permanent(f"task {self._task}: a batch has another schema than the one before")
        self._tally += tally(batch)
        if self._stager.key:
            self._keys.append(_keys_of(batch, self._stager.key))
            self._bytes += self._keys[-1].nbytes
        rows = self._stager.to_store(batch)
        if rows.num_rows == 0:
            return
        conformed = conform(rows, self._table.schema())
        if not self._waiting:
            check_columns(self._table, conformed.schema)
        self._waiting.append(conformed)
        self._bytes += conformed.nbytes
        if self._bytes >= self._stager.file_bytes:
            self._flush()

    def _flush(self) -> None:
        with storage_faults(f"staging into {self._folder}"):
            if self._waiting:
                rows = pa.Table.from_batches(self._waiting)
                self._files += arrow_io._dataframe_to_data_files(
                    self._table, rows, self._io, write_uuid=uuid.uuid4()
                )
            if self._keys:
                self._write_keys()
        self._waiting, self._keys, self._bytes = [], [], 0

    def _write_keys(self) -> None:
        name = f"keys-{len(self._key_files):05d}.parquet"
        with self._io.new_output(f"{self._folder}/{name}").create() as stream:
            pq.write_table(pa.Table.from_batches(self._keys), stream)
            size = stream.tell()
        path = f"{folder_of(self._stager.txn)}{self._below()}/{name}"
        self._key_files.append({"path": path, "size": size})

    def _below(self) -> str:
        return self._folder.removeprefix(self._stager.folder)

    def finish(self) -> Receipt:
        self._flush()
        detail = {
            "files": [self._described(file) for file in self._files],
            "keys": self._key_files,
            "layout": self._table.default_spec_id,
            "schema": None if self._schema is None else schema_to_text(self._schema),
        }
        return Receipt(self._task, self._tally, detail)

    def _described(self, file: DataFile) -> dict[str, Any]:
        inside = file.file_path.removeprefix(self._stager.folder)
        return file_to_json(file, f"{folder_of(self._stager.txn)}{inside}", self._table)

    def discard(self) -> None:
        """Remove the task's folder, as far as possible."""
        self._waiting, self._keys = [], []
        with contextlib.suppress(Exception):
            system, path = file_system(self._io, self._folder)
            system.delete_dir(path)


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
    except (ValueError, TypeError) as error:
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
    if pa.types.is_timestamp(column.type) and column.type.tz not in (None, "UTC"):
        return column.cast(pa.timestamp(column.type.unit, "UTC"))
    return column


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
