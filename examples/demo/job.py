"""The Spark driver process that the demo kills: ``python -m examples.demo.job FOLDER …``.

It reads payments from Kafka, or from a folder, until the source has ended and everything
is written, and tells what happens as JSON lines in a file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from examples.demo.payments import SCHEMA
from examples.demo.place import Place, Variant
from semel import MessagePipeline, events
from semel.testing import services

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

BatchFunction = Callable[["DataFrame", int], None]

FILES_PER_BATCH: Final = 12
"""Three seconds of payments, so that a backlog is several batches."""

RECORDS_PER_BATCH: Final = 6_000

JVM_OPTIONS: Final = (
    "-XX:TieredStopAtLevel=1",  # quick to start; the demo never runs long enough for more
    "-XX:+UseSerialGC",
    "-XX:-UsePerfData",  # whose files in /tmp a killed JVM would leave
)


class Teller:
    """Appends to the file that the parent process reads; a line is out when `tell` returns."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(self, what: str, **nouns: Any) -> None:
        """Write one line."""
        line = json.dumps({"event": what, **nouns}, default=str)
        os.write(self._file, f"{line}\n".encode())

    def pass_on(self, event: events.Event) -> None:
        """Write one of semel's own events."""
        self.tell(type(event).__name__, **asdict(event))


def spark_session(place: Place) -> SparkSession:
    """Start Spark in this process, with all its files below the place's folder."""
    from pyspark.sql import SparkSession

    options = " ".join((*JVM_OPTIONS, f"-Djava.io.tmpdir={place.scratch}"))
    spark = (
        SparkSession.builder.master("local[2]")
        .appName("semel-demo")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.extraJavaOptions", options)
        .config("spark.local.dir", str(place.scratch))
        .config("spark.sql.warehouse.dir", str(place.scratch / "warehouse"))
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.jars", ",".join(services.connector_jars() if place.bootstrap else ()))
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("WARN")
    return spark


def read(spark: SparkSession, place: Place) -> DataFrame:
    """Read the stream of payments."""
    if not place.bootstrap:
        files = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", FILES_PER_BATCH)
        return files.json(str(place.input))
    return (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", place.bootstrap)
        .option("subscribe", place.topic)
        .option("startingOffsets", "earliest")
        .option("includeHeaders", "true")
        .option("maxOffsetsPerTrigger", RECORDS_PER_BATCH)
        .load()
    )


def start_query(writer: DataStreamWriter, place: Place, teller: Teller) -> StreamingQuery:
    """Start reading; the query stops by itself when all is written and nothing waits."""
    query = (
        writer.option("checkpointLocation", str(place.checkpoint))
        .trigger(processingTime="200 milliseconds")
        .start()
    )
    threading.Thread(target=_stop_at_end, args=(query, place, teller), daemon=True).start()
    return query


def _stop_at_end(query: StreamingQuery, place: Place, teller: Teller) -> None:
    # The query's own failure is raised where the main thread awaits it.
    with suppress(Exception):
        for end in (place.source_ended, place.mended):
            while query.isActive and not end.exists():
                time.sleep(0.1)
            query.processAllAvailable()
            teller.tell("AllRead")
        query.stop()


def watched(function: BatchFunction, teller: Teller) -> BatchFunction:
    """Tell when a batch begins and ends."""

    def watch(df: DataFrame, batch_id: int) -> None:
        teller.tell("BatchBegun", batch=batch_id)
        function(df, batch_id)
        teller.tell("BatchDone", batch=batch_id)

    return watch


def run(variant: Variant, place: Place, teller: Teller) -> int:
    """Run the query to its end; return the exit code."""
    spark = spark_session(place)
    teller.tell("SparkReady")
    match variant:
        case Variant.PLAIN:
            from examples.demo.plain import payments_of, plain_function

            function = plain_function(place, lambda sink: teller.tell("Writing", sink=sink))
            writer = payments_of(read(spark, place)).writeStream
            writer.foreachBatch(watched(function, teller))
            start_query(writer, place, teller).awaitTermination()
            code = 0
        case Variant.SEMEL:
            from examples.demo.pipeline import pipeline

            payments = pipeline(place)
            events.EVENTS.subscribe(teller.pass_on)

            def start() -> StreamingQuery:
                stream = read(spark, place)
                is_messages = isinstance(payments, MessagePipeline)
                writer = payments.write(stream) if is_messages else stream.writeStream
                writer.foreachBatch(watched(payments, teller))
                return start_query(writer, place, teller)

            code = payments.run(start)
    spark.stop()
    return int(code)


def _use_own_spark() -> None:
    """Forget any other Spark, and settings for it, the user has."""
    for name in [name for name in os.environ if name.startswith(("SPARK_", "PYSPARK_"))]:
        del os.environ[name]
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"


def main() -> None:
    """Read the arguments and run."""
    arguments = argparse.ArgumentParser(prog="python -m examples.demo.job")
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("variant", type=Variant, choices=list(Variant))
    arguments.add_argument("driver", type=int, help="how many drivers there were before, plus one")
    arguments.add_argument("bootstrap", help="the Kafka broker, or empty: from files")
    arguments.add_argument("s3", help="the URL of the object store")
    arguments.add_argument("catalog", help="the URL of its Iceberg catalog")
    given = arguments.parse_args()
    servers = given.bootstrap, given.s3, given.catalog
    place = Place(given.folder.resolve(), os.environ["DATABASE_URL"], *servers)
    # Spark makes folders where it is started.
    os.chdir(place.scratch)
    _use_own_spark()
    sys.exit(run(given.variant, place, Teller(place.events(given.driver))))


if __name__ == "__main__":
    main()
