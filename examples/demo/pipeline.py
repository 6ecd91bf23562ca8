"""The pipelines with semel: Postgres, Iceberg, S3 and Parquet files under one decision."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import pyarrow as pa
from pyiceberg.catalog import load_catalog

from examples.demo.handler import POLICY, handle
from examples.demo.payments import LARGE_CENTS, SCHEMA
from examples.demo.place import Place
from semel import ExactlyOnce, MessagePipeline, Policy
from semel.sinks import FilesSink, IcebergSink, PostgresSink, S3Sink, TwoPhaseSink

# No primary key, in either variant: nothing but the protocol keeps duplicates out.
TABLE = """
CREATE TABLE entries (
    id text, account text, kind text, amount bigint, version bigint, cycle text, place bigserial
)
"""

ROWS = "struct(id, account, kind, amount, version)"
LARGE_ROWS = f"if(abs(amount) > {LARGE_CENTS}, {ROWS}, null)"


def pipeline(place: Place) -> ExactlyOnce:
    """Messages of a topic, with a handler; or rows of files, made by Spark."""
    if not place.bootstrap:
        return ExactlyOnce("payments", place.ledger, sinks(place, ROWS, LARGE_ROWS))
    written = sinks(place)
    return MessagePipeline(
        "payments",
        policy=Policy.parse(POLICY),
        database=place.url,
        handler=partial(handle, outage=place.outage),
        sinks=written,
        schemas={sink.name: SCHEMA for sink in written},
        ledger=place.ledger,
    )


def sinks(place: Place, rows: str | None = None, large: str | None = None) -> list[TwoPhaseSink]:
    """Every payment to Postgres and Iceberg, the large ones to S3 and to Parquet files, too."""
    return [
        PostgresSink(place.url, table="entries", rows=rows, cycle_column="cycle"),
        IcebergSink(place.table, rows=rows, catalog="lake", properties=place.lake),
        S3Sink(place.objects, rows=large, endpoint=place.s3),
        FilesSink(place.large, rows=large),
    ]


def create_iceberg_table(place: Place) -> None:
    """Create the table that the pipeline writes to."""
    texts = [pa.field(name, pa.string()) for name in ("id", "account", "kind")]
    with closing(load_catalog("lake", **place.lake)) as catalog:
        catalog.create_namespace(place.folder.name)
        numbers = [pa.field(name, pa.int64()) for name in ("amount", "version")]
        catalog.create_table(place.table, pa.schema([*texts, *numbers]))
