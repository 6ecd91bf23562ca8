"""After a crash: find the message that kills its process, and quarantine it.

Who may run in this process: all of its work at once, or one suspect alone.

A process dies with everything that runs in it, so a death says something about
one message only if nothing else ran.  Runners, retry workers and inbox workers
of a process share its turns, on whatever event loops and threads they run.

Notes of tries: which worker wrote one, and whether its process can still outlive that.

    written ─▶ the writer runs: says nothing ─▶ taken back, or inherited when it is old
       └─▶ the writer is gone: not outlived, the message is a suspect

A writer that runs is at the message now, or could not take its note back; a worker
owes that, whoever handles the message meanwhile, and pays when the database answers.

After an unclean stop: which records are handled one at a time, and for how long.

A process that dies cannot say which message killed it.  Its row says which
partitions it worked on and how many records it had; whoever gets such a
partition handles that many records alone (`semel.messaging.receive.crash`).  In
normal operation this costs one small transaction per start.

One message that may kill its process: its try is written first, and the killer put aside.

    note the try ─▶ commit ─▶ read ─▶ handle ─▶ take the note back
       └─ not outlived too often ─▶ parked; a dead letter where reading it kills

While it is tried alone, nothing else runs in the process (`semel.messaging.receive.crash`):
a death is its own.  Only a death leaves the note of a try behind, which counts
once its writer is gone (`semel.messaging.receive.crash`); an exception, a stop's deadline
and a database that refuses are outlived.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Final

from semel.codec import Unread, Unreadable
from semel.crashpoints import CrashPoint, reach
from semel.errors import Misuse
from semel.events import EVENTS, Metric
from semel.lease import Owner, owner_text, this_process
from semel.message import Coordinates, Message, Partition, Record
from semel.messaging.consumer import Consumer, invokes, unread
from semel.messaging.database import Database, Unit
from semel.messaging.failed.attempt_failed import (
    fence_to_park,
    leave_the_room,
    write_unreadable,
)
from semel.messaging.failure import Classified, FailureClass
from semel.messaging.handle.attempt import Attempt
from semel.messaging.handle.claims import (
    TERMINAL,
    ClaimRequest,
    ClaimRow,
    ClaimState,
    HeldElsewhere,
    refusal,
)
from semel.messaging.outcome import Ack, Outcome, Refused, settlement
from semel.messaging.receive.broker import Subscription
from semel.messaging.records import LEFT_SECONDS, Member, Note, WaitingMessage
from semel.messaging.redact import reason_of

log = logging.getLogger("semel.messaging")


PATIENCE_SECONDS: Final = 30.0
"""How long work waits for a suspect, and a suspect for work: one may need the other to end."""


_TRYING: Final[ContextVar[object | None]] = ContextVar("semel_trying", default=None)
"""The try within which this code runs; the tasks that it begins have it, too."""


class Turns:
    """The turns of one process.

    Work that nobody suspects pays for two entries under a lock, and waits for nothing as long
    as nobody is suspected.
    """

    def __init__(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._patience_seconds = patience_seconds
        self.forget()

    def forget(self) -> None:
        """Begin anew: in a process that was just forked, nothing runs."""
        self._lock = threading.Lock()
        self._running: set[object] = set()
        self._stuck: set[object] = set()
        """What of that no suspect waits for any more."""

        self._suspects = 0
        """How many wait for being alone, or are."""

        self._tried: object | None = None
        """The try of a suspect that is made now."""

        self._lets_pass = False
        """Work that was held back too long runs beside this suspect."""

        self._bells: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def beside_others(self) -> AsyncIterator[None]:
        """Run work that nobody suspects; waits while somebody else is tried alone."""
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
        """Run a suspect while nothing else runs; new work is held back meanwhile.

        Two suspects never run at once.  Work that does not end within the patience is left
        running beside the suspect, and not waited for again.

        Raises:
            Misuse: whoever tries a suspect, or a task that it began, tries another one meanwhile,
                and would wait for itself.
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
        """Wait until a condition, which may take what it finds, holds; False where it is late."""
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
        """Let whoever waits look again."""
        if not self._bells:
            return
        with self._lock:
            bells, self._bells = self._bells, []
        for loop, bell in bells:
            # A loop that was closed has nobody waiting any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_answer, bell)


def _answer(bell: asyncio.Future[None]) -> None:
    if not bell.done():
        bell.set_result(None)


TURNS: Final = Turns()
"""The turns of this process."""


os.register_at_fork(after_in_child=TURNS.forget)


