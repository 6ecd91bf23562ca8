"""The staged shards of the Kafka sink: Arrow files in a folder or bucket that all machines share.

Kafka has no transaction that many tasks could share, so what a cycle sends is kept there until
the decision.  `semel.arrow.attempts` draws the folders.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

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

_SHOWN: Final = 60
"""How many characters of a key a message shows."""


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


class Demand(NamedTuple):
    """What prepare must ask Kafka about the records of a topic."""

    size: int = 0
    largest: str = ""
    """Which record has that size, and the column that has most of it."""

    partition: int = -1
    highest: str = ""
    """Which record names that partition."""

    keyless: int = 0
    """How many records have no key."""

    def __or__(self, other: Demand) -> Demand:
        """Return what both demand."""
        sizes, partitions = max(self[:2], other[:2]), max(self[2:4], other[2:4])
        return Demand(*sizes, *partitions, self.keyless + other.keyless)


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
        self._topics: dict[str, Demand] = {}

    def write(self, batch: Batch) -> None:
        """Append records to the shard."""
        records = as_records(batch, self._stager.topic)
        if not records.num_rows:
            return
        self._note(records)
        with self._stager.area.faults() as system:
            if self._writer is None:
                system.create_dir(self._path.rpartition("/")[0])
                self._stream = system.open_output_stream(self._path)
                options = pa.ipc.IpcWriteOptions(compression="lz4")
                self._writer = pa.ipc.new_stream(self._stream, RECORDS, options=options)
            self._writer.write_batch(records)
        self._tally += tally(records)

    def _note(self, records: Any) -> None:
        """Keep by topic what it must take.

        Raises:
            Permanent: no topic could.
        """
        sizes = {
            name: pc.fill_null(pc.binary_length(records.column(name)), 0).cast(pa.int64())
            for name in ("value", "key")
        }
        if records.column("headers").null_count < records.num_rows:
            texts = [
                sum(len(h["key"].encode()) + len(h["value"] or b"") + 10 for h in row or ())
                for row in records.column("headers").to_pylist()
            ]
            sizes["headers"] = pa.array(texts, pa.int64())
        total = functools.reduce(pc.add, sizes.values())
        topics, partitions = records.column("topic"), records.column("partition")
        below = pc.index(pc.fill_null(pc.less(partitions, 0), False), True).as_py()
        if below >= 0:
            raise Permanent(
                f"sink {self._stager.area.sink}: {_named(records, below)} has "
                f"{partitions[below]} in column partition; partitions begin at 0, and a null lets "
                f"the key choose one"
            )
        partitions, keyless = pc.fill_null(partitions, -1), records.column("key").is_null()
        columns = [topics, total, partitions, keyless.cast(pa.int64())]
        table = pa.table(columns, ["topic", "size", "partition", "keyless"]).group_by("topic")
        asked = [("size", "max"), ("partition", "max"), ("keyless", "sum")]
        for row in table.aggregate(asked).to_pylist():
            topic, size, partition = row["topic"], row["size_max"], row["partition_max"]
            known = self._topics.get(topic, Demand())
            largest, highest = known.largest, known.highest
            # Only a record that is worse than all before is looked for.
            if size > known.size:
                at = _first(topics, topic, total, size)
                column = max(sizes, key=lambda name: sizes[name][at].as_py())
                largest = f"column {column} of {_named(records, at)}"
            if partition > known.partition:
                highest = _named(records, _first(topics, topic, partitions, partition))
            found = Demand(size, largest, partition, highest, row["keyless_sum"])
            self._topics[topic] = known | found

    def finish(self) -> Receipt:
        chunks = []
        if self._writer is not None:
            with self._stager.area.faults() as system:
                self._writer.close()
                self._stream.close()
                sync(system, self._path)
                size = system.get_file_info(self._path).size
            rows = [self._tally.rows, self._tally.hash]
            chunks.append({"file": self._file, "size": size, "tally": rows})
        return Receipt(self._task, self._tally, {"chunks": chunks, "topics": self._topics})

    def discard(self) -> None:
        """Remove the shard, as far as possible."""
        with contextlib.suppress(Exception):
            if self._stream is not None:
                self._stream.close()
            self._stager.area.opened()[0].delete_file(self._path)


def _first(topics: Any, topic: str, column: Any, value: int) -> int:
    """Return the first record of *topic* that has *value* in *column*."""
    return int(pc.index(pc.and_(pc.equal(topics, topic), pc.equal(column, value)), True).as_py())


def _named(records: Any, at: int) -> str:
    """Name a record by its key; no other value is shown."""
    key = records.column("key")[at].as_py()
    if key is None:
        return "a record without a key"
    return f"the record with key {key.decode(errors='backslashreplace')[:_SHOWN]!r}"
