"""The hooks of the broker contract, for brokers that live in the test's own process."""

from __future__ import annotations

from contextlib import asynccontextmanager

from semel.memory.broker import BrokerFailure, Call
from semel.testing.contracts.broker import BrokerContract


class InThisProcess(BrokerContract):
    """`open` makes `self.broker`, on `self.clock`."""

    quiet_seconds = 0.1

    async def shut(self):
        await self.broker.close()

    async def create_topic(self, topic, partitions):
        self.broker.create_topic(topic, partitions)

    async def subscribe(self, group, topics):
        return await self.broker.subscribe(group, topics)

    def make_publisher(self):
        return self.broker.publisher()

    def make_reader(self):
        return self.broker.reader()

    async def kill(self, member):
        self.broker.kill(member)
        self.clock.advance(self.broker.patience.session_seconds)

    async def leave_hole(self, partition):
        self.broker.skip(partition, 2)

    async def trim(self, partition, up_to):
        self.broker.trim(partition, up_to)

    @asynccontextmanager
    async def outage(self):
        self.broker.fail(*(BrokerFailure(call, times=None) for call in Call))
        yield
        self.broker.heal()
