"""Messages on Spark, beside deduplication in Spark's state, and beside none."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import psycopg
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from bench.frames import PARTITIONS, spark_session
from bench.harness import Benchmark, Row, Scale, Spread, Table, Target, measure, timed
from bench.machine import cpu_seconds
from bench.server import Database, postgres
from semel import MessagePipeline, NonRetryableMessageError, Policy, RetryableMessageError
from semel.sinks import MessagesSink, PostgresSink
from semel.sql.database import SqlDatabase

PLAIN = "JDBC, no deduplication"
STATE = "dropDuplicatesWithinWatermark, JDBC"
FRAMES = "semel, rows made by Spark"
PYTHON = "semel, Python handler"

ABOUT = """\
JSON messages of 165 bytes come from files with the columns of Spark's Kafka source; 10 % of them
are repetitions (half of one in the same batch, half of one that was claimed before), 1 % cannot be
handled. Each alternative is a streaming query that stays open and gets a batch per round; the time
is Spark's whole trigger, the CPU is the JVM's, Python's and PostgreSQL's, all on these cores.

* **JDBC, no deduplication** is a `foreachBatch` with `from_json`, `persist`, and Spark's own writer
  (tuned as above) for rows and for what cannot be handled. It writes all repetitions, and after a
  failure a batch twice.
* **dropDuplicatesWithinWatermark, JDBC** is the same behind Spark's deduplication, with RocksDB. It
  knows only its checkpoint, forgets after the watermark, and writes twice after a failure, too.
* **semel** is a `MessagePipeline` with order per key, a claim for each message, dead letters with
  their attempts, and rows in a table, all of it one decision. Its table of claims has 100,000 rows
  before each batch, or 10,000,000 (made by `generate_series`) before the first.

Before each batch a pipeline asks questions: has a message killed its process, what is due, which
keys are held. A message that is due wakes an idle query, whose trigger is 500 ms."""

Handler: TypeAlias = Callable[[Any], Iterator[Any]]

POLICY = """
deliverySemantics:
  topics: {{bills: {{key: account, ordering: per-key, retention: 7d}}}}
  consumers:
    {name}:
      messageId: {{from: payload:id}}
      retry: {{maxAttempts: 5, initialDelayMs: 1, maxDelayMs: 2, mode: retry-table}}
      dlq: {{enabled: true, owner: billing-team}}
