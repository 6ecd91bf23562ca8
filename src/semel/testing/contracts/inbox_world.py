"""Messages of an inbox, and what is done with them, for its contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from semel.messaging.database import Database
from semel.messaging.inbox import InboxMessage


def message(message_id: str, key: str | None = None, **more: Any) -> InboxMessage:
    """Make a message for the consumer ``stock``."""
    payload = message_id.encode("utf-8", "surrogatepass")
    fields: dict[str, Any] = {"consumer": "stock", "message_type": "reserve", **more}
    return InboxMessage(message_id=message_id, payload=payload, key=key, **fields)


async def store(database: Database, *messages: InboxMessage) -> list[bool]:
    """Store each message in a transaction of its own."""
    stored = []
    for one in messages:
        async with database.begin() as unit:
            stored.append(await unit.inbox.store(one))
    return stored


async def due(database: Database, limit: int = 100, consumer: str = "stock") -> list[str]:
    """Return the ids of what can be taken, and take nothing."""
    async with database.begin() as unit:
        found: Sequence[InboxMessage] = await unit.inbox.take_due(consumer, limit)
    return [one.message_id for one in found]


async def done(database: Database, message_id: str, result: str | None = None) -> None:
    """Mark a message as processed."""
    async with database.begin() as unit:
        await unit.inbox.done("stock", message_id, result)


async def failed(database: Database, message_id: str, delay_seconds: float | None) -> int:
    """Write a failed attempt."""
    async with database.begin() as unit:
        return await unit.inbox.failed("stock", message_id, "out of stock", delay_seconds)


async def get(database: Database, message_id: str) -> InboxMessage:
    """Return a message that is there."""
    async with database.begin() as unit:
        found = await unit.inbox.get("stock", message_id)
    assert found is not None, f"message {message_id} is not in the inbox"
    return found
