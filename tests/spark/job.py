"""A Spark driver of its own process, to be killed: files in, Postgres and files out."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from semel import ExactlyOnce, Settings
from semel.crashpoints import CrashPoint, reach
from semel.events import EVENTS, Event
from semel.lease import Takeover
from semel.pipeline.cycle import CommitFatal
from semel.sinks import FilesSink, PostgresSink
from semel.testing.services import jdbc_jars

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


def plain(folder: Path, postgres: str) -> Callable[[DataFrame, int], None]:
    """What people write without semel: Spark's own writers, one after the other."""
    where = urlsplit(postgres)

    def write(df: DataFrame, batch: int) -> None:
        rows = df.select("id", "amount").persist()
        rows.write.mode("append").parquet(str(folder / "all"))
        (
            rows.write.format("jdbc")
            .option("url", f"jdbc:postgresql://{where.hostname}:{where.port}{where.path}")
            .option("driver", "org.postgresql.Driver")
            .option("user", where.username or "")
            .option("password", where.password or "")
            .option("dbtable", "entries")
            .mode("append")
            .save()
        )
        rows.unpersist()
        reach(CrashPoint.SPARK_BATCH_AFTER)

    return write


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("postgres")
    parser.add_argument("--mode", default="staging")
    parser.add_argument("--master", default="local[2,4]")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--takeover", action="store_true")
    parser.add_argument("--checkpoint")
    parser.add_argument("--plain", action="store_true")
    arguments = parser.parse_args()
    if arguments.plain:
        arguments.set.append(f"spark.jars={','.join(map(str, jdbc_jars()))}")
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("semel").setLevel(logging.DEBUG)
    spark = session(arguments.master, arguments.set)
    takeover = Takeover.FORCE if arguments.takeover else Takeover.WAIT
    job = pipeline(arguments.folder, arguments.postgres, arguments.mode, takeover)

    def tell(event: Event) -> None:
        words = getattr(event, "outcome", ""), getattr(event, "reason", "")
        print(type(event).__name__, *words, flush=True)

    EVENTS.subscribe(tell)

    def start(function: Callable[[DataFrame, int], None]) -> StreamingQuery:
        return (
            spark.readStream.schema("id long, amount long, at long")
            .option("maxFilesPerTrigger", 1)
            .json(str(arguments.folder / "in"))
            .repartition(2)
            .writeStream.foreachBatch(function)
            .option(
                "checkpointLocation", arguments.checkpoint or str(arguments.folder / "checkpoint")
            )
            .trigger(availableNow=True)
            .start()
        )

    if arguments.plain:
        start(plain(arguments.folder, arguments.postgres)).awaitTermination()
        return 0
    code = job.run(lambda: start(job))
    if isinstance(job.outcome, CommitFatal):
        print(f"FATAL {job.outcome.reason}", flush=True)
    print(f"EXIT {code.name}", flush=True)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
