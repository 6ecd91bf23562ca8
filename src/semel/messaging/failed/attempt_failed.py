"""Writes a failed attempt, and what becomes of its message, in one transaction.

in every case                the attempt: when and why it failed
retryable, attempts left     FAILED_RETRYABLE, due later  (and its payload, in the waiting table)
retryable, none left  ┐
hopeless              ┴──▶   FAILED_TERMINAL + dead letter, or PARKED + waiting table
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from semel.codec import Unread, Unreadable
from semel.lease import Owner, this_process
from semel.message import Message, digest_of, text_of
from semel.messaging.consumer import Consumer, holds_key
from semel.messaging.database import Unit
from semel.messaging.failed.deadletters import Failed, keep_letter, letter_of
from semel.messaging.failed.waiting import (
    leave_waiting,
    let_in,
    overtakes,
    parked_without_payload,
    take_out,
)
from semel.messaging.failure import Classified, Exhausted, FailureClass, Hopeless, RetryIn, verdict
from semel.messaging.handle.claims import (
    ERASED,
    Claimed,
    ClaimRequest,
    ClaimRow,
    ClaimState,
    Conflict,
    Duplicate,
    Failure,
    HeldElsewhere,
    NotClaimable,
    Parked,
    Terminal,
    refusal,
    source_of,
)
from semel.messaging.outcome import (
    Conflicted,
    DeadLettered,
    Outcome,
    ParkedAway,
    Refused,
    RetryLater,
    RetryStored,
    Skipped,
    Told,
)
from semel.messaging.receive.offsets import Ended, mark_kept
from semel.messaging.records import (
    LEFT_SECONDS,
    DeadLetter,
    FailedAttempt,
    Gap,
    InboxMessage,
    WaitingMessage,
    Waits,
    conflict_id,
)
from semel.messaging.redact import ERASED_REASON
from semel.policy.vocabulary import GapPolicy, GiveUp


async def keep_attempt(
    unit: Unit, consumer: str, message: Message, failure: Classified, claim: ClaimRow | None
) -> None:
    """Write the failed attempt of a message whose *claim* has the failure already."""
    # If a repetition fails, the claim is COMPLETED, and its time is that of the effect.
    is_its_time = claim is not None and claim.state is not ClaimState.COMPLETED
    await unit.attempts.add(
        _attempt(
            consumer,
            message.id,
            message.key,
            message.attempt,
            failure,
            is_erased=claim is not None and claim.erased_at is not None,
            at=claim.failed_at or 0.0 if claim is not None and is_its_time else 0.0,
        )
    )


async def keep_attempt_of_inbox(
    unit: Unit, consumer: str, message_id: str, failure: Classified
) -> InboxMessage | None:
    """Write the failed attempt of a stored message whose row counts it already; return the row.

    None, and nothing written, if it is processed: another worker has handled it meanwhile.
    """
    stored = await unit.inbox.get(consumer, message_id)
    if stored is None or stored.processed_at is not None:
        return None
    is_erased = stored.erased_at is not None
    await unit.attempts.add(
        _attempt(consumer, message_id, stored.key, stored.attempts, failure, is_erased=is_erased)
    )
    return stored


def _attempt(
    consumer: str,
    message_id: str,
    key: str | None,
    number: int,
    failure: Classified,
    *,
    is_erased: bool,
    at: float = 0.0,
) -> FailedAttempt:
    return FailedAttempt(
        consumer,
        message_id,
        number,
        failure.code,
        failure.failure_class.value,
        # An exception may quote the payload that was erased.
        "" if is_erased else failure.reason,
        failure.exception,
        _worker(this_process()),
        key,
        at,
    )


@cache
def _worker(process: str) -> str:
    owner = Owner.read(process)
    return "" if owner is None else str(owner)


async def file(unit: Unit, consumer: Consumer, message: Message, letter: DeadLetter) -> bool:
    """Write a dead letter, and mark the message's offset; False if the message had one."""
    is_new = await keep_letter(unit, consumer.settings, letter)
    if message.source is not None:
        first = letter
        if not is_new:
            first = await unit.dead_letters.get(consumer.name, letter.message_id) or letter
        await mark_kept(unit, consumer.name, message.source, first)
    return is_new


