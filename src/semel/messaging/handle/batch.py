"""Many messages in one transaction, with the final state of one transaction per message.

    claim all, sorted, in one statement
    handle in chunks, a savepoint each ──▶ a chunk failed? undo it, find the failing message
    commit                             ──▶ the commit failed? one transaction per message

After a failure the handlers of a chunk are called again: effects outside the database repeat.

    consume_many    deliveries: a savepoint for a chunk
    all_or_nothing  deliveries of a batch that may not be split (`BatchPolicy.FAIL_BATCH`)
    drain           waiting messages: a savepoint each, because most have failed before
    consume_each    one transaction per message: the others must reach the same final state
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from semel.clock import SYSTEM_CLOCK
from semel.crashpoints import CrashPoint, reach
from semel.errors import Fenced, InDoubt
from semel.message import Message, producer_id
from semel.messaging.database import Database, TransactionEnded, Unit
from semel.messaging.failed.waiting import is_next, leave_waiting
from semel.messaging.failure import Classified
from semel.messaging.handle.attempt import (
    Attempt,
    classify,
    ends_waiting,
    handle_message,
    handling,
    in_time,
)
from semel.messaging.handle.claims import ClaimAnswer, Claimed, ClaimRequest, ClaimState, source_of
from semel.messaging.handler import Consumer, holds_key
from semel.messaging.outcome import (
    Handled,
    Nack,
    Outcome,
    ParkedAway,
    RetryLater,
    RetryStored,
    alert,
    settlement,
)
from semel.messaging.receive.crash import clear_own_notes
from semel.messaging.receive.offsets import Ended, FetchMarks
from semel.messaging.records import Waits
from semel.messaging.redact import reason_of
from semel.messaging.settings import Order
from semel.policy.vocabulary import BatchPolicy, Duplicates

log = logging.getLogger("semel.messaging")


NOT_ATTEMPTED = RetryLater(0.0)
"""The outcome of a message that was not tried: an earlier message comes back."""


async def consume_each(
    consumer: Consumer, database: Database, messages: Sequence[Message]
) -> list[Outcome]:
    """Handle deliveries in one transaction each, in order; the model of `consume_many`."""
    blocked = Blocked(consumer)
    outcomes: list[Outcome] = []
    for message in messages:
        if blocked.stands_before(message):
            outcomes.append(NOT_ATTEMPTED)
            continue
        outcome = await handle_message(consumer, database, message)
        blocked.note(message, outcome)
        outcomes.append(outcome)
    return outcomes


def blocks_key(consumer: Consumer, message: Message, outcome: Outcome) -> bool:
    """Return whether the message entered the waiting table and holds its key there."""
    return isinstance(outcome, RetryStored | ParkedAway) and holds_key(consumer, message)


@dataclass(slots=True)
class Blocked:
    """Which messages must not be handled, because an earlier one comes back or waits."""

    consumer: Consumer
    _all: bool = False
    _where: set[tuple[object, object]] = field(default_factory=set)
    _held: set[str | None] = field(default_factory=set)

    @property
    def anything(self) -> bool:
        """True if any message is blocked."""
        return self._all or bool(self._where or self._held)

    def note(self, message: Message, outcome: Outcome) -> None:
        """Record the outcome of a message."""
        if blocks_key(self.consumer, message, outcome):
            self._held.add(message.key)
        if not isinstance(settlement(outcome), Nack):
            return
        stops = self.consumer.settings.batch in (BatchPolicy.STOP, BatchPolicy.FAIL_BATCH)
        # In an outage the rest of the batch is not tried.
        self._all = self._all or stops or self.consumer.circuit.is_open
        self._where.add(self._lane(message))

    def stands_before(self, message: Message) -> bool:
        """Return whether *message* must wait for an earlier one that comes back."""
        return self._all or self._lane(message) in self._where

    def holds(self, message: Message) -> bool:
        """Return whether an earlier message of its key entered the waiting table."""
        return message.key in self._held and holds_key(self.consumer, message)

    def _lane(self, message: Message) -> tuple[object, object]:
        place = message.source.place if message.source else None
        match self.consumer.settings.order:
            case Order.PARTITION:
                return place, None
            case Order.KEY if message.key is not None:
                return place, message.key
            case _:
                return place, message.id


async def all_or_nothing(
    consumer: Consumer,
    database: Database,
    messages: Sequence[Message],
    marks: FetchMarks | None = None,
) -> list[Outcome]:
    """Commit the whole batch or nothing; a message that is given up leaves the batch first.

        all in one transaction ──▶ kept
                │
                ├─ a message fails ──▶ nothing is kept, its attempt counts, all come back
                │                      given up? it leaves the batch, and the rest begins again
                └─ the commit fails ─▶ one transaction per message finds the failing one

    A failed commit does not show which message caused it, and would fail again without limit.
    So the batch continues with one transaction per message, up to the first that comes back.

    Raises:
        TransactionEnded: a handler committed past every guard; nothing may be acknowledged.
    """
    outcomes: dict[int, Outcome] = {}
    while True:
        left = [i for i in range(len(messages)) if i not in outcomes]
        rest = [messages[i] for i in left]
        try:
            # If a message left the batch, another transaction wrote its outcome, and the marks
            # of the fetch are not written here.
            within = marks if len(rest) == len(messages) else None
            found = await _kept_whole(consumer, database, rest, within)
        except _Failed as failed:
            outcome = failed.outcome or await _counted(database, failed)
            outcomes[left[failed.index]] = outcome
            if not isinstance(settlement(outcome), Nack):
                continue
            # Only the failed message counts an attempt; the others come back with it.
            found = [_comes_along(outcome)] * len(left)
            found[failed.index] = outcome
        except TransactionEnded:
            raise
        except (InDoubt, Fenced) as error:
            # The commit may have succeeded: the claims of the next deliveries show it.
            failure = classify(consumer, database, error)
            found = [RetryLater(consumer.settings.held_retry_seconds, failure)] * len(left)
        except Exception as error:  # noqa: BLE001  one transaction per message finds the cause
            _falls_back("batch is not kept whole", consumer, database, error)
            found = await consume_each(consumer, database, rest)
        outcomes.update(zip(left, found, strict=True))
        return [outcomes[i] for i in range(len(messages))]


def _comes_along(outcome: Outcome) -> Outcome:
    return RetryLater(outcome.seconds) if isinstance(outcome, RetryLater) else outcome


class _Failed(Exception):
    """A message of the batch failed, so the batch failed."""

    def __init__(self, index: int, attempt: Attempt, outcome: Outcome | None) -> None:
        super().__init__(index)
        self.index = index
        self.attempt = attempt
        self.outcome = outcome
        """Its outcome, if it did not fail but comes back."""


async def _counted(database: Database, failed: _Failed) -> Outcome:
    """Write the failure of the message that failed, as if it had been alone."""
    error, attempt = failed.__cause__ or failed, failed.attempt
    failure = attempt.failure(database, error)
    if attempt.says_nothing(error, failure):
        return attempt.comes_back(failure)
    return await attempt.fail(database, failure)


async def _kept_whole(
    consumer: Consumer,
    database: Database,
    messages: Sequence[Message],
    marks: FetchMarks | None,
) -> list[Outcome]:
    """Run the whole transaction, again after a deadlock or a serialization failure."""
    if consumer.takes_batches:
        try:
            return await _in_one_call(consumer, database, messages, marks)
        except (TransactionEnded, InDoubt, Fenced):
            raise
        except Exception as error:  # noqa: BLE001  batches of one find the message
            _falls_back("batch is split", consumer, database, error)
    for left in reversed(range(consumer.settings.conflict_tries)):
        try:
            return await _in_order(consumer, database, messages, marks, runs_again=left > 0)
        except Exception as error:
            cause = error.__cause__ if isinstance(error, _Failed) else error
            is_conflict = cause and classify(consumer, database, cause).is_conflict
            if not (left and is_conflict):
                raise
    raise AssertionError("the last try returns or raises")


def _stands_behind(consumer: Consumer, before: Sequence[Message], message: Message) -> bool:
    """Return whether earlier messages of its key are in the batch: they must not wait behind it."""
    return holds_key(consumer, message) and any(one.key == message.key for one in before)


async def _given_up(unit: Unit, failed: _Failed, failure: Classified, error: Exception) -> Outcome:
    """Write a failure within the batch's transaction, unless the message comes back."""
    attempt = failed.attempt
    if attempt.says_nothing(error, failure):
        raise failed from error
    try:
        outcome = await attempt.write_failure(unit, failure)
    except Exception as second:  # noqa: BLE001  the failure itself must not be lost
        extra = {"id": attempt.message.id, "why": reason_of(second)}
        log.info("failure is written alone", extra=extra)
        raise failed from error
    if isinstance(outcome, RetryLater):
        raise failed from error
    return outcome


