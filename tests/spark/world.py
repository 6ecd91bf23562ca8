"""A folder of JSON files as a source, and queries over it that end by themselves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

SCHEMA = "id long, amount long, at long"
EVERYTHING: Callable[[DataFrame], DataFrame] = lambda df: df  # noqa: E731  a default, named


class World:
    """Where one test's source and checkpoints are."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = spark
        self.folder = folder
        self.input = folder / "in"
        self.input.mkdir()
        self._files = 0
        self.ids: list[int] = []

    def put(self, *ids: int) -> None:
        """Add one file; with one file per trigger it is one batch."""
        lines = [json.dumps({"id": i, "amount": i * 10, "at": 1_700_000_000 + i}) for i in ids]
        self._files += 1
        unseen = self.folder / f"{self._files}.tmp"
        unseen.write_text("\n".join(lines) + "\n")
        unseen.rename(self.input / f"{self._files:05}.json")
        self.ids += ids

    def stream(self) -> DataFrame:
        """Read the files, one a batch."""
        reader = self.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
        return reader.json(str(self.input))

    def start(
        self,
        pipeline: Callable[[DataFrame, int], None],
        checkpoint: str = "checkpoint",
        shape: Callable[[DataFrame], DataFrame] = EVERYTHING,
    ) -> Any:
        """Start a query that ends when it has read everything."""
        return (
            shape(self.stream())
            .writeStream.foreachBatch(pipeline)
            .option("checkpointLocation", str(self.checkpoint(checkpoint)))
            .trigger(availableNow=True)
            .start()
        )

    def run(
        self,
        pipeline: Callable[[DataFrame, int], None],
        checkpoint: str = "checkpoint",
        shape: Callable[[DataFrame], DataFrame] = EVERYTHING,
    ) -> None:
        """Run a query to its end."""
        query = self.start(pipeline, checkpoint, shape)
        try:
            assert query.awaitTermination(90)
        finally:
            query.stop()

    def checkpoint(self, name: str = "checkpoint") -> Path:
        """Where a checkpoint is."""
        return self.folder / name

    def lose(self, name: str = "checkpoint") -> None:
        """Delete a checkpoint."""
        shutil.rmtree(self.checkpoint(name))

    def forget_commit(self, batch: int, name: str = "checkpoint") -> None:
        """Make Spark forget that it noted *batch* as done, as a kill right before would."""
        commits = self.checkpoint(name) / "commits"
        (commits / str(batch)).unlink()
        (commits / f".{batch}.crc").unlink(missing_ok=True)


def ids_in(rows: list[Any]) -> list[int]:
    """The ids of some rows, sorted, so that two of one show."""
    return sorted(row["id"] for row in rows)


def deduplicated(df: DataFrame) -> DataFrame:
    """Pass every id once an hour: a query with state."""
    timed = df.withColumn("time", F.timestamp_seconds("at")).withWatermark("time", "1 hour")
    return timed.dropDuplicatesWithinWatermark(["id"]).drop("time")


def counted(df: DataFrame) -> DataFrame:
    """Close a window of ten ids when the watermark passes it: rows come in later batches."""
    timed = df.withColumn("time", F.timestamp_seconds("at")).withWatermark("time", "0 seconds")
    windows = timed.groupBy(F.window("time", "10 seconds")).agg(F.count("*").alias("n"))
    return windows.select(F.unix_timestamp("window.start").alias("id"), "n")
