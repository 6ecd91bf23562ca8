"""Batch speed with per-message meaning: one transaction, the same final state.

    claim all, sorted, in one statement
    handle in chunks, a savepoint each ──▶ a chunk failed? undo it, find the culprit
    commit                             ──▶ the commit failed? one transaction per message

A chunk that failed calls its handlers again: effects outside the database repeat.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from semel.crashpoints import CrashPoint, reach
from semel.message import Message
from semel.messaging.alerts import alert
from semel.messaging.claims import ClaimAnswer, Claimed, ClaimRequest
from semel.messaging.consumer import Consumer
from semel.messaging.context import handling
from semel.messaging.database import Database, TransactionEnded, Unit
from semel.messaging.failing import Held, write_failure
from semel.messaging.handling import apply, claim_and_handle, classify, comes_back, says_nothing
from semel.messaging.one_by_one import NOT_ATTEMPTED as NOT_ATTEMPTED
from semel.messaging.one_by_one import Blocked, blocks_key
from semel.messaging.one_by_one import consume_each as consume_each
from semel.messaging.outcome import (
    Handled,
    Nack,
    Outcome,
    Skipped,
    settlement,
)
from semel.messaging.overtaking import is_next
from semel.messaging.queueing import queue_claimed_up
from semel.messaging.refusing import not_claimed, refused
from semel.messaging.settings import BatchPolicy, Duplicates
from semel.messaging.tries import Try
from semel.messaging.whole import all_or_nothing

log = logging.getLogger("semel.messaging")


async def consume_many(
    consumer: Consumer, database: Database, messages: Sequence[Message]
) -> list[Outcome]:
    """Handle a batch of deliveries; the outcomes in the order of *messages*.

    The final state is that of one transaction per message, in order; a batch that may not be
    split is kept whole or comes back.

    Raises:
        TransactionEnded: a handler committed past every guard; nothing may be acknowledged.
    """
    if consumer.settings.batch is BatchPolicy.FAIL_BATCH:
        return await all_or_nothing(consumer, database, messages, _in_one_call)
    try:
        return await _together(consumer, database, messages)
    except TransactionEnded:
        # One by one, claims that it made durable would look like duplicates.
        raise
    except Exception as error:  # noqa: BLE001  whatever it was, one by one will say
        log.info(
            "batch falls back to one transaction per message",
            extra={"consumer": consumer.name, "why": classify(consumer, database, error).reason},
        )
    return await consume_each(consumer, database, messages)


@dataclass(frozen=True, slots=True)
class _Step:
    """One message of the batch, and what its claim said."""

    message: Message
    answer: ClaimAnswer | None
    """None: it was not claimed with the others, because its key was held or its id repeats."""


async def _together(
    consumer: Consumer, database: Database, messages: Sequence[Message]
) -> list[Outcome]:
    """Handle different messages in one transaction."""
    async with database.begin() as unit:
        reach(CrashPoint.CLAIM_BEFORE, consumer.name)
        steps = await _claimed(consumer, unit, messages)
        reach(CrashPoint.CLAIM_AFTER, consumer.name)
        outcomes = await _in_chunks(consumer, database, unit, steps)
        reach(CrashPoint.MESSAGE_COMMIT_BEFORE, consumer.name)
    alert(outcomes)
    reach(CrashPoint.MESSAGE_COMMIT_AFTER, consumer.name)
    return outcomes


async def _in_one_call(
    consumer: Consumer, database: Database, messages: Sequence[Message]
) -> list[Outcome]:
    """Handle all messages in one transaction, by one call of a handler that takes batches."""
    ran = _Ran()
    async with database.begin() as unit:
        steps = await _claimed(consumer, unit, messages)
        try:
            async with unit.savepoint():
                await _run(consumer, unit, steps, ran)
        except TransactionEnded:
            raise
        except Exception as error:
            # Whatever a handler raises, it is not the commit's.
            raise _OneByOne from error
        reach(CrashPoint.MESSAGE_COMMIT_BEFORE, consumer.name)
    reach(CrashPoint.MESSAGE_COMMIT_AFTER, consumer.name)
    return ran.outcomes


async def _claimed(consumer: Consumer, unit: Unit, messages: Sequence[Message]) -> list[_Step]:
    """Claim all messages whose keys are not held, in one statement."""
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
    return [_Step(message, found.get(index)) for index, message in enumerate(messages)]


async def _in_chunks(
    consumer: Consumer, database: Database, unit: Unit, steps: Sequence[_Step]
) -> list[Outcome]:
    batch = _Batch(consumer, database, unit)
    while left := steps[len(batch.outcomes) :]:
        size = len(left) if consumer.takes_batches else consumer.pace.size(consumer.settings.chunk)
        await batch.run(left[:size])
    return batch.outcomes


class _Batch:
    """The steps of one transaction, done in order."""

    def __init__(self, consumer: Consumer, database: Database, unit: Unit) -> None:
        self.consumer = consumer
        self.database = database
        self.unit = unit
        self.blocked = Blocked(consumer)
        self.outcomes: list[Outcome] = []

    async def run(self, chunk: Sequence[_Step]) -> None:
        """Handle a chunk at once; where that fails, up to the culprit, which is handled alone."""
        if self.blocked.anything and any(map(self._is_blocked, chunk)):
            return await self._one_by_one(chunk)
        ran = _Ran()
        if await self._at_once(chunk, ran):
            return self.consumer.pace.went_well(len(chunk))
        self.consumer.pace.failed()
        done = len(ran.outcomes)
        if self.consumer.takes_batches or done == len(chunk):
            # All ran, and what they wrote was refused at the end: nobody knows whose.
            return await self._one_by_one(chunk)
        before, culprit = chunk[:done], chunk[done]
        if before and not await self._at_once(before, _Ran()):
            await self._one_by_one(before)
        elif call := ran.failed_call():
            # It has found what it would find alone, and those before it are well without it.
            return self._note(culprit, await self._failed(culprit, *call))
        return await self._one_by_one([culprit])

    def _is_blocked(self, step: _Step) -> bool:
        return self.blocked.stands_before(step.message) or self.blocked.holds(step.message)

    async def _at_once(self, chunk: Sequence[_Step], ran: _Ran) -> bool:
        """Handle a chunk in one savepoint; False, and nothing done, where that fails."""
        try:
            async with self.unit.savepoint():
                await _run(self.consumer, self.unit, chunk, ran)
        except Exception as error:  # noqa: BLE001  found out one by one
            _raise_if_over(self.consumer, self.database, error)
            ran.error = error
            return False
        self.outcomes.extend(ran.outcomes)
        return True

    async def _one_by_one(self, steps: Sequence[_Step]) -> None:
        for step in steps:
            self._note(step, await self._alone(step))

    def _note(self, step: _Step, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.blocked.note(step.message, outcome)

    async def _alone(self, step: _Step) -> Outcome:
        """Handle one message in a savepoint of its own."""
        consumer, unit, message = self.consumer, self.unit, step.message
        if self.blocked.stands_before(message):
            if isinstance(step.answer, Claimed):
                await unit.claims.give_back(consumer.name, message.id, step.answer)
            return NOT_ATTEMPTED
        queues = isinstance(step.answer, Claimed) and self.blocked.holds(message)
        if queues and not await is_next(consumer, unit, message):
            return await queue_claimed_up(consumer, unit, message)
        state = Try(message, overtakes=queues)
        try:
            async with unit.savepoint():
                if isinstance(step.answer, Claimed):
                    state.message = message.tried(step.answer.attempt)
                    return await apply(consumer, unit, state)
                if step.answer is not None:
                    return await not_claimed(consumer, unit, state, step.answer)
                return await claim_and_handle(consumer, unit, state)
        except Exception as error:  # noqa: BLE001  whatever a handler raises is classified
            _raise_if_over(consumer, self.database, error)
            return await self._failed(step, state, error)

    async def _failed(self, step: _Step, state: Try, error: Exception) -> Outcome:
        """Write a failure beside what the others did."""
        consumer, unit, message = self.consumer, self.unit, step.message
        failure = classify(consumer, self.database, error)
        if says_nothing(error, state):
            if isinstance(step.answer, Claimed):
                await unit.claims.give_back(consumer.name, message.id, step.answer)
            return comes_back(consumer, message, failure)
        held = Held(by_this_transaction=isinstance(step.answer, Claimed))
        written = await write_failure(unit, consumer, state.message, failure, state.gap, held)
        return Skipped() if written is None else written


@dataclass(slots=True)
class _Ran:
    """How far the messages of one savepoint came."""

    outcomes: list[Outcome] = field(default_factory=list)
    state: Try | None = None
    """The try that has not ended, of a message that was claimed with the batch."""

    error: Exception | None = None

    def failed_call(self) -> tuple[Try, Exception] | None:
        """Return which call of the handler failed, and how; None where it was something else."""
        if self.state is None or self.error is None or not self.state.began:
            return None
        return self.state, self.error


async def _run(consumer: Consumer, unit: Unit, chunk: Sequence[_Step], ran: _Ran) -> None:
    """Do in order what the claims said."""
    calls = _calls(consumer, chunk) if consumer.takes_batches else {}
    for index, step in enumerate(chunk):
        if index in calls:
            await _batch_handler(consumer, unit, calls[index])
        if consumer.takes_batches and isinstance(step.answer, Claimed):
            ran.outcomes.append(Handled())
            continue
        outcome: Outcome
        match step.answer:
            case Claimed(attempt=attempt):
                ran.state = Try(step.message.tried(attempt))
                outcome = await apply(consumer, unit, ran.state)
                ran.state = None
            case None:
                outcome = await claim_and_handle(consumer, unit, Try(step.message))
            case answer:
                outcome = await refused(consumer, unit, step.message, answer)
        if isinstance(settlement(outcome), Nack) or blocks_key(consumer, step.message, outcome):
            # It holds up those behind it.
            raise _OneByOne
        ran.outcomes.append(outcome)


def _calls(consumer: Consumer, chunk: Sequence[_Step]) -> dict[int, list[Message]]:
    """Say before which steps a handler of batches is called, and with which messages.

    Once; more often where others are handled between them, which must not come behind a newer
    message of their key: duplicates that are invoked, and what is only claimed on its turn.
    """
    calls: dict[int, list[Message]] = {}
    begin = 0
    claimed = {step.message.id for step in chunk if isinstance(step.answer, Claimed)}
    for index, step in enumerate(chunk):
        if isinstance(step.answer, Claimed):
            calls.setdefault(begin, []).append(step.message.tried(step.answer.attempt))
        elif consumer.settings.duplicates is Duplicates.INVOKE or (
            step.answer is None and step.message.id not in claimed
        ):
            begin = index + 1
    return calls


async def _batch_handler(consumer: Consumer, unit: Unit, messages: Sequence[Message]) -> None:
    await unit.begin_message()
    with handling(consumer.name, messages[0], messages):
        await consumer.invoke(messages, unit.session)
    reach(CrashPoint.HANDLE_AFTER, consumer.name)


def _raise_if_over(consumer: Consumer, database: Database, error: Exception) -> None:
    """Raise where the whole transaction must be given up, and not only this savepoint.

    Not where an error says that a connection was lost, which may be one of the handler's own:
    if it was this one, the next statement fails, and nothing is written beside it.
    """
    if isinstance(error, TransactionEnded):
        raise error
    if classify(consumer, database, error).is_conflict:
        raise error


class _OneByOne(Exception):
    """The chunk has something in it that only one message at a time can do."""
