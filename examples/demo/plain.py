"""The pipeline without semel, as it is usually written: one sink after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import psycopg

from examples.demo.payments import LARGE_CENTS, SCHEMA
from examples.demo.place import Place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row


INSERT = """
INSERT INTO entries (id, account, kind, amount, version) VALUES (%s, %s, %s, %s, %s)
"""


def payments_of(stream: DataFrame) -> DataFrame:
    """Read the records of a topic, each one once; what files have is payments already."""
    if "value" not in stream.columns:
        return stream
    return (
        stream.selectExpr("timestamp", f"from_json(string(value), '{SCHEMA}') AS payment")
        .select("timestamp", "payment.*")
        .where("id IS NOT NULL")
        .withWatermark("timestamp", "1 hour")
        .dropDuplicatesWithinWatermark(["id"])
        .drop("timestamp")
    )


def plain_function(place: Place, say: Callable[[str], None]) -> Callable[[DataFrame, int], None]:
    """Make the foreachBatch function; *say* gets what it writes to, for the display only."""
    url = place.url

    def insert(rows: Iterable[Row]) -> None:
        with psycopg.connect(url) as connection, connection.cursor() as cursor:
            cursor.executemany(INSERT, rows)

    def write(df: DataFrame, batch_id: int) -> None:
        df = df.persist()
        say("files")
        large = df.where(f"abs(amount) > {LARGE_CENTS}")
        large.write.mode("append").parquet(str(place.large))
        say("postgres")
        df.foreachPartition(insert)
        df.unpersist()

    return write
