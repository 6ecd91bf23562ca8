"""One attempt at one message: claim, handle, and write the failure.

    begin ─▶ claim ─▶ handle ─▶ commit ─▶ (settle)
               │         └─ raises ─▶ roll back ─▶ begin ─▶ write the failure ─▶ commit ─▶ (settle)
               └─ not ours: return the outcome that the claim implies

`Attempt` does these steps in a transaction that its caller opened, and records how far it came:
one transaction for each message (`handle_message`), one for a batch, or those of a lease.
Nothing here calls the broker: the caller settles the message by its outcome.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, assert_never

from semel.codec import Unreadable
from semel.crashpoints import CrashPoint, reach
from semel.errors import Fenced, InDoubt, Misuse
from semel.message import Message, producer_id
from semel.messaging.database import Database, TransactionEnded, Unit
from semel.messaging.failed.attempt_failed import (
    FailedMessage,
    forget_tries,
    refused_as,
    write_conflict,
    write_unreadable,
)
from semel.messaging.failed.retrytopic import came_by_retry
from semel.messaging.failed.waiting import (
    InSequence,
    due_version,
    in_sequence,
    is_next,
    leave_waiting,
    let_in,
    parked_without_payload,
    release_next_version,
)
from semel.messaging.failure import (
    Classified,
    NonRetryableMessageError,
    RetryableMessageError,
    SequenceGap,
)
from semel.messaging.handle.cancel import called
from semel.messaging.handle.claims import (
    ERASED,
    OLD_VERSION,
    ClaimAnswer,
    Claimed,
    ClaimRequest,
    ClaimState,
    Conflict,
    Duplicate,
    Failure,
    HeldElsewhere,
    NotDue,
    NotOurs,
    Parked,
    RunByPipeline,
    Stale,
    Terminal,
    refusal,
)
from semel.messaging.handler import Consumer, holds_key, invokes
from semel.messaging.outcome import (
    NO_LONGER_WAITING,
    Handled,
    Outcome,
    ParkedAway,
    Refused,
    RetryLater,
    RetryStored,
    Skipped,
    alert,
)
from semel.messaging.receive.offsets import Ended
from semel.messaging.records import BEHIND, Gap, WaitingMessage, Waits
from semel.messaging.redact import ERASED_REASON
from semel.policy.vocabulary import GapPolicy

log = logging.getLogger("semel.messaging")

Result = TypeVar("Result")


@dataclass(slots=True)
class Handling:
    """One call of a handler."""

    consumer: str
    message: Message
    """The message; for a whole batch, the first one."""

    ids: frozenset[str]
    """The ids of all messages of the call."""

    sent: dict[tuple[str, str], int] = field(default_factory=dict)
    """How many messages it has sent so far, by the id of the cause and by destination."""

    is_over: bool = False
    """The handler has ended; a task that it began may go on."""

    _token: Token[Handling | None] | None = None

    # Not a generator, because that is slower around each call.
    def __enter__(self) -> Handling:
        self._token = _HANDLING.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.is_over = True
        if self._token is not None:
            _HANDLING.reset(self._token)

    def handles(self, message: Message) -> bool:
        """Return whether this call handles *message*."""
        return message.id in self.ids

    def next_ordinal(self, cause: Message, destination: str) -> int:
        """Return the number of the next message to *destination*.

        The ids of outgoing messages contain it: a handler that runs again sends the same ids.
        """
        ordinal = self.sent.get((cause.id, destination), 0)
        self.sent[cause.id, destination] = ordinal + 1
        return ordinal


_HANDLING: ContextVar[Handling | None] = ContextVar("semel_handling", default=None)


def handling_now() -> Handling | None:
    """Return the handler call in which this code runs; None outside of handlers."""
    return _HANDLING.get()


def refuse_if_late(opened_in: Handling | None) -> None:
    """Check that no handler writes after it has ended, unless *opened_in* is its own call.

    What a leftover task wrote would be committed with other messages, and written again by the
    next attempt.

    Raises:
        Misuse: it has ended.
    """
    now = _HANDLING.get()
    if now is not None and now.is_over and now is not opened_in:
        raise Misuse(
            f"a task of the handler of message {now.message.id!r} wrote after the handler had "
            f"ended: nothing of it is kept. Await every task, best in a TaskGroup"
        )


def handling(consumer: str, message: Message, batch: Sequence[Message] = ()) -> Handling:
    """Mark the block as the handler call for *message*, and for the rest of its *batch*."""
    return Handling(consumer, message, frozenset(one.id for one in batch or (message,)))


@dataclass(slots=True)
class Attempt:
    """One attempt at a message, and how far it came."""

    consumer: Consumer
    delivered: Message
    """The message as it was delivered; `message` is what the handler gets."""

    answer: ClaimAnswer | None = None
    """The answer to its claim, if a batch claimed it; None: the attempt claims."""

    from_waiting: bool = False
    """The message comes from the waiting table, not from the broker."""

    fence: int | None = None
    """The fence of its lease, if it has one."""

    overtakes: bool = False
    """Other messages of its key wait for its version."""

    message: Message = field(init=False)
    """With the number of this attempt, or marked as a repetition."""

    began: bool = field(default=False, init=False)
    """The handler was called: the failure counts as an attempt."""

    ended: bool = field(default=False, init=False)
    """The attempt succeeded: an error after this, as of the commit, is not the handler's."""

    gap: Gap | None = field(default=None, init=False)
    """The missing versions that make it fail."""

    def __post_init__(self) -> None:
        self.message = self.delivered

    def again(self) -> Attempt:
        """Return the same attempt before it began."""
        return replace(self)

    @property
    def is_claimed(self) -> bool:
        """A batch claimed the message in its transaction, which may continue after a failure."""
        return isinstance(self.answer, Claimed)

    async def run(self, unit: Unit) -> Outcome:
        """Claim in the open transaction, unless a batch did, and act on the answer."""
        answer = self.answer
        if answer is None:
            gone = await self.enter(unit)
            if gone is not None:
                return gone
            request = ClaimRequest.of(self.message)
            answer = await unit.claims.try_claim(self.consumer.name, request)
            reach(CrashPoint.CLAIM_AFTER, self.consumer.name)
        if isinstance(answer, Claimed):
            self.message = self.message.tried(answer.attempt)
            outcome = await self.apply(unit)
        else:
            outcome = await self.refuse(unit, answer)
        if self.answer is None:
            # For claimed messages, the batch removes all rows in one statement.
            await self.leave(unit, answer, outcome)
        return outcome

    async def leave(self, unit: Unit, answer: ClaimAnswer, outcome: Outcome) -> None:
        """Remove the message from the waiting table, if it came from there and is over."""
        if self.from_waiting and ends_waiting(answer):
            ended = Ended(self.message.id, self.message.source, outcome)
            await leave_waiting(unit, self.consumer.name, ended)

    async def enter(self, unit: Unit) -> Outcome | None:
        """Check the waiting table, before the claim; None if the message may be handled now."""
        if self.from_waiting:
            return await self._take_turn(unit)
        if not holds_key(self.consumer, self.message):
            return None
        key = self.message.key or ""
        if key not in await unit.waiting.hold(self.consumer.name, [key]):
            return None
        return await self._queue_up(unit)

    async def _take_turn(self, unit: Unit) -> Outcome | None:
        """Lock the row of a waiting message; None if it still waits unchanged.

        Since it was read, another worker may have handled or parked it, or a person may have
        changed it: then it comes back, and is read again.
        """
        consumer, message = self.consumer, self.message
        if holds_key(consumer, message):
            await unit.waiting.hold(consumer.name, [message.key or ""])
        is_retry = came_by_retry(message) is not None
        if is_retry:
            waiting = await unit.waiting.take_retry(consumer.name, message.id, message.attempt)
        else:
            waiting = await unit.waiting.take(consumer.name, message.id)
        if waiting is None:
            left = await unit.waiting.get(consumer.name, message.id)
            if left is None:
                return Skipped(NO_LONGER_WAITING)
            if left.waits is Waits.PARKED:
                return Refused("parked")
            if is_retry and left.attempts != message.attempt:
                return RetryStored()  # a later record, or the retry worker, brings it
            return RetryLater(consumer.settings.held_retry_seconds)
        if waiting.payload_hash != message.digest:
            # A person changed it.  The retry worker handles what is in the table.
            return RetryStored() if is_retry else RetryLater(0.0)
        if waiting.waits is Waits.BEHIND:
            # Its claim is PARKED, too.  Reopening is safe: under the key's lock no other worker
            # can hold the message.
            await unit.claims.reopen(consumer.name, message.id)
        return None

    async def _queue_up(self, unit: Unit) -> Outcome | None:
        """Put a message behind those of its key; None if its version is the next one."""
        consumer, message = self.consumer, self.message
        if await is_next(consumer, unit, message):
            self.overtakes = True
            return None
        row = await unit.claims.look_up(consumer.name, message.id)
        if row is not None:
            no = refusal(row, message.digest, await unit.now())
            if no is not None:
                await need_service(unit, consumer.name)
                return await self.refuse(unit, no)
        if await unit.waiting.get(consumer.name, message.id) is not None:
            await need_service(unit, consumer.name)
            return RetryStored()
        erased_at = None if row is None else row.erased_at
        failure = _behind(message, erased_at)
        if not await unit.claims.mark_failed(consumer.name, message.id, failure):
            return RetryLater(consumer.settings.held_retry_seconds)
        return await _put_behind(consumer, unit, message, erased_at)

    async def queue_claimed_up(self, unit: Unit) -> Outcome:
        """Put a message that a batch has claimed behind the one of its key that failed."""
        name, message = self.consumer.name, self.message
        row = await unit.claims.undo(name, message.id, _behind(message))
        if row.erased_at is not None:
            await unit.claims.undo(name, message.id, _behind(message, row.erased_at))
        return await _put_behind(self.consumer, unit, message, row.erased_at)

    async def refuse(self, unit: Unit, answer: NotOurs) -> Outcome:
        """Return the outcome of a message that its claim does not allow to handle now."""
        consumer, message, settings = self.consumer, self.message, self.consumer.settings
        match answer:
            case Duplicate(result):
                if invokes(consumer, answer):
                    await self._invoke_again(unit)
                return Skipped("duplicate", result)
            case NotDue(seconds_left):
                is_stored = settings.stores_retries and came_by_retry(message) is None
                if is_stored and await unit.waiting.get(consumer.name, message.id):
                    return RetryStored()
                return RetryLater(max(seconds_left, 0.0))
            case HeldElsewhere(seconds_left=seconds):
                return RetryLater(min(max(seconds, 0.05), settings.held_retry_seconds))
            case Stale():
                return RetryLater(settings.held_retry_seconds)
            case Parked() | Terminal():
                return refused_as(answer)
            case Conflict(expected):
                return await write_conflict(unit, consumer, message, expected)
            case _ as never:
                assert_never(never)

    async def _invoke_again(self, unit: Unit) -> None:
        """Call the handler for a duplicate: its effect is durable, what it sends may not be."""
        self.message = self.message.repeated()
        self.began = True
        await unit.begin_message()
        await self.invoke(unit.session, self.consumer.settings.handler_seconds)
        await forget_tries(unit, self.consumer, self.message)

    async def apply(self, unit: Unit) -> Outcome:
        """Handle a claimed message; first check its version, if the consumer does so."""
        consumer, message = self.consumer, self.message
        await unit.begin_message()
        if not consumer.settings.versioned:
            return await self.call(unit)
        if message.version is None or message.key is None:
            self.began = True
            raise NonRetryableMessageError("it has no version, or no key", "SCHEMA_INVALID")
        current = await unit.versions.current(consumer.name, message.key)
        first = consumer.settings.first_version
        outcome: Outcome
        match in_sequence(message.version, current, first):
            case InSequence.OLD:
                await unit.claims.pass_over(consumer.name, message.id, OLD_VERSION)
                return Skipped("old version")
            case InSequence.NEXT:
                outcome, how = await self.call(unit), "arrived"
            case InSequence.GAP:
                due = due_version(current, first)
                gap = Gap(consumer.name, message.key, due, message.version)
                outcome, how = await self._across(unit, gap)
        await unit.versions.advance(consumer.name, message.key, message.version)
        if self.overtakes or (self.from_waiting and holds_key(consumer, message)):
            await release_next_version(consumer, unit, message)
        if how:
            # A rebuilt aggregate also fills the gaps that were crossed earlier.
            after = None if how == "rebuilt" else current
            await unit.versions.close_gaps(consumer.name, message.key, message.version, how, after)
        return outcome

    async def _across(self, unit: Unit, gap: Gap) -> tuple[Outcome, str]:
        """Apply the gap policy; return how the gap was closed, empty if it stays open."""
        consumer = self.consumer
        match consumer.settings.gaps:
            case GapPolicy.ALERT:
                await unit.versions.open_gap(gap)
                return replace(await self.call(unit), gap=gap), ""
            case GapPolicy.FETCH if consumer.fetch_missing is not None:
                self.began = True
                await self._repair(consumer.fetch_missing(self.message, unit.session, gap))
                return await self.call(unit), "fetched"
            case GapPolicy.REBUILD if consumer.rebuild is not None:
                self.began = True
                await self._repair(consumer.rebuild(self.message, unit.session, gap))
                return Handled(), "rebuilt"
            case _:
                self.began = True
                self.gap = gap
                raise SequenceGap(gap.key, gap.expected, gap.found)

    async def call(self, unit: Unit) -> Handled:
        """Call the handler in the open transaction, and write its result to the claim."""
        result = await self.invoke(unit.session, self.consumer.settings.handler_seconds)
        if self.consumer.settings.keeps_results:
            message = self.message
            kept = json.dumps(result, default=str)
            await unit.claims.keep_result(self.consumer.name, message.id, kept, message.key)
        return Handled(result)

    async def invoke(self, second: Any, seconds: float | None = None) -> Any:
        """Call the handler with its message and a session or a lease; return its result.

        Raises:
            RetryableMessageError: it took longer than *seconds*, and was cancelled.
        """
        self.began = True
        with handling(self.consumer.name, self.message):
            result = await in_time(seconds, self.consumer.invoke(self.message, second))
        reach(CrashPoint.HANDLE_AFTER, self.consumer.name)
        return result

    async def _repair(self, call: Awaitable[None]) -> None:
        await in_time(self.consumer.settings.handler_seconds, called(call))

    async def beside_others(self, unit: Unit, database: Database) -> Outcome:
        """Run in a savepoint of a batch's transaction; write a failure in the same transaction.

        Raises:
            Exception: the whole transaction must be given up: it has ended, or conflicts with
                another one, or a waiting message could not be read.
        """
        try:
            async with unit.savepoint():
                outcome = await self.run(unit)
            self.ended = True
            return outcome
        except Exception as error:
            failure = self.failure(database, error)
            if isinstance(error, TransactionEnded) or failure.is_conflict:
                raise
            if self.from_waiting and self.says_nothing(error, failure):
                raise
            return await self.failed_beside_others(unit, error, failure)

    async def failed_beside_others(
        self, unit: Unit, error: BaseException, failure: Classified
    ) -> Outcome:
        """Write a failure in the batch's transaction, after the rollback of its savepoint."""
        if self.says_nothing(error, failure):
            await self.give_back(unit)
            return self.comes_back(failure)
        return await self.write_failure(unit, failure)

    async def give_back(self, unit: Unit) -> None:
        """Undo the claim that the batch took: the message was not tried."""
        if isinstance(self.answer, Claimed):
            await unit.claims.give_back(self.consumer.name, self.message.id, self.answer)

    def failure(self, database: Database, error: BaseException) -> Classified:
        """Classify *error*: by the consumer's rules, then the database's, then the general ones."""
        return classify(self.consumer, database, error)

    def says_nothing(self, error: BaseException, failure: Classified) -> bool:
        """Return whether *error* is a failure of another system, not of the message.

        Before the handler began, no failure counts as an attempt.  Nor does a commit whose answer
        was lost: the claim shows whether it succeeded, and the next delivery reads it.
        """
        if not self.began or self.consumer.circuit.spares(failure):
            return True
        # If the handler itself raises one of these, it counts as an attempt: attempts are limited.
        return self.ended and isinstance(error, InDoubt | Fenced)

    def comes_back(self, failure: Classified, why: str = "message comes back") -> RetryLater:
        """Log why the delivery comes back; nothing is written."""
        log.warning(
            why,
            extra={
                "consumer": self.consumer.name,
                "id": self.message.id,
                "reason": failure.reason,
            },
        )
        return RetryLater(self.consumer.settings.held_retry_seconds, failure)

    async def fail(self, database: Database, failure: Classified) -> Outcome:
        """Write the failure in a transaction of its own; a message that has ended stays unchanged.

        With the fence of a lease, a message that another owner has taken stays unchanged, too.
        """
        consumer = self.consumer
        try:
            async with database.begin() as unit:
                reach(CrashPoint.FAILURE_BEFORE, consumer.name)
                if holds_key(consumer, self.message):
                    await unit.waiting.hold(consumer.name, [self.message.key or ""])
                outcome = await self.write_failure(unit, failure)
            reach(CrashPoint.FAILURE_AFTER, consumer.name)
        except Exception as error:  # noqa: BLE001  the delivery comes back, and is tried again
            log.warning(
                "failure could not be written; message comes back",
                extra={
                    "consumer": consumer.name,
                    "id": self.message.id,
                    "reason": failure.reason,
                    "why": self.failure(database, error).reason,
                },
            )
            return RetryLater(consumer.settings.held_retry_seconds, failure)
        return outcome

    async def write_failure(self, unit: Unit, failure: Classified) -> Outcome:
        """Write what becomes of the failed message, in the open transaction."""
        return await self._failed(unit, failure).write()

    async def park(self, unit: Unit, failure: Classified) -> Outcome:
        """Park the message, regardless of the retry policy."""
        return await self._failed(unit, failure).park()

    def _failed(self, unit: Unit, failure: Classified) -> FailedMessage:
        how = (self.gap, self.is_claimed, self.fence, self.from_waiting)
        return FailedMessage(unit, self.consumer, self.message, failure, *how)


