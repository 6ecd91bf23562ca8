"""One message, one transaction: claim, handle, commit; or roll back and write the failure.

    begin ─▶ claim ─▶ handle ─▶ commit ─▶ (settle)
               │         └─ raises ─▶ roll back ─▶ begin ─▶ write the failure ─▶ commit ─▶ (settle)
               └─ not ours: answer as the claim table says

Nothing here talks to a broker: the outcome says what became of the message,
and whoever delivered it settles it afterwards.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace

from semel.codec import Unreadable
from semel.crashpoints import CrashPoint, reach
from semel.errors import Fenced, InDoubt
from semel.message import Message
from semel.messaging.alerts import alert
from semel.messaging.cancelling import called
from semel.messaging.claims import OLD_VERSION, Claimed, ClaimRequest
from semel.messaging.consumer import Consumer
from semel.messaging.context import handling
from semel.messaging.database import Database, Unit
from semel.messaging.failing import (
    Held,
    holds_key,
    leave_the_room,
    write_failure,
    write_unreadable,
)
from semel.messaging.failure import Classified, NonRetryableMessageError, SequenceGap
from semel.messaging.outcome import Handled, Outcome, RetryLater, Skipped
from semel.messaging.overtaking import let_next_go
from semel.messaging.queueing import into_the_room, out_of_the_room
from semel.messaging.refusing import ends_waiting, not_claimed
from semel.messaging.sequence import Gap, GapPolicy, InSequence, due_version, in_sequence
from semel.messaging.tries import Try
from semel.messaging.waiting import WaitingMessage

log = logging.getLogger("semel.messaging")


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
