"""A Kafka source on a real broker: positions, a lost checkpoint, a topic made again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, Producer
from confluent_kafka.admin import AdminClient, NewPartitions
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from semel import ExactlyOnce
from semel.errors import Misuse, NeedsOperator
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

    def put_in_transactions(self, *ids: int) -> None:
        """Put each id between two transactions that are given up; markers take offsets, too."""
        producer = Producer(
            {"bootstrap.servers": self.broker.bootstrap, "transactional.id": self.name}
        )
        producer.list_topics(timeout=30)
        producer.init_transactions(30)
        for i in ids:
            for text, end in [
                ("-1", producer.abort_transaction),
                (str(i), producer.commit_transaction),
                ("-1", producer.abort_transaction),
            ]:
                producer.begin_transaction()
                producer.produce(self.name, value=text, partition=i % 2)
                producer.flush(30)
                end(30)
        self.ids += map(str, ids)

    def add_partition(self) -> None:
        admin = AdminClient({"bootstrap.servers": self.broker.bootstrap})
        admin.create_partitions([NewPartitions(self.name, 3)])[self.name].result(30)
        while len(admin.list_topics(self.name, timeout=30).topics[self.name].partitions) < 3:
            pass
        # The old one would not know it for a while.
        self._producer = Producer({"bootstrap.servers": self.broker.bootstrap})

    def offsets_of(self, group: str) -> dict[str, int]:
        """Read a group's offsets, as tools that show lag do."""
        admin = AdminClient({"bootstrap.servers": self.broker.bootstrap})
        asked = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])
        found = asked[group].result(30).topic_partitions
        return {f"{at.topic}/{at.partition}": at.offset for at in found}

    @property
    def options(self) -> dict[str, str]:
        return {"kafka.bootstrap.servers": self.broker.bootstrap, "subscribe": self.name}

    def pipeline(self, **more: str) -> ExactlyOnce:
        return ExactlyOnce("app", self.ledger, [self.sink], **more)

    def run(self, pipeline: ExactlyOnce, checkpoint: str = "checkpoint", **options: str) -> None:
        reader = (
            self.spark.readStream.format("kafka")
            .options(**self.options)
            .option("kafka.isolation.level", "read_committed")
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


def test_a_lost_checkpoint_goes_on_where_the_ledger_ends(topic: Topic) -> None:
    """With transactions in the topic, a new partition, and no word from the user."""
    topic.put(*range(8))
    topic.put_in_transactions(8, 9)
    first = topic.pipeline()
    topic.run(first, starting=first.starting_offsets(topic.options))
    topic.put_in_transactions(10, 11)
    topic.put(*range(12, 16))
    topic.add_partition()
    topic._producer.produce(topic.name, value="16", partition=2)
    assert topic._producer.flush(30) == 0
    topic.ids.append("16")

    pipeline = topic.pipeline()
    topic.run(pipeline, "new", starting=pipeline.starting_offsets(topic.options))

    assert topic.visible() == topic.ids
    starts = json.loads(
        topic.pipeline().starting_offsets(
            {
                "Kafka.Bootstrap.Servers": topic.broker.bootstrap,
                "assign": json.dumps({topic.name: [0, 2]}),
            }
        )
    )
    assert (list(starts), sorted(starts[topic.name])) == ([topic.name], ["0", "2"])
    by_pattern = {**topic.options, "subscribePattern": f"{topic.name}|none"}
    del by_pattern["subscribe"]
    assert set(json.loads(topic.pipeline().starting_offsets(by_pattern))[topic.name]) == set("012")


def test_positions_of_a_topic_that_was_made_again_are_no_start(topic: Topic) -> None:
    topic.put(1)
    topic.run(topic.pipeline())
    topic.make_again()

    with pytest.raises(NeedsOperator, match="deleted and created again"):
        topic.pipeline().starting_offsets(topic.options)
    with pytest.raises(Misuse, match=r"subscribe, subscribePattern or assign"):
        topic.pipeline().starting_offsets({"kafka.bootstrap.servers": topic.broker.bootstrap})
    with pytest.raises(Misuse, match=r"with kafka\.bootstrap\.servers"):
        topic.pipeline().starting_offsets({"subscribe": topic.name})


def test_a_consumer_group_follows_the_committed_cycles(topic: Topic) -> None:
    group = f"lag-of-{topic.name}"
    topic.put(*range(20))

    topic.run(topic.pipeline(consumer_group=group))

    ends = topic.ledger.positions(topic.pipeline().scope).ends
    assert topic.offsets_of(group) == {partition: at.end for (_, partition), at in ends.items()}
    assert sum(topic.offsets_of(group).values()) == 20


def test_a_group_that_cannot_be_written_stops_no_cycle(topic: Topic, caplog) -> None:
    group = f"taken-by-others-{topic.name}"
    topic.put(*range(4))
    member = Consumer({"bootstrap.servers": topic.broker.bootstrap, "group.id": group})
    member.subscribe([topic.name])
    while not member.assignment():
        member.poll(0.1)

    topic.run(topic.pipeline(consumer_group=group))

    member.close()
    assert topic.visible() == topic.ids
    assert "offsets of the consumer group not published" in caplog.text


def test_a_consumer_group_without_a_kafka_source_is_refused(spark, tmp_path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.json").write_text('{"id": 1}')
    pipeline = ExactlyOnce("app", MemoryLedger(), [MemorySink()], consumer_group="lag")
    stream = spark.readStream.schema("id long").json(str(tmp_path / "in"))
    query = (
        stream.writeStream.foreachBatch(pipeline)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )

    with pytest.raises(StreamingQueryException):
        query.awaitTermination(90)

    assert "consumer_group is for queries that read Kafka" in str(pipeline.failure)
