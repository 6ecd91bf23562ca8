"""A Kafka source on a real broker: positions, a lost checkpoint, a topic made again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from semel import ExactlyOnce
from semel.memory.ledger import MemoryLedger
from semel.memory.sink import MemorySink
from semel.testing.services import KafkaServer

pytestmark = [pytest.mark.spark, pytest.mark.kafka]

_numbers = count(1)


class Topic:
    """A topic with two partitions, its query, and where the query's rows go."""

    def __init__(self, broker: KafkaServer, spark: SparkSession, folder: Path) -> None:
        self.name = f"payments-{next(_numbers)}"
        self.broker = broker
        self.spark = spark
        self.folder = folder
        self.ledger = MemoryLedger()
        self.sink = MemorySink(rows="struct(cast(value as string) as id)")
        self.ids: list[str] = []
        self._producer = Producer({"bootstrap.servers": broker.bootstrap})
        broker.create_topic(self.name, 2)

    def put(self, *ids: int) -> None:
        for i in ids:
            self._producer.produce(self.name, key=str(i), value=str(i), partition=i % 2)
        assert self._producer.flush(30) == 0
        self.ids += map(str, ids)

    def pipeline(self) -> ExactlyOnce:
        return ExactlyOnce("app", self.ledger, [self.sink])

    def run(self, pipeline: ExactlyOnce, checkpoint: str = "checkpoint", **options: str) -> None:
        reader = (
            self.spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", self.broker.bootstrap)
            .option("subscribe", self.name)
            .option("startingOffsets", options.pop("starting", "earliest"))
            .option("maxOffsetsPerTrigger", 7)
        )
        query = (
            reader.options(**options)
            .load()
            .writeStream.foreachBatch(pipeline)
            .option("checkpointLocation", str(self.folder / checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        try:
            assert query.awaitTermination(90)
        finally:
            query.stop()
            pipeline.stop()

    def visible(self) -> list[str]:
        return sorted((row["id"] for row in self.sink.visible), key=int)

    def make_again(self) -> None:
        admin = AdminClient({"bootstrap.servers": self.broker.bootstrap})
        for future in admin.delete_topics([self.name]).values():
            future.result(30)
        while self.name in admin.list_topics(timeout=30).topics:
            pass
        self.broker.create_topic(self.name, 2)


@pytest.fixture
def topic(kafka_server: KafkaServer, spark: SparkSession, tmp_path: Path) -> Iterator[Topic]:
    return Topic(kafka_server, spark, tmp_path)


def test_positions_are_the_next_offsets_and_survive_the_checkpoint(topic: Topic) -> None:
    topic.put(*range(20))
    topic.run(topic.pipeline())
    pipeline = topic.pipeline()
    ends = topic.ledger.positions(pipeline.scope).ends
    assert {place: at.end for place, at in ends.items()} == {
        ("0", f"{topic.name}/0"): 10,
        ("0", f"{topic.name}/1"): 10,
    }
    assert all(at.topic_id for at in ends.values())

    with pytest.raises(StreamingQueryException):
        topic.run(pipeline, "new")
    assert f"{topic.name}/0: overlap, 0 to" in str(pipeline.failure)

    topic.put(*range(20, 30))
    start = {topic.name: {p.rpartition("/")[2]: at.end for (_, p), at in ends.items()}}
    topic.run(topic.pipeline(), "newer", starting=json.dumps(start))
    assert topic.visible() == topic.ids


def test_a_gap_after_a_lost_checkpoint_is_refused_with_its_ranges(topic: Topic) -> None:
    topic.put(*range(10))
    topic.run(topic.pipeline())
    topic.put(*range(10, 20))

    pipeline = topic.pipeline()
    with pytest.raises(StreamingQueryException):
        topic.run(pipeline, "new", starting=json.dumps({topic.name: {"0": 7, "1": 5}}))

    assert f"{topic.name}/0: gap, 5 to 7 was never committed" in str(pipeline.failure)
    assert topic.visible() == topic.ids[:10]


def test_a_topic_made_again_under_its_name_is_refused(topic: Topic) -> None:
    topic.put(*range(4))
    topic.run(topic.pipeline())
    topic.make_again()
    topic.put(*range(100, 120))

    pipeline = topic.pipeline()
    with pytest.raises(StreamingQueryException):
        topic.run(pipeline)

    assert "deleted and created again" in str(pipeline.failure)
    assert topic.visible() == ["0", "1", "2", "3"]


def test_a_source_that_hides_lost_records_is_refused(topic: Topic) -> None:
    topic.put(1)
    pipeline = topic.pipeline()

    with pytest.raises(StreamingQueryException):
        topic.run(pipeline, failOnDataLoss="false")

    assert "failOnDataLoss=false" in str(pipeline.failure)
    assert topic.visible() == []
