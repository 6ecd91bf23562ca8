"""All consumers of a database on one page, and what waits in their inboxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from semel.errors import Misuse
from semel.messaging.records import DeadLetterFilter, InboxMessage, WaitingFilter, Waits
from semel.operate.outbox import OutboxStatus
from semel.operate.stores import OperatorDatabase, OperatorUnit

MOST_COUNTED: Final = 1000
"""Keys, gaps and stale claims are counted up to this number."""


@dataclass(frozen=True, slots=True)
class ConsumerOverview:
    """What a consumer has, and what needs a person."""

    consumer: str
    processes: int
    """Running now."""

    lag: int | None
    """Records behind, as its processes last wrote it; null where none of them did."""

    standing_since: float | None
    """Since when it stands still in an outage; null where it works."""

    inbox: int
    """Messages in its inbox that are due."""

    retries: int
    """Messages that wait for their next attempt."""

    dead_letters: int
    parked: int
    parked_keys: int
    gaps: int
    stale_claims: int

    @property
    def needs_attention(self) -> bool:
        """Something waits for a person, or records wait and no process runs."""
        waits = self.dead_letters or self.parked or self.gaps or self.stale_claims
        is_left = not self.processes and bool(self.lag or self.inbox or self.retries)
        return bool(waits) or is_left or self.standing_since is not None


@dataclass(frozen=True, slots=True)
class Overview:
    """The answer of `overview`."""

    consumers: Sequence[ConsumerOverview]
    outboxes: Sequence[OutboxStatus]

    @property
    def needs_attention(self) -> bool:
        """A consumer or an outbox needs a person."""
        return any(one.needs_attention for one in self.consumers) or any(
            one.needs_attention for one in self.outboxes
        )


async def overview(database: OperatorDatabase) -> Overview:
    """Count what each consumer and each outbox of a database has; a transaction for each."""
    async with database.begin() as unit:
        names = await unit.members.consumers()
        outboxes = [
            OutboxStatus(name, await unit.outbox.numbers(name), await unit.outbox.leader(name))
            for name in await unit.members.outboxes()
        ]
    found: list[ConsumerOverview] = []
    for name in names:
        async with database.begin() as unit:
            found.append(await _of_one(unit, name))
    return Overview(found, outboxes)


async def _of_one(unit: OperatorUnit, name: str) -> ConsumerOverview:
    members = await unit.members.running(name)
    lags = [member.lag for member in members if member.lag is not None]
    standing = [member.standing_since for member in members if member.standing_since is not None]
    parked = await unit.waiting.count(WaitingFilter(name, waits=Waits.PARKED))
    return ConsumerOverview(
        name,
        len(members),
        sum(lags) if lags else None,
        min(standing, default=None),
        await unit.inbox.pending(name),
        await unit.waiting.count(WaitingFilter(name, waits=Waits.RETRY)),
        await unit.dead_letters.count(DeadLetterFilter(consumer=name)),
        parked,
        len(await unit.waiting.held_keys(name, MOST_COUNTED)) if parked else 0,
        len(await unit.versions.gaps(name, MOST_COUNTED)),
        len(await unit.claims.in_progress(name, MOST_COUNTED, expired=True)),
    )


async def need_consumer(database: OperatorDatabase, name: str) -> None:
    """Check that a consumer has a row in any table; a database without any row knows all.

    Raises:
        Misuse: there are other consumers, and not this one.
    """
    async with database.begin() as unit:
        known = await unit.members.consumers()
    if known and name not in known:
        more = f" and {len(known) - 10} more" if len(known) > 10 else ""
        raise Misuse(
            f"there is no consumer {name!r} in this database; it has {', '.join(known[:10])}{more}"
        )


@dataclass(frozen=True, slots=True)
class InboxList:
    """The answer of `inbox_messages`."""

    consumer: str
    due: int
    """How many a worker will try; the list also holds those that failed."""

    messages: Sequence[InboxMessage]

    @property
    def needs_attention(self) -> bool:
        """A message failed, and its worker has given it up or put it aside."""
        return any(message.due_at is None for message in self.messages)


async def inbox_messages(database: OperatorDatabase, consumer: str, limit: int) -> InboxList:
    """List the messages of an inbox that are not handled, the oldest first."""
    async with database.begin() as unit:
        found = await unit.inbox.outlines(consumer, limit)
        return InboxList(consumer, await unit.inbox.pending(consumer), found)