async def make_letter(
    unit: Unit,
    consumer: Consumer,
    message: Message,
    failure: Classified,
    told: Told,
    claim: ClaimRow | None,
) -> DeadLetter:
    """Return the dead letter of a failed message; without payload if its claim says erased."""
    now = max(claim.updated_at, claim.failed_at or 0.0) if claim else await unit.now()
    first = claim.first_seen_at if claim else now
    letter = letter_of(consumer, message, Failed(failure, told, first, now))
    # A conflict has another payload than the claim: erasing the first did not erase it.
    if claim is None or claim.erased_at is None or told is Told.CONFLICT:
        return letter
    gone = replace(letter, payload=None, headers={}, reason=ERASED_REASON)
    return replace(gone, erased_at=claim.erased_at)


@dataclass(frozen=True, slots=True)
class Held:
    """How the failed attempt held its claim."""

    by_this_transaction: bool = False
    """This transaction took the claim, and turns it into the failure."""

    fence: int | None = None
    """The fence of a leased claim; if the claim has another one, the lease was lost."""

    from_waiting: bool = False
    """The message was read from the waiting table, and is still in it."""


async def write_failure(
    unit: Unit,
    consumer: Consumer,
    message: Message,
    failure: Classified,
    gap: Gap | None = None,
    claim: Held | None = None,
) -> Outcome:
    """Write a failed attempt, and return what becomes of its message.

    If another worker or a person ended the message while it was tried, their decision stays: the
    outcome is `Skipped` if they completed it.  If another owner holds the message, it comes back.
    If the claim says that the payload was erased, no part of the payload is written.
    """
    claim = claim or Held()
    if message.is_duplicate:
        return await _not_sent_again(unit, consumer, message, failure, claim)
    settings = consumer.settings
    if gap is not None:
        await unit.versions.open_gap(gap)
    found = verdict(settings.retry, failure, message.attempt)
    if gap is not None and settings.gaps is GapPolicy.PARK_KEY:
        return await _park(unit, consumer, message, failure, claim)
    match found:
        case RetryIn(seconds):
            return await _retry(unit, consumer, message, failure, seconds, claim)
        case Exhausted() if settings.on_exhausted is GiveUp.PARK:
            return await _park(unit, consumer, message, failure, claim)
        case Hopeless() if settings.on_hopeless is GiveUp.PARK:
            return await _park(unit, consumer, message, failure, claim)
        case _:
            return await _dead_letter(unit, consumer, message, failure, claim)


async def _not_sent_again(
    unit: Unit, consumer: Consumer, message: Message, failure: Classified, claim: Held
) -> Outcome:
    """Write the failure of an invoked duplicate: its effect is durable, but what it sends is not.

    Its claim stays COMPLETED, so the attempts are counted in the crash notes: they are limited
    as those of any other message.
    """
    message = message.tried(await _count(unit, consumer, message))
    handled = await unit.claims.look_up(consumer.name, message.id)
    await keep_attempt(unit, consumer.name, message, failure, handled)
    found = verdict(consumer.settings.retry, failure, message.attempt)
    if isinstance(found, RetryIn):
        now = await unit.waiting.get(consumer.name, message.id) if claim.from_waiting else None
        if now is None:
            return RetryLater(found.seconds, failure, message.attempt)
        # The broker does not deliver it again: the retry worker takes it when its row is due.
        again = replace(now, waits=Waits.RETRY, attempts=message.attempt, reason=failure.reason)
        again = replace(again, error_code=failure.code, exception=failure.exception)
        await unit.waiting.put(again, found.seconds)
        return RetryStored(failure, message.attempt)
    # Used-up attempts stay counted: if the rest of its batch brings the message back, it is not
    # tried that many times again.
    if isinstance(found, Hopeless):
        await forget_tries(unit, consumer, message)
    letter = await make_letter(unit, consumer, message, failure, Told.DLQ, handled)
    dead = DeadLettered(failure, is_new=await file(unit, consumer, message, letter))
    if claim.from_waiting:
        await leave_waiting(unit, consumer.name, Ended(message.id, None, dead))
    return dead


