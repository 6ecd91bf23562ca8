"""The outbox: how full it is, who relays it, and what the broker refused."""

from __future__ import annotations

import json
from dataclasses import dataclass

from semel.lease import Owner
from semel.messaging.send.outbox import Leader, OutboxEntry
from semel.operate.stores import OperatorDatabase


@dataclass(frozen=True, slots=True)
class LeaderReport:
    """Who relays, by the last lease."""

    owner: str
    """Empty where the last relay was stopped."""

    epoch: int
    seconds_left: float
    """Of the lease; 0 where it ran out, and nobody relays."""


@dataclass(frozen=True, slots=True)
class OutboxStatus:
    """The answer to `semel outbox status`."""

    database: str
    outbox: str
    pending: int
    """Messages that can be sent, or wait behind a parked one."""

    parked: int
    """Messages that the broker will never take as they are."""

    oldest_seconds: float
    """How long the oldest pending message has waited."""

    leader: LeaderReport | None
    """Null where no relay ever ran."""

    @property
    def needs_attention(self) -> bool:
        """Tell whether something is parked, or waits and nobody relays."""
        is_led = self.leader is not None and self.leader.seconds_left > 0
        return self.parked > 0 or (self.pending > 0 and not is_led)


@dataclass(frozen=True, slots=True)
class ParkedLine:
    """A parked message in a list."""

    message_id: str
    topic: str
    key: str | None
    """Later messages of this key and topic wait."""

    reason: str
    attempts: int
    created_at: float
    erased: bool


@dataclass(frozen=True, slots=True)
class ParkedList:
    """The answer to `semel outbox parked`."""

    database: str
    outbox: str
    total: int
    """How many there are; the list may show fewer."""

    messages: list[ParkedLine]

    @property
    def needs_attention(self) -> bool:
        """A list needs none."""
        return False


async def outbox_status(database: OperatorDatabase, name: str, outbox: str) -> OutboxStatus:
    """Ask how an outbox stands."""
    async with database.begin() as unit:
        numbers = await unit.outbox.numbers(outbox)
        leader = await unit.outbox.leader(outbox)
    return OutboxStatus(
        name, outbox, numbers.pending, numbers.parked, numbers.oldest_seconds, _leader(leader)
    )


async def parked_list(database: OperatorDatabase, name: str, outbox: str, limit: int) -> ParkedList:
    """Ask what was set aside."""
    async with database.begin() as unit:
        entries = await unit.outbox.parked(outbox, limit)
        numbers = await unit.outbox.numbers(outbox)
    return ParkedList(name, outbox, numbers.parked, [_line(entry) for entry in entries])


def _leader(leader: Leader | None) -> LeaderReport | None:
    if leader is None:
        return None
    try:
        owner = str(Owner.from_json(json.loads(leader.owner)))
    except (ValueError, TypeError):
        owner = leader.owner
    return LeaderReport(owner, leader.epoch, leader.seconds_left)


def _line(entry: OutboxEntry) -> ParkedLine:
    return ParkedLine(
        entry.message_id,
        entry.topic,
        entry.key,
        entry.parked_reason,
        entry.attempts,
        entry.created_at,
        entry.erased_at is not None,
    )
