"""One message that may kill its process: its try is written first, and the killer put aside.

    note the try ─▶ commit ─▶ read ─▶ handle ─▶ take the note back
       └─ not outlived too often ─▶ parked; a dead letter where reading it kills

While it is tried alone, nothing else runs in the process (`semel.messaging.turns`):
a death is its own.  Only a death leaves the note of a try behind, which counts
once its writer is gone (`semel.messaging.notes`); an exception, a stop's deadline
and a database that refuses are outlived.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from semel.codec import Unread, Unreadable
from semel.crashpoints import CrashPoint, reach
from semel.measures import MEASURES, Metric
from semel.message import Message, Record
from semel.messaging.claims import (
    TERMINAL,
    ClaimRequest,
    ClaimRow,
    ClaimState,
    HeldElsewhere,
    refusal,
)
from semel.messaging.consumer import Consumer
from semel.messaging.database import Database, Unit
from semel.messaging.failing import (
    Held,
    fence_to_park,
    invokes,
    leave_the_room,
    park_poison,
    write_failure,
    write_unreadable,
)
from semel.messaging.failure import Classified, FailureClass
from semel.messaging.kept import unread
from semel.messaging.notes import (
    forget_note,
    is_noted_by_another,
    note_try,
    outlived,
    outliving,
    take_back,
    unless_begun,
)
from semel.messaging.outcome import Ack, Outcome, Refused, Skipped, settlement
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
    put_aside: Callable[[Message | Unreadable, Outcome], None] = lambda arrival, outcome: None,
) -> Outcome:
    """Read and handle a record that may kill the process; put it aside if it did so too often.

    A message is parked.  What kills while it is read is no message yet: its bytes become a
    dead letter, as those of any record that cannot be read.  *put_aside* hears of what was
    durably put aside, and not handled.
    """
    limit = consumer.settings.poison_attempts
    reason = f"the process died {limit} times while it read this record alone"
    unread = Unreadable(record, Unread.UNDECODABLE, reason)
    async with TURNS.alone():
        async with unless_begun(consumer.name, database, [unread.id]), database.begin() as unit:
            buried: Outcome | None = None
            if await note_try(unit, consumer.name, unread.id) > limit:
                buried = await write_unreadable(unit, consumer, unread)
                await outlived(unit, consumer.name, [unread.id])
        if buried is not None:
            # The letter only says that it cannot be read.
            MEASURES.count(Metric.POISON, record.at.topic, "")
            _log_poison(consumer, unread.id)
            put_aside(unread, buried)
            return buried
        async with unless_begun(consumer.name, database, [unread.id]):
            arrival = consumer.reading.read(record)
            if not isinstance(arrival, Unreadable):
                suspect = _Suspect(arrival, was_read_as=unread.id, deaths=limit)
                begun = await _begin(consumer, database, suspect)
        if isinstance(arrival, Unreadable):
            await take_back(consumer.name, database, [unread.id], whoever=True)
            return await handle(arrival)
        if begun.aside is not None:
            put_aside(arrival, begun.aside)
        return await _carry_out(consumer, database, begun, lambda: handle(arrival))


async def handle_waiting(
    consumer: Consumer,
    database: Database,
    waiting: WaitingMessage,
    handle: Callable[[], Awaitable[Outcome]],
) -> Outcome:
    """Read and handle a message out of the waiting room; park it if it kills too often.

    Nobody's row says that it is in flight, so its try is always written first.  Only where an
    earlier try was not outlived is it handled alone, and only such tries count.  What another
    owner holds under a living lease is neither tried nor parked.
    """
    message = unread(waiting)
    limit = consumer.settings.poison_attempts
    with suppress(_IsSuspected):
        async with TURNS.beside_others():
            first = _Suspect(message, waiting, deaths=limit + 1, tries_at_most=1)
            begun = await _begin(consumer, database, first)
            return await _carry_out(consumer, database, begun, handle)
    async with TURNS.alone():
        # The first death is not its own for sure: others ran beside it.
        suspect = _Suspect(message, waiting, deaths=limit + 1)
        begun = await _begin(consumer, database, suspect)
        return await _carry_out(consumer, database, begun, handle)


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


@dataclass(frozen=True, slots=True)
class _Begun:
    """A try that is about to be made, or the end of all tries."""

    message: Message
    is_noted: bool
    aside: Outcome | None
    is_anothers: bool = False
    """The note that stands is another worker's: it ran when this try began, or its lease did."""


