"""One message of a replay: where it is now, whether it may be handled, and what became of it.

    COMPLETED            a duplicate: nothing is done
    waiting              released if it is parked, and tried if nothing is before it
    a dead letter        removed, and its claim taken again
    due in an inbox      left to the inbox's worker
    only in the broker   handled like any delivery

The engine handles it, under its own id: its claim decides, as with every delivery.  One
transaction takes the message from its place, handles it, and says so: in the mark of its
offset, in the replay's cursor and in the audit trail.

    begin ─▶ take it ─▶ claim, handle ─▶ mark, cursor, audit ─▶ commit
                           │
                           └─ fails ─▶ roll back
    begin ─▶ send it back ─▶ failed attempt ─▶ cursor, audit ─▶ commit

The audit trail says that it was sent back in both cases, because the loop guard counts it.  A
handler that kills the process leaves nothing of these transactions, so its try is noted and
committed before (`Replayer.look`): a message that kills too often is refused.

A lease takes more than one transaction.  So a message of a leased consumer is sent back first,
into the waiting table, and handled from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, TypeAlias, assert_never

from semel.clock import SYSTEM_CLOCK
from semel.codec import Unreadable, unreadable_id
from semel.crashpoints import CrashPoint, reach
from semel.errors import Fenced, InDoubt, Retryable
from semel.lease import Owner
from semel.message import Message
from semel.messaging.database import TransactionEnded
from semel.messaging.failure import Classified
from semel.messaging.handle.attempt import Attempt, handle_unreadable
from semel.messaging.handle.claims import (
    REPLACED,
    Claimed,
    ClaimFound,
    ClaimRequest,
    ClaimState,
    found_of,
)
from semel.messaging.handle.lease import handle_leased
from semel.messaging.handler import Consumer, holds_key, message_of
from semel.messaging.outcome import (
    MEANING,
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
    alert,
    tell,
)
from semel.messaging.receive.crash import clear_own_notes, note_try, unless_begun
from semel.messaging.receive.offsets import Ended, mark_ends
from semel.messaging.records import DeadLetter, InboxMessage, WaitingMessage, Waits
from semel.messaging.redact import ERASED_REASON
from semel.messaging.settings import DAY_SECONDS, Order, ReplayRules
from semel.operate.audit import (
    NoSuchMessage,
    NotPossible,
    acting,
    complete_without_effect,
    need_letter,
    need_not_handled,
    need_not_too_often,
    need_review,
    remove_letter,
)
from semel.operate.deadletters import move_to_waiting, need_own_id
from semel.operate.parking import release_parked
from semel.operate.selection import SelectedMessage
from semel.operate.stores import Act, OperatorDatabase, OperatorUnit
from semel.policy.vocabulary import Duplicates, Mode, RetryMode


class ReplayInterrupted(Retryable):
    """A message could not be tried: the database does not answer, or a lock is held."""

    def __init__(self, consumer: str, message_id: str, why: str) -> None:
        super().__init__(consumer, message_id, why)
        self.consumer = consumer
        self.message_id = message_id
        self.why = why

    def __str__(self) -> str:
        return (
            f"consumer {self.consumer}: message {self.message_id!r} could not be tried "
            f"({self.why}); run the replay again, and it goes on with it"
        )


class ReplayResult(StrEnum):
    """What became of one message of a replay."""

    HANDLED = "handled"
    DUPLICATE = "duplicate"
    """It was handled before, or has an old version: nothing was done."""

    FAILED = "failed"
    """Its handler failed; it waits, or is parked or dead, as after any delivery."""

    REFUSED = "refused"
    """It must not be replayed: a person has to look at it."""

    LEFT = "left"
    """It waits behind another message or for its time, or another worker has it."""

    SENT = "sent"
    """It is due for the pipeline that runs the consumer, and is handled there."""

    MISSING = "missing"
    """Its payload is in no table any more."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """A message of a replay, and what became of it."""

    message_id: str
    result: ReplayResult
    why: str = ""
    code: str = ""
    """Of a failure; the audit trail keeps it instead of *why*, which may quote the message."""


def replayed(message_id: str, outcome: Outcome) -> Replayed:
    """Say what an outcome of the engine is in a replay."""
    result = ReplayResult(MEANING[type(outcome)].replay)
    match outcome:
        case Handled():
            return Replayed(message_id, result)
        case Skipped(why):
            return Replayed(message_id, result, "" if why == "duplicate" else why)
        case Refused(why):
            return Replayed(message_id, result, why)
        case Conflicted():
            return Replayed(message_id, result, "its id is known with another payload")
        case RetryLater() | RetryStored() | ParkedAway() | DeadLettered():
            if outcome.failure is None:
                why = "it waits for its turn, or another worker has it"
                return Replayed(message_id, ReplayResult.LEFT, why)
            code = outcome.failure.code
            return Replayed(message_id, result, f"{code}: {outcome.failure.reason}", code)
        case _ as never:
            assert_never(never)


NOWHERE: Final = "its payload is in no table any more"

Found: TypeAlias = WaitingMessage | InboxMessage | DeadLetter | Message | Unreadable
"""A message of a replay, from the table that has it, or from the broker."""


async def find_message(unit: OperatorUnit, consumer: str, item: SelectedMessage) -> Found | None:
    """Return the message from its place."""
    return (
        await unit.waiting.get(consumer, item.message_id)
        or await unit.dead_letters.get(consumer, item.message_id)
        or await unit.inbox.get(consumer, item.message_id)
        or item.arrival
    )


def read_message(consumer: Consumer, found: Found | None) -> Message | str:
    """Return the message that would be handled, or why there is none."""
    message: Message | Unreadable
    match found:
        case None:
            return NOWHERE
        case Message() | Unreadable():
            message = found
        case _ if found.erased_at is not None:
            return ERASED_REASON
        case _:
            message = message_of(consumer, found)
    if isinstance(message, Unreadable):
        return f"it cannot be read: {message.reason}"
    return message


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How one message is replayed: by whom, why, and what limits it."""

    actor: str
    reason: str
    most_replays: int
    """The loop guard: how often a message may be sent back, by replays and by hand together."""

    rules: ReplayRules = field(default_factory=ReplayRules)
    """Which topics' messages may be replayed, and how old those without a claim may be."""


