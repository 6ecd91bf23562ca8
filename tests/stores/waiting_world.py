"""How the contract of the waiting room puts messages in and looks at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from semel.messaging.records import WaitingFilter, WaitingMessage, Waits
from tests.stores.world import DatabaseWorld

CONSUMER = "billing"
LONG_SECONDS = 3600.0


def waiting(message_id: str, waits: Waits = Waits.RETRY, **fields: Any) -> WaitingMessage:
    """Make a waiting message; one with a key holds it unless *fields* say otherwise."""
    given: dict[str, Any] = {"consumer": CONSUMER, "key": None, "payload": message_id.encode()}
    given["held"] = fields.get("key") is not None
    return WaitingMessage(message_id=message_id, waits=waits, **{**given, **fields})


def behind(message_id: str, key: str, **fields: Any) -> WaitingMessage:
    """Make a message that queues up behind another one of its key."""
    return waiting(message_id, Waits.BEHIND, key=key, **fields)


def parked(message_id: str, key: str | None = None, **fields: Any) -> WaitingMessage:
    """Make a message that waits for a person."""
    return waiting(message_id, Waits.PARKED, key=key, **fields)


async def put(world: DatabaseWorld, *messages: WaitingMessage, delay_seconds: float = 0.0) -> None:
    """Let messages in, one transaction each."""
    for message in messages:
        async with world.database.begin() as unit:
            await unit.waiting.put(message, delay_seconds)


async def get(world: DatabaseWorld, message_id: str) -> WaitingMessage:
    """Read a message that must be there."""
    async with world.database.begin() as unit:
        found = await unit.waiting.get(CONSUMER, message_id)
    assert found is not None, f"{message_id} is gone"
    return found


async def find(
    world: DatabaseWorld, which: WaitingFilter, limit: int = 100
) -> Sequence[WaitingMessage]:
    """Read committed messages."""
    async with world.database.begin() as unit:
        return await unit.waiting.find(which, limit)


async def due(world: DatabaseWorld, limit: int = 100, consumer: str = CONSUMER) -> list[str]:
    """Return the ids of the messages whose turn it is, and let them go again."""
    async with world.database.begin() as unit:
        return [found.message_id for found in await unit.waiting.take_due(consumer, limit)]


async def remove(world: DatabaseWorld, message_id: str) -> bool:
    """Take a message out."""
    async with world.database.begin() as unit:
        return await unit.waiting.remove_many(CONSUMER, [message_id]) > 0


async def held(world: DatabaseWorld, *keys: str) -> frozenset[str]:
    """Ask which keys are held, and let them go again."""
    async with world.database.begin() as unit:
        return await unit.waiting.hold(CONSUMER, keys)
