"""A Spark driver of its own process, to be killed: files in, Postgres and files out."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from semel import ExactlyOnce, Settings
from semel.events import EVENTS, Event
from semel.lease import Takeover
from semel.pipeline.cycle import CommitFatal
from semel.sinks import FilesSink, PostgresSink

ROWS = "struct(id, amount)"
LARGE = "if(amount >= 500, struct(id), null)"


def session(master: str, settings: list[str]) -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = (
        SparkSession.builder.master(master)
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1")
        .config("spark.log.level", "ERROR")
    )
    for setting in settings:
        builder = builder.config(*setting.split("=", 1))
    return builder.getOrCreate()


def pipeline(
    folder: Path, postgres: str, mode: str, takeover: Takeover = Takeover.WAIT
) -> ExactlyOnce:
    return ExactlyOnce(
        "job",
        f"sqlite:///{folder / 'job.ledger'}",
        [
            PostgresSink(
                postgres, "entries", rows=ROWS, mode=mode, write="append", cycle_column="cycle"
            ),
            FilesSink(folder / "all", rows=ROWS),
            FilesSink(folder / "large", rows=LARGE, name="large", format="jsonl"),
        ],
        settings=Settings(takeover=takeover, lease_seconds=20.0),
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("postgres")
    parser.add_argument("--mode", default="staging")
    parser.add_argument("--master", default="local[2,4]")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--takeover", action="store_true")
    arguments = parser.parse_args()
    spark = session(arguments.master, arguments.set)
    takeover = Takeover.FORCE if arguments.takeover else Takeover.WAIT
    job = pipeline(arguments.folder, arguments.postgres, arguments.mode, takeover)

    def tell(event: Event) -> None:
        words = getattr(event, "outcome", ""), getattr(event, "reason", "")
        print(type(event).__name__, *words, flush=True)

    EVENTS.subscribe(tell)
    reader = spark.readStream.schema("id long, amount long, at long")
    code = job.run(
        lambda: (
            reader.option("maxFilesPerTrigger", 1)
            .json(str(arguments.folder / "in"))
            .repartition(2)
            .writeStream.foreachBatch(job)
            .option("checkpointLocation", str(arguments.folder / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
    )
    if isinstance(job.outcome, CommitFatal):
        print(f"FATAL {job.outcome.reason}", flush=True)
    print(f"EXIT {code.name}", flush=True)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
