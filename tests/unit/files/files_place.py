"""A files sink in a folder of its own, and how rows get there."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds

from semel.files.layout import Layout
from semel.files.sink import FilesSink
from semel.pipeline.sink import SinkOK
from semel.pipeline.txn import Scope

SCOPE = Scope("ledger", "payments", "main")
SCHEMA = pa.schema([("id", pa.int64())])


def new_sink(folder):
    sink = FilesSink(folder / "lake")
    sink.fence(SCOPE, 1)
    return sink


def stage(sink, txn, ids, task="task-1"):
    writer = sink.stager(txn).open(task)
    writer.write(pa.RecordBatch.from_pydict({"id": ids}, SCHEMA))
    return writer.finish()


def prepared(sink, txn, ids=(1, 2)):
    outcome = sink.prepare(txn, [stage(sink, txn, list(ids))])
    assert isinstance(outcome, SinkOK), outcome
    return outcome.token


def committed(sink, txn, ids=(1, 2)):
    token = prepared(sink, txn, ids)
    assert isinstance(sink.commit(txn, token), SinkOK)
    return token


def place_of(sink, txn):
    return Path(Layout(sink.path, txn.scope).shown(txn.cycle))


def held_at(sink, txn):
    return Path(Layout(sink.path, txn.scope).prepared(txn))


def read(sink):
    table = ds.dataset(sink.path, format="parquet", partitioning="hive").to_table()
    return sorted(table["id"].to_pylist()) if table.num_columns else []


def staged_file(sink):
    (file,) = Path(sink.path).glob("_semel/*/staged/*/*/*")
    return file
