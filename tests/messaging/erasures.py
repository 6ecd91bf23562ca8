"""What is to be erased, and what is left of it."""

from __future__ import annotations

from contextlib import asynccontextmanager

from semel.message import Coordinates, Message
from semel.messaging.handler import consumer
from semel.messaging.records import DeadLetterFilter
from semel.messaging.settings import ConsumerSettings, RetryPolicy
from semel.operate.retention import erase
from semel.outboxes import Outbox
from semel.policy.vocabulary import RetryMode
from tests.messaging.act_world import ANN, BILLING

SECRET = b'{"name": "Alice"}'
TWICE = RetryPolicy(
    max_attempts=2,
    initial_delay_seconds=0.0,
    max_delay_seconds=0.0,
    jitter=False,
    mode=RetryMode.RETRY_TABLE,
)
ONCE = ConsumerSettings(retry=RetryPolicy(max_attempts=1))


def message(message_id="m1", key="alice", raw=SECRET):
    at = Coordinates("payments", 0, 7)
    return Message(message_id, None, raw, key, headers={"message-id": b"m1"}, source=at)


class Late:
    """A database in which something is erased between a failure and what is written of it."""

    def __init__(self, world, **by):
        self._world = world
        self._by = by
        self.has_failed = False
        self.classification = world.database.classification

    def fail(self):
        self.has_failed = True

    @asynccontextmanager
    async def begin(self):
        if self.has_failed:
            self.has_failed = False
            await erased(self._world, **self._by)
        async with self._world.database.begin() as unit:
            yield unit


def failing(policy, error=TimeoutError, fail=lambda: None):
    @consumer(BILLING, policy=policy)
    async def handle(message, session):
        fail()
        raise error("no")

    return handle


async def payloads(world):
    """Return everything that is left of a payload, wherever it may be."""
    async with world.database.begin() as unit:
        letters = await unit.dead_letters.find(DeadLetterFilter(), 100)
        kept = [(letter.payload, dict(letter.headers)) for letter in letters]
        for letter in letters:
            kept += [(r.payload, {}) for r in await unit.revisions.of(BILLING, letter.message_id)]
    return [one for one in kept if one != (None, {})]


async def erased(world, **by):
    await erase(world.database, **by, **ANN)


def invoicing():
    outbox = Outbox()

    @consumer(BILLING, policy=ConsumerSettings(keeps_results=True))
    async def handle(message, session):
        await outbox.add(session, "invoices", {"name": "Alice"}, key="invoice-1")
        return {"name": "Alice"}

    return handle
