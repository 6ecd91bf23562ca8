"""What the page about FastStream says of its acknowledgement policies, on a real broker."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Annotated, Any

import pytest

pytest.importorskip("faststream")

from faststream import AckPolicy, Context, confluent
from faststream import kafka as theirs

from semel.kafka.client import kafka

pytestmark = [pytest.mark.kafka, pytest.mark.filterwarnings("ignore:AckPolicy.REJECT_ON_ERROR")]

PAGE = Path(__file__).parents[2] / "docs/howto/kafka/faststream.md"
ROW = re.compile(r"^\| .*?`(\w+)`.*? \| ([\d ]+) \| (\d) \|", re.MULTILINE)
MESSAGES = range(6)


def send(server, topic):
    server.create_topic(topic)
    producer = kafka.Producer({"bootstrap.servers": server.bootstrap})
    for number in MESSAGES:
        producer.produce(topic, str(number))
    assert producer.flush(30) == 0


def committed(server, topic):
    client = kafka.Consumer({"bootstrap.servers": server.bootstrap, "group.id": topic})
    (found,) = client.committed([kafka.TopicPartition(topic, 0)], timeout=10)
    client.close()
    return found.offset


@pytest.mark.parametrize("client", [theirs, confluent], ids=["aiokafka", "confluent"])
def test_each_policy_does_what_the_page_says(kafka_server, client):
    said = {name: (seen, int(at)) for name, seen, at in ROW.findall(PAGE.read_text())}
    found = {}

    async def try_out(broker, policy):
        topic = f"acks-{client.__name__.rpartition('.')[2]}-{policy.name.lower()}"
        await asyncio.to_thread(send, kafka_server, topic)
        seen = []
        if policy is AckPolicy.ACK_FIRST:
            options = {"auto_commit_interval_ms": 100}  # the default policy, sooner
        else:
            options = {"ack_policy": policy}

        async def handle(number: int, message: Annotated[Any, Context()]) -> None:
            seen.append(number)
            if number == 2 and seen.count(2) <= 3:
                raise ValueError("not yet")
            if policy is AckPolicy.MANUAL:
                await message.ack()

        subscriber = broker.subscriber(
            topic, group_id=topic, auto_offset_reset="earliest", **options
        )
        subscriber(handle)
        await subscriber.start()
        while await asyncio.to_thread(committed, kafka_server, topic) < len(MESSAGES):
            await asyncio.sleep(0.1)
        found[policy.name] = (" ".join(map(str, seen)), len(MESSAGES))

    async def story():
        async with client.KafkaBroker(kafka_server.bootstrap, logger=None) as broker:
            async with asyncio.timeout(60):
                await asyncio.gather(*(try_out(broker, policy) for policy in AckPolicy))

    asyncio.run(story())

    assert found == said
