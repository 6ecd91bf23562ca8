"""The staged shards of the Kafka sink: Arrow files in a folder or bucket that all machines share.

Kafka has no transaction that many tasks could share, so what a cycle sends is kept there until
the decision.  `semel.arrow.attempts` draws the folders.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from dataclasses import dataclass
from typing import Any, Final

from semel.arrow.area import Area
from semel.arrow.attempts import sync
from semel.arrow.tally import tally
from semel.errors import Permanent, require
from semel.pipeline.sink import Batch, Receipt, Schema, Tally
from semel.pipeline.txn import SinkTxnId

pa: Any = require("pyarrow", "kafka-sink")
pc: Any = require("pyarrow.compute", "kafka-sink")

RECORDS: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ]
)
"""The columns of Spark's own Kafka writer."""


def check_columns(sink: str, schema: Schema, has_topic: bool) -> None:
    """Raise Permanent unless rows of *schema* are records."""
    for column in schema:
        if column.name not in RECORDS.names:
            raise Permanent(
                f"sink {sink}: a record has the columns key, value, headers, topic and partition, "
                f"not {column.name}; give rows=F.struct(…)"
            )
        wanted = RECORDS.field(column.name).type
        is_text = pa.types.is_string(column.type) and pa.types.is_binary(wanted)
        if not (is_text or _casts(column.type, wanted)):
            raise Permanent(
                f"sink {sink}: column {column.name} must be "
                f"{'text or bytes' if pa.types.is_binary(wanted) else wanted}, not {column.type}"
            )
    if "value" not in schema.names:
        raise Permanent(f"sink {sink}: the rows have no column value")
    if not has_topic and "topic" not in schema.names:
        raise Permanent(f"sink {sink}: give topic=…, or a column topic")


def _casts(given: Any, wanted: Any) -> bool:
    try:
        pa.array([], given).cast(wanted)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False
    return True


def as_records(batch: Batch, topic: str) -> Any:
    """Return the rows with all columns of `RECORDS`; *topic* where they name none."""
    columns = []
    for wanted in RECORDS:
        found = batch.column(wanted.name) if wanted.name in batch.schema.names else None
        if found is None:
            found = pa.nulls(batch.num_rows, wanted.type)
        elif found.type != wanted.type:
            found = found.cast(wanted.type)
        if wanted.name == "topic":
            found = pc.fill_null(found, topic) if topic else found
            if found.null_count:
                raise Permanent("a record has no topic; give topic=…, or a value in its column")
        columns.append(found)
    return pa.RecordBatch.from_arrays(columns, schema=RECORDS)


@dataclass(frozen=True)
class ShardStager:
    """What a task needs to stage records."""

    area: Area
    txn: SinkTxnId
    topic: str

    def open(self, task: str) -> ShardWriter:
        """Begin a shard, in a place where the driver's own records are.

        Raises:
            Permanent: they are not: this machine has another folder there.
        """
        self.area.check_shared(self.txn.scope)
        return ShardWriter(self, task)


class ShardWriter:
    """The shard of one task attempt; a task without rows has none."""

    def __init__(self, stager: ShardStager, task: str) -> None:
        self._stager, self._task = stager, task
        kept = re.sub(r"[^A-Za-z0-9-]", "-", task)[:40]
        self._file = f"{kept}-{hashlib.sha256(task.encode()).hexdigest()[:12]}.arrow"
        self._path = f"{stager.area.folder(stager.txn)}/{self._file}"
        self._stream: Any = None
        self._writer: Any = None
        self._tally = Tally()
        self._topics: dict[str, list[Any]] = {}

    def write(self, batch: Batch) -> None:
        """Append records to the shard."""
        records = as_records(batch, self._stager.topic)
        if not records.num_rows:
            return
        with self._stager.area.faults() as system:
            if self._writer is None:
                system.create_dir(self._path.rpartition("/")[0])
                self._stream = system.open_output_stream(self._path)
                options = pa.ipc.IpcWriteOptions(compression="lz4")
                self._writer = pa.ipc.new_stream(self._stream, RECORDS, options=options)
            self._writer.write_batch(records)
        self._tally += tally(records)
        self._note(records)

    def _note(self, records: Any) -> None:
        """Keep by topic what prepare must ask Kafka about: the largest record and partition."""
        sizes = pc.add(
            pc.fill_null(pc.binary_length(records.column("key")), 0),
            pc.fill_null(pc.binary_length(records.column("value")), 0),
        )
        if records.column("headers").null_count < records.num_rows:
            texts = [
                sum(len(h["key"]) + len(h["value"] or b"") + 8 for h in row or ())
                for row in records.column("headers").to_pylist()
            ]
            sizes = pc.add(sizes, pa.array(texts, sizes.type))
        table = pa.table(
            [records.column("topic"), sizes, pc.fill_null(records.column("partition"), -1)],
            ["topic", "size", "partition"],
        )
        largest = table.group_by("topic").aggregate([("size", "max"), ("partition", "max")])
        for row in largest.to_pylist():
            known = self._topics.setdefault(row["topic"], [0, -1])
            known[:] = [max(known[0], row["size_max"]), max(known[1], row["partition_max"])]

    def finish(self) -> Receipt:
        size = 0
        if self._writer is not None:
            with self._stager.area.faults() as system:
                self._writer.close()
                self._stream.close()
                sync(system, self._path)
                size = system.get_file_info(self._path).size
        file = self._file if self._writer is not None else None
        detail = {"file": file, "size": size, "topics": self._topics}
        return Receipt(self._task, self._tally, detail)

    def discard(self) -> None:
        """Remove the shard, as far as possible."""
        with contextlib.suppress(Exception):
            if self._stream is not None:
                self._stream.close()
            self._stager.area.opened()[0].delete_file(self._path)