async def _begin(consumer: Consumer, database: Database, suspect: _Suspect) -> _Begun:
    """Write the try before it is made; put the message aside instead if it killed too often.

    Only a try that was not outlived counts: a message that fails and comes back is not one
    that kills.
    """
    name, message = consumer.name, suspect.message
    noted: list[str] = []
    async with unless_begun(name, database, noted), database.begin() as unit:
        if suspect.was_read_as:
            # Whoever else noted it may die of something else: reading it does not kill.
            await unit.members.acquit(name, suspect.was_read_as)
        row = await unit.claims.look_up(name, message.id)
        runs = await _runs(unit, consumer, suspect, row)
        may_kill = runs in (_Runs.YES, _Runs.AGAIN)
        tries = await note_try(unit, name, message.id) if may_kill else 0
        if suspect.tries_at_most is not None and tries > suspect.tries_at_most:
            raise _IsSuspected
        noted += [message.id] if may_kill else []
        aside: Outcome | None = None
        if runs is _Runs.ASIDE or tries > suspect.deaths:
            aside = await _put_aside(unit, consumer, suspect, runs)
        if runs is _Runs.OVER and row is not None and row.state is ClaimState.COMPLETED:
            # Whoever noted it: he may die before he takes it back, and nobody comes here again.
            await unit.members.acquit(name, message.id)
        elif runs is _Runs.OVER or aside is not None:
            await forget_note(unit, name, message.id)
        is_anothers = False
        if runs is not _Runs.OVER and aside is None and suspect.waiting is None:
            is_anothers = await is_noted_by_another(unit, name, message.id)
    reach(CrashPoint.CAREFUL_ATTEMPT_AFTER, name)
    return _Begun(message, tries > 0, aside, is_anothers)


async def _carry_out(
    consumer: Consumer,
    database: Database,
    begun: _Begun,
    handle: Callable[[], Awaitable[Outcome]],
) -> Outcome:
    """Make the try that is written, and take it back if the process outlives it."""
    message = begun.message
    if begun.aside is not None:
        _log_poison(consumer, message.id)
        return begun.aside
    noted = [message.id] if begun.is_noted else []
    async with outliving(consumer.name, database, noted):
        outcome = await handle()
    if begun.is_anothers and isinstance(settlement(outcome), Ack):
        # Its writer is dead, or may die, and nobody comes back to a message that is over.
        await take_back(consumer.name, database, [message.id], whoever=True)
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


async def _runs(unit: Unit, consumer: Consumer, suspect: _Suspect, row: ClaimRow | None) -> _Runs:
    message = suspect.message
    no = None if row is None else refusal(row, message.digest, await unit.now())
    if invokes(consumer, no):
        # Its claim stays COMPLETED, whatever it does: only the letter tells that it kills.
        letter = await unit.dead_letters.get(consumer.name, message.id)
        killed = letter is not None and letter.error_code == CRASHED
        return _Runs.ASIDE if killed else _Runs.AGAIN
    if row is not None and row.state in (_OVER if suspect.waiting is None else TERMINAL):
        return _Runs.OVER
    if isinstance(no, HeldElsewhere):
        return _Runs.NOT
    return _Runs.YES if no is None or suspect.waiting is not None else _Runs.NOT


_OVER: Final = TERMINAL | {ClaimState.PARKED}


async def _put_aside(unit: Unit, consumer: Consumer, suspect: _Suspect, runs: _Runs) -> Outcome:
    if runs is _Runs.ASIDE:
        over = Refused(f"dead letter ({CRASHED})")
        if suspect.waiting is not None:
            message = suspect.message
            await leave_the_room(unit, consumer.name, message.id, over, message.source)
        return over
    limit = consumer.settings.poison_attempts
    reason = f"the process died {limit} times while it handled this message alone"
    failure = Classified(FailureClass.POISON, CRASHED, reason, "")
    held = Held(from_waiting=suspect.waiting is not None)
    message = suspect.message.tried(limit)
    if runs is _Runs.AGAIN:
        # Its effect is durable, so there is nothing to park; what it sends may be lost.
        found = await write_failure(unit, consumer, message.repeated(), failure, claim=held)
    else:
        # It may have been leased since it was looked at.
        fence = await fence_to_park(unit, consumer, ClaimRequest.of(message))
        found = await park_poison(unit, consumer, message, failure, replace(held, fence=fence))
    return Skipped() if found is None else found


def _log_poison(consumer: Consumer, id: str) -> None:
    log.error("poison message put aside", extra={"consumer": consumer.name, "id": id})
