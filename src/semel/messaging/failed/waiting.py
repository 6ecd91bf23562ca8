"""The waiting table: how messages enter and leave it, and which version goes first.

The transaction that adds or removes a message also marks its offset and clears its crash notes.
So an audit can distinguish kept messages from lost ones, and no note is left behind.

The version decides the order: the one that the others of its key wait for overtakes them.

    v3 came, v2 did not ─▶ v3 waits and holds the key
                           v2 comes ─▶ handled at once; if it fails, it waits on its own
    v3, v2, v1 came     ─▶ v2 waits behind v3, until v1 is applied

In the order of arrival, v2 would wait for v3, and v3 for v2.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from typing import Final

from semel.message import Message
from semel.messaging.database import Unit
from semel.messaging.handler import Consumer, message_of
from semel.messaging.outcome import Refused
from semel.messaging.receive.offsets import Ended, mark_ends, mark_kept
from semel.messaging.records import WaitingFilter, WaitingMessage, Waits
from semel.messaging.redact import ERASED_REASON
from semel.messaging.settings import FIRST_VERSION


async def let_in(
    unit: Unit, message: Message, waiting: WaitingMessage, seconds: float = 0.0, *, is_new: bool
) -> None:
    """Write a message into the waiting table; if it *is_new* there, mark its offset."""
    now = await unit.waiting.put(waiting, seconds)
    if is_new:
        await mark_kept(unit, waiting.consumer, message.source, now)


async def leave_waiting(unit: Unit, consumer: str, *ended: Ended) -> int:
    """Remove messages that are over from the waiting table; return how many were there.

    Their crash notes go, too, those of every process: no later attempt comes that could clear
    them.  The offset of each message is marked with how it ended, unless it is a dead letter now.
    """
    ids = [one.message_id for one in ended]
    removed = await unit.waiting.remove_many(consumer, ids)
    await unit.members.clear_notes(consumer, ids)
    await mark_ends(unit, consumer, ended)
    return removed


async def take_out(unit: Unit, consumer: str, message_id: str) -> None:
    """Remove a dead-lettered message, if another delivery or a replay made it wait."""
    waiting = await unit.waiting.get(consumer, message_id)
    if waiting is not None:
        ended = Ended(message_id, waiting.source, Refused("dead letter"))
        await leave_waiting(unit, consumer, ended)


def parked_without_payload(waiting: WaitingMessage, erased_at: float) -> WaitingMessage:
    """Return a waiting message without its payload: parked, because it cannot be handled."""
    gone = replace(waiting, waits=Waits.PARKED, payload=None, headers={}, reason=ERASED_REASON)
    return replace(gone, erased_at=erased_at)


class InSequence(StrEnum):
    """How a version relates to the one that was applied last."""

    OLD = "old"
    NEXT = "next"
    GAP = "gap"


def due_version(current: int | None, first: int = FIRST_VERSION) -> int:
    """Return the version that comes after the one that was applied last (None: none yet)."""
    return first if current is None else current + 1


def in_sequence(version: int, current: int | None, first: int = FIRST_VERSION) -> InSequence:
    """Compare a message's version with the one that was applied last (None: none yet).

    Before a version was applied, none is old: a version lower than *first* begins the
    aggregate, too.
    """
    due = due_version(current, first)
    if version == due or (current is None and version < due):
        return InSequence.NEXT
    return InSequence.OLD if version < due else InSequence.GAP


FIRST_PAGE: Final = 2
"""The message itself, if it waits, and the one after it: nearly always the next version."""


PAGE: Final = 100


async def is_next(consumer: Consumer, unit: Unit, message: Message) -> bool:
    """Return whether the version of a message is the next one of its key.

    Then it must not wait behind the others of its key: they all wait for it.
    """
    if not consumer.settings.versioned or message.version is None or message.key is None:
        return False
    current = await unit.versions.current(consumer.name, message.key)
    first = consumer.settings.first_version
    return in_sequence(message.version, current, first) is not InSequence.GAP


async def overtakes(consumer: Consumer, unit: Unit, message: Message) -> bool:
    """Return whether other waiting messages of its key wait for this message."""
    if not consumer.settings.versioned or message.key is None:
        return False
    held = await unit.waiting.hold(consumer.name, [message.key])
    return bool(held) and await is_next(consumer, unit, message)


async def release_next_version(consumer: Consumer, unit: Unit, applied: Message) -> None:
    """Give the next version behind *applied* its turn, if it waits behind later ones."""
    if applied.version is not None and applied.key is not None:
        await release_version(consumer, unit, applied.key, applied.version + 1)


async def release_version(consumer: Consumer, unit: Unit, key: str, due: int) -> None:
    """Give the version that is *due* its turn, if it waits behind later ones of its key."""
    is_behind_later = False
    which = WaitingFilter(consumer.name, key=key, held=True)
    limit = FIRST_PAGE
    while queue := await unit.waiting.find(which, limit):
        for waiting in queue:
            version = _version_of(consumer, waiting)
            if version == due:
                if is_behind_later:
                    await unit.waiting.let_overtake(consumer.name, waiting.message_id)
                return
            is_behind_later |= version is not None and version > due
        which, limit = replace(which, after_place=queue[-1].place), PAGE


async def waiting_versions(consumer: Consumer, unit: Unit, key: str) -> set[int]:
    """Return the versions of a key that are in the waiting table."""
    versions: set[int] = set()
    which = WaitingFilter(consumer.name, key=key)
    while queue := await unit.waiting.find(which, PAGE):
        versions |= {
            version for waiting in queue if (version := _version_of(consumer, waiting)) is not None
        }
        which = replace(which, after_place=queue[-1].place)
    return versions


def _version_of(consumer: Consumer, waiting: WaitingMessage) -> int | None:
    # An unreadable message has no version here; its failure is reported when its turn comes.
    with suppress(Exception):
        found = message_of(consumer, waiting)
        return found.version if isinstance(found, Message) else None
    return None
