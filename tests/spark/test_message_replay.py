"""A replay of a topic's offsets for a consumer that Spark runs, on a real broker."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from semel import MessagePipeline, Policy, SqlDatabase
from semel.kafka.broker import KafkaBroker
from semel.message import Message, Partition
from semel.operate.replay import Replay, ReplayReport, ReplaySettings
from semel.operate.selection import Offsets
from semel.sinks import PostgresSink
from semel.testing.services import KafkaServer
from tests.spark.test_messages import QUICK, Topic

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.postgres]


def test_records_that_only_the_topic_has_are_handled_once_by_the_pipeline(
    kafka_server: KafkaServer, spark: SparkSession, postgres_url: str, tmp_path: Path
) -> None:
    def index(message: Message) -> Any:
        yield "documents", {"id": message.id, "version": 1, "title": message.payload["title"]}

    topic = Topic(kafka_server, spark, postgres_url, tmp_path)
    policy = Policy.parse(QUICK.replace("versioned: true", "").replace("gaps: park-key", ""))
    schema = "id string, version long, title string"
    search = MessagePipeline(
        "indexer",
        policy=policy,
        database=postgres_url,
        handler=index,
        sinks=[PostgresSink(postgres_url, "documents", write="append", schema=schema)],
        ledger=f"sqlite:///{tmp_path}/search.ledger",
    )
    topic.put("m1", {"title": "one"})
    topic.run(search)
    for name in ("m2", "m3"):
        topic.put(name, {"title": name})

    async def replay() -> ReplayReport:
        database, broker = SqlDatabase(postgres_url), KafkaBroker(kafka_server.bootstrap)
        [partition] = {
            Partition(topic.name, number)
            for number in (0, 1)
            if (await broker.reader().bounds(Partition(topic.name, number)))[1]
        }
        try:
            return await Replay(
                search.as_consumer(),
                database,
                Offsets(partition, 0, 3),
                ReplaySettings(canary=()),
                actor="ann",
                reader=broker.reader(),
            ).run()
        finally:
            await database.close()

    report = asyncio.run(replay())
    topic.run(search)  # which finds both records in the topic, too

    assert {kind.value: number for kind, number in report.counts.items() if number} == {
        "duplicate": 1,
        "sent": 2,
    }
    assert topic.documents() == [("m1", 1, "one"), ("m2", 1, "m2"), ("m3", 1, "m3")]
    assert topic.ask("select state, count(*) from processed_message group by 1") == [
        ("COMPLETED", 3)
    ]
    assert topic.ask("select count(*) from waiting_message") == [(0,)]
