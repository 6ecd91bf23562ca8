"""One message that may kill its process: its try is written first, and the killer put aside.

    suspect ─▶ commit ─▶ read ─▶ handle ─▶ acquit
       └─ not outlived too often ─▶ parked; a dead letter where reading it kills

While it is tried alone, nothing else runs in the process (`semel.messaging.turns`):
a death is its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Final

from semel.codec import Unread, Unreadable
from semel.crashpoints import CrashPoint, reach
from semel.measures import MEASURES, Metric
from semel.message import Message, Record
from semel.messaging.claims import TERMINAL, ClaimState, Duplicate, refusal
from semel.messaging.consumer import Consumer
from semel.messaging.database import Database, Unit
from semel.messaging.failing import (
    Held,
    leave_the_room,
    park_poison,
    write_failure,
    write_unreadable,
)
from semel.messaging.failure import Classified, FailureClass
from semel.messaging.outcome import Outcome, Refused, Skipped
from semel.messaging.settings import Duplicates
from semel.messaging.turns import TURNS
from semel.messaging.waiting import WaitingMessage

log = logging.getLogger("semel.messaging")

CRASHED: Final = "CRASHED"
"""The code of a message that was put aside because it kills."""


async def handle_record(
    consumer: Consumer,
    database: Database,
    record: Record,
    handle: Callable[[Message | Unreadable], Awaitable[Outcome]],
) -> Outcome:
    """Read and handle a record that may kill the process; put it aside if it did so too often.

    A message is parked.  What kills while it is read is no message yet: its bytes become a
    dead letter, as those of any record that cannot be read.
    """
    limit = consumer.settings.poison_attempts
    reason = f"the process died {limit} times while it read this record alone"
    unread = Unreadable(record, Unread.UNDECODABLE, reason)
    async with TURNS.alone():
        async with database.begin() as unit:
            buried: Outcome | None = None
            if await unit.members.suspect(consumer.name, unread.id) > limit:
                buried = await write_unreadable(unit, consumer, unread)
                await unit.members.acquit(consumer.name, unread.id)
        if buried is not None:
            _tell_poison(consumer, unread.id, record.at.topic)
            return buried
        try:
            arrival = consumer.reading.read(record)
        except Exception:
            await _acquit(consumer, database, unread.id)
            raise
        if isinstance(arrival, Unreadable):
            await _acquit(consumer, database, unread.id)
            return await handle(arrival)
        suspect = _Suspect(arrival, was_read_as=unread.id, deaths=limit)
        return await _try(consumer, database, suspect, lambda: handle(arrival))


async def handle_waiting(
    consumer: Consumer,
    database: Database,
    waiting: WaitingMessage,
    handle: Callable[[], Awaitable[Outcome]],
) -> Outcome:
    """Read and handle a message out of the waiting room; park it if it kills too often.

    Nobody's row says that it is in flight, so its try is always written first.  Only where an
    earlier try was not outlived is it handled alone, and only such tries count.
    """
    message = _unread(waiting)
    limit = consumer.settings.poison_attempts
    with suppress(_IsSuspected):
        async with TURNS.beside_others():
            first = _Suspect(message, waiting, deaths=limit + 1, tries_at_most=1)
            return await _try(consumer, database, first, handle)
    async with TURNS.alone():
        # The first death is not its own for sure: others ran beside it.
        suspect = _Suspect(message, waiting, deaths=limit + 1)
        return await _try(consumer, database, suspect, handle)


@dataclass(frozen=True, slots=True)
class _Suspect:
    """A message that may kill the process."""

    message: Message
    waiting: WaitingMessage | None = None
    """It comes out of the waiting room, and was not read yet."""

    was_read_as: str = ""
    """The suspicion that reading the record would kill, which it did not."""

    deaths: int = 1
    """How many tries that were not outlived put it aside."""

    tries_at_most: int | None = None
    """It is only handled here as long as it is not tried more often than this."""


class _IsSuspected(Exception):
    """An earlier try of a message was not outlived."""


async def _try(
    consumer: Consumer,
    database: Database,
    suspect: _Suspect,
    handle: Callable[[], Awaitable[Outcome]],
) -> Outcome:
    """Write the try, then handle; put the message aside instead if it killed too often.

    Only a try that was not outlived counts: a message that fails and comes back is not one
    that kills.
    """
    message = suspect.message
    async with database.begin() as unit:
        if suspect.was_read_as:
            await unit.members.acquit(consumer.name, suspect.was_read_as)
        runs = await _runs(unit, consumer, suspect)
        may_kill = runs in (_Runs.YES, _Runs.AGAIN)
        tries = 0 if not may_kill else await unit.members.suspect(consumer.name, message.id)
        if suspect.tries_at_most is not None and tries > suspect.tries_at_most:
            raise _IsSuspected
        aside: Outcome | None = None
        if runs is _Runs.ASIDE or tries > suspect.deaths:
            aside = await _put_aside(unit, consumer, suspect, runs)
        if runs is _Runs.OVER or aside is not None:
            await unit.members.acquit(consumer.name, message.id)
    reach(CrashPoint.CAREFUL_ATTEMPT_AFTER, consumer.name)
    if aside is not None:
        _tell_poison(
            consumer, message.id, message.source.topic if message.source else "", message.type
        )
        return aside
    try:
        outcome = await handle()
    except (Exception, asyncio.CancelledError):
        # A stop's deadline ended it, say, and not the other way round.
        if tries:
            await _acquit(consumer, database, message.id)
        raise
    if tries:
        await _acquit(consumer, database, message.id)
    return outcome


class _Runs(Enum):
    """Whether the handler will run, as far as the claim says."""

    YES = "yes"
    AGAIN = "again"
    """For a duplicate, which is invoked."""

    ASIDE = "aside"
    """It would, for a duplicate that has killed: a dead letter says so."""

    NOT = "not"
    """Not now; it comes back."""

    OVER = "over"
    """Never again."""


async def _runs(unit: Unit, consumer: Consumer, suspect: _Suspect) -> _Runs:
    message = suspect.message
    row = await unit.claims.look_up(consumer.name, message.id)
    no = None if row is None else refusal(row, message.digest, await unit.now())
    if isinstance(no, Duplicate) and consumer.settings.duplicates is Duplicates.INVOKE:
        # Its claim stays COMPLETED, whatever it does: only the letter tells that it kills.
        letter = await unit.dead_letters.get(consumer.name, message.id)
        killed = letter is not None and letter.error_code == CRASHED
        return _Runs.ASIDE if killed else _Runs.AGAIN
    if row is not None and row.state in (_OVER if suspect.waiting is None else TERMINAL):
        return _Runs.OVER
    return _Runs.YES if no is None or suspect.waiting is not None else _Runs.NOT


_OVER: Final = TERMINAL | {ClaimState.PARKED}


async def _put_aside(unit: Unit, consumer: Consumer, suspect: _Suspect, runs: _Runs) -> Outcome:
    if runs is _Runs.ASIDE:
        if suspect.waiting is not None:
            await leave_the_room(unit, consumer.name, suspect.message.id)
        return Refused(f"dead letter ({CRASHED})")
    limit = consumer.settings.poison_attempts
    reason = f"the process died {limit} times while it handled this message alone"
    failure = Classified(FailureClass.POISON, CRASHED, reason, "")
    message, held = suspect.message.tried(limit), Held(from_waiting=suspect.waiting is not None)
    if runs is _Runs.AGAIN:
        # Its effect is durable, so there is nothing to park; what it sends may be lost.
        found = await write_failure(unit, consumer, message.repeated(), failure, claim=held)
    else:
        found = await park_poison(unit, consumer, message, failure, held)
    return Skipped() if found is None else found


def _unread(waiting: WaitingMessage) -> Message:
    """Return a waiting message as it stands there: to read it may be what kills."""
    return Message(
        waiting.message_id,
        None,
        waiting.payload or b"",
        waiting.key,
        waiting.message_type,
        waiting.headers,
        waiting.source,
        waiting.timestamp,
        schema_version=waiting.schema_version,
        correlation_id=waiting.correlation_id,
        digest=waiting.payload_hash,
    )


def _tell_poison(consumer: Consumer, id: str, topic: str, kind: str = "") -> None:
    MEASURES.count(Metric.POISON, topic, kind)
    log.error("poison message put aside", extra={"consumer": consumer.name, "id": id})


async def _acquit(consumer: Consumer, database: Database, id: str) -> None:
    async with database.begin() as unit:
        await unit.members.acquit(consumer.name, id)
