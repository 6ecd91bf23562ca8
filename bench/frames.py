"""A Spark session, frames of payments, and whole cycles over them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from semel.ledger.sqlite import SqliteLedger
from semel.pipeline.cycle import CommitSucceeded
from semel.pipeline.driver import Driver
from semel.pipeline.sink import TwoPhaseSink
from semel.pipeline.source import BatchRange
from semel.pipeline.txn import CycleId
from semel.spark.staging import arrow_schemas, select_rows, stage
from semel.testing.services import jdbc_jars

PARTITIONS = 2


@contextmanager
def spark_session() -> Iterator[SparkSession]:
    """Lend a session on two cores, with Spark's own defaults and PostgreSQL's JDBC driver."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master(f"local[{PARTITIONS}]")
        .appName("semel-bench")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.jars", ",".join(jdbc_jars()))
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    try:
        yield spark
    finally:
        spark.stop()


def payments(spark: SparkSession, rows: int, first: int = 0) -> DataFrame:
    """Return *rows* payments with ascending ids, in two partitions."""
    number = f.col("number")
    return (
        spark.range(first, first + rows, 1, PARTITIONS)
        .withColumnRenamed("id", "number")
        .select(
            f.concat(f.lit("payment-"), f.lpad(number.cast("string"), 12, "0")).alias("id"),
            f.concat(f.lit("account-"), (number % 5000).cast("string")).alias("account"),
            ((number * 7919 % 20_000_000 - 2_000_000) / 100).cast("decimal(18,2)").alias("amount"),
            f.timestamp_micros(f.lit(1_700_000_000_000_000) + number * 1_234_567).alias("at"),
            (number % 1000).cast("int").alias("n"),
        )
    )


def cached(frame: DataFrame) -> DataFrame:
    """Keep a frame in memory, so that only writing it is timed."""
    kept = frame.cache()
    kept.count()
    return kept


class Cycles:
    """A pipeline on static frames: every frame is one whole cycle of a SQLite ledger."""

    def __init__(self, sinks: Sequence[TwoPhaseSink], folder: Path) -> None:
        self._sinks = sinks
        self._ledger = SqliteLedger(folder / "bench.ledger")
        self.driver = Driver("bench", self._ledger, sinks)
        self.driver.start()
        self._generation = self._ledger.open_generation(self.driver.lease, "bench")
        self._batch = 0
        self._end = 0

    def check(self, frame: DataFrame) -> None:
        """Let the sinks look at the rows, as they do once in a query's life."""
        schemas = arrow_schemas(select_rows(frame, self._sinks), self._sinks)
        for sink in self._sinks:
            sink.check(schemas[sink.name])

    def run(self, frame: DataFrame) -> None:
        """Stage, prepare, decide and commit one frame."""
        cycle = CycleId(self.driver.scope, self._generation.number, self._batch)
        span = BatchRange.of_offsets({"payments/0": (self._end, self._end + 1)})
        outcome = self.driver.run_cycle(
            cycle, lambda: span, lambda txn: stage(frame, self._sinks, txn)
        )
        if not isinstance(outcome, CommitSucceeded):
            raise TypeError(f"the cycle was not committed: {outcome}")
        self._batch += 1
        self._end += 1

    def close(self) -> None:
        """Release what the cycles used."""
        self.driver.stop()
        self._ledger.close()