"""

COLUMNS = "key binary, value binary, topic string, partition int, offset long, timestamp timestamp"
PAID = "id string, account string, amount long, note string"
ROW = "struct(paid.id as id, paid.account as account, paid.amount as amount, paid.note as note)"
HOPELESS = "if(paid.amount <= 0, struct('NOT_POSITIVE' as code, 'nothing to pay' as reason), null)"
EFFECTS = "(id text, account text, amount bigint, note text)"

# These two are both PostgreSQL's and Spark's.
ID = "concat('msg-', md5(concat({salt}, n)))"
PAYLOAD = """concat('{{"id": "', id, '", "account": "account-', n % 20000,
 '", "amount": ', {amount}, ', "note": "', repeat('x', 60), '"}}')"""

DUE_APART_SECONDS = 2.7  # not a multiple of the trigger's interval


def run(scale: Scale) -> list[Table]:
    """Measure batches in turns, then what a batch asks first, then messages that are due."""
    size = scale.pick(100_000, 5_000)
    small, large = scale.pick(100_000, 10_000), scale.pick(10_000_000, 50_000)
    many = f"{FRAMES}, {large:,} claims"
    folder = Path(tempfile.mkdtemp(prefix="semel-bench-"))
    with spark_session() as spark, postgres() as server:
        spark.conf.set("spark.sql.shuffle.partitions", PARTITIONS)
        store = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        spark.conf.set("spark.sql.streaming.stateStore.providerClass", store)
        feed = _Feed(spark, folder, size)
        turns = {
            PLAIN: _plain(feed, server, "plain", small),
            STATE: _plain(feed, server, "state", small),
            FRAMES: _semel(feed, place := _Place(server, "frames", small)),
            PYTHON: _semel(feed, _Place(server, "python", small), _handler()),
            many: _semel(feed, _Place(server, "many", large)),
        }
        times = measure(turns, scale.rounds_or(7), 2)
        for turn in turns.values():
            turn.stop()
        asked = measure(_asking(place, scale.pick(50, 5)), scale.rounds_or(7))
        visible = _due(feed, _Place(server, "due", 0), scale.pick(10, 3))
    shutil.rmtree(folder)
    rows = []
    for name, seconds in times.seconds.items():
        rate = Spread.of([size / one for one in seconds])
        cpu = Spread.of(turns[name].cpu[-times.rounds :])
        rows.append(Row(name, [times.spread(name).text(0), rate.text(0), cpu.text(2)]))
    columns, targets = ["ms", "messages/s", "CPU seconds"], [(FRAMES, STATE, 1.3)]
    targets += [(FRAMES, PLAIN, 0.85), (many, FRAMES, 0.85), (PYTHON, FRAMES, 0.65)]
    ratios = [(name, to, times.ratio(name, to), wanted) for name, to, wanted in targets]
    beside = [Row(n, [to, r.text(2)], Target.at_least(wanted, r)) for n, to, r, wanted in ratios]
    spreads = [(name, asked.spread(name), 10) for name in asked.seconds]
    spreads.append(("a message is due, until its row is visible", visible, 1500))
    found = [Row(name, [s.text(1)], Target.at_most(most, s, "ms")) for name, s, most in spreads]
    return [
        Table(f"Batches of {size:,} messages", columns, rows, times.rounds),
        Table("One beside another", ["beside", "× as fast"], beside, times.rounds),
        Table("Coming back", ["ms"], found, asked.rounds),
    ]


@dataclass
class _Feed:
    """Makes batches as files, and gives each query its own copy of them."""

    spark: SparkSession
    folder: Path
    size: int

    def start(self, name: str, write: Callable[[DataFrame], Any], trigger: str) -> Any:
        (self.folder / name).mkdir()
        writer = write(self.spark.readStream.schema(COLUMNS).parquet(f"{self.folder / name}/*"))
        writer = writer.option("checkpointLocation", str(self.folder / f"{name}.checkpoint"))
        return writer.trigger(processingTime=trigger).start()

    def made(self, number: int, claims: int) -> Path:
        """Return a batch: of 20 messages one is repeated, and one has a claim."""
        path = self.folder / f"batch-{number}-{claims}"
        if path.exists():
            return path
        # A prime number spreads those with claims over the table.
        claimed = f"1 + ({number * self.size // 20} + i div 20) * 7919 % {claims}"
        new = f"{number * self.size} + i + if(i % 20 = 0, 1, 0)"
        rows = self.spark.range(0, self.size, 1, PARTITIONS).withColumnRenamed("id", "i")
        rows = rows.withColumn("n", f.expr(f"if(i % 20 = 10, {claimed}, {new})"))
        named = ID.format(salt="if(i % 20 = 10, 'old-', 'new-')")
        amount = "if(i % 100 = 5, -1, 1 + n % 1000)"
        rows.withColumn("id", f.expr(named)).selectExpr(
            "cast(concat('account-', n % 20000) as binary) as key",
            f"cast({PAYLOAD.format(amount=amount)} as binary) as value",
            "'bills' as topic",
            "cast(i % 4 as int) as partition",
            f"{number * self.size} + i as offset",
            "timestamp_micros(1700000000000000 + n) as timestamp",
        ).write.parquet(str(path))
        return path

    def put(self, name: str, batch: Path) -> None:
        """Let a query see a batch, all of its files at once."""
        copy = self.folder / f"{name}-{batch.name}"
        shutil.copytree(batch, copy)
        copy.rename(self.folder / name / batch.name)


@dataclass
class _Turn:
    """A query that stays open; each call gives it one batch."""

    feed: _Feed
    name: str
    claims: int
    write: Callable[[DataFrame], Any]
    clear: Callable[[], None]
    count: Callable[[], int]
    wanted: int
    stop_writing: Callable[[], None] = lambda: None
    number: int = 0
    query: Any = None
    cpu: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        """Return the seconds of the trigger with the batch."""
        batch = self.feed.made(self.number, self.claims)
        self.number += 1
        self.clear()
        self.query = self.query or self.feed.start(self.name, self.write, "1 second")
        before = cpu_seconds()
        self.feed.put(self.name, batch)
        self.query.processAllAvailable()
        self.cpu.append(cpu_seconds() - before)
        # Behind a watermark a trigger without rows follows, which is not counted.
        done = [one for one in self.query.recentProgress if one["numInputRows"]]
        if (len(done), self.count()) != (self.number, self.wanted):
            raise ValueError(f"{len(done)} triggers, {self.count()} rows instead of {self.wanted}")
        return float(done[-1]["durationMs"]["triggerExecution"]) / 1000

    def stop(self) -> None:
        self.query.stop()
        self.stop_writing()


def _plain(feed: _Feed, server: Database, name: str, claims: int) -> _Turn:
    letters, columns = f"{name}_letters", 'value bytea, topic text, partition int, "offset" bigint'
    server.run(f"CREATE TABLE {name} {EFFECTS}", f"CREATE TABLE {letters} ({columns})")

    def write_batch(batch: DataFrame, number: int) -> None:
        kept = batch.persist()
        server.jdbc_append(kept.where("amount > 0").select("paid.*"), name)
        hopeless = kept.where("amount <= 0").select("value", "topic", "partition", "offset")
        server.jdbc_append(hopeless, letters)
        kept.unpersist()

    def write(stream: DataFrame) -> Any:
        paid = f.from_json(f.col("value").cast("string"), PAID).alias("paid")
        rows = stream.select("*", paid).select("*", "paid.*")
        if name == "state":
            rows = rows.withWatermark("timestamp", "1 hour").dropDuplicatesWithinWatermark(["id"])
        return rows.writeStream.foreachBatch(write_batch)

    repeated = feed.size // 20 if name == "state" else 0
    wanted = feed.size - repeated - feed.size // 100
    clear = partial(server.run, f"TRUNCATE {name}, {letters}")
    return _Turn(feed, name, claims, write, clear, partial(server.count, name), wanted)


async def _create_tables(url: str) -> None:
    database = SqlDatabase(url)
    await database.create_tables()
    await database.close()


class _Place:
    """A database with semel's tables, and the claims of one consumer."""

    def __init__(self, server: Database, name: str, claims: int) -> None:
        self.name, self.claims = name, claims
        server.run(f"CREATE DATABASE {name}")
        self.url = server.url.rsplit("/", 1)[0] + f"/{name}"
        asyncio.run(_create_tables(self.url))
        self._connection = psycopg.connect(self.url, autocommit=True)
        self.run(f"CREATE TABLE effects {EFFECTS}")
        self._fill()

    def _fill(self) -> None:
        payload, named = PAYLOAD.format(amount="1 + n % 1000"), ID.format(salt="'old-'")
        self.run(
            f"INSERT INTO semel.processed_message "
            f"(consumer_name, message_id, state, attempts, payload_hash) SELECT '{self.name}', id, "
            f"'COMPLETED', 1, encode(sha256(convert_to({payload}, 'UTF8')), 'hex') FROM "
            f"(SELECT n, {named} AS id FROM generate_series(1, {self.claims}) n) AS old",
            "VACUUM ANALYZE semel.processed_message",
        )

    def run(self, *statements: str) -> list[tuple[Any, ...]]:
        """Execute statements, each in a transaction of its own; return the last one's rows."""
        for statement in statements:
            found = self._connection.execute(statement.encode())
        return found.fetchall() if found.description else []

    def count(self) -> int:
        return int(self.run("SELECT count(*) FROM effects")[0][0])

    def clear(self) -> None:
        # Claims are made anew where that does not take minutes.
        self.run("TRUNCATE effects, semel.dead_letter, semel.failed_attempt, semel.cycle_outcome")
        if self.claims <= 100_000:
            self.run("TRUNCATE semel.processed_message")
            self._fill()

    def pipeline(self, handler: Handler | None) -> MessagePipeline:
        made: dict[str, Any] = {"handler": handler}
        sink = PostgresSink(self.url, "effects", write="append", schema=PAID)
        if handler is None:
            made = {"columns": {"paid": f"from_json(string(value), '{PAID}')"}, "failure": HOPELESS}
            sink = PostgresSink(self.url, "effects", write="append", rows=ROW)
        policy = Policy.parse(POLICY.format(name=self.name))
        return MessagePipeline(self.name, policy=policy, database=self.url, sinks=[sink], **made)


