"""Consumers that Spark runs, on a real broker and a real database."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from confluent_kafka import Producer
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.functions import expr

from semel import (
    MessagePipeline,
    NonRetryableMessageError,
    Policy,
    RetryableMessageError,
    Send,
    SqlDatabase,
)
from semel.codec import FromCoordinates, FromPayload, Reading
from semel.events import EVENTS, CycleEnded, GapCrossed, Measurement, Metric
from semel.kafka.codecs import AvroCodec
from semel.sinks import PostgresSink
from semel.testing.services import KafkaServer, PostgresServer
from tests.unit.policy.policy_texts import TEMPLATE

if TYPE_CHECKING:
    from tests.unit.kafka.schema_registry import SchemaRegistry

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.postgres]

QUICK = """
deliverySemantics:
  topics: {cases: {key: caseId, ordering: per-key}}
  consumers:
    indexer:
      versioned: true
      gaps: park-key
      retry: {maxAttempts: 4, initialDelayMs: 1, maxDelayMs: 50, mode: retry-table}
      dlq: {enabled: true, owner: search-team}
"""


class Topic:
    """A topic with two partitions, a database with semel's tables, and queries over both."""

    def __init__(self, broker: KafkaServer, spark: SparkSession, url: str, folder: Path) -> None:
        self.name = f"cases-{uuid.uuid4().hex[:8]}"
        self.broker, self.spark, self.url, self.folder = broker, spark, url, folder
        self._producer = Producer({"bootstrap.servers": broker.bootstrap})
        broker.create_topic(self.name, 2)
        asyncio.run(_create_tables(url))
        self.ask("create table documents (id text primary key, version bigint, title text)")

    def put(self, message_id: str | None, value: Any, key: str = "k") -> None:
        raw = value if isinstance(value, bytes) else json.dumps(value).encode()
        headers = [] if message_id is None else [("message-id", message_id.encode())]
        self._producer.produce(self.name, raw, key, headers=headers)
        assert self._producer.flush(30) == 0

    def stream(self) -> Any:
        reader = self.spark.readStream.format("kafka").option("subscribe", self.name)
        reader = reader.option("kafka.bootstrap.servers", self.broker.bootstrap)
        return reader.option("startingOffsets", "earliest").option("includeHeaders", "true").load()

    def run(self, pipeline: MessagePipeline, until: Callable[[], bool] | None = None) -> None:
        """Run the query over all that is there; with *until*, as long as that is false."""
        writer = pipeline.write(self.stream()).option("checkpointLocation", f"{self.folder}/ck")
        if until is None:
            query = writer.trigger(availableNow=True).start()
        else:
            query = writer.trigger(processingTime="200 milliseconds").start()
        deadline = time.monotonic() + 90
        try:
            if until is None:
                assert query.awaitTermination(90)
            while until is not None and not until():
                assert query.isActive, query.exception()
                assert time.monotonic() < deadline, "it did not come so far"
                query.awaitTermination(0.2)
        finally:
            query.stop()
            pipeline.stop()

    def ask(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("set search_path = public, semel")
            found = connection.execute(statement)  # type: ignore[call-overload]
            return found.fetchall() if found.description else []

    def documents(self) -> list[tuple[Any, ...]]:
        return self.ask("select id, version, title from documents order by id")

    def sink(self, name: str = "postgres") -> PostgresSink:
        schema = "id string, version long, title string"
        return PostgresSink(
            self.url, "documents", key=["id"], version_column="version", schema=schema, name=name
        )

    def pipeline(
        self, handler: Any, consumer: str = "indexer", text: str = QUICK, **how: Any
    ) -> Any:
        return MessagePipeline(
            consumer,
            policy=Policy.parse(text),
            database=self.url,
            handler=handler,
            sinks=[self.sink()],
            tasks=2,
            **how,
        )


async def _create_tables(url: str) -> None:
    database = SqlDatabase(url)
    await database.create_tables()
    await database.close()


@pytest.fixture
def topic(
    kafka_server: KafkaServer, spark: SparkSession, postgres_url: str, tmp_path: Path
) -> Iterator[Topic]:
    return Topic(kafka_server, spark, postgres_url, tmp_path)


def indexing() -> Callable[..., Any]:
    """Return a handler that Spark pickles by value: its workers cannot import this module."""

    def index(message):
        case = message.payload
        title = case["title"]
        if title == "fails once" and message.attempt == 1:
            raise RetryableMessageError("not yet")
        if title == "poison":
            raise NonRetryableMessageError("no")
        yield "documents", {"id": message.key, "version": case["version"], "title": title}
        yield Send("indexed", {"id": message.id}, key=message.key)

    return index


def test_messages_are_deduplicated_ordered_and_routed_in_one_decision(topic: Topic) -> None:
    topic.put("a1", {"version": 1, "title": "one"}, "a")
    topic.put("a1", {"version": 1, "title": "one"}, "a")
    topic.put("a2", {"version": 2, "title": "fails once"}, "a")
    topic.put("a3", {"version": 3, "title": "three"}, "a")
    topic.put("b2", {"version": 2, "title": "early"}, "b")
    topic.put("b1", {"version": 1, "title": "late"}, "b")
    topic.put("c1", {"version": 1, "title": "poison"}, "c")
    topic.put("d", b"{", "d")
    topic.put(None, {"version": 1, "title": "no id"}, "e")

    waiting = "select count(*) from waiting_message"
    pipeline = topic.pipeline(indexing())
    topic.run(pipeline, lambda: len(topic.documents()) == 2 and topic.ask(waiting) == [(0,)])

    assert topic.documents() == [("a", 3, "three"), ("b", 2, "early")]
    letters = topic.ask("select message_id, error_code from dead_letter order by error_code")
    assert [code for _, code in letters] == [
        "DESERIALIZATION_FAILED",
        "MESSAGE_ID_MISSING",
        "REJECTED",
    ]
    claims = dict(topic.ask("select message_id, state from processed_message"))
    assert {claims[one] for one in ("a1", "a2", "a3", "b1", "b2")} == {"COMPLETED"}
    assert claims["c1"] == "FAILED_TERMINAL"
    sent = topic.ask("select key from outbox_message order by place")
    assert sorted(key for (key,) in sent) == ["a", "a", "a", "b", "b"]
    counts = topic.ask("select outcome, sum(total)::int from cycle_outcome group by 1 order by 1")
    assert dict(counts)["duplicate_skipped"] == 1
    assert sum(number for _, number in counts) == 9


@pytest.mark.parametrize(("claims", "kept"), [("all", 2), ("lean", 0)])
def test_a_second_start_skips_what_was_handled(topic: Topic, claims: str, kept: int) -> None:
    topic.put("a1", {"version": 1, "title": "one"}, "a")
    topic.run(topic.pipeline(indexing(), claims=claims))
    topic.put("a1", {"version": 1, "title": "one"}, "a")
    topic.put("a2", {"version": 2, "title": "two"}, "a")

    topic.run(topic.pipeline(indexing(), claims=claims))

    assert topic.documents() == [("a", 2, "two")]
    assert topic.ask("select count(*) from processed_message") == [(kept,)]
    counts = dict(topic.ask("select outcome, sum(total)::int from cycle_outcome group by 1"))
    assert counts == {"success": 2, "duplicate_skipped": 1}


def test_a_batch_stands_still_while_a_dependency_is_down_and_the_query_lives(topic: Topic) -> None:
    up = topic.folder / "up"
    calls = topic.folder / "calls"

    def index(message):
        with calls.open("a") as told:
            told.write(f"{message.attempt}\n")
        if not up.exists():
            raise RetryableMessageError("down", "DEPENDENCY_UNAVAILABLE")
        yield "documents", {"id": message.key, "version": 1, "title": ""}

    for number in range(25):
        topic.put(f"m{number}", {"version": 1}, f"k{number}")
    aborted: list[CycleEnded] = []
    unsubscribe = EVENTS.subscribe(
        lambda event: aborted.append(event) if event.outcome == "aborted" else None, CycleEnded
    )

    def is_done() -> bool:
        if len(aborted) > 3:  # more than the attempts of a cycle
            up.touch()
        return len(topic.documents()) == 25

    topic.run(topic.pipeline(index, text=QUICK.replace("versioned: true", "")), is_done)
    unsubscribe()

    assert set(calls.read_text().split()) == {"1"}
    assert topic.ask("select count(*) from waiting_message") == [(0,)]


@pytest.mark.parametrize("kept_out_by", ["positions", "a state store"])
def test_without_claims_something_else_keeps_repetitions_out(
    topic: Topic, kept_out_by: str
) -> None:
    def effect(message):
        yield "documents", {"id": message.id, "version": 1, "title": ""}

    def pipeline() -> Any:
        schema = "id string, version long, title string"
        return MessagePipeline(
            "indexer",
            database=topic.url,
            handler=effect,
            id_from=FromCoordinates() if kept_out_by == "positions" else None,
            sinks=[PostgresSink(topic.url, "documents", write="append", schema=schema)],
            claims="failed",
            tasks=2,
        )

    records = topic.stream

    def without_repetitions() -> Any:
        named = "string(filter(headers, one -> one.key = 'message-id')[0].value)"
        stream = records().withColumn("id", expr(named)).withWatermark("timestamp", "1 hour")
        return stream.dropDuplicatesWithinWatermark(["id"])

    if kept_out_by == "a state store":
        topic.stream = without_repetitions  # type: ignore[method-assign]
    repeats = kept_out_by == "a state store"
    for names in (["m1", "m2", "m1"], ["m2", "m3"]):
        for name in names:
            topic.put(name, {"version": 1})
        topic.run(pipeline())

    assert len(topic.documents()) == (3 if repeats else 5)
    assert topic.ask("select count(*) from processed_message") == [(0,)]


def test_two_databases_share_the_keys_of_a_consumer(
    topic: Topic, postgres_server: PostgresServer
) -> None:
    second = postgres_server.create_database(f"second_{uuid.uuid4().hex[:8]}")
    asyncio.run(_create_tables(second))

    def pipeline() -> Any:
        return MessagePipeline(
            "indexer",
            policy=Policy.parse(QUICK.replace("versioned: true", "versioned: false")),
            database=[topic.url, second],
            handler=indexing(),
            sinks=[topic.sink()],
            tasks=2,
        )

    def ask(url: str, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(url, options="-c search_path=semel") as connection:
            return connection.execute(statement).fetchall()  # type: ignore[call-overload]

    for number in range(12):
        for _ in range(2):
            title = "fails once" if number % 3 == 0 else "one"
            topic.put(f"m{number}", {"version": 1, "title": title}, f"k{number}")
    waiting = "select count(*) from waiting_message"
    topic.run(
        pipeline(),
        lambda: (
            len(topic.documents()) == 12
            and ask(topic.url, waiting) == ask(second, waiting) == [(0,)]
        ),
    )
    topic.put("m1", {"version": 1, "title": "one"}, "k1")
    topic.run(pipeline())

    assert len(topic.documents()) == 12
    claims = "select message_id from processed_message where state = 'COMPLETED'"
    found = [{name for (name,) in ask(url, claims)} for url in (topic.url, second)]
    assert found[0] | found[1] == {f"m{number}" for number in range(12)}
    assert not found[0] & found[1]
    assert all(found)
    outbox = "select count(*) from outbox_message"
    assert ask(topic.url, outbox)[0][0] + ask(second, outbox)[0][0] == 12
    counts = "select outcome, sum(total)::int from cycle_outcome group by 1"
    assert sorted(ask(topic.url, counts)) == sorted(ask(second, counts))
    assert sum(number for _, number in ask(second, counts)) == 25
    topic.put("m13", {"version": 1, "title": "one"}, "k1")
    with pytest.raises(StreamingQueryException, match="messages-1-of-2"):
        topic.run(topic.pipeline(indexing()))


def test_a_gap_that_is_crossed_is_told_on_the_driver(topic: Topic) -> None:
    topic.put("a1", {"version": 1, "title": "one"}, "a")
    topic.put("a3", {"version": 3, "title": "three"}, "a")
    text = QUICK.replace("indexer:", "Search.Indexer:").replace("park-key", "alert")
    crossed: list[GapCrossed] = []
    unsubscribe = EVENTS.subscribe(crossed.append, GapCrossed)

    topic.run(topic.pipeline(indexing(), "Search.Indexer", text))
    unsubscribe()

    assert crossed == [GapCrossed("Search.Indexer", "Search.Indexer", "a", 2, 3)]
    assert topic.documents() == [("a", 3, "three")]


def test_duration_commits_and_lag_are_measured(topic: Topic) -> None:
    measured: list[Measurement] = []
    for number in range(5):
        topic.put(f"a{number}", {"version": number + 1, "title": "one"}, "a")
    unsubscribe = EVENTS.subscribe(measured.append, Measurement)

    topic.run(topic.pipeline(indexing()))
    unsubscribe()

    took = [one for one in measured if one.metric is Metric.DURATION]
    assert sum(one.readings for one in took) == 5
    assert all(one.labels["topic"] == topic.name and one.value > 0 for one in took)
    commits = [one.labels for one in measured if one.metric is Metric.OFFSET_COMMITS]
    assert commits == [{"topic": topic.name, "consumer_group": "indexer", "status": "ok"}]
    lag = {one.labels["partition"]: one.value for one in measured if one.metric is Metric.LAG}
    assert lag == {"0": 0.0, "1": 0.0}


def test_no_note_is_left_after_a_batch(topic: Topic) -> None:
    topic.ask(
        "insert into crash_suspect (consumer, message_id, tries, writer, noted_at) "
        "values ('indexer', 'gone', 1, '', 0)"
    )
    topic.put("a1", {"version": 1, "title": "one"}, "a")

    topic.run(topic.pipeline(indexing()))

    assert topic.documents() == [("a", 1, "one")]
    assert topic.ask("select message_id from crash_suspect") == []


def test_available_now_handles_a_retry_that_is_due_without_new_records(topic: Topic) -> None:
    later = QUICK.replace("initialDelayMs: 1, maxDelayMs: 50", "initialDelayMs: 60000")
    topic.put("a1", {"version": 1, "title": "fails once"}, "a")
    topic.run(topic.pipeline(indexing(), text=later))
    assert topic.documents() == []
    topic.ask("update waiting_message set due_at = 1")

    topic.run(topic.pipeline(indexing(), text=later))

    assert topic.documents() == [("a", 1, "fails once")]
    assert topic.ask("select count(*) from waiting_message") == [(0,)]


def test_the_policy_of_the_source_document_runs_both_its_consumers(topic: Topic) -> None:
    def index(message):
        case = message.payload
        yield (
            "documents",
            {"id": case["caseId"], "version": message.version, "title": case["title"]},
        )

    def send(message):
        yield Send("mail", {"to": message.payload["to"]}, key=message.key)

    policy = topic.folder / "delivery.yaml"
    policy.write_text(TEMPLATE)
    for number, title in [(1, "one"), (3, "three"), (2, "two"), (3, "three")]:
        case = {"caseId": "k", "version": number, "title": title, "to": "ann"}
        topic.put(f"m{number}", case, "k")

    search = MessagePipeline(
        "search-indexer",
        policy=policy,
        database=topic.url,
        handler=index,
        sinks=[topic.sink()],
    )
    topic.run(search)
    sender = MessagePipeline(
        "notification-sender",
        policy=Policy.parse(TEMPLATE),
        database=topic.url,
        handler=send,
        sinks=[],
        tasks=1,
    )
    topic.folder = topic.folder / "sender"
    topic.run(sender)

    assert topic.documents() == [("k", 3, "three")]
    assert topic.ask("select topic, key from outbox_message") == [("mail", "k")] * 3


def test_spark_makes_the_rows_where_there_is_no_handler(topic: Topic) -> None:
    sink = PostgresSink(
        topic.url, "documents", "struct(case.id, case.version, case.title)", key=["id"]
    )
    pipeline = MessagePipeline(
        "indexer",
        policy=Policy.parse(QUICK.replace("versioned: true", "versioned: false")),
        database=topic.url,
        columns={"case": "from_json(string(value), 'id string, version long, title string')"},
        failure="if(case.title = 'poison', struct('REJECTED' as code, 'no' as reason), null)",
        sinks=[sink],
        tasks=2,
    )
    topic.put("a1", {"id": "a", "version": 1, "title": "one"}, "a")
    topic.put("a1", {"id": "a", "version": 1, "title": "one"}, "a")
    topic.put("b1", {"id": "b", "version": 1, "title": "poison"}, "b")
    topic.put("c1", b"{", "c")
    topic.put("d1", {"id": "d", "version": 7, "title": "four"}, "d")

    topic.run(pipeline)

    assert topic.documents() == [("a", 1, "one"), ("d", 7, "four")]
    letters = topic.ask("select message_id, error_code from dead_letter order by 2")
    assert [code for _, code in letters] == ["DESERIALIZATION_FAILED", "REJECTED"]


def test_an_expression_that_raises_ends_the_batch_with_the_message_in_words(topic: Topic) -> None:
    pipeline = MessagePipeline(
        "indexer",
        database=topic.url,
        columns={"version": "cast(get_json_object(string(value), '$.version') as bigint)"},
        sinks=[PostgresSink(topic.url, "documents", "struct(string(key) as id, version)")],
        tasks=2,
    )
    for number in range(20):
        topic.put(f"m{number}", {"version": "seven" if number == 13 else number}, f"k{number % 3}")

    with pytest.raises(StreamingQueryException):
        topic.run(pipeline)

    told = str(pipeline.failure)
    assert "CAST_INVALID_INPUT" in told
    assert f"raises is 'm13', {topic.name}/" in told
    assert "seven" not in told


def test_messages_of_a_schema_registry_are_read_by_the_workers(
    topic: Topic, schema_registry: SchemaRegistry
) -> None:
    from confluent_kafka.schema_registry import SchemaRegistryClient
    from confluent_kafka.schema_registry.avro import AvroSerializer
    from confluent_kafka.serialization import MessageField, SerializationContext

    fields = [{"name": "id", "type": "string"}, {"name": "version", "type": "long"}]
    schema = {"type": "record", "name": "Case", "fields": fields}
    with SchemaRegistryClient({"url": schema_registry.url}) as client:
        serialise = AvroSerializer(client, json.dumps(schema))
        context = SerializationContext(topic.name, MessageField.VALUE)
        for version in (1, 2, 2):
            topic.put(None, serialise({"id": "a", "version": version}, context))
    topic.put(None, b"no framing")
    codec = AvroCodec(schema_registry.url)

    def index(message):
        yield "documents", {"id": message.key, "version": message.payload["version"], "title": ""}

    pipeline = MessagePipeline(
        "indexer",
        database=topic.url,
        handler=index,
        # Only the codec can read the key, so the rows are shared out by what Python finds.
        reading=Reading(FromCoordinates(), key_from=FromPayload("id"), codec=codec),
        sinks=[topic.sink()],
        tasks=2,
    )
    topic.run(pipeline)
    codec.close()

    assert topic.documents() == [("a", 2, "")]
    claims = topic.ask("select state, count(*)::int from processed_message group by 1 order by 1")
    assert claims == [("COMPLETED", 3), ("FAILED_TERMINAL", 1)]
