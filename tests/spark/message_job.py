"""A consumer on Spark in a process of its own, to be killed: Kafka in, Postgres and files out."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from semel import (
    MessagePipeline,
    NonRetryableMessageError,
    Policy,
    RetryableMessageError,
    Send,
    Settings,
)
from semel.codec import FromPayload
from semel.crashpoints import CrashPoint, reach
from semel.events import EVENTS, Event
from semel.lease import Takeover
from semel.sinks import FilesSink, PostgresSink
from semel.testing.services import connector_jars, jdbc_jars
from tests.spark.job import session

POLICY = """
deliverySemantics:
  topics: {cases: {key: caseId, ordering: per-key}}
  consumers:
    indexer:
      versioned: true
      gaps: retry
      retry: {maxAttempts: 50, initialDelayMs: 1, maxDelayMs: 20, mode: retry-table}
      dlq: {enabled: true, owner: search-team}
      poison: {maxAttemptsBeforePark: 2}
"""
SCHEMA = "id string, key string, version long"


def handle(message: Any) -> Any:
    told = message.payload
    if told["fails"] and message.attempt <= told["fails"]:
        raise RetryableMessageError("not yet")
    if told["hopeless"]:
        raise NonRetryableMessageError("no")
    if told["parks"] and not Path(told["parks"]).exists():
        raise ValueError("broken")
    if told["kills"] and not Path(told["kills"]).exists():
        Path(told["kills"]).touch()
        os._exit(9)  # the worker's process, as a broken native library would
    if told["fells"] and not Path(told["fells"]).exists():
        Path(told["fells"]).touch()
        daemon = Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(daemon.rpartition(")")[2].split()[1]), signal.SIGKILL)  # its executor
    yield "effects", {"id": message.id, "key": message.key, "version": message.version}
    yield "files", {"id": message.id, "key": message.key, "version": message.version}
    yield Send("handled", {"id": message.id}, key=message.key)


def pipeline(folder: Path, postgres: str, takeover: Takeover) -> MessagePipeline:
    return MessagePipeline(
        "indexer",
        policy=Policy.parse(POLICY),
        database=postgres,
        handler=handle,
        key_from=FromPayload("key"),
        sinks=[
            PostgresSink(postgres, "effects", write="append", schema=SCHEMA),
            FilesSink(folder / "files", schema=SCHEMA),
        ],
        ledger=f"sqlite:///{folder / 'job.ledger'}",
        tasks=2,
        settings=Settings(takeover=takeover, lease_seconds=20.0),
    )


def plain(df: DataFrame, postgres: str) -> Any:
    """What people write without semel: Spark's deduplication, and its JDBC writer."""
    from pyspark.sql import functions as f

    where = urlsplit(postgres)
    told = f.from_json(f.col("value").cast("string"), "id string, key string, version long")
    rows = (
        df.select("timestamp", told.alias("told"))
        .select("timestamp", "told.*")
        .where("id is not null")
        .withWatermark("timestamp", "1 hour")
        .dropDuplicatesWithinWatermark(["id"])
    )

    def write(batch: DataFrame, number: int) -> None:
        (
            batch.select("id", "key", "version")
            .write.format("jdbc")
            .option("url", f"jdbc:postgresql://{where.hostname}:{where.port}{where.path}")
            .option("driver", "org.postgresql.Driver")
            .option("user", where.username or "")
            .option("password", where.password or "")
            .option("dbtable", "effects")
            .mode("append")
            .save()
        )
        reach(CrashPoint.SPARK_BATCH_AFTER)

    return rows.writeStream.foreachBatch(write)


def is_done(postgres: str, messages: int) -> bool:
    """Whether every message has an end, and none waits."""
    with psycopg.connect(postgres) as connection:
        connection.execute("set search_path = public, semel")
        found = connection.execute(
            "select (select count(*) from processed_message "
            "where state in ('COMPLETED', 'FAILED_TERMINAL')), "
            "(select count(*) from waiting_message)"
        ).fetchone()
    return found == (messages, 0)


def stop_when_done(query: StreamingQuery, postgres: str, messages: int) -> None:
    def watch() -> None:
        while query.isActive and not is_done(postgres, messages):
            if query.awaitTermination(0.3):
                return
        query.stop()

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("postgres")
    parser.add_argument("bootstrap")
    parser.add_argument("topic")
    parser.add_argument("messages", type=int)
    parser.add_argument("--takeover", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--master", default="local[2,4]")
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    jars = [*connector_jars(), *(jdbc_jars() if arguments.plain else [])]
    settings = [f"spark.jars={','.join(map(str, jars))}", *arguments.set]
    spark = session(arguments.master, settings)

    def tell(event: Event) -> None:
        words = getattr(event, "outcome", ""), getattr(event, "reason", "")
        print(type(event).__name__, *words, flush=True)

    EVENTS.subscribe(tell)
    records = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", arguments.bootstrap)
        .option("subscribe", arguments.topic)
        .option("startingOffsets", "earliest")
        .option("includeHeaders", "true")
        .option("maxOffsetsPerTrigger", 20)
        .load()
    )
    checkpoint = str(arguments.folder / "checkpoint")
    if arguments.plain:
        writer = plain(records, arguments.postgres).option("checkpointLocation", checkpoint)
        writer.trigger(availableNow=True).start().awaitTermination()
        return 0
    takeover = Takeover.FORCE if arguments.takeover else Takeover.WAIT
    job = pipeline(arguments.folder, arguments.postgres, takeover)

    def start() -> StreamingQuery:
        writer = job.write(records).option("checkpointLocation", checkpoint)
        query: StreamingQuery = writer.trigger(processingTime="100 milliseconds").start()
        stop_when_done(query, arguments.postgres, arguments.messages)
        print("STARTED", flush=True)
        return query

    code = job.run(start)
    print(f"EXIT {code.name}", flush=True)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
