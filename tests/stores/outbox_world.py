"""What the outbox contract's parts share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from semel.messaging.database import Database
from semel.messaging.send.outbox import Leadership, OutboxEntry

OUTBOX: Final = "outbox"
LEASE_SECONDS: Final = 60.0


def entry(message_id: str, key: str | None = "k", **more: Any) -> OutboxEntry:
    """Make an entry."""
    fields: dict[str, Any] = {"topic": "payments", "value": message_id.encode(), **more}
    return OutboxEntry(message_id, key=key, **fields)


async def add(database: Database, *entries: OutboxEntry) -> None:
    """Write entries in a transaction of their own."""
    async with database.begin() as unit:
        await unit.outbox.add(entries)


async def read(
    database: Database, after_place: int = 0, limit: int = 100, outbox: str = OUTBOX
) -> Sequence[OutboxEntry]:
    """Read in a transaction of its own."""
    async with database.begin() as unit:
        return await unit.outbox.read(outbox, after_place, limit)


async def ids(database: Database, outbox: str = OUTBOX) -> list[str]:
    """Return the ids of everything that can be read, in order."""
    return [entry.message_id for entry in await read(database, outbox=outbox)]


async def lead(
    database: Database, owner: str, outbox: str = OUTBOX, *, instead_of: str = ""
) -> Leadership | None:
    """Try to lead, in a transaction of its own."""
    async with database.begin() as unit:
        return await unit.outbox.lead(outbox, owner, LEASE_SECONDS, instead_of=instead_of)


async def leads(database: Database, owner: str = "one", outbox: str = OUTBOX) -> Leadership:
    """Lead, or fail the test."""
    found = await lead(database, owner, outbox)
    assert found is not None, "nobody else leads, and yet the leadership was refused"
    return found


async def delete(database: Database, leadership: Leadership, *places: int) -> int:
    """Delete in a transaction of its own."""
    async with database.begin() as unit:
        return await unit.outbox.delete(leadership, places)


async def park(database: Database, leadership: Leadership, place: int, reason: str = "no") -> None:
    """Park in a transaction of its own."""
    async with database.begin() as unit:
        await unit.outbox.park(leadership, place, reason)


async def parked(database: Database, outbox: str = OUTBOX) -> list[str]:
    """Return the ids of what was set aside, in order."""
    async with database.begin() as unit:
        return [entry.message_id for entry in await unit.outbox.parked(outbox, 100)]
