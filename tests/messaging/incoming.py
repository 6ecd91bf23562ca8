"""Messages for an inbox, and handlers that do as a test tells them."""

from __future__ import annotations

from semel.message import Coordinates, Message
from semel.messaging.failed.retries import retry_due
from semel.messaging.handler import consumer
from semel.messaging.receive.inbox import InboxWorker
from semel.messaging.settings import ConsumerSettings, RetryPolicy

AT_ONCE = RetryPolicy(
    max_attempts=3, initial_delay_seconds=0.0, max_delay_seconds=0.0, jitter=False
)
SETTINGS = ConsumerSettings(retry=AT_ONCE, dead_letter_owner="warehouse")


def message(message_id, payload=1, key=None):
    return Message(
        message_id,
        payload,
        str(payload).encode(),
        key,
        type="reserve",
        headers={"trace": b"t"},
        source=Coordinates("orders", 0, 7),
        correlation_id="c",
    )


class Handling:
    """A handler that writes down what it saw, in the database's own tables where it can."""

    def __init__(self, settings=SETTINGS):
        self.seen = []
        self.failures = {}
        self.consumer = consumer("stock", policy=settings)(self._handle)

    async def _handle(self, message, session):
        self.seen.append(message.id)
        if failures := self.failures.get(message.id):
            raise failures.pop(0) if len(failures) > 1 else failures[0]
        return {"payload": message.payload, "attempt": message.attempt}


async def work_once(consumer, database):
    """Handle once what is due in an inbox or waits for a retry, as one worker."""
    worker = InboxWorker(consumer, database, poll_seconds=0.001)
    runner = worker._new_runner()
    await runner.run_until_idle()
    await retry_due(worker.consumer, database)
    await runner.run_until_idle()
    await runner._membership.leave()


async def get(world, message_id):
    async with world.database.begin() as unit:
        return await unit.inbox.get("stock", message_id)


async def letter(world, message_id):
    async with world.database.begin() as unit:
        return await unit.dead_letters.get("stock", message_id)
