"""Queries over Spark Connect in one process, each with one declaration missing or none."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from semel import ExactlyOnce
from semel.sinks import FilesSink


def run(spark: SparkSession, folder: Path, missing: str) -> None:
    """Run the query to its end, and print how it ended."""
    checkpoint = str(folder / "checkpoint")
    known = {"checkpoint": checkpoint, "fails_on_data_loss": True}
    job = ExactlyOnce(
        "job",
        f"sqlite:///{folder / 'job.ledger'}",
        [FilesSink(folder / "out", rows="struct(id)", format="jsonl")],
        **{name: value for name, value in known.items() if name != missing},
    )
    query = (
        spark.readStream.schema("id long")
        .option("maxFilesPerTrigger", 1)
        .json(str(folder / "in"))
        .writeStream.foreachBatch(job)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    try:
        query.awaitTermination()
    except Exception as error:  # noqa: BLE001  whatever it is, the test reads it
        print("REFUSED", str(error).replace("\n", " "))
    else:
        print("DONE")


if __name__ == "__main__":
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = SparkSession.builder.remote("local[2]").getOrCreate()
    for missing in sys.argv[2:]:
        run(session, Path(sys.argv[1]), missing)
    session.stop()
