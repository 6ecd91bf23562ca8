"""Kafka keeps the contract of a broker, on a real broker, under both group protocols."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest

from semel.kafka.broker import KafkaBroker
from semel.kafka.client import GroupProtocol, kafka
from semel.message import Partition
from semel.testing.contracts.broker import BrokerContract

pytestmark = pytest.mark.kafka


class OnKafka(BrokerContract):
    """Each member is a client of its own name, behind the proxy that can cut it off."""

    patience_seconds = 30.0
    quiet_seconds = 0.5
    protocol: GroupProtocol
    config: ClassVar = {}
    """Settings of every client."""

    idle: ClassVar = {"max.poll.interval.ms": 2_500}
    """A member whose thread stands still is taken for dead after this time."""

    @pytest.fixture(autouse=True)
    def _server(self, kafka_server):
        self.server = kafka_server

    async def open(self):
        self.names = {}
        self.broker = self.connect(self.server.bootstrap)

    def connect(self, bootstrap, **config):
        return KafkaBroker(bootstrap, protocol=self.protocol, config={**self.config, **config})

    async def shut(self):
        self.server.proxy.cut_off()

    async def create_topic(self, topic, partitions):
        await asyncio.to_thread(self.server.create_topic, topic, partitions)

    async def subscribe(self, group, topics):
        name = f"member-{uuid.uuid4().hex[:8]}"
        broker = self.connect(self.server.cut_bootstrap, **{"client.id": name, **self.idle})
        member = await broker.subscribe(group, topics)
        self.names[member] = name
        return member

    def make_publisher(self):
        settings = {"message.timeout.ms": 3_000}
        return self.connect(self.server.cut_bootstrap, **settings).publisher()

    def make_reader(self):
        return self.broker.reader()

    async def kill(self, member):
        member._poll = lambda seconds: time.sleep(0.01)
        while await asyncio.to_thread(self._is_member, member):
            await asyncio.sleep(0.1)

    def _is_member(self, member):
        admin = self.broker._admin()
        (answer,) = admin.describe_consumer_groups([member.group]).values()
        return self.names[member] in {one.client_id for one in answer.result(30).members}

    async def leave_hole(self, partition):
        def abort():
            producer = kafka.Producer(
                {"bootstrap.servers": self.server.bootstrap, "transactional.id": uuid.uuid4().hex}
            )
            producer.list_topics(timeout=10)
            producer.init_transactions(30)
            producer.begin_transaction()
            producer.produce(partition.topic, b"never", partition=partition.number)
            producer.flush(10)
            producer.abort_transaction(30)

        await asyncio.to_thread(abort)

    async def trim(self, partition, up_to):
        place = kafka.TopicPartition(partition.topic, partition.number, up_to)
        admin = self.broker._admin()
        asked = admin.delete_records([place])
        for answer in asked.values():
            await asyncio.to_thread(answer.result, 30)

    @asynccontextmanager
    async def outage(self):
        self.server.proxy.refuse()
        self.server.proxy.cut()
        yield
        self.server.proxy.accept()


class TestKafkaConsumerProtocol(OnKafka):
    protocol = GroupProtocol.CONSUMER


class TestKafkaClassicProtocol(OnKafka):
    protocol = GroupProtocol.CLASSIC
    config: ClassVar = {"session.timeout.ms": 2_500, "heartbeat.interval.ms": 300}


@pytest.mark.parametrize("protocol", GroupProtocol)
def test_the_first_fetch_waits_until_the_group_has_assigned_partitions(kafka_server, protocol):
    topic = f"first-fetch-{protocol}"
    kafka_server.create_topic(topic)

    async def first_fetch():
        broker = KafkaBroker(kafka_server.bootstrap, protocol=protocol)
        member = await broker.subscribe(topic, [topic])
        await member.fetch(10, wait_seconds=0.0)
        assigned = member.assignment
        await member.close()
        return assigned

    assert asyncio.run(first_fetch()) == {Partition(topic, 0)}
