"""Two sinks in one pass of the plan, beside writing a persisted frame twice."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from bench.frames import Cycles, payments, spark_session
from bench.harness import Alternative, Benchmark, Scale, Table, compared, measure, timed
from bench.server import Database, postgres
from semel.files.sink import FilesSink
from semel.pipeline.sink import TwoPhaseSink
from semel.postgres.sink import Mode, PostgresSink

TWICE = "persist, write twice"

ABOUT = """\
A batch is read from Parquet files, computed, and written to two places. *Persist, write twice* is
what a `foreachBatch` does to avoid computing it twice: `persist`, one writer after the other,
`unpersist`. semel feeds both sinks in one pass and keeps nothing in memory."""


def run(scale: Scale) -> list[Table]:
    """Measure a table with files, and two folders of files."""
    rows = scale.pick(500_000, 20_000)
    folder = Path(tempfile.mkdtemp(prefix="semel-bench-"))
    with spark_session() as spark, postgres() as database:
        payments(spark, rows).write.parquet(str(folder / "source"))
        database.make("payments")
        with_table = measure(_table_and_files(spark, database, folder), scale.rounds_or(7), 2)
        with_files = measure(_files_and_files(spark, folder), scale.rounds_or(7), 2)
    shutil.rmtree(folder)
    wanted = {"semel, staging": 1.3, "semel, prepared": 1.3}
    return [
        compared(f"PostgreSQL and Parquet, {rows:,} rows", with_table, TWICE, wanted),
        compared(f"Parquet and Parquet, {rows:,} rows", with_files, TWICE, {"semel": 1.3}),
    ]


def _batch(spark: SparkSession, folder: Path) -> DataFrame:
    """Read and compute, as a batch of a query does whenever it is used."""
    source = spark.read.parquet(str(folder / "source"))
    day = f.date_format("at", "yyyy-MM-dd")
    key = f.sha2(f.concat_ws("|", "id", "account", day), 256)
    return source.withColumn("account", f.substring(key, 1, 16))


def _table_and_files(
    spark: SparkSession, database: Database, folder: Path
) -> dict[str, Alternative]:
    def twice() -> float:
        database.clear("payments")
        target = _empty(folder / "plain")
        with timed() as watch:
            kept = _batch(spark, folder).persist()
            database.jdbc_append(kept, "payments")
            kept.write.mode("append").parquet(str(target))
            kept.unpersist()
        return watch.seconds

    alternatives = {TWICE: twice}
    modes: tuple[Mode, ...] = ("staging", "prepared")
    for mode in modes:
        home = _empty(folder / mode)
        sinks: list[TwoPhaseSink] = [
            PostgresSink(database.url, "payments", mode=mode, write="append", name=mode),
            FilesSink(home / "files"),
        ]
        alternatives[f"semel, {mode}"] = _semel(
            spark, folder, home, sinks, lambda: database.clear("payments")
        )
    return alternatives


def _files_and_files(spark: SparkSession, folder: Path) -> dict[str, Alternative]:
    def twice() -> float:
        first, second = _empty(folder / "first"), _empty(folder / "second")
        with timed() as watch:
            kept = _batch(spark, folder).persist()
            kept.write.mode("append").parquet(str(first))
            kept.where("amount > 1000").write.mode("append").parquet(str(second))
            kept.unpersist()
        return watch.seconds

    home = _empty(folder / "files")
    sinks: list[TwoPhaseSink] = [
        FilesSink(home / "all", name="all"),
        FilesSink(home / "large", "if(amount > 1000, struct(*), null)", name="large"),
    ]
    return {TWICE: twice, "semel": _semel(spark, folder, home, sinks, lambda: None)}


def _semel(
    spark: SparkSession,
    folder: Path,
    home: Path,
    sinks: Sequence[TwoPhaseSink],
    clear: Callable[[], None],
) -> Alternative:
    cycles = Cycles(sinks, home)
    cycles.check(_batch(spark, folder))

    def alternative() -> float:
        clear()
        with timed() as watch:
            cycles.run(_batch(spark, folder))
        return watch.seconds

    return alternative


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


BENCHMARK = Benchmark("two-sinks", "Two sinks in one pass", ABOUT, run)