async def _in_order(
    consumer: Consumer,
    database: Database,
    messages: Sequence[Message],
    marks: FetchMarks | None,
    *,
    runs_again: bool,
) -> list[Outcome]:
    """Handle one message after the other in one transaction; the first that fails ends it."""
    outcomes: list[Outcome] = []
    async with _transaction(consumer, database, outcomes, marks) as unit:
        for index, message in enumerate(messages):
            attempt = Attempt(consumer, message)
            try:
                async with unit.savepoint():
                    outcome = await attempt.run(unit)
            except TransactionEnded:
                raise
            except Exception as error:
                failed = _Failed(index, attempt, None)
                if not _stands_behind(consumer, messages[:index], message):
                    raise failed from error
                failure = attempt.failure(database, error)
                if runs_again and failure.is_conflict:
                    raise failed from error
                outcome = await _given_up(unit, failed, failure, error)
            if isinstance(settlement(outcome), Nack):
                raise _Failed(index, attempt, outcome)
            outcomes.append(outcome)
    return outcomes


@asynccontextmanager
async def _transaction(
    consumer: Consumer,
    database: Database,
    outcomes: Collection[Outcome],
    marks: FetchMarks | None = None,
) -> AsyncIterator[Unit]:
    """Open the transaction of a batch; the block adds the *outcomes* of its messages.

    At the end it writes the marks of their offsets, so they are durable with the effects.
    """
    async with database.begin() as unit:
        yield unit
        if marks is not None:
            await marks.write(unit, [*outcomes])
        reach(CrashPoint.MESSAGE_COMMIT_BEFORE, consumer.name)
    alert(outcomes)
    reach(CrashPoint.MESSAGE_COMMIT_AFTER, consumer.name)
    if marks is not None:
        marks.are_durable()


