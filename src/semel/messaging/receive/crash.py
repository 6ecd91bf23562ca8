"""After a crash: find the message that kills its process, and quarantine it.

A process that dies cannot report which message killed it.  Three parts find it:

    Membership   a row for each process: its partitions, and how many records it may have had.
                 The next owner of such a partition handles that many records alone.
    Turns        while a suspect is tried alone, nothing else runs in the process.
    guarded      note the try ─▶ commit ─▶ run ─▶ clear the note
                    └─ too many deaths ─▶ quarantine: parked, or a dead letter

Only a death leaves a note behind: after an exception, the deadline of a stop, or a refusal of
the database, the process clears it.  A note counts when the process that wrote it is gone.

    written ─▶ its writer runs: no death ─▶ the writer clears it, or another takes it over
       └─▶ its writer is gone: a death, the message is a suspect

When a message is over, the notes of all processes are cleared: for a waiting message in the
transaction that removes it (`semel.messaging.failed.waiting.leave_waiting`), for a delivery by
`guarded`, because a delivery comes again until it is acknowledged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Final, TypeVar

from semel import lease
from semel.codec import Unread, Unreadable, unreadable_id
from semel.crashpoints import CrashPoint, reach
from semel.errors import Misuse
from semel.events import EVENTS, Metric
from semel.lease import Owner, owner_text, this_process
from semel.message import Coordinates, Message, Partition, Record
from semel.messaging.database import Database, Unit
from semel.messaging.failed.attempt_failed import fence_to_park, write_unreadable
from semel.messaging.failed.retrytopic import read_delivery
from semel.messaging.failed.waiting import leave_waiting
from semel.messaging.failure import Classified, FailureClass
from semel.messaging.handle.attempt import Attempt
from semel.messaging.handle.claims import (
    CLOSED,
    TERMINAL,
    ClaimRequest,
    ClaimState,
    HeldElsewhere,
    RunByPipeline,
    refusal,
)
from semel.messaging.handler import Consumer, invokes, unread
from semel.messaging.outcome import (
    Ack,
    DeadLettered,
    Handled,
    Outcome,
    Refused,
    RetryStored,
    settlement,
)
from semel.messaging.receive.broker import Subscription
from semel.messaging.receive.offsets import Ended
from semel.messaging.records import LEFT_SECONDS, Member, Note, WaitingMessage
from semel.messaging.redact import reason_of

log = logging.getLogger("semel.messaging")


PATIENCE_SECONDS: Final = 30.0
"""How long work waits for a suspect, and a suspect for work.  Limited, because one may need the
other in order to end."""


_TRYING: Final[ContextVar[object | None]] = ContextVar("semel_trying", default=None)
"""The try in which this code runs; tasks that it starts inherit it."""


class Turns:
    """Lets a suspect run while nothing else runs in the process.

    Other work takes a lock twice, and does not wait as long as there is no suspect.
    """

    def __init__(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._patience_seconds = patience_seconds
        self.forget()

    def forget(self) -> None:
        """Reset the state: in a process that was just forked, nothing runs."""
        self._lock = threading.Lock()
        self._running: set[object] = set()
        self._stuck: set[object] = set()
        """The running work that no suspect waits for any more."""

        self._suspects = 0
        """How many suspects wait to run alone, or run alone."""

        self._tried: object | None = None
        """The try of a suspect that runs now."""

        self._lets_pass = False
        """Work that waited too long runs beside this suspect."""

        self._bells: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def beside_others(self) -> AsyncIterator[None]:
        """Run work that is not a suspect; wait while a suspect is tried alone."""
        work = object()
        if not await self._until(lambda: self._begin(work), self._patience_seconds):
            with self._lock:
                self._lets_pass = True
                self._running.add(work)
            self._ring()
        try:
            yield
        finally:
            with self._lock:
                self._running.discard(work)
                self._stuck.discard(work)
            self._ring()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Run a suspect while nothing else runs; new work waits meanwhile.

        Two suspects never run at once.  Work that does not end within the patience runs on
        beside the suspect, and later suspects do not wait for it.

        Raises:
            Misuse: called within the try of another suspect, which would wait for itself.
        """
        if _TRYING.get() is self._tried is not None:
            raise Misuse("a suspect is tried alone: not within the try of another one")
        me, is_tried = object(), False
        _TRYING.set(me)
        with self._lock:
            self._suspects += 1
        try:
            is_tried = await self._until(lambda: self._try(me))
            if not await self._until(lambda: self._running <= self._stuck, self._patience_seconds):
                with self._lock:
                    self._stuck |= self._running
            yield
        finally:
            _TRYING.set(None)
            with self._lock:
                self._suspects -= 1
                if is_tried:
                    self._tried, self._lets_pass = None, False
            self._ring()

    def _begin(self, work: object) -> bool:
        if self._suspects and not self._lets_pass:
            return False
        self._running.add(work)
        return True

    def _try(self, by: object) -> bool:
        if self._tried is not None:
            return False
        self._tried = by
        return True

    async def _until(self, is_so: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until *is_so* returns True, which may change the state; False after *seconds*."""
        loop = asyncio.get_running_loop()
        by = None if seconds is None else loop.time() + seconds
        while True:
            with self._lock:
                if is_so():
                    return True
                bell = (loop, loop.create_future())
                self._bells.append(bell)
            try:
                async with asyncio.timeout_at(by):
                    await bell[1]
            except TimeoutError:
                return False
            finally:
                with self._lock, suppress(ValueError):
                    self._bells.remove(bell)

    def _ring(self) -> None:
        """Wake all waiting tasks, to check their conditions again."""
        if not self._bells:
            return
        with self._lock:
            bells, self._bells = self._bells, []
        for loop, bell in bells:
            # A closed loop raises; no task waits in it any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_answer, bell)


def _answer(bell: asyncio.Future[None]) -> None:
    if not bell.done():
        bell.set_result(None)


TURNS: Final = Turns()
"""The turns of this process."""


os.register_at_fork(after_in_child=TURNS.forget)


class Writer:
    """One worker of one consumer, which makes one try after another.

    A process may have several: without names of their own, one worker could clear the note that
    another has just written.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.uncleared: set[str] = set()
        """The messages whose notes it could not clear yet."""

    async def clear_the_rest(self, consumer: str, database: Database) -> None:
        """Clear the notes that it could not clear earlier; between two tries, or at its end."""
        with noting_as(self):
            await try_to_clear(consumer, database, ())


_WRITER: Final[ContextVar[Writer | None]] = ContextVar("semel_writer", default=None)


@contextmanager
def noting_as(writer: Writer) -> Iterator[None]:
    """Write the notes of the block under the name of one worker."""
    token = _WRITER.set(writer)
    try:
        yield
    finally:
        _WRITER.reset(token)


def _me() -> str:
    writer, process = _WRITER.get(), this_process()
    if writer is None:
        return process
    return owner_text(Owner.from_json(json.loads(process)), writer.name)


async def note_try(unit: Unit, consumer: str, message_id: str) -> int:
    """Note that a message is about to be tried alone; return how many tries count with this one.

    If more than one: each earlier try ended with the death of its process.
    """
    suspects = await note_tries(unit, consumer, [message_id])
    if message_id not in suspects:
        return 1
    if suspects[message_id].writer == _me():
        # This worker survived the earlier try, and only could not clear its note.
        return suspects[message_id].tries
    return await unit.members.suspect(consumer, message_id, _me())


async def note_tries(
    unit: Unit, consumer: str, message_ids: Collection[str], *, are_locked: bool = False
) -> Mapping[str, Note]:
    """Note one try of each of several messages, together; return the notes of the suspects.

    The note of a suspect stays unchanged: it is counted up when the suspect is tried alone.
    *are_locked*: this transaction holds the messages' rows in the waiting table.
    """
    me = _me()
    suspects: dict[str, Note] = {}
    for message_id, note in (await unit.members.note(consumer, message_ids, me)).items():
        is_mine = note.writer == me
        if note.tries > 1 if is_mine else await _is_gone(unit, consumer, note):
            suspects[message_id] = note
        elif not is_mine and (are_locked or await unit.now() >= note.noted_at + LEFT_SECONDS):
            # Its writer runs and is not at the message, whose row it would have locked: it did
            # not clear the note yet, and must not clear it while this worker is at the message.
            await unit.members.clear_notes(consumer, [message_id], note.writer)
            await unit.members.note(consumer, [message_id], me)
    return suspects


async def clear_own_notes(unit: Unit, consumer: str, message_ids: Collection[str]) -> None:
    """Clear the notes of this worker; those of others stay."""
    await unit.members.clear_notes(consumer, message_ids, _me())


@asynccontextmanager
async def clearing_own_notes(
    consumer: str, database: Database, message_ids: Collection[str]
) -> AsyncIterator[None]:
    """Clear the notes of messages when the block ends or raises: the process survived.

    A refusal of the database or the deadline of a stop is not a death.
    """
    async with unless_begun(consumer, database, message_ids):
        yield
    await try_to_clear(consumer, database, message_ids)


@asynccontextmanager
async def unless_begun(
    consumer: str, database: Database, message_ids: Collection[str]
) -> AsyncIterator[None]:
    """Clear the notes of messages if the block raises: then nothing is tried.

    It also encloses the transaction that writes the notes: a commit whose answer was lost may
    have written them.
    """
    try:
        yield
    except (Exception, asyncio.CancelledError):
        await try_to_clear(consumer, database, message_ids)
        raise


async def try_to_clear(
    consumer: str, database: Database, message_ids: Collection[str], *, of_all_writers: bool = False
) -> None:
    """Clear notes in a transaction of its own, if the database answers.

    If it does not, the notes stay.  They do not count while this process runs, and the worker
    clears them with its next ones.  *of_all_writers*: for messages that are over.
    """
    writer = _WRITER.get()
    uncleared = set[str]() if writer is None else writer.uncleared
    uncleared.update(message_ids)
    if not uncleared:
        return
    now = frozenset(uncleared)
    try:
        async with database.begin() as unit:
            await clear_own_notes(unit, consumer, now)
            if of_all_writers:
                await unit.members.clear_notes(consumer, message_ids)
    except Exception as error:  # noqa: BLE001  the outcome of the messages must not be lost
        why = {"consumer": consumer, "reason": reason_of(error)}
        log.warning("crash notes could not be cleared", extra=why)
    else:
        uncleared -= now


async def clear_note_left_behind(unit: Unit, consumer: str, message_id: str) -> None:
    """Clear the note of a message that is over, unless its writer runs and may handle it."""
    note = (await unit.members.notes(consumer, [message_id])).get(message_id)
    if note is None:
        return
    if note.writer == _me() or await _is_gone(unit, consumer, note):
        await unit.members.clear_notes(consumer, [message_id], note.writer)


def is_gone(member: Member) -> bool:
    """Return whether a member's process is certainly gone.

    A process that runs writes its row again if it was removed.
    """
    return lease.is_gone(member.owner)


async def _is_gone(unit: Unit, consumer: str, note: Note) -> bool:
    """Return whether the writer of a note is gone, as far as that can be known."""
    if lease.is_gone(note.writer):
        return True
    owner = Owner.read(note.writer)
    if owner is not None and owner.is_running():
        return False
    if await unit.now() < note.noted_at + LEFT_SECONDS:
        return False
    members = [Owner.read(member.owner) for member in await unit.members.running(consumer)]
    known = [owner_text(member) for member in members if member is not None]
    return owner is None or owner_text(owner) not in known


class Membership:
    """This process's row, and the partitions whose records it handles one at a time."""

    def __init__(
        self,
        consumer: Consumer,
        subscription: Subscription,
        database: Database,
        owner: Owner,
        in_flight: int,
        seconds: float,
    ) -> None:
        self._consumer = consumer
        self._subscription = subscription
        self._database = database
        self._owner = owner
        self._in_flight = in_flight
        self._seconds = seconds
        self._entered: frozenset[Partition] = frozenset()
        self._standing_since: float | None = None
        self._suspects: dict[Partition, _Suspects] = {}

    async def work_on(self, partitions: frozenset[Partition]) -> None:
        """Write which partitions this process works on, before it handles their records.

        Returns at once if nothing changed.
        """
        if partitions == self._entered:
            return
        before = self._entered
        await self._enter(partitions)
        for partition in before - partitions:
            self._suspects.pop(partition, None)
        await self._look_for_crashes(partitions - before)
        self._entered = partitions

    async def give_up(self, partitions: Collection[Partition]) -> None:
        """Remove partitions from the row that have no records in flight any more."""
        left = self._entered - frozenset(partitions)
        if left != self._entered:
            await self._enter(left)
            self._entered = left
        for partition in partitions:
            self._suspects.pop(partition, None)

    @property
    def tells_otherwise(self) -> bool:
        """The row says that the consumer stands still and it does not, or the other way round."""
        return bool(self._entered) and self._standing_since != self._consumer.circuit.since

    async def renew(self, lag: int | None = None) -> None:
        """Renew the row."""
        if self._entered:
            await self._enter(self._entered, lag)

    async def _enter(self, partitions: frozenset[Partition], lag: int | None = None) -> None:
        since = self._consumer.circuit.since
        member = Member(
            self._consumer.name,
            self._owner.instance,
            json.dumps(self._owner.to_json()),
            partitions,
            self._in_flight,
            standing_since=since,
            lag=lag,
            refusals=self._consumer.replays.refusals,
        )
        async with self._database.begin() as unit:
            if partitions:
                await unit.members.enter(member, self._seconds)
                await unit.members.forget_expired(member.consumer)
            else:
                # Without partitions nothing is in flight, so no row is needed.
                await unit.members.leave(member.consumer, member.name)
        self._standing_since = since
        reach(CrashPoint.MEMBER_ENTER_AFTER, self._consumer.name)

    async def need_service(self) -> None:
        """Remove the row, if there is one, and raise if a pipeline runs the consumer.

        Called when the row is committed: a pipeline that begins writes its own row first, and
        then looks for members, so the second of the two sees the first.

        Raises:
            RunByPipeline: this process must not work.
        """
        async with self._database.begin() as unit:
            engine = await unit.members.engine(self._consumer.name)
            if engine is not None:
                await unit.members.leave(self._consumer.name, self._owner.instance)
        if engine is not None:
            raise RunByPipeline(self._consumer.name, engine.pipeline)

    async def _look_for_crashes(self, partitions: frozenset[Partition]) -> None:
        if not partitions:
            return
        await self.need_service()
        async with self._database.begin() as unit:
            others = await unit.members.others(
                self._consumer.name, self._owner.instance, partitions
            )
        for partition in partitions:
            accused = [other for other in others if partition in other.partitions]
            if accused:
                await self._suspect(partition, accused)

    async def _suspect(self, partition: Partition, others: Sequence[Member]) -> None:
        """Handle the records that other processes may have had in flight one at a time."""
        at_most = max(other.in_flight for other in others)
        start = await self._subscription.committed(partition)
        # Records after this end were not delivered to any of them.
        end = await self._subscription.end(partition)
        self._suspects[partition] = _Suspects(at_most, end, others)
        if start >= end:
            await self._clear(partition)
            return
        log.warning(
            "unclean stop found: one message at a time",
            extra={
                "consumer": self._consumer.name,
                "partition": str(partition),
                "records": min(at_most, end - start),
            },
        )

    async def is_careful(self, at: Coordinates) -> bool:
        """Return whether a record is handled alone; the first one that is not ends this mode."""
        suspects = self._suspects.get(at.place)
        if suspects is None:
            return False
        if at.offset >= suspects.end:
            await self._clear(at.place)
            return False
        return True

    async def handled_alone(self, at: Coordinates) -> None:
        """Count a record that was handled alone; after the last one, clear the others' rows."""
        suspects = self._suspects.get(at.place)
        if suspects is None:
            return
        suspects.left -= 1
        if suspects.left <= 0 or at.offset + 1 >= suspects.end:
            await self._clear(at.place)

    async def _clear(self, partition: Partition) -> None:
        """End the mode for a partition: all records that were in flight are handled."""
        me, name = self._owner.instance, self._consumer.name
        async with self._database.begin() as unit:
            for other in self._suspects[partition].of:
                await unit.members.release(name, other.name, partition)
                elsewhere = await unit.members.others(name, me, other.partitions - {partition})
                named = {member.name for member in elsewhere}
                if other.name not in named and is_gone(other):
                    await unit.members.leave(name, other.name)
        self._suspects.pop(partition, None)

    async def leave(self) -> None:
        """Remove the row: the process ends cleanly."""
        reach(CrashPoint.MEMBER_LEAVE_BEFORE, self._consumer.name)
        async with self._database.begin() as unit:
            await unit.members.leave(self._consumer.name, self._owner.instance)
        self._entered = frozenset()


@dataclass(slots=True)
class _Suspects:
    """The records of one partition that may have killed a process."""

    left: int
    """How many of its records are not handled alone yet, at most."""

    end: int
    """The offset after the last record that it can have had."""

    of: Sequence[Member]
    """The members whose rows name the partition."""


CRASHED: Final = "CRASHED"
"""The code of a message that was quarantined because it kills."""

Result = TypeVar("Result")


class _Runs(Enum):
    """Whether the handler will run, according to the claim."""

    YES = "yes"
    AGAIN = "again"
    """Yes, for a duplicate that is invoked."""

    QUARANTINED = "quarantined"
    """No: the invoked duplicate has killed before, as its dead letter shows."""

    NOT = "not"
    """Not now; it comes back."""

    OVER = "over"
    """Never again, unless a person sends it back."""

    DONE = "done"
    """Never again: its effect is durable."""


async def _always(unit: Unit) -> _Runs:
    return _Runs.YES


class Clear(Enum):
    """Which notes are cleared after a try that the process survived."""

    OWN = "own"
    ALL = "all"
    """Those of all workers: the message is over, and no later attempt could clear them."""

    CLEARED = "cleared"
    """None: the transaction that ended the message has cleared them."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """Work that may kill the process, and what to do if it does."""

    id: str
    """The id under which its tries are noted."""

    deaths: int
    """After this many tries that ended with a death, it is quarantined."""

    quarantine: Callable[[Unit, _Runs], Awaitable[Outcome | None]]
    """Quarantines it in the open transaction; returns None if it is over by now."""

    tell: Callable[[Outcome], None] = lambda outcome: None
    """Called after the quarantine is durable."""

    runs: Callable[[Unit], Awaitable[_Runs]] = _always
    is_alone: bool = True
    """False: other work runs beside it, and it is refused if it has killed before."""


class IsSuspected(Exception):
    """An earlier try ended with the death of its process."""


async def guarded(
    consumer: Consumer,
    database: Database,
    suspect: Suspect,
    run: Callable[[], Awaitable[Result]],
    clears: Callable[[Result], Clear] = lambda result: Clear.OWN,
) -> Result | Outcome:
    """Run work that may kill the process, with a note of the try; or quarantine it.

    *clears* returns for a result which notes to clear.

    Raises:
        IsSuspected: it has to be tried alone; nothing was noted.
    """
    name, noted = consumer.name, list[str]()
    quarantined: Outcome | None = None
    async with unless_begun(name, database, noted), database.begin() as unit:
        runs = await suspect.runs(unit)
        tries = 0
        if runs in (_Runs.YES, _Runs.AGAIN):
            tries = await note_try(unit, name, suspect.id)
            if tries > 1 and not suspect.is_alone:
                raise IsSuspected
            noted.append(suspect.id)
        if runs is _Runs.QUARANTINED or tries > suspect.deaths:
            quarantined = await suspect.quarantine(unit, runs)
        if runs is _Runs.DONE:
            await unit.members.clear_notes(name, [suspect.id])
        elif runs is _Runs.OVER or quarantined is not None:
            await clear_note_left_behind(unit, name, suspect.id)
    reach(CrashPoint.CAREFUL_ATTEMPT_AFTER, name)
    if quarantined is not None:
        log.error("poison message quarantined", extra={"consumer": name, "id": suspect.id})
        suspect.tell(quarantined)
        return quarantined
    async with unless_begun(name, database, noted):
        result = await run()
    match clears(result):
        case Clear.ALL if runs not in (_Runs.OVER, _Runs.DONE):
            await try_to_clear(name, database, [suspect.id], of_all_writers=True)
        case Clear.OWN | Clear.ALL:
            await try_to_clear(name, database, noted)
        case Clear.CLEARED:
            pass
    return result


async def handle_record(
    consumer: Consumer,
    database: Database,
    record: Record,
    handle: Callable[[Message | Unreadable], Awaitable[Outcome]],
    quarantined: Callable[[Message | Unreadable, Outcome], None] = lambda arrival, outcome: None,
) -> Outcome:
    """Read and handle a record that may kill the process; quarantine it if it did so too often.

    A message is parked.  A record that kills while it is read is dead-lettered as bytes, like any
    record that cannot be read.  *quarantined* is called after the quarantine is durable.
    """
    limit = consumer.settings.poison_attempts
    reason = f"the process died {limit} times while it read this record alone"
    unread = Unreadable(record, Unread.UNDECODABLE, reason)

    async def quarantine(unit: Unit, runs: _Runs) -> Outcome:
        return await write_unreadable(unit, consumer, unread)

    def tell_unread(outcome: Outcome) -> None:
        # The outcome shows only that the record cannot be read, not that it kills.
        EVENTS.measure(Metric.POISON, record.at.topic, "")
        quarantined(unread, outcome)

    async def read() -> Message | Unreadable:
        return read_delivery(consumer, record)

    # Under an id of its own, because a stored record is unreadable under the id of its message,
    # whose notes count the deaths of the handler.
    reading = Suspect(unreadable_id(record.at), limit, quarantine, tell_unread)
    async with TURNS.alone():
        # After a successful read, reading does not kill: clear all notes of reading.
        arrival = await guarded(consumer, database, reading, read, lambda read: Clear.ALL)
        if isinstance(arrival, Unreadable):
            return await handle(arrival)
        if not isinstance(arrival, Message):
            return arrival
        message = arrival
        suspect = _message(
            consumer, message, limit, tell=lambda outcome: quarantined(message, outcome)
        )
        return await guarded(consumer, database, suspect, lambda: handle(message), _delivered)


async def handle_waiting(
    consumer: Consumer,
    database: Database,
    waiting: WaitingMessage,
    handle: Callable[[], Awaitable[Outcome]],
) -> Outcome:
    """Read and handle a waiting message; park it if it kills too often.

    The members' rows do not cover waiting messages, so each try is noted first.  Only after a
    death is it handled alone.  A message that another owner has leased is neither tried nor
    parked.
    """
    # One more: other work ran beside the first try, and may have caused that death.
    limit = consumer.settings.poison_attempts + 1
    suspect = _message(consumer, unread(waiting), limit, from_waiting=True)
    with suppress(IsSuspected):
        async with TURNS.beside_others():
            beside = replace(suspect, is_alone=False)
            return await guarded(consumer, database, beside, handle, _waited)
    async with TURNS.alone():
        return await guarded(consumer, database, suspect, handle, _waited)


def _delivered(outcome: Outcome) -> Clear:
    # A message that waits for its retry may be tried by another worker already: keep its note.
    is_over = isinstance(settlement(outcome), Ack) and not isinstance(outcome, RetryStored)
    return Clear.ALL if is_over else Clear.OWN


def ends_notes(outcome: Outcome) -> bool:
    """Return whether the transaction that ended a waiting message so cleared all its notes.

    After any other outcome another worker may be trying it.
    """
    return isinstance(outcome, Handled | DeadLettered)


def _waited(outcome: Outcome) -> Clear:
    return Clear.CLEARED if ends_notes(outcome) else Clear.OWN


def _message(
    consumer: Consumer,
    message: Message,
    deaths: int,
    tell: Callable[[Outcome], None] = lambda outcome: None,
    *,
    from_waiting: bool = False,
) -> Suspect:
    """Return a message as a suspect, whose claim says whether it runs."""
    runs = partial(_runs, consumer, message, from_waiting)
    quarantine = partial(_quarantine, consumer, message, from_waiting)
    return Suspect(message.id, deaths, quarantine, tell, runs)


async def _runs(consumer: Consumer, message: Message, from_waiting: bool, unit: Unit) -> _Runs:
    row = await unit.claims.look_up(consumer.name, message.id)
    no = None if row is None else refusal(row, message.digest, await unit.now())
    if invokes(consumer, no):
        # Its claim stays COMPLETED in every case: only the dead letter shows that it kills.
        letter = await unit.dead_letters.get(consumer.name, message.id)
        killed = letter is not None and letter.error_code == CRASHED
        return _Runs.QUARANTINED if killed else _Runs.AGAIN
    if row is not None and row.state in (TERMINAL if from_waiting else CLOSED):
        return _Runs.DONE if row.state is ClaimState.COMPLETED else _Runs.OVER
    if isinstance(no, HeldElsewhere):
        return _Runs.NOT
    return _Runs.YES if no is None or from_waiting else _Runs.NOT


async def _quarantine(
    consumer: Consumer, message: Message, from_waiting: bool, unit: Unit, runs: _Runs
) -> Outcome:
    if runs is _Runs.QUARANTINED:
        over = Refused(f"dead letter ({CRASHED})")
        if from_waiting:
            await leave_waiting(unit, consumer.name, Ended(message.id, message.source, over))
        return over
    limit = consumer.settings.poison_attempts
    reason = f"the process died {limit} times while it handled this message alone"
    failure = Classified(FailureClass.POISON, CRASHED, reason, "")
    attempt = Attempt(consumer, message.tried(limit), from_waiting=from_waiting)
    if runs is _Runs.AGAIN:
        # Its effect is durable, so there is nothing to park; but what it sends may be lost.
        attempt.message = attempt.message.repeated()
        return await attempt.write_failure(unit, failure)
    # Another owner may have leased it since its claim was read.
    attempt.fence = await fence_to_park(unit, consumer, ClaimRequest.of(message))
    return await attempt.park(unit, failure)