class Writer:
    """One worker of one consumer, which tries one thing after another.

    A process may have several, and one that came too late would take back what another noted.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.owed: set[str] = set()
        """Of which messages it may have left a note that it could not take back yet."""

    async def pay(self, consumer: str, database: Database) -> None:
        """Take back what it owes, if anything; between two tries, or at its end."""
        with noting_as(self):
            await take_back(consumer, database, ())


_WRITER: Final[ContextVar[Writer | None]] = ContextVar("semel_writer", default=None)


@contextmanager
def noting_as(writer: Writer) -> Iterator[None]:
    """Write the notes of the block as those of one worker of this process."""
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
    """Note that a message is about to be tried; return how many tries count, with this one.

    More than one makes it a suspect: so many less one were not outlived.
    """
    me = _me()
    before = (await unit.members.note(consumer, [message_id], me)).get(message_id)
    if before is None:
        return 1
    if before.writer == me:
        # This worker has outlived it, and only could not say so.
        return before.tries
    if await _is_gone(unit, consumer, before):
        return await unit.members.suspect(consumer, message_id, me)
    await _inherit(unit, consumer, message_id, before)
    return 1


async def note_tries(unit: Unit, consumer: str, message_ids: Collection[str]) -> frozenset[str]:
    """Note one try of each of several messages, together; return those that are suspects.

    What was noted before stays as it is: a suspect is to be tried alone.
    """
    me = _me()
    before = await unit.members.note(consumer, message_ids, me)
    suspects = set()
    for message_id, note in before.items():
        is_mine = note.writer == me
        if note.tries > 1 if is_mine else await _is_gone(unit, consumer, note):
            suspects.add(message_id)
        elif not is_mine:
            await _inherit(unit, consumer, message_id, note)
    return frozenset(suspects)


async def _inherit(unit: Unit, consumer: str, message_id: str, note: Note) -> None:
    """Write one's own note for an old one of a process that runs, and could not take it back.

    A message that its writer is at is locked or leased, and nobody else gets as far as this.
    """
    if await unit.now() >= note.noted_at + LEFT_SECONDS:
        await unit.members.acquit_many(consumer, [message_id], note.writer)
        await unit.members.note(consumer, [message_id], _me())


async def outlived(unit: Unit, consumer: str, message_ids: Collection[str]) -> None:
    """Take back what this worker noted; what others did is theirs."""
    await unit.members.acquit_many(consumer, message_ids, _me())


@asynccontextmanager
async def outliving(
    consumer: str, database: Database, message_ids: Collection[str]
) -> AsyncIterator[None]:
    """Take back what was noted of messages however the block ends, unless the process does.

    A database that refuses or a stop's deadline is no death.
    """
    async with unless_begun(consumer, database, message_ids):
        yield
    await take_back(consumer, database, message_ids)


@asynccontextmanager
async def unless_begun(
    consumer: str, database: Database, message_ids: Collection[str]
) -> AsyncIterator[None]:
    """Take back what was noted of messages if the block raises: nothing is tried then.

    Around the transaction that notes it, too: a commit whose answer was lost leaves the note.
    """
    try:
        yield
    except (Exception, asyncio.CancelledError):
        await take_back(consumer, database, message_ids)
        raise


async def take_back(
    consumer: str, database: Database, message_ids: Collection[str], *, whoever: bool = False
) -> None:
    """Do what `outlived` does in a transaction of its own, if the database answers.

    Where it does not, a note stays that says nothing while this process runs.  A worker owes
    it, and takes it back with the next ones, whatever they are.  *whoever* wrote them: for
    messages that are over.
    """
    writer = _WRITER.get()
    owed = set[str]() if writer is None else writer.owed
    owed.update(message_ids)
    if not owed:
        return
    now = frozenset(owed)
    try:
        async with database.begin() as unit:
            await outlived(unit, consumer, now)
            for message_id in message_ids if whoever else ():
                await unit.members.acquit(consumer, message_id)
    except Exception as error:  # noqa: BLE001  what became of the messages matters more
        why = {"consumer": consumer, "reason": reason_of(error)}
        log.warning("a note of tries stays", extra=why)
    else:
        owed -= now


async def is_noted_by_another(unit: Unit, consumer: str, message_id: str) -> bool:
    """Tell whether the note of a message is that of another worker."""
    note = (await unit.members.notes(consumer, [message_id])).get(message_id)
    return note is not None and note.writer != _me()


async def forget_note(unit: Unit, consumer: str, message_id: str) -> None:
    """Take back what was noted of a message that is over, unless its writer is still at it."""
    note = (await unit.members.notes(consumer, [message_id])).get(message_id)
    if note is None:
        return
    if note.writer == _me() or await _is_gone(unit, consumer, note):
        await unit.members.acquit_many(consumer, [message_id], note.writer)


def is_gone(member: Member) -> bool:
    """Tell whether a member's process surely runs no more; one that runs writes its row again."""
    owner = Owner.read(member.owner)
    return owner is not None and owner.is_gone()