async def consume_many(
    consumer: Consumer,
    database: Database,
    messages: Sequence[Message],
    marks: FetchMarks | None = None,
) -> list[Outcome]:
    """Handle a batch of deliveries; the outcomes in the order of *messages*.

    The final state is that of one transaction per message, in order; a batch that may not be
    split is committed whole or comes back.  If one transaction handles the whole batch, it also
    writes the *marks* of the fetch.

    Raises:
        TransactionEnded: a handler committed past every guard; nothing may be acknowledged.
        Misuse: an id begins like one that semel generates.
    """
    for message in messages:
        producer_id(message.id)
    if consumer.settings.batch is BatchPolicy.FAIL_BATCH:
        return await all_or_nothing(consumer, database, messages, marks)
    try:
        return await _together(consumer, database, messages, marks)
    except TransactionEnded as ended:
        # Do not fall back: claims that it made durable would look like duplicates.
        await _give_back(consumer, database, ended)
        raise
    except Exception as error:  # noqa: BLE001  one transaction per message finds the cause
        _falls_back("batch falls back to one transaction per message", consumer, database, error)
    return await consume_each(consumer, database, messages)


def _falls_back(how: str, consumer: Consumer, database: Database, error: Exception) -> None:
    why = classify(consumer, database, error).reason
    log.info(how, extra={"consumer": consumer.name, "why": why})


async def _together(
    consumer: Consumer,
    database: Database,
    messages: Sequence[Message],
    marks: FetchMarks | None,
) -> list[Outcome]:
    """Handle different messages in one transaction."""
    outcomes: list[Outcome] = []
    async with _transaction(consumer, database, outcomes, marks) as unit:
        reach(CrashPoint.CLAIM_BEFORE, consumer.name)
        attempts = await _claimed(consumer, unit, messages)
        reach(CrashPoint.CLAIM_AFTER, consumer.name)
        batch = _Batch(consumer, database, unit, outcomes)
        try:
            while left := attempts[len(outcomes) :]:
                pace = consumer.pace
                size = len(left) if consumer.takes_batches else pace.size(consumer.settings.chunk)
                await batch.run(left[:size])
        except TransactionEnded as ended:
            if not consumer.takes_batches:
                _note_behind(ended, [(one.delivered, one.answer) for one in attempts])
            raise
    return outcomes


