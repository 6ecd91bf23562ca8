"""Four sinks in one pass beside four writers one after the other, and Iceberg alone."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
from pyiceberg.catalog import load_catalog
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import to_arrow_schema

from bench.frames import Cycles, cached, payments, spark_session
from bench.harness import Alternative, Benchmark, Scale, Table, compared, measure, timed
from bench.server import Database, postgres
from semel.delta.sink import DeltaSink
from semel.files.sink import FilesSink
from semel.iceberg.sink import IcebergSink
from semel.pipeline.sink import TwoPhaseSink
from semel.postgres.sink import Mode, PostgresSink

FOUR_TIMES = "persist, write four times"
PYICEBERG = "pyiceberg"

ABOUT = """\
A batch is read from Parquet files, computed, and written to PostgreSQL, to Parquet files, to an
Iceberg table (a catalog in SQLite, a warehouse on this disk) and to a Delta table. *Persist, write
four times* is what a `foreachBatch` without further jars does: `persist`, JDBC, Spark's Parquet
writer, one `toArrow` for both `pyiceberg`'s `append` and `write_deltalake`, `unpersist`. It may
repeat or lose rows in any of the four after a failure. semel feeds all of them in one pass, and
commits them under one decision.

Iceberg alone, from a cached DataFrame: `toArrow` and `pyiceberg`'s `append`, which writes the data
files on the driver, beside a whole cycle of semel, whose tasks write them, and beside Spark's own
Parquet writer, which has no table at the end."""


def run(scale: Scale) -> list[Table]:
    """Measure four sinks, then Iceberg."""
    rows = scale.pick(300_000, 20_000)
    folder = Path(tempfile.mkdtemp(prefix="semel-bench-"))
    with (
        spark_session() as spark,
        postgres() as database,
        closing(load_catalog("lake", **_lake(folder))) as lake,
    ):
        payments(spark, rows).write.parquet(str(folder / "source"))
        database.make("payments")
        place = _Place(spark, folder, lake, database)
        four = measure(_four(place), scale.rounds_or(7), 2)
        alone = measure(_iceberg_alone(place, rows), scale.rounds_or(7), 2)
    shutil.rmtree(folder)
    wanted = {"semel, staging": 2.0, "semel, prepared": 2.0}
    return [
        compared(f"Four sinks, {rows:,} rows", four, FOUR_TIMES, wanted),
        compared(f"Appending to Iceberg, {rows:,} rows", alone, PYICEBERG, {"semel": 1.0}),
    ]


def _lake(folder: Path) -> dict[str, str]:
    return {
        "type": "sql",
        "uri": f"sqlite:///{folder}/catalog.db",
        "warehouse": f"file://{folder}/lake",
    }


class _Place:
    """Where everything is written; the tables are made on first use."""

    def __init__(self, spark: SparkSession, folder: Path, lake: Any, database: Database) -> None:
        self.spark = spark
        self.folder = folder
        self.database = database
        self._lake = lake
        found = to_arrow_schema(payments(spark, 1).schema, timezone="UTC")
        self._schema = pa.schema([column.with_nullable(True) for column in found])
        lake.create_namespace("bench")

    def batch(self) -> DataFrame:
        """Read and compute, as a batch of a query does whenever it is used."""
        source = self.spark.read.parquet(str(self.folder / "source"))
        day = f.date_format("at", "yyyy-MM-dd")
        key = f.sha2(f.concat_ws("|", "id", "account", day), 256)
        return source.withColumn("account", f.substring(key, 1, 16))

    def lake_table(self, name: str) -> Any:
        return self._lake.create_table_if_not_exists(f"bench.{name}", schema=self._schema)

    def lake_sink(self, name: str) -> IcebergSink:
        self.lake_table(name)
        return IcebergSink(f"bench.{name}", catalog="lake", properties=_lake(self.folder))

    def delta_table(self, name: str) -> str:
        path = str(self.folder / f"delta-{name}")
        deltalake.DeltaTable.create(path, deltalake.Schema.from_arrow(self._schema), mode="ignore")
        return path

    def empty(self, name: str) -> Path:
        shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / name).mkdir()
        return self.folder / name


def _four(place: _Place) -> dict[str, Alternative]:
    table, delta = place.lake_table("plain"), place.delta_table("plain")

    def four_times() -> float:
        place.database.clear("payments")
        target = place.empty("plain")
        with timed() as watch:
            kept = place.batch().persist()
            place.database.jdbc_append(kept, "payments")
            kept.write.mode("append").parquet(str(target))
            rows = kept.toArrow()
            table.append(rows)
            deltalake.write_deltalake(delta, rows, mode="append")
            kept.unpersist()
        return watch.seconds

    alternatives: dict[str, Alternative] = {FOUR_TIMES: four_times}
    modes: tuple[Mode, ...] = ("staging", "prepared")
    for mode in modes:
        alternatives[f"semel, {mode}"] = _semel(place, mode)
    return alternatives


def _semel(place: _Place, mode: Mode) -> Alternative:
    home = place.empty(f"four-{mode}")
    sinks: list[TwoPhaseSink] = [
        PostgresSink(place.database.url, "payments", mode=mode, write="append", name=mode),
        FilesSink(home / "files"),
        place.lake_sink(f"four_{mode}"),
        DeltaSink(place.delta_table(f"four-{mode}")),
    ]
    cycles = Cycles(sinks, home)
    cycles.check(place.batch())

    def semel() -> float:
        place.database.clear("payments")
        with timed() as watch:
            cycles.run(place.batch())
        return watch.seconds

    return semel


def _iceberg_alone(place: _Place, rows: int) -> dict[str, Alternative]:
    frame, table = cached(payments(place.spark, rows)), place.lake_table("alone")
    home = place.empty("alone")
    cycles = Cycles([place.lake_sink("ours")], home)
    cycles.check(frame)

    def pyiceberg() -> float:
        with timed() as watch:
            table.append(frame.toArrow())
        return watch.seconds

    def semel() -> float:
        with timed() as watch:
            cycles.run(frame)
        return watch.seconds

    def parquet() -> float:
        target = place.empty("parquet")
        with timed() as watch:
            frame.write.mode("append").parquet(str(target))
        return watch.seconds

    return {PYICEBERG: pyiceberg, "semel": semel, "Spark's Parquet writer": parquet}


BENCHMARK = Benchmark("table-sinks", "Four sinks in one pass, and Iceberg", ABOUT, run)
