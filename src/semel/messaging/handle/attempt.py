"""One message, one transaction: claim, handle, commit; or roll back and write the failure.

What is being handled right now, for the parts that derive ids from it.

One attempt at a message, and how far it came.

The answer to a delivery whose claim says that it is not ours to handle now.

Into the waiting room, behind those of its key, and out of it when its turn comes.

    a delivery, its key is held ─▶ queues up BEHIND (or overtakes, if its version is next)
    its turn comes              ─▶ still there, still the same? then it is handled

In the transaction that handles the message, under the lock of its key.

One message, one transaction: claim, handle, commit; or roll back and write the failure.

    begin ─▶ claim ─▶ handle ─▶ commit ─▶ (settle)
               │         └─ raises ─▶ roll back ─▶ begin ─▶ write the failure ─▶ commit ─▶ (settle)
               └─ not ours: answer as the claim table says

Nothing here talks to a broker: the outcome says what became of the message,
and whoever delivered it settles it afterwards.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, replace
from typing import assert_never

from semel.codec import Unreadable
from semel.crashpoints import CrashPoint, reach
from semel.errors import Fenced, InDoubt, Misuse
from semel.message import Message
from semel.messaging.consumer import Consumer, holds_key, invokes
from semel.messaging.database import Database, Unit
from semel.messaging.failed.attempt_failed import (
    Held,
    forget_tries,
    leave_the_room,
    write_conflict,
    write_failure,
    write_unreadable,
)
from semel.messaging.failed.waiting import (
    is_next,
    let_next_go,
    mark_waiting,
    parked_without_payload,
)
from semel.messaging.failure import Classified, NonRetryableMessageError, SequenceGap
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
    Stale,
    Terminal,
    refusal,
)
from semel.messaging.handle.versions import InSequence, due_version, in_sequence
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
from semel.messaging.records import BEHIND, Gap, WaitingMessage, Waits
from semel.messaging.redact import ERASED_REASON
from semel.policy.vocabulary import GapPolicy

log = logging.getLogger("semel.messaging")


@dataclass(slots=True)
class Handling:
    """One call of a handler."""

    consumer: str
    message: Message
    """What is handled; of a whole batch, the first."""

    ids: frozenset[str]
    """Of everything that is handled."""

    sent: dict[tuple[str, str], int] = field(default_factory=dict)
    """How many messages it has sent so far, by the id of the cause and by destination."""

    is_over: bool = False
    """The handler has ended; a task that it began may go on."""

    def handles(self, message: Message) -> bool:
        """Tell whether this call handles *message*."""
        return message.id in self.ids

    def next_ordinal(self, cause: Message, destination: str) -> int:
        """Count a message to *destination*; a handler that runs again counts the same way."""
        ordinal = self.sent.get((cause.id, destination), 0)
        self.sent[cause.id, destination] = ordinal + 1
        return ordinal


_HANDLING: ContextVar[Handling | None] = ContextVar("semel_handling", default=None)


def handling_now() -> Handling | None:
    """Return the call of a handler that this code runs in; None outside of handlers."""
    return _HANDLING.get()


def refuse_if_late(opened_in: Handling | None) -> None:
    """See that no handler that has ended writes in a transaction, *opened_in* this call of one.

    What its task wrote would be its neighbours', and would happen again with its next attempt.

    Raises:
        Misuse: it has ended.
    """
    now = _HANDLING.get()
    if now is not None and now.is_over and now is not opened_in:
        raise Misuse(
            f"a task of the handler of message {now.message.id!r} wrote after the handler had "
            f"ended: nothing of it is kept. Await whatever is begun, best in a TaskGroup"
        )


def handling(
    consumer: str, message: Message, batch: Sequence[Message] = ()
) -> AbstractContextManager[Handling]:
    """Say that the block handles *message*, and with it the rest of its *batch*."""
    return _Now(Handling(consumer, message, frozenset(one.id for one in batch or (message,))))


class _Now(AbstractContextManager[Handling]):
    """The time during which something is handled; no generator, for it stands around each call."""

    __slots__ = ("_handling", "_token")

    def __init__(self, handling: Handling) -> None:
        self._handling = handling
        self._token: Token[Handling | None] | None = None

    def __enter__(self) -> Handling:
        self._token = _HANDLING.set(self._handling)
        return self._handling

    def __exit__(self, *error: object) -> None:
        self._handling.is_over = True
        if self._token is not None:
            _HANDLING.reset(self._token)


@dataclass(slots=True)
class Try:
    """How far an attempt came before it failed."""

    message: Message
    began: bool = False
    """The handler was called: the failure counts as an attempt."""

    ended: bool = False
    """The handler returned: whatever fails now is not its doing."""

    from_waiting: bool = False
    """The message comes out of the waiting room, not from the broker."""

    overtakes: bool = False
    """Others of its key wait in the room for its version."""

    gap: Gap | None = field(default=None)


async def not_claimed(consumer: Consumer, unit: Unit, state: Try, answer: NotOurs) -> Outcome:
    """Answer as `refused` does; *state* tells whether the handler was invoked all the same."""
    if invokes(consumer, answer):
        state.message = state.message.repeated()
        state.began = True
    return await refused(consumer, unit, state.message, answer)


async def refused(
    consumer: Consumer,
    unit: Unit,
    message: Message,
    answer: NotOurs,
) -> Outcome:
    """Answer a delivery whose message is not ours to handle now."""
    settings = consumer.settings
    match answer:
        case Duplicate(result):
            if invokes(consumer, answer):
                await unit.begin_message()
                with handling(consumer.name, message.repeated()) as now:
                    await consumer.invoke(now.message, unit.session)
                await forget_tries(unit, consumer, message)
            return Skipped("duplicate", result)
        case NotDue(seconds_left):
            if settings.stores_retries and await unit.waiting.get(consumer.name, message.id):
                return RetryStored()
            return RetryLater(max(seconds_left, 0.0))
        case HeldElsewhere(seconds_left=seconds):
            return RetryLater(min(max(seconds, 0.05), settings.held_retry_seconds))
        case Stale():
            return RetryLater(settings.held_retry_seconds)
        case Parked():
            return Refused("parked")
        case Terminal(error_code):
            return Refused(f"dead letter ({error_code})")
        case Conflict(expected):
            return await write_conflict(unit, consumer, message, expected)
        case _ as never:
            assert_never(never)


def ends_waiting(answer: ClaimAnswer) -> bool:
    """Tell whether a message out of the waiting room is over with this answer to its claim."""
    return not isinstance(answer, Parked | NotDue | HeldElsewhere)


async def into_the_room(
    consumer: Consumer, unit: Unit, message: Message, state: Try | None = None
) -> Outcome | None:
    """Queue a delivery up whose key is held; None where it may be handled now."""
    if not holds_key(consumer, message):
        return None
    key = message.key or ""
    if key not in await unit.waiting.hold(consumer.name, [key]):
        return None
    return await behind_others(consumer, unit, state or Try(message))


async def out_of_the_room(consumer: Consumer, unit: Unit, message: Message) -> Outcome | None:
    """Make sure that a waiting message still waits for its turn; None where it does.

    Another worker may have handled or parked it since it was read, and a person may have
    changed it: then it is read again, with what it says now.
    """
    if holds_key(consumer, message):
        await unit.waiting.hold(consumer.name, [message.key or ""])
    waiting = await unit.waiting.take(consumer.name, message.id)
    if waiting is None:
        left = await unit.waiting.get(consumer.name, message.id)
        if left is None:
            return Skipped(NO_LONGER_WAITING)
        if left.waits is Waits.PARKED:
            return Refused("parked")
        return RetryLater(consumer.settings.held_retry_seconds)
    if waiting.payload_hash != message.digest:
        return RetryLater(0.0)
    if waiting.waits is Waits.BEHIND:
        # Its claim says parked, too, and under the key's lock nobody else can have it.
        await unit.claims.reopen(consumer.name, message.id)
    return None


async def behind_others(consumer: Consumer, unit: Unit, state: Try) -> Outcome | None:
    """Queue a message up whose key is held; None where its version says that it is next."""
    message = state.message
    if await is_next(consumer, unit, message):
        state.overtakes = True
        return None
    row = await unit.claims.look_up(consumer.name, message.id)
    if row is not None:
        no = refusal(row, message.digest, await unit.now())
        if no is not None:
            return await not_claimed(consumer, unit, state, no)
    if await unit.waiting.get(consumer.name, message.id) is not None:
        return RetryStored()
    erased_at = None if row is None else row.erased_at
    if not await unit.claims.mark_failed(consumer.name, message.id, _behind(message, erased_at)):
        return RetryLater(consumer.settings.held_retry_seconds)
    return await _queue_up(consumer, unit, message, erased_at)


async def queue_claimed_up(consumer: Consumer, unit: Unit, message: Message) -> Outcome:
    """Put a message that this transaction has claimed behind the one of its key that failed."""
    row = await unit.claims.undo(consumer.name, message.id, _behind(message))
    if row.erased_at is not None:
        await unit.claims.undo(consumer.name, message.id, _behind(message, row.erased_at))
    return await _queue_up(consumer, unit, message, row.erased_at)


def _behind(message: Message, erased_at: float | None = None) -> Failure:
    """Return what the claim of a message says that waits for an earlier one of its key."""
    code = BEHIND if erased_at is None else ERASED
    return Failure(ClaimState.PARKED, 0, code, payload_hash=message.digest)


async def _queue_up(
    consumer: Consumer, unit: Unit, message: Message, erased_at: float | None
) -> ParkedAway:
    """Put a message behind those of its key; without payload where its claim says erased."""
    why = "an earlier message of its key waits" if erased_at is None else ERASED_REASON
    waiting = WaitingMessage.of(consumer.name, message, Waits.BEHIND, held=True)
    waiting = replace(waiting, reason=why)
    if erased_at is not None:
        waiting = replace(parked_without_payload(waiting, erased_at), error_code=ERASED)
    await unit.waiting.put(waiting)
    await mark_waiting(unit, consumer.name, message)
    return ParkedAway(why)


async def handle_message(consumer: Consumer, database: Database, message: Message) -> Outcome:
    """Handle one delivery; never raises for what a message, a handler or a database does.

    Repeating it after any crash is safe: the claim decides.
    """
    return await attempt(consumer, database, message, None)


async def attempt(
    consumer: Consumer, database: Database, message: Message, waiting: WaitingMessage | None
) -> Outcome:
    """Run the whole transaction, again after a deadlock or a serialization failure."""
    for left in reversed(range(consumer.settings.conflict_tries)):
        state = Try(message, from_waiting=waiting is not None)
        try:
            outcome = await _in_one_transaction(consumer, database, state)
            reach(CrashPoint.MESSAGE_COMMIT_AFTER, consumer.name)
            return outcome
        except Exception as error:  # noqa: BLE001  whatever a handler raises is classified
            failure = classify(consumer, database, error)
            if failure.is_conflict and left:
                continue
            if says_nothing(error, state):
                return comes_back(consumer, message, failure)
            return await after_failure(consumer, database, state, failure)
    raise AssertionError("the last try returns")


def classify(consumer: Consumer, database: Database, error: BaseException) -> Classified:
    """Say what *error* is: by the consumer's own rules, then by the database's, then by all."""
    return consumer.classification(database.classification).classify(error)


def says_nothing(error: BaseException, state: Try) -> bool:
    """Tell whether the failure is about asking, not about the message.

    Before the handler began, whatever went wrong is nobody's attempt.  A commit whose answer
    was lost says nothing either: the claim knows, and the next delivery asks it.
    """
    if not state.began:
        return True
    # A handler that raises one has failed like any other, and is not tried without end.
    return state.ended and isinstance(error, InDoubt | Fenced)


def comes_back(consumer: Consumer, message: Message, failure: Classified) -> RetryLater:
    """Let a delivery come back of which nothing is written."""
    log.warning(
        "message comes back",
        extra={"consumer": consumer.name, "id": message.id, "reason": failure.reason},
    )
    return RetryLater(consumer.settings.held_retry_seconds, failure)


async def _in_one_transaction(consumer: Consumer, database: Database, state: Try) -> Outcome:
    async with database.begin() as unit:
        reach(CrashPoint.CLAIM_BEFORE, consumer.name)
        outcome = await claim_and_handle(consumer, unit, state)
        state.ended = True
        reach(CrashPoint.MESSAGE_COMMIT_BEFORE, consumer.name)
    alert([outcome])
    return outcome


async def claim_and_handle(consumer: Consumer, unit: Unit, state: Try) -> Outcome:
    """Claim in the open transaction and do what the answer says."""
    message = state.message
    if state.from_waiting:
        gone = await out_of_the_room(consumer, unit, message)
    else:
        gone = await into_the_room(consumer, unit, message, state)
    if gone is not None:
        return gone
    answer = await unit.claims.try_claim(consumer.name, ClaimRequest.of(message))
    reach(CrashPoint.CLAIM_AFTER, consumer.name)
    if isinstance(answer, Claimed):
        state.message = message.tried(answer.attempt)
        outcome = await apply(consumer, unit, state)
    else:
        outcome = await not_claimed(consumer, unit, state, answer)
    if state.from_waiting and ends_waiting(answer):
        await leave_the_room(unit, consumer.name, message.id, outcome, message.source)
    return outcome


async def apply(consumer: Consumer, unit: Unit, state: Try) -> Outcome:
    """Handle a claimed message, its version checked where the consumer wants that."""
    message = state.message
    await unit.begin_message()
    if not consumer.settings.versioned:
        return await call(consumer, unit, state)
    if message.version is None or message.key is None:
        state.began = True
        raise NonRetryableMessageError("it has no version, or no key", "SCHEMA_INVALID")
    current = await unit.versions.current(consumer.name, message.key)
    first = consumer.settings.first_version
    outcome: Outcome
    match in_sequence(message.version, current, first):
        case InSequence.OLD:
            await unit.claims.pass_over(consumer.name, message.id, OLD_VERSION)
            return Skipped("old version")
        case InSequence.NEXT:
            outcome, how = await call(consumer, unit, state), "arrived"
        case InSequence.GAP:
            due = due_version(current, first)
            gap = Gap(consumer.name, message.key, due, message.version)
            outcome, how = await _across(consumer, unit, state, gap)
    await unit.versions.advance(consumer.name, message.key, message.version)
    if state.overtakes or (state.from_waiting and holds_key(consumer, message)):
        await let_next_go(consumer, unit, message)
    if how:
        # Whoever makes an aggregate anew has filled the gaps that were crossed before, too.
        after = None if how == "rebuilt" else current
        await unit.versions.close_gaps(consumer.name, message.key, message.version, how, after)
    return outcome


async def _across(consumer: Consumer, unit: Unit, state: Try, gap: Gap) -> tuple[Outcome, str]:
    """Do what the gap policy says; return how the gap was closed, empty where it stays open."""
    match consumer.settings.gaps:
        case GapPolicy.ALERT:
            await unit.versions.open_gap(gap)
            return replace(await call(consumer, unit, state), gap=gap), ""
        case GapPolicy.FETCH if consumer.fetch_missing is not None:
            state.began = True
            await called(consumer.fetch_missing(state.message, unit.session, gap))
            return await call(consumer, unit, state), "fetched"
        case GapPolicy.REBUILD if consumer.rebuild is not None:
            state.began = True
            await called(consumer.rebuild(state.message, unit.session, gap))
            return Handled(), "rebuilt"
        case _:
            state.began = True
            state.gap = gap
            raise SequenceGap(gap.key, gap.expected, gap.found)


async def call(consumer: Consumer, unit: Unit, state: Try) -> Handled:
    """Call the handler in the open transaction."""
    state.began = True
    with handling(consumer.name, state.message):
        result = await consumer.invoke(state.message, unit.session)
    reach(CrashPoint.HANDLE_AFTER, consumer.name)
    if consumer.settings.keeps_results:
        kept = json.dumps(result, default=str)
        key = state.message.key
        await unit.claims.keep_result(consumer.name, state.message.id, kept, key)
    return Handled(result)


async def after_failure(
    consumer: Consumer,
    database: Database,
    state: Try,
    failure: Classified,
    fence: int | None = None,
) -> Outcome:
    """Write the failure in a transaction of its own; it never overwrites how a message ended.

    With the *fence* of a leased claim: nor what another owner makes of the message.
    """
    try:
        async with database.begin() as unit:
            reach(CrashPoint.FAILURE_BEFORE, consumer.name)
            if holds_key(consumer, state.message):
                await unit.waiting.hold(consumer.name, [state.message.key or ""])
            held = Held(fence=fence, from_waiting=state.from_waiting)
            outcome = await write_failure(unit, consumer, state.message, failure, state.gap, held)
        reach(CrashPoint.FAILURE_AFTER, consumer.name)
    except Exception as error:  # noqa: BLE001  the delivery comes back, and is tried again
        log.warning(
            "failure could not be written; message comes back",
            extra={
                "consumer": consumer.name,
                "id": state.message.id,
                "reason": failure.reason,
                "why": classify(consumer, database, error).reason,
            },
        )
        return RetryLater(consumer.settings.held_retry_seconds, failure)
    return Skipped() if outcome is None else outcome


async def handle_unreadable(consumer: Consumer, database: Database, record: Unreadable) -> Outcome:
    """Make a dead letter of a record that is no message."""
    try:
        async with database.begin() as unit:
            reach(CrashPoint.FAILURE_BEFORE, consumer.name)
            outcome = await write_unreadable(unit, consumer, record)
        reach(CrashPoint.FAILURE_AFTER, consumer.name)
        return outcome
    except Exception as error:  # noqa: BLE001  the delivery comes back
        failure = classify(consumer, database, error)
        return RetryLater(consumer.settings.held_retry_seconds, failure)