def _note_behind(
    ended: TransactionEnded, batch: Sequence[tuple[Message, ClaimAnswer | None]]
) -> None:
    """Note at the error which messages the batch had claimed and not handled yet."""
    ids = [message.id for message, _ in batch]
    if ended.message_id in ids:
        behind = batch[ids.index(ended.message_id) + 1 :]
        ended.behind = [(one, claim) for one, claim in behind if isinstance(claim, Claimed)]


async def _give_back(consumer: Consumer, database: Database, ended: TransactionEnded) -> None:
    """Undo the claims of messages that were not handled, if a handler's COMMIT has kept them.

    With them the messages would pass for handled when they are delivered again.
    """
    if not ended.behind:
        return
    try:
        async with database.begin() as unit:
            for message, claimed in ended.behind:
                row = await unit.claims.look_up(consumer.name, message.id)
                # After a ROLLBACK the claims are gone, or another delivery has its own.
                is_kept = row is not None and row.state is ClaimState.COMPLETED
                if is_kept and row is not None and row.source == source_of(message):
                    await unit.claims.give_back(consumer.name, message.id, claimed)
    except Exception as error:  # noqa: BLE001  the first error is raised
        log.error(  # noqa: TRY400  a traceback shows the parameters of statements
            "claims without effects could not be given back",
            extra={
                "consumer": consumer.name,
                "ids": [message.id for message, _ in ended.behind],
                "why": reason_of(error),
            },
        )


async def _in_one_call(
    consumer: Consumer,
    database: Database,
    messages: Sequence[Message],
    marks: FetchMarks | None,
) -> list[Outcome]:
    """Handle all messages in one transaction, by one call of a handler that takes batches."""
    ran = _Ran()
    async with _transaction(consumer, database, ran.outcomes, marks) as unit:
        attempts = await _claimed(consumer, unit, messages)
        try:
            async with unit.savepoint():
                await _run(consumer, unit, attempts, ran)
        except TransactionEnded:
            raise
        except Exception as error:
            # An error of the handler, not of the commit: try the messages one by one.
            raise _OneByOne from error
    return ran.outcomes


async def _claimed(consumer: Consumer, unit: Unit, messages: Sequence[Message]) -> list[Attempt]:
    """Claim all messages whose keys are not held, in one statement.

    A message whose key is held, or whose id occurs twice, is claimed when its turn comes.
    """
    keys: list[str] = []
    if consumer.settings.holds_waiting_keys:
        keys = sorted({message.key for message in messages if message.key is not None})
    held = await unit.waiting.hold(consumer.name, keys) if keys else frozenset()
    firsts: dict[str, int] = {}
    for index, message in enumerate(messages):
        firsts.setdefault(message.id, index)
    asked = [index for index in firsts.values() if not held or messages[index].key not in held]
    requests = [ClaimRequest.of(messages[index]) for index in asked]
    answers = await unit.claims.try_claim_many(consumer.name, requests)
    found = dict(zip(asked, answers, strict=True))
    return [Attempt(consumer, message, found.get(i)) for i, message in enumerate(messages)]


