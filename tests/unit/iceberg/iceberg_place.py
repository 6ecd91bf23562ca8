"""An Iceberg table of a test's own: a catalog in SQLite, a warehouse in a folder."""

from __future__ import annotations

import uuid

import pyarrow as pa
from pyiceberg.catalog import load_catalog

from semel.pipeline.sink import SinkOK
from semel.pipeline.txn import CycleId, Scope
from semel.sinks import IcebergSink

SCOPE = Scope("ledger-1", "payments", "main")
TABLE = "db.rows"


class Lake:
    """A catalog with one table, and the sinks that a test opens on it."""

    def __init__(self, folder):
        self.folder = folder
        self.properties = {
            "type": "sql",
            "uri": f"sqlite:///{folder}/catalog.db",
            "warehouse": f"file://{folder}/lake",
        }
        self.catalog = load_catalog("lake", **self.properties)
        self.catalog.create_namespace("db")
        self.sinks = []

    def create(self, *columns, **options):
        return self.catalog.create_table(TABLE, schema=pa.schema(columns), **options)

    def sink(self, kind=IcebergSink, epoch=None, **options):
        sink = kind(TABLE, catalog="lake", properties=self.properties, **options)
        self.sinks.append(sink)
        if epoch is not None:
            sink.fence(SCOPE, epoch)
        return sink

    def table(self):
        return self.catalog.load_table(TABLE)

    def ids(self):
        return sorted(self.table().scan().to_arrow()["id"].to_pylist())

    def close(self):
        for sink in self.sinks:
            sink.close()
        self.catalog.close()


def txn(batch=0, generation=1):
    return CycleId(SCOPE, generation, batch).attempt()


def rows(*ids):
    return pa.RecordBatch.from_pylist([{"id": n, "text": f"row {n}"} for n in ids])


def stage(sink, txn, *batches):
    writer = sink.stager(txn).open(f"task-{uuid.uuid4().hex}")
    for batch in batches:
        writer.write(batch)
    return writer.finish()


def prepared(sink, txn, *batches):
    outcome = sink.prepare(txn, [stage(sink, txn, *batches)])
    assert isinstance(outcome, SinkOK), outcome
    return outcome.token


def committed(sink, txn, *batches):
    token = prepared(sink, txn, *batches)
    assert sink.commit(txn, token) == SinkOK()
    return token
