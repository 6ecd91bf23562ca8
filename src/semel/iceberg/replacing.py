"""What a write removes from a table: the rows that have its keys, or whole partitions.

Rows are removed by copying: each data file that has some of them is replaced by one without
them.  Files that cannot have them, by their partition and their statistics, are not read.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from semel.errors import Permanent, require

pa: Any = require("pyarrow", "iceberg")
pc: Any = require("pyarrow.compute", "iceberg")
pq: Any = require("pyarrow.parquet", "iceberg")
expressions: Any = require("pyiceberg.expressions", "iceberg")
arrow_io: Any = require("pyiceberg.io.pyarrow", "iceberg")

# So many values of a key are compared one by one with a file's statistics and partition.
_FEW_KEYS: Final = 200


@dataclass(frozen=True, slots=True)
class Replaced:
    """Data files that leave the table, and those that take their place."""

    gone: Sequence[Any] = ()
    instead: Sequence[Any] = ()


def read_keys(table: Any, root: str, files: Sequence[Mapping[str, Any]]) -> Any:
    """Read the keys that the tasks of a cycle have staged, with the types of the table."""
    found = []
    for file in files:
        with table.io.new_input(f"{root}/{file['path']}").open() as stream:
            found.append(pq.read_table(stream))
    keys = pa.concat_tables(found)
    return keys.cast(_arrow_schema(table, keys.column_names))


def twice(keys: Any) -> dict[str, Any] | None:
    """Return a key that comes more than once."""
    counted = keys.append_column("semel.row", pa.nulls(keys.num_rows, pa.int8())).group_by(
        keys.column_names
    )
    counts = counted.aggregate([("semel.row", "count", pc.CountOptions(mode="all"))])
    found = counts.filter(pc.greater(counts["semel.row_count"], 1)).slice(0, 1)
    return found.drop_columns(["semel.row_count"]).to_pylist()[0] if found.num_rows else None


def without_keys(table: Any, keys: Any, folder: str) -> Replaced:
    """Copy into *folder* what remains of each data file that has some of the keys."""
    gone, instead = [], []
    where = {"write.data.path": folder, "write.object-storage.enabled": "false"}
    properties = {**table.metadata.properties, **where}
    metadata = table.metadata.model_copy(update={"properties": properties})
    for task in with_keys(table, keys):
        rows = _read(table, task, table.schema())
        kept = rows.filter(pc.invert(_has_key(rows, keys)))
        gone.append(task.file)
        if kept.num_rows:
            write = uuid.uuid4()
            instead += arrow_io._dataframe_to_data_files(metadata, kept, table.io, write_uuid=write)
    return Replaced(gone, instead)


def with_keys(table: Any, keys: Any) -> Iterator[Any]:
    """Yield the scan tasks of the data files that have some of the keys."""
    for task in tasks_for(table, keys):
        found = _read(table, task, table.schema().select(*keys.column_names))
        if pc.any(_has_key(found, keys)).as_py():
            yield task


def tasks_for(table: Any, keys: Any) -> Iterator[Any]:
    """Plan the scan of the data files that may have some of the keys."""
    condition = expressions.AlwaysTrue()
    for name in keys.column_names:
        values = pc.unique(keys[name])
        if len(values) <= _FEW_KEYS:
            part = expressions.In(name, values.to_pylist())
        else:
            ends = pc.min_max(values).as_py()
            least = expressions.GreaterThanOrEqual(name, ends["min"])
            part = expressions.And(least, expressions.LessThanOrEqual(name, ends["max"]))
        condition = expressions.And(condition, part)
    return iter(table.scan(row_filter=condition).plan_files())


def in_partitions(table: Any, files: Sequence[Any]) -> Replaced:
    """Find the data files in the partitions of *files*.

    Raises:
        Permanent: the table has files of another partitioning, which may have such rows, too.
    """
    spec = table.metadata.default_spec_id
    partitions = {file.partition for file in files}
    if not partitions:
        return Replaced()
    gone = []
    for task in table.scan().plan_files():
        if task.file.spec_id != spec:
            raise Permanent(
                f"{task.file.file_path} has an earlier partitioning than the table has now, so an "
                f"overwrite cannot know what to replace; rewrite the table's data files first"
            )
        if task.file.partition in partitions:
            gone.append(task.file)
    return Replaced(gone)


def _read(table: Any, task: Any, schema: Any) -> Any:
    everything = expressions.AlwaysTrue()
    scan = arrow_io.ArrowScan(table.metadata, table.io, schema, everything)
    return scan.to_table([task])


def _has_key(rows: Any, keys: Any) -> Any:
    """Return for each row whether it has one of the keys."""
    names = keys.column_names
    mine = rows.select(names).cast(keys.schema)
    numbered = mine.append_column("semel.row", pa.array(range(rows.num_rows), pa.int64()))
    found = numbered.join(keys, keys=names, join_type="left semi")["semel.row"]
    return pc.is_in(numbered["semel.row"], value_set=found.combine_chunks())


def _arrow_schema(table: Any, names: Sequence[str]) -> Any:
    schema = arrow_io.schema_to_pyarrow(table.schema().select(*names), include_field_ids=False)
    return pa.schema([schema.field(name).with_nullable(True) for name in names])
