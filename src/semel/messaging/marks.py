"""Marking what becomes of an offset whose message outlives its delivery in our own tables.

    comes into the waiting room, or among the dead letters     KEPT
    is handled, skipped, deleted there                         HANDLED, SKIPPED, DELETED
    leaves because another delivery of it ended                DUPLICATE, REFUSED

Always in the transaction that does so: the audit takes an offset that was kept, did
not end and is nowhere for lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from semel.message import Coordinates, Partition
from semel.messaging.completeness import Mark, ranges_of
from semel.messaging.database import Unit
from semel.messaging.deadletters import DeadLetter
from semel.messaging.outcome import (
    Conflicted,
    DeadLettered,
    Handled,
    Outcome,
    ParkedAway,
    Refused,
    RetryLater,
    RetryStored,
    Skipped,
    Told,
    told,
)
from semel.messaging.waiting import WaitingMessage

Kept: TypeAlias = WaitingMessage | DeadLetter


async def mark(unit: Unit, consumer: str, what: Mark, *places: Coordinates | None) -> None:
    """Note what became of offsets; messages that came from no broker have none."""
    by_partition: dict[Partition, set[int]] = {}
    for at in places:
        if at is not None:
            by_partition.setdefault(at.place, set()).add(at.offset)
    ranges = [
        one
        for place, offsets in sorted(by_partition.items())
        for one in ranges_of(place, [(offset, what.value) for offset in sorted(offsets)])
    ]
    if ranges:
        await unit.outcomes.record(consumer, ranges)


async def mark_kept(
    unit: Unit, consumer: str, came_from: Coordinates | None, kept: Kept | None
) -> None:
    """Note that a message that came from an offset is kept: for it, or for an earlier delivery.

    *kept* is what the tables have of it; the first delivery's coordinates stay there.
    """
    is_its_own = kept is not None and kept.source == came_from
    await mark(unit, consumer, Mark.KEPT if is_its_own else Mark.REFUSED, came_from)


@dataclass(frozen=True, slots=True)
class Ended:
    """A message that leaves the waiting room or the dead letters, and why."""

    message_id: str
    came_from: Coordinates | None
    outcome: Outcome


async def mark_ends(unit: Unit, consumer: str, ended: Sequence[Ended]) -> None:
    """Note how messages ended; nothing of those that stay in our tables."""
    for end in (Mark.HANDLED, Mark.DUPLICATE):
        await mark(unit, consumer, end, *(e.came_from for e in ended if end_of(e.outcome) is end))
    for one in ended:
        if end_of(one.outcome) is Mark.REFUSED and one.came_from is not None:
            letter = await unit.dead_letters.get(consumer, one.message_id)
            await mark_kept(unit, consumer, one.came_from, letter)


def end_of(outcome: Outcome) -> Mark | None:
    """Say how a message out of our tables ended; None where it is still, or again, in there."""
    match outcome:
        case Handled():
            return Mark.HANDLED
        case Skipped():
            return Mark.DUPLICATE
        case Refused():
            return Mark.REFUSED
        case RetryLater() | RetryStored() | DeadLettered() | ParkedAway() | Conflicted():
            return None
        case _ as never:
            assert_never(never)


def noted(outcome: Outcome) -> str:
    """Return what the range of a delivery says.

    A message that waits already is kept for an earlier delivery, whose offset is marked; it
    may be the same one, before a crash.
    """
    if isinstance(outcome, RetryStored) and outcome.failure is None:
        return Told.TERMINAL_FAILURE.value
    return told(outcome).value