async def need_service(unit: Unit, consumer: str) -> None:
    """Raise if a pipeline runs the consumer; claims check it themselves.

    Raises:
        RunByPipeline: it does.
    """
    engine = await unit.members.engine(consumer)
    if engine is not None:
        raise RunByPipeline(consumer, engine.pipeline)


async def in_time(seconds: float | None, call: Awaitable[Result]) -> Result:
    """Await code of the consumer, and cancel it after *seconds*.

    Raises:
        RetryableMessageError: it took longer.
    """
    try:
        async with asyncio.timeout(seconds) as deadline:
            return await call
    except (RetryableMessageError, TimeoutError) as error:
        # The cancellation arrives in the handler, which makes it a failure.
        if not deadline.expired():
            raise
        why = f"the handler took longer than {seconds:g} s and was cancelled"
        raise RetryableMessageError(why, "HANDLER_TIMEOUT") from error


def ends_waiting(answer: ClaimAnswer) -> bool:
    """Return whether this answer to its claim means that a waiting message is over."""
    return not isinstance(answer, Parked | NotDue | HeldElsewhere)


def _behind(message: Message, erased_at: float | None = None) -> Failure:
    """Return what to write into the claim of a message that waits for an earlier one."""
    marker = BEHIND if erased_at is None else ERASED
    return Failure(ClaimState.PARKED, 0, "", payload_hash=message.digest, marker=marker)