class _NotTried(Exception):
    """Rolls back a transaction in which a message turned out not to be one to try now."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


_WriteOutcome: TypeAlias = Callable[[OperatorUnit, Outcome], Awaitable[None]]
"""Writes what became of a message, in the open transaction that ends it."""


@dataclass
class _Way:
    """How a message comes from its place to its handler, in an open transaction."""

    attempt: Attempt
    options: ReplayOptions
    write: _WriteOutcome
    acts: list[Act] = field(default_factory=list, init=False)
    """What was done in this transaction, for the audit trail.

    Written last: an entry locks the trail until the commit, and a handler may take long."""

    def __post_init__(self) -> None:
        self.name, self.message_id = self.attempt.consumer.name, self.attempt.message.id

    async def send_back(self, unit: OperatorUnit) -> WaitingMessage | None:
        """Put it where it can be handled; return its row if that is in the waiting table.

        Raises:
            NotPossible, NoSuchMessage: a person has to look at it, or another one has taken it.
        """
        return None

    async def handle(self, unit: OperatorUnit) -> Outcome:
        """Take the message from its place, and handle it.

        Raises:
            NotPossible, NoSuchMessage: as `send_back`.
            _NotTried: it cannot be claimed now.
        """
        await self.send_back(unit)
        return await self.attempt.run(unit)

    async def fail(self, unit: OperatorUnit, failure: Classified) -> Outcome:
        """Write the failure of a message whose transaction was rolled back."""
        await self.lock_key(unit)
        await self.send_back(unit)
        return await self.attempt.write_failure(unit, failure)

    async def end(self, unit: OperatorUnit, outcome: Outcome) -> Outcome:
        """Write what the engine does not write about the end of the message."""
        return outcome

    async def audit(self, unit: OperatorUnit) -> None:
        """Write the acts of this transaction into the audit trail."""
        for act in self.acts:
            await unit.audit.append(act)

    async def lock_key(self, unit: OperatorUnit) -> None:
        """Lock the key before any row of the message, as all workers do."""
        message = self.attempt.message
        if holds_key(self.attempt.consumer, message):
            await unit.waiting.hold(self.name, [message.key or ""])

    async def need_not_too_often(self, unit: OperatorUnit) -> int:
        """Return how often it was sent back, or raise NotPossible."""
        most = self.options.most_replays
        return await need_not_too_often(unit, self.name, self.message_id, most)

    def did(self, act: str, message_id: str, **details: object) -> None:
        """Note an act for the audit trail."""
        options = self.options
        done = Act(options.actor, act, self.name, message_id, options.reason, details)
        self.acts.append(done)


@dataclass
class _FromLetter(_Way):
    """A dead letter: handled where it is, and sent back only if that fails, or for a lease."""

    letter: DeadLetter

    async def handle(self, unit: OperatorUnit) -> Outcome:
        attempt, letter = self.attempt, self.letter
        await self.lock_key(unit)
        await self._need(unit, letter)
        await need_review(unit, letter)
        await remove_letter(unit, self.name, self.message_id)
        await unit.claims.reopen(self.name, self.message_id)
        answer = await unit.claims.try_claim(self.name, ClaimRequest.of(attempt.message))
        reach(CrashPoint.CLAIM_AFTER, self.name)
        if not isinstance(answer, Claimed):
            raise _NotTried(await attempt.refuse(unit, answer))
        attempt.message = attempt.message.tried(answer.attempt)
        outcome = await attempt.apply(unit)
        await mark_ends(unit, self.name, [Ended(self.message_id, letter.source, outcome)])
        return outcome

    async def send_back(self, unit: OperatorUnit) -> WaitingMessage | None:
        # Read again, because its payload may have been erased since.
        letter = await need_letter(unit, self.name, self.message_id)
        await self._need(unit, letter)
        await need_not_handled(unit, self.name, self.message_id)
        await move_to_waiting(unit, letter, Waits.RETRY)
        await unit.claims.reopen(self.name, self.message_id)
        return await unit.waiting.get(self.name, self.message_id)

    async def _need(self, unit: OperatorUnit, letter: DeadLetter) -> None:
        need_own_id(letter)
        retry = await self.need_not_too_often(unit) + 1
        self.did("dlq.retry", self.message_id, retry=retry, error_code=letter.error_code)


@dataclass
class _FromWaiting(_Way):
    """A message of the waiting table, which the engine removes."""

    waiting: WaitingMessage

    async def send_back(self, unit: OperatorUnit) -> WaitingMessage | None:
        if self.waiting.waits is Waits.PARKED:
            await self.lock_key(unit)
            await self.need_not_too_often(unit)
            await release_parked(unit, self.waiting)
            self.did("park.release", self.message_id)
        return self.waiting


@dataclass
class _FromBroker(_Way):
    """A record that is in none of our tables, or only as bytes that could not be read.

    If it can be read at last, it is handled under the id that it really has, and the dead
    letter of its bytes is closed.
    """

    letter: DeadLetter | None = field(default=None, init=False)
    """The dead letter of its bytes."""

    async def send_back(self, unit: OperatorUnit) -> WaitingMessage | None:
        source = self.attempt.message.source
        if source is not None:
            self.letter = await unit.dead_letters.get(self.name, unreadable_id(source))
        if self.letter is not None:
            await need_review(unit, self.letter)
        return None

    async def handle(self, unit: OperatorUnit) -> Outcome:
        return await self.end(unit, await super().handle(unit))

    async def fail(self, unit: OperatorUnit, failure: Classified) -> Outcome:
        return await self.end(unit, await super().fail(unit, failure))

    async def end(self, unit: OperatorUnit, outcome: Outcome) -> Outcome:
        """Mark the offset, which no delivery marks, and close the dead letter of the bytes."""
        name, letter = self.name, self.letter
        ended = Ended(self.message_id, self.attempt.message.source, outcome)
        if letter is None:
            # A record that was refused may be a loss, and stays one.
            if isinstance(outcome, Handled | Skipped):
                await mark_ends(unit, name, [ended])
            return outcome
        is_left = replayed(self.message_id, outcome).result is ReplayResult.LEFT
        if not is_left and await unit.dead_letters.remove(name, letter.message_id):
            await complete_without_effect(unit, name, letter.message_id, REPLACED)
            await mark_ends(unit, name, [ended])
            self.did("dlq.read", letter.message_id, read_as=self.message_id)
        return outcome


WriteResult: TypeAlias = Callable[[OperatorUnit, Replayed], Awaitable[None]]
"""Writes what became of a message of a replay, in the open transaction that ends it."""

Handle: TypeAlias = Callable[[Message, WaitingMessage | None], Awaitable[Outcome]]
"""How a consumer's messages are handled, where that is not in one transaction."""