class _Batch:
    """The attempts of one transaction, in order."""

    def __init__(
        self, consumer: Consumer, database: Database, unit: Unit, outcomes: list[Outcome]
    ) -> None:
        self.consumer = consumer
        self.database = database
        self.unit = unit
        self.outcomes = outcomes
        self.blocked = Blocked(consumer)

    async def run(self, chunk: Sequence[Attempt]) -> None:
        """Handle a chunk at once; if that fails, handle the failing message alone."""
        if self.blocked.anything and any(map(self._is_blocked, chunk)):
            return await self._one_by_one(chunk)
        ran = _Ran()
        if await self._at_once(chunk, ran):
            return self.consumer.pace.went_well(len(chunk))
        self.consumer.pace.failed()
        done = len(ran.outcomes)
        if self.consumer.takes_batches or done == len(chunk):
            # All handlers ran, and the flush at the end was refused: the cause is unknown.
            return await self._one_by_one(chunk)
        before, culprit = chunk[:done], chunk[done]
        if before and not await self._at_once(before, _Ran()):
            await self._one_by_one(before)
        elif call := ran.failed_call():
            # Alone it would fail in the same way, and the messages before it succeed without it.
            attempt, error = call
            failure = attempt.failure(self.database, error)
            return self._note(
                culprit, await attempt.failed_beside_others(self.unit, error, failure)
            )
        return await self._one_by_one([culprit])

    def _is_blocked(self, attempt: Attempt) -> bool:
        message = attempt.delivered
        return self.blocked.stands_before(message) or self.blocked.holds(message)

    async def _at_once(self, chunk: Sequence[Attempt], ran: _Ran) -> bool:
        """Handle a chunk in one savepoint; False, and nothing done, if that fails."""
        try:
            async with self.unit.savepoint():
                await _run(self.consumer, self.unit, chunk, ran)
        except Exception as error:  # noqa: BLE001  the caller finds the message one by one
            _raise_if_over(self.consumer, self.database, error)
            ran.error = error
            return False
        self.outcomes.extend(ran.outcomes)
        return True

    async def _one_by_one(self, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            self._note(attempt, await self._alone(attempt.again()))

    def _note(self, attempt: Attempt, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.blocked.note(attempt.delivered, outcome)

    async def _alone(self, attempt: Attempt) -> Outcome:
        """Handle one message in a savepoint of its own."""
        message = attempt.delivered
        if self.blocked.stands_before(message):
            await attempt.give_back(self.unit)
            return NOT_ATTEMPTED
        if attempt.is_claimed and self.blocked.holds(message):
            if not await is_next(self.consumer, self.unit, message):
                return await attempt.queue_claimed_up(self.unit)
            attempt.overtakes = True
        return await attempt.beside_others(self.unit, self.database)


@dataclass(slots=True)
class _Ran:
    """How far the messages of one savepoint came."""

    outcomes: list[Outcome] = field(default_factory=list)
    attempt: Attempt | None = None
    """The attempt that has not ended, if the batch claimed its message."""

    error: Exception | None = None

    def failed_call(self) -> tuple[Attempt, Exception] | None:
        """Return the handler call that failed, and its error; None if something else failed."""
        if self.attempt is None or self.error is None or not self.attempt.began:
            return None
        return self.attempt, self.error


async def _run(consumer: Consumer, unit: Unit, chunk: Sequence[Attempt], ran: _Ran) -> None:
    """Act on the answers of the claims, in order."""
    calls = _calls(consumer, chunk) if consumer.takes_batches else {}
    for index, planned in enumerate(chunk):
        if index in calls:
            await _batch_handler(consumer, unit, calls[index])
        if consumer.takes_batches and planned.is_claimed:
            ran.outcomes.append(Handled())
            continue
        attempt = planned.again()
        ran.attempt = attempt if attempt.is_claimed else None
        outcome = await attempt.run(unit)
        ran.attempt = None
        message = planned.delivered
        if isinstance(settlement(outcome), Nack) or blocks_key(consumer, message, outcome):
            # It blocks later messages, which the chunk does not check.
            raise _OneByOne
        ran.outcomes.append(outcome)


def _calls(consumer: Consumer, chunk: Sequence[Attempt]) -> dict[int, list[Message]]:
    """Return before which messages the batch handler is called, and with which messages.

    It is called once, unless other messages are handled in between: invoked duplicates, and
    messages that are claimed on their turn.  Those must not come after a newer message of their
    key, so the batch is split there.
    """
    calls: dict[int, list[Message]] = {}
    begin = 0
    claimed = {attempt.delivered.id for attempt in chunk if attempt.is_claimed}
    for index, attempt in enumerate(chunk):
        message, answer = attempt.delivered, attempt.answer
        if isinstance(answer, Claimed):
            calls.setdefault(begin, []).append(message.tried(answer.attempt))
        elif consumer.settings.duplicates is Duplicates.INVOKE or (
            answer is None and message.id not in claimed
        ):
            begin = index + 1
    return calls


async def _batch_handler(consumer: Consumer, unit: Unit, messages: Sequence[Message]) -> None:
    await unit.begin_message()
    with handling(consumer.name, messages[0], messages):
        call = consumer.invoke(messages, unit.session)
        await in_time(consumer.settings.handler_seconds, call)
    reach(CrashPoint.HANDLE_AFTER, consumer.name)


def _raise_if_over(consumer: Consumer, database: Database, error: Exception) -> None:
    """Raise if the whole transaction must be given up, not only this savepoint.

    Do not raise for a lost connection: it may be another connection of the handler.  If it was
    this one, the next statement fails.
    """
    if isinstance(error, TransactionEnded):
        raise error
    if classify(consumer, database, error).is_conflict:
        raise error


class _OneByOne(Exception):
    """The chunk contains a message that must be handled alone."""


# Well below the lock timeout, because a delivery whose key is locked here waits that long.
TOGETHER_SECONDS: Final = 0.25


async def drain(
    consumer: Consumer,
    database: Database,
    messages: Mapping[str, Message],
    stopping: Callable[[], bool],
) -> AsyncIterator[dict[str, Outcome]]:
    """Handle waiting messages, 1, 2, 4 … in a transaction; yield their outcomes by id.

    Ends early if a transaction was not committed: the caller then handles the rest in one
    transaction each.  Also ends between two transactions when *stopping* returns True.

    Raises:
        TransactionEnded: a handler committed past every guard; no message counts as handled.
    """
    left, size = list(messages), 1
    while left and not stopping():
        began = SYSTEM_CLOCK.monotonic()
        found = await _handle_together(consumer, database, {id: messages[id] for id in left[:size]})
        if not found:
            break
        yield found
        left = left[size:]
        size = 2 * size if SYSTEM_CLOCK.monotonic() < began + TOGETHER_SECONDS else 1


async def _handle_together(
    consumer: Consumer, database: Database, messages: Mapping[str, Message]
) -> dict[str, Outcome]:
    """Handle waiting messages in one transaction; return nothing if it was not committed."""
    drained = _Drain(consumer, database)
    try:
        async with _transaction(consumer, database, drained.outcomes.values()) as unit:
            await drained.run(unit, messages)
    except TransactionEnded as ended:
        await _give_back(consumer, database, ended)
        raise
    except Exception as error:  # noqa: BLE001  one transaction per message finds the cause
        how = "waiting messages fall back to one transaction each"
        _falls_back(how, consumer, database, error)
        return {}
    return drained.outcomes


@dataclass(slots=True)
class _Drain:
    """Handles the waiting messages of one transaction."""

    consumer: Consumer
    database: Database
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    _waits: dict[str, Waits] = field(default_factory=dict)
    _leaving: list[Ended] = field(default_factory=list)

    async def run(self, unit: Unit, messages: Mapping[str, Message]) -> None:
        """Handle the messages that are still due, in their order."""
        name = self.consumer.name
        due = await self._still_due(unit, messages)
        for message in due:
            if self._waits[message.id] is Waits.BEHIND:
                # Its claim is PARKED, too.  Reopening is safe: under the key's lock no other
                # worker can hold the message.
                await unit.claims.reopen(name, message.id)
        reach(CrashPoint.CLAIM_BEFORE, name)
        # Claim all at once, because that sorts them: a redelivered batch may claim the same
        # messages, and another order could deadlock.
        answers = await unit.claims.try_claim_many(name, [ClaimRequest.of(one) for one in due])
        reach(CrashPoint.CLAIM_AFTER, name)
        batch = list(zip(due, answers, strict=True))
        try:
            for message, answer in batch:
                self.outcomes[message.id] = await self._one(unit, message, answer)
        except TransactionEnded as ended:
            _note_behind(ended, batch)
            raise
        # Both in this transaction: a note disappears only if its message is committed.
        await clear_own_notes(unit, name, list(self.outcomes))
        await leave_waiting(unit, name, *self._leaving)

    async def _still_due(self, unit: Unit, messages: Mapping[str, Message]) -> list[Message]:
        """Lock the messages that were not handled, locked or changed since they were read."""
        keys = {m.key or "" for m in messages.values() if holds_key(self.consumer, m)}
        if keys:
            await unit.waiting.hold(self.consumer.name, sorted(keys))
        due = await unit.waiting.take_many(self.consumer.name, messages.keys())
        self._waits = {
            waiting.message_id: waiting.waits
            for waiting in due
            if waiting.payload_hash == messages[waiting.message_id].digest
        }
        for message_id in messages.keys() - self._waits.keys():
            self.outcomes[message_id] = RetryLater(self.consumer.settings.held_retry_seconds)
        return [messages[message_id] for message_id in self._waits]

    async def _one(self, unit: Unit, message: Message, answer: ClaimAnswer) -> Outcome:
        attempt = Attempt(self.consumer, message, answer, from_waiting=True)
        outcome = await attempt.beside_others(unit, self.database)
        if attempt.ended and ends_waiting(answer):
            self._leaving.append(Ended(message.id, message.source, outcome))
        return outcome