async def _put_behind(
    consumer: Consumer, unit: Unit, message: Message, erased_at: float | None
) -> ParkedAway:
    """Put a message behind those of its key; without payload if its claim says erased."""
    why = "an earlier message of its key waits" if erased_at is None else ERASED_REASON
    waiting = WaitingMessage.of(consumer.name, message, Waits.BEHIND, held=True)
    waiting = replace(waiting, reason=why)
    if erased_at is not None:
        waiting = replace(parked_without_payload(waiting, erased_at), error_code=ERASED)
    await let_in(unit, message, waiting, is_new=True)
    return ParkedAway(why)


async def handle_message(
    consumer: Consumer,
    database: Database,
    message: Message,
    waiting: WaitingMessage | None = None,
) -> Outcome:
    """Handle one delivery in one transaction; again after a deadlock.

    Errors of a message, a handler or a database become outcomes, not exceptions.  Repeating the
    call after any crash is safe: the claim shows whether the message was handled.  *waiting* is
    its row, if the message comes from the waiting table.

    Raises:
        TransactionEnded: the handler ended the transaction past every guard; do not acknowledge.
        Misuse: its id begins like one that semel generates.
    """
    producer_id(message.id)
    for left in reversed(range(consumer.settings.conflict_tries)):
        attempt = Attempt(consumer, message, from_waiting=waiting is not None)
        try:
            outcome = await _in_one_transaction(database, attempt)
            reach(CrashPoint.MESSAGE_COMMIT_AFTER, consumer.name)
            return outcome
        except TransactionEnded:
            # The claim may be durable without the effect: it must not look like a duplicate.
            raise
        except Exception as error:  # noqa: BLE001  every exception of a handler is classified
            failure = attempt.failure(database, error)
            if failure.is_conflict and left:
                continue
            if attempt.says_nothing(error, failure):
                return attempt.comes_back(failure)
            return await attempt.fail(database, failure)
    raise AssertionError("the last try returns")


async def _in_one_transaction(database: Database, attempt: Attempt) -> Outcome:
    async with database.begin() as unit:
        reach(CrashPoint.CLAIM_BEFORE, attempt.consumer.name)
        outcome = await attempt.run(unit)
        attempt.ended = True
        reach(CrashPoint.MESSAGE_COMMIT_BEFORE, attempt.consumer.name)
    alert([outcome])
    return outcome


def classify(consumer: Consumer, database: Database, error: BaseException) -> Classified:
    """Classify *error*: by the consumer's rules, then the database's, then the general ones."""
    return consumer.classification(database.classification).classify(error)


async def handle_unreadable(consumer: Consumer, database: Database, record: Unreadable) -> Outcome:
    """Dead-letter a record that cannot be read as a message."""
    try:
        async with database.begin() as unit:
            reach(CrashPoint.FAILURE_BEFORE, consumer.name)
            outcome = await write_unreadable(unit, consumer, record)
        reach(CrashPoint.FAILURE_AFTER, consumer.name)
        return outcome
    except Exception as error:  # noqa: BLE001  the delivery comes back
        failure = classify(consumer, database, error)
        return RetryLater(consumer.settings.held_retry_seconds, failure)
