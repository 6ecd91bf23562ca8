"""A query over Spark Connect, in a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from semel import ExactlyOnce
from semel.sinks import FilesSink


def main(folder: Path, *extra: str) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    checkpoint = str(folder / "checkpoint")
    known = {"checkpoint": checkpoint, "fails_on_data_loss": True}
    job = ExactlyOnce(
        "job",
        f"sqlite:///{folder / 'job.ledger'}",
        [FilesSink(folder / "out", rows="struct(id)", format="jsonl")],
        **{name: value for name, value in known.items() if name not in extra},
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
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
