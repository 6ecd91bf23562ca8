"""FastStream's consumer keeps the contract of a broker, on a real broker."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import pytest

pytest.importorskip("faststream")

from faststream.kafka import KafkaBroker
from faststream.kafka.subscriber.usecase import DefaultSubscriber

from semel.faststream.aiokafka import ConsumerSubscription, make_subscriber
from semel.kafka.client import GroupProtocol
from semel.messaging import RunnerSettings
from semel.testing.contracts.broker_world import BrokerAbility
from tests.kafka.test_broker_contract import OnKafka


class Idle(DefaultSubscriber):
    """Fetches nothing: the test does."""

    async def _run_consume_loop(self, consumer):
        pass


class Member(ConsumerSubscription):
    """A member that comes and goes with its broker, as a process does."""

    async def close(self):
        await self.started
        await super().close()
        await self.broker.stop()


class TestFastStreamConsumer(OnKafka):
    """Publishers and readers are our own: FastStream's consumer is what is tested."""

    protocol = GroupProtocol.CLASSIC
    # aiokafka reads our publisher's lz4 only with a package that it does not bring along.
    config: ClassVar = {"compression.type": "none"}
    cannot: ClassVar = {
        BrokerAbility.KILL: "aiokafka sends heartbeats on the loop that the test runs on",
    }

    async def subscribe(self, group, topics):
        broker = KafkaBroker(self.server.cut_bootstrap, logger=None)
        subscriber = make_subscriber(
            broker,
            tuple(topics),
            group,
            RunnerSettings(),
            session_timeout_ms=6_000,
            heartbeat_interval_ms=300,
        )
        subscriber.__class__ = Idle
        subscriber(handle)
        member = subscriber._listener = Member(group, "earliest", lambda: subscriber.consumer)
        member.broker = broker
        # It returns when partitions are assigned, which waits for the others' listeners; and until
        # then any assignment may still change, because aiokafka's rebalances are eager.
        member.started = asyncio.create_task(broker.start())
        await asyncio.wait({member.started}, timeout=2.0)
        return member


async def handle(message):
    raise AssertionError("the runner's handler is not FastStream's")
