"""A consumer with its runner, whose offsets are audited."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from semel.codec import FromHeader
from semel.memory.broker import MemoryBroker
from semel.message import Message, Partition
from semel.messaging.failed.retries import retry_due
from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
from semel.messaging.handler import consumer
from semel.messaging.receive.runner import Runner
from semel.messaging.settings import ConsumerSettings, RetryPolicy, RunnerSettings
from semel.operate.completeness import PartitionAudit, audit_completeness
from semel.operate.replay import Replay, ReplaySettings
from semel.operate.selection import Ids, Offsets
from semel.policy.vocabulary import GiveUp, Mode, RetryMode
from tests.stores.world import DatabaseWorld

BILLING = "billing"
PLACE = Partition("payments", 0)
ANN = {"actor": "ann", "reason": "it was wrong"}
QUICK = RunnerSettings(wait_seconds=0.01, stop_seconds=1.0)
TABLE = RetryPolicy(
    max_attempts=2,
    initial_delay_seconds=0,
    max_delay_seconds=0,
    jitter=False,
    mode=RetryMode.RETRY_TABLE,
)
CALM = {"held_retry_seconds": 0.01, "circuit_failures": 0}
"""Nothing stands still, however many of a few messages fail."""

PARKS = {"on_hopeless": GiveUp.PARK, "on_exhausted": GiveUp.PARK}


class Service:
    """A consumer with its runner, whose failures are given by message id."""

    def __init__(self, world: DatabaseWorld, mode: Mode = Mode.TRANSACTIONAL, **settings: Any):
        self.database = world.database
        self.broker = MemoryBroker({"payments": 1})
        self.failures: dict[str, Exception] = {}
        chosen = ConsumerSettings(**{**CALM, "retry": TABLE, **settings})

        @consumer(BILLING, policy=chosen, id_from=FromHeader("message-id"), mode=mode)
        async def handle(message: Message, session: Any) -> None:
            if message.id in self.failures:
                raise self.failures[message.id]

        self.consumer = handle

    def send(self, *ids: str, value: bytes = b"{}", key: bytes | None = None) -> None:
        for message_id in ids:
            headers = {"message-id": message_id.encode()} if message_id else {}
            self.broker.put("payments", value, key=key, headers=headers, partition=0)

    async def work(self) -> None:
        """Deliver what was sent, and leave the retries alone."""
        subscription = await self.broker.subscribe(BILLING, ["payments"])
        await self.broker.settled(BILLING)
        settings = replace(QUICK, mode=self.consumer.mode or Mode.TRANSACTIONAL)
        runner = Runner(self.consumer, subscription, self.database, settings)
        await runner.run_until_idle()
        await runner._membership.leave()
        await subscription.close()

    async def retry(self) -> None:
        while await retry_due(self.consumer, self.database):
            pass

    async def audit(self) -> PartitionAudit:
        (found,) = await audit_completeness(self.database, BILLING)
        return found

    async def stands(self) -> dict[str, int]:
        """Say how all offsets stand; everything is accounted for."""
        found = await self.audit()
        assert found.is_complete, found
        return {standing.value: number for standing, number in found.counts.items() if number}


async def lose(database: Any, *ids: str) -> None:
    """Delete messages past everything, as SQL by hand does."""
    async with database.begin() as unit:
        for message_id in ids:
            await unit.waiting.remove_many(BILLING, [message_id])
            await unit.dead_letters.remove(BILLING, message_id)


def dead() -> Exception:
    return NonRetryableMessageError("no such account")


def down() -> Exception:
    return RetryableMessageError("no answer")


async def replayed(service: Service, selection: Ids | Offsets) -> None:
    settings = ReplaySettings(canary=())
    reader = service.broker.reader()
    replay = Replay(
        service.consumer, service.database, selection, settings, actor="ann", reader=reader
    )
    await replay.run()


async def with_one(world: DatabaseWorld, failure: Exception, **settings: Any) -> Service:
    """Deliver three messages, of which the second fails once."""
    service = Service(world, **settings)
    service.failures = {"m1": failure}
    service.send("m0", "m1", "m2")
    await service.work()
    service.failures = {}
    return service