# How often a replay looks what a pipeline made of a message.
PAUSE_SECONDS: Final = 0.2

# After this many tries, the transaction that holds the lock will not end soon.
TRIES: Final = 3


def replaying(consumer: Consumer) -> Consumer:
    """Return the consumer as a replay runs it.

    Duplicates are skipped even where deliveries invoke the handler, and what fails waits in
    the retry table: no broker will deliver it again.  So no partition is held back; a
    key is held, even if deliveries of the consumer do not hold it.
    """
    settings = consumer.settings
    by_partition = settings.order is Order.PARTITION
    replayed = replace(
        settings,
        duplicates=Duplicates.SKIP,
        retry=replace(settings.retry, mode=RetryMode.RETRY_TABLE),
        order=Order.NONE if by_partition else settings.order,
        holds_keys=None if by_partition or not settings.holds_keys else True,
    )
    return consumer.with_settings(replayed)


class Replayer:
    """Handles the messages of a replay, each in one transaction, or under a lease."""

    def __init__(
        self,
        consumer: Consumer,
        database: OperatorDatabase,
        options: ReplayOptions,
        handle: Handle | None = None,
    ) -> None:
        self.consumer = replaying(consumer)
        self.database = database
        self.options = options
        self._handle = handle or (self._leased if consumer.mode is Mode.LEASED else None)
        self._owner = Owner.here().instance
        self._pipeline = ""
        """Which pipeline runs the consumer, if one does."""

    async def find_engine(self, unit: OperatorUnit) -> None:
        """Look whether a pipeline runs the consumer: then messages are sent to it."""
        engine = await unit.members.engine(self.consumer.name)
        self._pipeline = "" if engine is None else engine.pipeline

    async def _leased(self, message: Message, waiting: WaitingMessage | None) -> Outcome:
        return await handle_leased(
            self.consumer, self.database, message, self._owner, waiting=waiting
        )

    async def look(self, unit: OperatorUnit, item: SelectedMessage) -> Found | Replayed:
        """Return the message, if it should be tried, or what it counts as.

        The try is noted.  The caller commits the note before the handler runs: if the handler
        kills the process, only the note is left of it.
        """
        name, message_id, arrival = self.consumer.name, item.message_id, item.arrival
        claim = await unit.claims.look_up(name, message_id)
        digest = arrival.digest if isinstance(arrival, Message) else ""
        if found_of(claim, digest, 0.0) is ClaimFound.OTHER_PAYLOAD:
            return self._refused(item, "its id is known with another payload")
        if claim is not None and claim.state is ClaimState.COMPLETED:
            return Replayed(message_id, ReplayResult.DUPLICATE)
        found = await find_message(unit, name, item)
        if isinstance(found, InboxMessage) and found.processed_at is not None:
            return Replayed(message_id, ReplayResult.DUPLICATE)
        if isinstance(arrival, Message) and claim is None:
            window = self.options.rules.of(_topic(arrival)).reaches_seconds
            if await unit.now() - arrival.timestamp > window:
                return self._refused(
                    item,
                    f"it is older than the replay window of {window / DAY_SECONDS:g} days and "
                    f"has no claim, so it is unknown whether it was handled",
                )
        # Where the topic is unknown, the strictest of all holds.
        topics = {_topic(one) for one in (found, arrival) if one is not None}
        refusal = self.options.rules.of(*topics).refusal
        if refusal is not None:
            return self._refused(item, refusal)
        match found:
            case None:
                return Replayed(message_id, ReplayResult.MISSING, NOWHERE)
            case InboxMessage() if found.due_at is not None:
                return Replayed(message_id, ReplayResult.LEFT, "the inbox's worker handles it")
            case DeadLetter(outcome=Told.CONFLICT):
                return self._refused(
                    item,
                    "its id is known with another payload: park it and give it a new id, or skip "
                    "it",
                )
            case WaitingMessage() | InboxMessage() | DeadLetter() if found.erased_at is not None:
                return self._refused(item, ERASED_REASON)
            case Unreadable():
                return found
        if self._pipeline:
            return found
        deaths = await note_try(unit, name, message_id) - 1
        # One more than alone: other work may run beside a replay, and have caused a death.
        if deaths <= self.consumer.settings.poison_attempts:
            return found
        # Without the notes, so that another replay can try it after a fix.
        await unit.members.clear_notes(name, [message_id])
        return self._refused(item, f"the process died {deaths} times while it was tried")

    def _refused(self, item: SelectedMessage, why: str) -> Replayed:
        return Replayed(item.message_id, ReplayResult.REFUSED, why)

    async def take(self, item: SelectedMessage, found: Found, write: WriteResult) -> Replayed:
        """Handle a message that `look` found.

        *write* is called in the transaction that ends it.

        Raises:
            ReplayInterrupted: none of the tries could begin.
            InDoubt: it is unknown whether the commit happened; the cursor shows it later.
        """
        name, message_id = self.consumer.name, item.message_id
        if self._pipeline:
            return await self._send_back(item, found, write)

        async def write_result(unit: OperatorUnit, outcome: Outcome) -> None:
            if isinstance(outcome, Handled | Skipped | DeadLettered):
                # It is over: no later attempt clears the notes of other processes.
                await unit.members.clear_notes(name, [message_id])
            else:
                await clear_own_notes(unit, name, [message_id])
            await write(unit, replayed(message_id, outcome))

        try:
            async with unless_begun(name, self.database, [message_id]):
                return replayed(message_id, await self._take(found, write_result))
        except _NotTried as answer:
            done = replayed(message_id, answer.outcome)
        except (NotPossible, NoSuchMessage) as error:
            done = self._refused(item, str(error))
        async with self.database.begin() as unit:
            await write(unit, done)
        return done

    async def _send_back(self, item: SelectedMessage, found: Found, write: WriteResult) -> Replayed:
        """Make a message due, for the pipeline that runs the consumer; handle nothing here."""

        async def write_nothing(unit: OperatorUnit, outcome: Outcome) -> None:
            """The cursor says what became of the message."""

        message = read_message(self.consumer, found)
        if isinstance(message, str):
            done = self._refused(item, "it cannot be read")
        else:
            way = self._way(found, message, write_nothing)
            done = Replayed(item.message_id, ReplayResult.SENT, f"{self._pipeline} handles it")
            try:
                async with acting(self.database) as unit:
                    if isinstance(found, DeadLetter | WaitingMessage):
                        await way.send_back(unit)
                    else:
                        await self._put(unit, way)
                    await write(unit, done)
                    await way.audit(unit)
            except (NotPossible, NoSuchMessage) as error:
                done = self._refused(item, str(error))
            else:
                return done
        async with self.database.begin() as unit:
            await write(unit, done)
        return done

    async def _put(self, unit: OperatorUnit, way: _Way) -> None:
        """Put a record that only its topic has where the pipeline finds what is due.

        Raises:
            NotPossible: it has a claim, or a dead letter: that says what may become of it.
        """
        name, message = self.consumer.name, way.attempt.message
        await way.lock_key(unit)
        claim = await unit.claims.look_up(name, message.id)
        bytes_id = "" if message.source is None else unreadable_id(message.source)
        if claim is not None:
            raise NotPossible(name, message.id, f"its claim is {claim.state}, without a message")
        if bytes_id and await unit.dead_letters.get(name, bytes_id) is not None:
            raise NotPossible(name, message.id, f"its bytes are dead letter {bytes_id!r}: retry it")
        holds = holds_key(self.consumer, message)
        waiting = WaitingMessage.of(name, message, Waits.RETRY, held=holds)
        await unit.waiting.put(replace(waiting, attempts=0))
        way.did("replay.put", message.id, source=str(message.source))

    async def ended(self, message_id: str, timeout: float) -> Replayed | None:
        """Wait for what the pipeline makes of a message that was sent back; None: too long."""
        name, deadline = self.consumer.name, SYSTEM_CLOCK.monotonic() + timeout
        while SYSTEM_CLOCK.monotonic() < deadline:
            async with self.database.begin() as unit:
                claim = await unit.claims.look_up(name, message_id)
                waiting = await unit.waiting.get(name, message_id)
                letter = await unit.dead_letters.get(name, message_id)
            failed = letter or waiting
            if waiting is None and letter is None and claim is not None:
                return Replayed(message_id, ReplayResult.HANDLED)
            if failed is not None and (letter is not None or failed.attempts):
                why = f"{failed.error_code}: {failed.reason}"
                return Replayed(message_id, ReplayResult.FAILED, why, failed.error_code)
            await asyncio.sleep(PAUSE_SECONDS)
        return None

    async def _take(self, found: Found, write: _WriteOutcome) -> Outcome:
        if isinstance(found, Unreadable):
            outcome = await handle_unreadable(self.consumer, self.database, found)
            tell(found, outcome, self.consumer.name)
            async with self.database.begin() as unit:
                await write(unit, outcome)
            return outcome
        message = read_message(self.consumer, found)
        if isinstance(message, str):
            # The replay keeps the reasons of refusals: they must not quote the payload.
            raise _NotTried(Refused("it cannot be read"))
        way = self._way(found, message, write)
        handle = self._handle
        if handle is None:
            return await self._until_begun(way, lambda left: self._once(way, left))
        async with acting(self.database) as unit:
            waiting = await way.send_back(unit)
            await way.audit(unit)
        outcome = await self._until_begun(way, lambda left: handle(message, waiting))
        return await self._ending(way, lambda unit: way.end(unit, outcome))

    def _way(self, found: Found, message: Message, write: _WriteOutcome) -> _Way:
        attempt, options = Attempt(self.consumer, message), self.options
        from_waiting = replace(attempt, from_waiting=True)
        match found:
            case WaitingMessage():
                return _FromWaiting(from_waiting, options, write, found)
            case DeadLetter() if message.id == found.message_id:
                # If it fails, it is sent back to the waiting table.
                return _FromLetter(from_waiting, options, write, found)
            case _:
                return _FromBroker(attempt, options, write)

    async def _until_begun(self, way: _Way, handle: Callable[[int], Awaitable[Outcome]]) -> Outcome:
        """Handle a message; where that could not begin, try again.

        *handle* gets the number of tries that are left.
        """
        message, why = way.attempt.message, ""
        for left in reversed(range(TRIES)):
            began = SYSTEM_CLOCK.monotonic()
            outcome = await handle(left)
            if not isinstance(outcome, RetryLater) or outcome.failure is None or outcome.attempts:
                tell(message, outcome, self.consumer.name, SYSTEM_CLOCK.monotonic() - began)
                return outcome
            why = outcome.failure.reason
            await asyncio.sleep(outcome.seconds)
        raise ReplayInterrupted(self.consumer.name, message.id, why)

    async def _once(self, way: _Way, left: int) -> Outcome:
        """Handle a message in one transaction; if it fails, write that in another one."""
        name = self.consumer.name
        attempt = way.attempt = way.attempt.again()
        try:
            reach(CrashPoint.CLAIM_BEFORE, name)
            outcome = await self._ending(way, way.handle)
            reach(CrashPoint.MESSAGE_COMMIT_AFTER, name)
            alert([outcome])
            return outcome
        except (TransactionEnded, _NotTried):
            raise
        except Exception as error:
            if isinstance(error, NotPossible | NoSuchMessage) and not attempt.began:
                raise
            if attempt.ended and isinstance(error, InDoubt | Fenced):
                raise
            failure = attempt.failure(self.database, error)
            # After the end of the handler, only the cursor and the audit trail can be locked.
            is_locked = attempt.ended and isinstance(error, Retryable)
            if is_locked or attempt.says_nothing(error, failure) or (failure.is_conflict and left):
                return attempt.comes_back(failure)
        reach(CrashPoint.FAILURE_BEFORE, name)
        outcome = await self._ending(way, lambda unit: way.fail(unit, failure))
        reach(CrashPoint.FAILURE_AFTER, name)
        return outcome

    async def _ending(
        self, way: _Way, end: Callable[[OperatorUnit], Awaitable[Outcome]]
    ) -> Outcome:
        """End a message in one transaction, with its notes, the cursor and the audit trail."""
        way.acts.clear()
        async with acting(self.database) as unit:
            outcome = await end(unit)
            way.attempt.ended = True
            # The cursor before the audit trail, as when a person stops the replay: in another
            # order, both could wait for each other.
            await way.write(unit, outcome)
            await way.audit(unit)
            reach(CrashPoint.MESSAGE_COMMIT_BEFORE, self.consumer.name)
        return outcome


def _topic(found: Found) -> str:
    match found:
        case Unreadable():
            return found.record.at.topic
        case Message():
            return "" if found.source is None else found.source.topic
        case _:
            return found.topic
