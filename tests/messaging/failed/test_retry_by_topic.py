"""The records of the retry topic: those that come twice, late, never, or from someone else."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from semel.message import Partition, raw_of
from semel.messaging.failed import retrytopic
from semel.messaging.failed.retries import retry_due
from semel.messaging.failure import RetryableMessageError
from semel.messaging.handler import consumer
from semel.messaging.receive.runner import Runner
from semel.messaging.settings import Order, RetryPolicy
from semel.operate.completeness import audit_completeness
from semel.policy.vocabulary import Mode, RetryMode
from tests.messaging.served import QUICK, Service

RETRY = "payments.billing.retry"
DEADLINE_SECONDS = 10


class Retrying(Service):
    """A service with a retry topic, whose relay is called by hand."""

    def __init__(self, **settings):
        policy = RetryPolicy(
            initial_delay_seconds=0.05,
            max_delay_seconds=0.05,
            jitter=False,
            mode=RetryMode.RETRY_TOPIC,
        )
        super().__init__(retry=policy, **settings)
        self.broker.create_topic(RETRY)
        self.tries = []
        self.fails = 1

        def fail(message):
            self.tries.append(message)
            if message.attempt <= self.fails:
                raise RetryableMessageError("not yet")

        self.fail = fail

    async def entries(self):
        async with self.database.begin() as unit:
            return await unit.outbox.read("outbox", 0, 10)

    def relay(self, entry, topic=RETRY):
        key = None if entry.key is None else raw_of(entry.key)
        self.broker.put(topic, entry.value, key=key, headers=entry.headers)

    async def serve(self, only=None, settings=QUICK):
        topics = self.consumer.topics("payments")
        subscription = await self.broker.subscribe("billing", topics)
        await self.broker.settled("billing")
        runner = Runner(only or self.consumer, subscription, self.database, settings)
        async with asyncio.timeout(DEADLINE_SECONDS):
            await runner.run_until_idle()
        await runner._membership.leave()
        await subscription.close()

    async def losses(self):
        audits = await audit_completeness(self.database, "billing")
        assert {audit.partition for audit in audits} <= {
            Partition("payments", 0),
            Partition(RETRY, 0),
        }
        return [(audit.partition, audit.lost, audit.unknown) for audit in audits if audit.lost]


@pytest.mark.parametrize("order", [Order.KEY, Order.NONE])
def test_a_record_that_comes_twice_or_after_a_later_one_has_no_effect(order):
    async def scenario():
        service = Retrying(order=order)
        service.fails = 2
        service.send(1, key="k")
        await service.serve()
        (first,) = await service.entries()
        service.relay(first)
        service.relay(first)
        await service.serve()
        _, second = await service.entries()
        service.relay(second)
        service.relay(first)
        service.relay(second)
        await service.serve()

        assert [message.attempt for message in service.tries] == [1, 2, 3]
        assert service.paid == ["m1"]
        assert {str(m.source) for m in service.tries} == {"payments/0/0"}
        assert not await service.losses()

    asyncio.run(scenario())


def test_a_record_that_does_not_come_back_is_handled_from_the_table(monkeypatch):
    monkeypatch.setattr(retrytopic, "LATE_SECONDS", 0.1)

    async def scenario():
        service = Retrying()
        service.send(1, 2, key="k")
        await service.serve()
        assert (await retry_due(service.consumer, service.database)) == []

        async with asyncio.timeout(DEADLINE_SECONDS):
            while service.paid != ["m1", "m2"]:
                await retry_due(service.consumer, service.database)
                await asyncio.sleep(0.01)
        service.relay((await service.entries())[0])
        await service.serve()

        assert service.paid == ["m1", "m2"]
        assert not await service.losses()

    asyncio.run(scenario())


def test_a_copy_in_another_topic_and_broken_headers_are_ordinary_records():
    async def scenario():
        service = Retrying()
        service.send(1)
        await service.serve()
        (entry,) = await service.entries()
        service.relay(entry, "payments")
        broken = {**entry.headers, "semel-retry-due": b"soon", "message-id": b"m7"}
        service.relay(entry._replace(headers=broken))
        await service.serve()

        # Neither has a usable id of its own but the second, which is a message of its own.
        assert [message.id for message in service.tries] == ["m1", "m7"]
        assert service.paid == []

    asyncio.run(scenario())


def test_in_mode_leased_a_retry_comes_back_by_the_topic_too():
    async def scenario():
        service = Retrying()

        @consumer(
            "billing",
            policy=service.consumer.settings,
            reading=service.consumer.reading,
            mode=Mode.LEASED,
        )
        async def leased(message, lease):
            service.fail(message)

        service.send(1, 2, key="k")
        settings = replace(QUICK, mode=Mode.LEASED)
        await service.serve(leased, settings)
        service.relay((await service.entries())[0])
        await service.serve(leased, settings)
        async with service.database.begin() as unit:
            assert await unit.waiting.get("billing", "m1") is None

        assert [(m.id, m.attempt) for m in service.tries] == [("m1", 1), ("m1", 2)]
        assert not await service.losses()

    asyncio.run(scenario())
