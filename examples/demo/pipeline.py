"""The pipeline with semel: Postgres, Iceberg, S3 and Parquet files under one decision."""

from __future__ import annotations

from contextlib import closing

import pyarrow as pa
from pyiceberg.catalog import load_catalog

from examples.demo.payments import LARGE_CENTS
from examples.demo.place import Place
from semel import ExactlyOnce
from semel.sinks import FilesSink, IcebergSink, PostgresSink, S3Sink

# No primary key, in either variant: nothing but the protocol keeps duplicates out.
TABLE = "CREATE TABLE entries (id text, account text, kind text, amount bigint, cycle text)"

ROWS = "struct(id, account, kind, amount)"
LARGE_ROWS = f"if(abs(amount) > {LARGE_CENTS}, {ROWS}, null)"


def pipeline(place: Place) -> ExactlyOnce:
    """Every payment to Postgres and Iceberg, the large ones to S3 and to Parquet files, too."""
    return ExactlyOnce(
        app="payments",
        ledger=place.ledger,
        sinks=[
            PostgresSink(place.url, table="entries", rows=ROWS, cycle_column="cycle"),
            IcebergSink(place.table, rows=ROWS, catalog="lake", properties=place.lake),
            S3Sink(place.objects, rows=LARGE_ROWS, endpoint=place.s3),
            FilesSink(place.large, rows=LARGE_ROWS),
        ],
    )


def create_iceberg_table(place: Place) -> None:
    """Create the table that the pipeline writes to."""
    texts = [pa.field(name, pa.string()) for name in ("id", "account", "kind")]
    with closing(load_catalog("lake", **place.lake)) as catalog:
        catalog.create_namespace(place.folder.name)
        catalog.create_table(place.table, pa.schema([*texts, pa.field("amount", pa.int64())]))