async def _count(unit: Unit, consumer: Consumer, message: Message) -> int:
    counter = _repetition_of(message)
    return await unit.members.suspect(consumer.name, counter, this_process())


def _repetition_of(message: Message) -> str:
    # Under an id of its own, because the crash notes of the message itself count deaths.
    return f"duplicate:{message.id}"


async def forget_tries(unit: Unit, consumer: Consumer, message: Message) -> None:
    """Reset the number of attempts of an invoked duplicate."""
    await unit.members.clear_notes(consumer.name, [_repetition_of(message)])


async def _fail(
    unit: Unit,
    consumer: Consumer,
    message: Message,
    state: ClaimState,
    failure: Classified,
    claim: Held,
    seconds: float = 0.0,
) -> ClaimRow | None:
    """Write the failure and the attempt; return the claim, or None if the message is over."""
    written = _failure(message, state, failure, seconds)
    row = await _mark(unit, consumer, message, written, claim)
    if row is not None:
        await keep_attempt(unit, consumer.name, message, failure, row)
    return row


async def _mark(
    unit: Unit, consumer: Consumer, message: Message, failure: Failure, claim: Held
) -> ClaimRow | None:
    if claim.by_this_transaction:
        return await unit.claims.undo(consumer.name, message.id, failure)
    if claim.from_waiting:
        waiting = await unit.waiting.get(consumer.name, message.id)
        if waiting is not None and waiting.waits is Waits.BEHIND:
            # A waiting message may be PARKED in its claim.  The attempt reopened the claim, but
            # that was rolled back.
            await unit.claims.reopen(consumer.name, message.id)
    if not await unit.claims.mark_failed(consumer.name, message.id, failure, claim.fence):
        return None
    return await unit.claims.look_up(consumer.name, message.id)


async def _ended(unit: Unit, consumer: Consumer, message: Message, failure: Classified) -> Outcome:
    """Return the outcome of a failed attempt whose message another owner ended, or holds."""
    row = await unit.claims.look_up(consumer.name, message.id)
    match refusal(row, message.digest, await unit.now()) if row else None:
        case Duplicate():
            return Skipped()
        case Conflict(expected):
            return await write_conflict(unit, consumer, message, expected)
        case Parked():
            return Refused("parked")
        case Terminal(error_code):
            return Refused(f"dead letter ({error_code})")
        case _:
            # The other owner may still fail, so the message must not be acknowledged.
            return RetryLater(consumer.settings.held_retry_seconds, failure)


def _failure(
    message: Message, state: ClaimState, failure: Classified, seconds: float = 0.0
) -> Failure:
    digest, source = message.digest, source_of(message)
    return Failure(state, message.attempt, failure.code, seconds, digest, source)


async def _retry(
    unit: Unit,
    consumer: Consumer,
    message: Message,
    failure: Classified,
    seconds: float,
    claim: Held,
) -> Outcome:
    state = ClaimState.FAILED_RETRYABLE
    row = await _fail(unit, consumer, message, state, failure, claim, seconds)
    if row is None:
        return await _ended(unit, consumer, message, failure)
    if not (consumer.settings.stores_retries or claim.from_waiting):
        return RetryLater(seconds, failure, message.attempt)
    waiting = await _waiting(unit, consumer, message, failure, Waits.RETRY, row)
    await let_in(unit, message, waiting, seconds, is_new=not claim.from_waiting)
    if waiting.erased_at is None:
        return RetryStored(failure, message.attempt)
    parked = Failure(ClaimState.PARKED, message.attempt, ERASED)
    await unit.claims.mark_failed(consumer.name, message.id, parked)
    return ParkedAway(ERASED_REASON, failure)


async def _park(
    unit: Unit, consumer: Consumer, message: Message, failure: Classified, claim: Held
) -> Outcome:
    row = await _fail(unit, consumer, message, ClaimState.PARKED, failure, claim)
    if row is None:
        return await _ended(unit, consumer, message, failure)
    waiting = await _waiting(unit, consumer, message, failure, Waits.PARKED, row)
    await let_in(unit, message, waiting, is_new=not claim.from_waiting)
    return ParkedAway(failure.reason, failure)