def _semel(feed: _Feed, place: _Place, handler: Handler | None = None) -> _Turn:
    pipeline = place.pipeline(handler)
    wanted = feed.size - feed.size // 10 - feed.size // 100
    side = (pipeline.write, place.clear, place.count, wanted, pipeline.stop)
    return _Turn(feed, place.name, place.claims, *side)


# Handlers are nested: pickled by value, because Spark's workers need not find this module.
def _handler() -> Handler:
    def pay(message: Any) -> Iterator[Any]:
        paid = message.payload
        if paid["amount"] <= 0:
            raise NonRetryableMessageError("nothing to pay", "NOT_POSITIVE")
        yield "effects", paid

    return pay


def _late_handler() -> Handler:
    def pay(message: Any) -> Iterator[Any]:
        if message.attempt == 1:
            seconds = message.payload["seconds"]
            raise RetryableMessageError("not yet", "NOT_YET", retry_after=seconds)
        yield "effects", {"id": message.id}

    return pay


def _asking(place: _Place, calls: int, keys: int = 1000) -> dict[str, Callable[[], float]]:
    """Return what a pipeline asks before each batch, with and without held keys."""
    sink = MessagesSink(place.url, place.name)
    reader = sink.reader()

    def asked(hold: str) -> float:
        place.run("TRUNCATE semel.waiting_message", hold, "ANALYZE semel.waiting_message")
        with timed() as watch:
            for _ in range(calls):
                reader.suspects()
                sink.come_back()
        return watch.seconds / calls

    hold = (
        f"INSERT INTO semel.waiting_message (consumer, message_id, waits, held, key) "
        f"SELECT '{place.name}', n, 'parked', 1, n FROM generate_series(1, {keys}) n"
    )
    held = f"questions, {keys:,} held keys"
    return {"questions, nothing waits": partial(asked, "SELECT"), held: partial(asked, hold)}