async def _is_gone(unit: Unit, consumer: str, note: Note) -> bool:
    """Tell whether the writer of a note runs no more, as far as anybody can know."""
    owner = Owner.read(note.writer)
    if owner is not None and owner.is_gone():
        return True
    if owner is not None and owner.is_running():
        return False
    if await unit.now() < note.noted_at + LEFT_SECONDS:
        return False
    for member in await unit.members.running(consumer):
        known = Owner.read(member.owner)
        if known is not None and owner is not None and owner_text(known) == owner_text(owner):
            return False
    return True


class Membership:
    """This process's row, and the partitions on which it is careful."""

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
        self._suspects: dict[Partition, _Suspects] = {}

    async def work_on(self, partitions: frozenset[Partition]) -> None:
        """Write which partitions this process works on, before it handles anything of them.

        Returns at once where nothing changed.
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
        """Take partitions off the row that nothing is in flight of any more."""
        left = self._entered - frozenset(partitions)
        if left != self._entered:
            await self._enter(left)
            self._entered = left
        for partition in partitions:
            self._suspects.pop(partition, None)

    async def renew(self) -> None:
        """Make the row last."""
        if self._entered:
            await self._enter(self._entered)

    async def _enter(self, partitions: frozenset[Partition]) -> None:
        member = Member(
            self._consumer.name,
            self._owner.instance,
            json.dumps(self._owner.to_json()),
            partitions,
            self._in_flight,
        )
        async with self._database.begin() as unit:
            if partitions:
                await unit.members.enter(member, self._seconds)
                await unit.members.forget_expired(member.consumer)
            else:
                # Nothing can be in flight: a row would only be left behind.
                await unit.members.leave(member.consumer, member.name)
        reach(CrashPoint.MEMBER_ENTER_AFTER, self._consumer.name)

    async def _look_for_crashes(self, partitions: frozenset[Partition]) -> None:
        if not partitions:
            return
        async with self._database.begin() as unit:
            others = await unit.members.others(
                self._consumer.name, self._owner.instance, partitions
            )
        for partition in partitions:
            accused = [other for other in others if partition in other.partitions]
            if accused:
                await self._suspect(partition, accused)

    async def _suspect(self, partition: Partition, others: Sequence[Member]) -> None:
        """Be careful with whatever others may have had of a partition."""
        at_most = max(other.in_flight for other in others)
        start = await self._subscription.committed(partition)
        # What came behind this was never delivered to any of them.
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
        """Tell whether a record is handled alone; the first one that is not ends it."""
        suspects = self._suspects.get(at.place)
        if suspects is None:
            return False
        if at.offset >= suspects.end:
            await self._clear(at.place)
            return False
        return True

    async def outlived(self, at: Coordinates) -> None:
        """Count a record that was handled alone; the last one clears the other process's row."""
        suspects = self._suspects.get(at.place)
        if suspects is None:
            return
        suspects.left -= 1
        if suspects.left <= 0 or at.offset + 1 >= suspects.end:
            await self._clear(at.place)

    async def _clear(self, partition: Partition) -> None:
        """Work on a partition as usual again: nothing that was in flight is left."""
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
    """What may have killed a process, in one partition."""

    left: int
    """How many records it may have had that were not handled alone yet."""

    end: int
    """Behind the last record that it can have had."""

    of: Sequence[Member]
    """Whose rows name the partition."""


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
            EVENTS.measure(Metric.POISON, record.at.topic, "")
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
    message = suspect.message.tried(limit)
    attempt = Attempt(consumer, message, from_waiting=suspect.waiting is not None)
    if runs is _Runs.AGAIN:
        # Its effect is durable, so there is nothing to park; what it sends may be lost.
        attempt.message = message.repeated()
        return await attempt.write_failure(unit, failure)
    # It may have been leased since it was looked at.
    attempt.fence = await fence_to_park(unit, consumer, ClaimRequest.of(message))
    return await attempt.park(unit, failure)


def _log_poison(consumer: Consumer, id: str) -> None:
    log.error("poison message put aside", extra={"consumer": consumer.name, "id": id})