async def park_poison(
    unit: Unit,
    consumer: Consumer,
    message: Message,
    failure: Classified,
    claim: Held | None = None,
) -> Outcome:
    """Park a message that kills its process."""
    return await _park(unit, consumer, message, failure, claim or Held())


async def fence_to_park(unit: Unit, consumer: Consumer, request: ClaimRequest) -> int | None:
    """Lease a message in this transaction, in order to park it; return the fence.

    None if it cannot be leased: it is over, parked already, or not due.

    Raises:
        NotClaimable: another owner holds it, possibly since the caller last read its state.
    """
    answer = await unit.claims.lease(
        consumer.name, request, owner=this_process(), seconds=LEFT_SECONDS
    )
    if isinstance(answer, HeldElsewhere):
        raise NotClaimable(consumer.name, request.message_id, answer)
    return answer.fence if isinstance(answer, Claimed) else None


async def _dead_letter(
    unit: Unit, consumer: Consumer, message: Message, failure: Classified, claim: Held
) -> Outcome:
    row = await _fail(unit, consumer, message, ClaimState.FAILED_TERMINAL, failure, claim)
    if row is None:
        return await _ended(unit, consumer, message, failure)
    told = Told.SCHEMA_INCOMPATIBLE if failure.failure_class is FailureClass.SCHEMA else Told.DLQ
    letter = await make_letter(unit, consumer, message, failure, told, row)
    await file(unit, consumer, message, letter)
    dead = DeadLettered(failure, told)
    if claim.from_waiting:
        await leave_waiting(unit, consumer.name, Ended(message.id, None, dead))
    else:
        await take_out(unit, consumer.name, message.id)
    return dead


async def write_conflict(
    unit: Unit, consumer: Consumer, message: Message, expected: str
) -> Conflicted:
    """Dead-letter a message whose id is known with another payload; the claim stays."""
    failure = Classified(
        FailureClass.POISON,
        "PAYLOAD_CONFLICT",
        f"the id is known with the payload {expected[:12]}…, this one is {message.digest[:12]}…",
        "",
    )
    first = await unit.claims.look_up(consumer.name, message.id)
    letter = await make_letter(unit, consumer, message, failure, Told.CONFLICT, first)
    # Under another id: a dead letter under the message's own id is about the first payload.
    its_own = conflict_id(message.id, message.digest)
    letter = replace(letter, message_id=its_own, expected_hash=expected)
    return Conflicted(expected, message.digest, await file(unit, consumer, message, letter))


async def write_unreadable(unit: Unit, consumer: Consumer, record: Unreadable) -> DeadLettered:
    """Dead-letter the bytes of a record that cannot be read, so that its offset may be passed."""
    told = (
        Told.SCHEMA_INCOMPATIBLE
        if record.why is Unread.SCHEMA_INCOMPATIBLE
        else Told.DESERIALIZATION_FAILURE
    )
    code = "MESSAGE_ID_MISSING" if record.why is Unread.NO_ID else "DESERIALIZATION_FAILED"
    failure = Classified(FailureClass.SCHEMA, code, record.reason, "")
    at = record.record.at
    message = Message(
        id=record.id,
        payload=None,
        raw=record.record.value or b"",
        key=None if record.record.key is None else text_of(record.record.key),
        headers=record.record.headers,
        source=at,
        timestamp=record.record.timestamp,
        digest=digest_of(record.record.value),
    )
    row = await _fail(unit, consumer, message, ClaimState.FAILED_TERMINAL, failure, Held())
    if row is None:
        row = await unit.claims.look_up(consumer.name, message.id)
    letter = await make_letter(unit, consumer, message, failure, told, row)
    return DeadLettered(failure, told, await file(unit, consumer, message, letter))


async def _waiting(
    unit: Unit,
    consumer: Consumer,
    message: Message,
    failure: Classified,
    waits: Waits,
    claim: ClaimRow,
) -> WaitingMessage:
    held = holds_key(consumer, message) and not await overtakes(consumer, unit, message)
    found = WaitingMessage.of(consumer.name, message, waits, held=held)
    waiting = replace(
        found,
        attempts=message.attempt,
        reason=failure.reason,
        error_code=failure.code,
        exception=failure.exception,
    )
    if claim.erased_at is None:
        return waiting
    return parked_without_payload(waiting, claim.erased_at)