def _due(feed: _Feed, place: _Place, messages: int) -> Spread:
    """Let messages fail once; return the ms from when each is due until its row is visible."""
    batch = feed.folder / "late"
    # The query's first batches are slow: the first two messages are not counted.
    late = {str(number): DUE_APART_SECONDS * (number + 1) for number in range(messages + 2)}
    told = [json.dumps({"id": one, "seconds": seconds}).encode() for one, seconds in late.items()]
    rows = [(b"%d" % number, value, number) for number, value in enumerate(told)]
    made = feed.spark.createDataFrame(rows, "key binary, value binary, offset long")
    made.selectExpr("*", "'bills' as topic", "0 as partition").write.parquet(str(batch))
    pipeline = place.pipeline(_late_handler())
    query = feed.start("due", pipeline.write, "500 milliseconds")
    feed.put("due", batch)
    due, visible = dict[str, int](), dict[str, float]()
    while len(visible) < len(late):
        query.awaitTermination(0.02)
        due |= place.run("SELECT message_id, due_at FROM semel.waiting_message")
        found = place.run("SELECT id FROM effects")
        visible |= {one: time.time() * 1e6 for (one,) in found if one not in visible}
    query.stop()
    pipeline.stop()
    return Spread.of([(visible[one] - due[one]) / 1000 for one in [*late][2:]])


BENCHMARK = Benchmark("messages-spark", "Messages on Spark", ABOUT, run)
