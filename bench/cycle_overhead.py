"""What a cycle costs on top of the job that it contains."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from pyspark.sql import DataFrame, SparkSession

from bench.frames import PARTITIONS, payments, spark_session
from bench.harness import Alternative, Benchmark, Row, Scale, Spread, Table, Target, measure
from bench.noop import NoopSink, NoopStager
from semel.spark.exactly_once import ExactlyOnce
from semel.spark.staging import RECEIPTS, staging_job

ROWS_PER_BATCH = 10_000
MOST_PERCENT = 15
MOST_MS = 60

PLAIN = "plain foreachBatch, the same job"
NOOP = "plain foreachBatch, Spark's noop writer"
SEMEL = "semel"

Started: TypeAlias = tuple[Callable[[DataFrame, int], None], Callable[[], None]]
"""What Spark calls for every batch, and what is called when the query has ended."""

ABOUT = """\
A streaming query of 10,000-row batches (Parquet files, two a batch, no pause between batches) into
a sink that keeps nothing. *The same job* is a `foreachBatch` that runs the very `mapInArrow` job
that semel runs, and nothing else; the difference is the cycle: reading the checkpoint, the lease,
five durable transactions of a SQLite ledger. *Spark's noop writer* never leaves the JVM: beside it
stands what the way to Python costs. A figure is the median of the batches of one run of the query
(Spark's `triggerExecution`, the first batches left out), and the table sums up the runs."""


def run(scale: Scale) -> list[Table]:
    """Measure queries of 40 batches."""
    batches, left_out = (20, 8) if scale.is_quick else (50, 15)
    source = Path(tempfile.mkdtemp(prefix="semel-bench-"))
    with spark_session() as spark:
        for number in range(batches):
            frame = payments(spark, ROWS_PER_BATCH, number * ROWS_PER_BATCH)
            frame.write.mode("append").parquet(str(source))

        def query(start: Callable[[], Started]) -> Alternative:
            def alternative() -> float:
                function, stop = start()
                try:
                    return _batch_seconds(spark, source, function, left_out)
                finally:
                    stop()

            return alternative

        times = measure(
            {
                PLAIN: query(lambda: (_same_job, lambda: None)),
                NOOP: query(lambda: (_noop_write, lambda: None)),
                SEMEL: query(_semel),
            },
            scale.rounds_or(6),
        )
    shutil.rmtree(source)
    rows = []
    for name, seconds in times.seconds.items():
        pairs = list(zip(seconds, times.seconds[PLAIN], strict=True))
        more = Spread.of([1000 * (own - plain) for own, plain in pairs])
        percent = Spread.of([100 * (own / plain - 1) for own, plain in pairs])
        cells = [times.spread(name).text(0)]
        cells += ["", ""] if name == PLAIN else [more.text(0), percent.text(0)]
        met = percent.median <= MOST_PERCENT or more.median <= MOST_MS
        words = f"≤ {MOST_PERCENT} % or ≤ {MOST_MS} ms more"
        rows.append(Row(name, cells, Target(words, met) if name == SEMEL else None))
    caption = f"{ROWS_PER_BATCH:,} rows a batch, {batches - left_out} batches a run"
    return [Table(caption, ["ms per batch", "ms more", "% more"], rows, times.rounds)]


def _same_job(df: DataFrame, batch_id: int) -> None:
    frame, tee = staging_job(df, [NoopSink()], [("noop", NoopStager())])
    frame.mapInArrow(tee, RECEIPTS).collect()


def _noop_write(df: DataFrame, batch_id: int) -> None:
    df.write.format("noop").mode("overwrite").save()


def _semel() -> Started:
    folder = tempfile.mkdtemp(prefix="semel-bench-")
    pipeline = ExactlyOnce("bench", f"sqlite:///{folder}/bench.ledger", [NoopSink()])
    return pipeline, pipeline.stop


def _batch_seconds(
    spark: SparkSession, source: Path, function: Callable[..., None], left_out: int
) -> float:
    """Run a query over all files; return the median time of all but the first batches."""
    with tempfile.TemporaryDirectory(prefix="semel-bench-") as folder:
        query = (
            spark.readStream.schema(spark.read.parquet(str(source)).schema)
            .option("maxFilesPerTrigger", PARTITIONS)
            .parquet(str(source))
            .writeStream.foreachBatch(function)
            .option("checkpointLocation", f"{folder}/checkpoint")
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        progress = [p for p in query.recentProgress if p.batchId >= left_out]
    return statistics.median(p.durationMs["triggerExecution"] for p in progress) / 1000


BENCHMARK = Benchmark("cycle-overhead", "The cycle's overhead", ABOUT, run)
