"""Versions and the waiting room: the one that others of its key wait for overtakes them.

    v3 came, v2 did not ─▶ v3 waits and holds the key
                           v2 comes ─▶ handled at once; if it fails, its turn is its own
    v3, v2, v1 came     ─▶ v2 queues up behind v3, until v1 is applied

The version is the order.  By their arrival alone, v2 would wait for v3, and v3 for v2.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Final

from semel.message import Message
from semel.messaging.consumer import Consumer
from semel.messaging.database import Unit
from semel.messaging.kept import message_of
from semel.messaging.sequence import InSequence, in_sequence
from semel.messaging.waiting import WaitingFilter, WaitingMessage

FIRST_PAGE: Final = 2
"""The message itself, where it waits, and the one behind it: nearly always the next version."""

PAGE: Final = 100


async def is_next(consumer: Consumer, unit: Unit, message: Message) -> bool:
    """Tell whether its version says that a message waits for none of its key.

    The version is the order: the one that all the others wait for must not queue up.
    """
    if not consumer.settings.versioned or message.version is None or message.key is None:
        return False
    current = await unit.versions.current(consumer.name, message.key)
    first = consumer.settings.first_version
    return in_sequence(message.version, current, first) is not InSequence.GAP


async def overtakes(consumer: Consumer, unit: Unit, message: Message) -> bool:
    """Tell whether a message that is about to wait is the one that others in the room wait for."""
    if not consumer.settings.versioned or message.key is None:
        return False
    held = await unit.waiting.hold(consumer.name, [message.key])
    return bool(held) and await is_next(consumer, unit, message)


async def let_next_go(consumer: Consumer, unit: Unit, applied: Message) -> None:
    """Give the next version behind *applied* its turn, if it waits behind later ones."""
    if applied.version is not None and applied.key is not None:
        await let_go(consumer, unit, applied.key, applied.version + 1)


async def let_go(consumer: Consumer, unit: Unit, key: str, due: int) -> None:
    """Give the version that is *due* its turn, if it waits behind later ones of its key."""
    is_behind_later = False
    which = WaitingFilter(consumer.name, key=key, held=True)
    limit = FIRST_PAGE
    while queue := await unit.waiting.find(which, limit):
        for waiting in queue:
            version = _version_of(consumer, waiting)
            if version == due:
                if is_behind_later:
                    await unit.waiting.let_go(consumer.name, waiting.message_id)
                return
            is_behind_later |= version is not None and version > due
        which, limit = replace(which, after_place=queue[-1].place), PAGE


async def waiting_versions(consumer: Consumer, unit: Unit, key: str) -> set[int]:
    """Return the versions of a key that are in the room, whatever they wait for."""
    versions: set[int] = set()
    which = WaitingFilter(consumer.name, key=key)
    while queue := await unit.waiting.find(which, PAGE):
        versions |= {
            version for waiting in queue if (version := _version_of(consumer, waiting)) is not None
        }
        which = replace(which, after_place=queue[-1].place)
    return versions


def _version_of(consumer: Consumer, waiting: WaitingMessage) -> int | None:
    with suppress(Exception):  # it says so itself when its turn comes
        found = message_of(consumer, waiting)
        return found.version if isinstance(found, Message) else None
    return None
