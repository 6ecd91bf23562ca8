"""Writes a failed attempt, and what becomes of its message, in one transaction.

in every case                the attempt: when and why it failed
retryable, attempts left     FAILED_RETRYABLE, due later  (and its payload, in the waiting table;
                             by retry topic also its record, in the outbox)
retryable, none left  ┐
hopeless              ┴──▶   FAILED_TERMINAL + dead letter, or PARKED + waiting table
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from semel.codec import Unread, Unreadable
from semel.lease import Owner, this_process
from semel.message import CONFLICT, Message, StoredRecord, digest_of, text_of
from semel.messaging.database import Unit
from semel.messaging.failed.deadletters import Failed, keep_letter, letter_of
from semel.messaging.failed.retrytopic import (
    came_by_retry,
    goes_by_topic,
    patience,
    send_to_retry,
)
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
from semel.messaging.handler import Consumer, holds_key
from semel.messaging.outcome import (
    Conflicted,
    DeadLettered,
    Mark,
    Outcome,
    ParkedAway,
    Refused,
    RetryLater,
    RetryStored,
    Skipped,
    Told,
)
from semel.messaging.receive.offsets import Ended, mark, mark_kept
from semel.messaging.records import (
    LEFT_SECONDS,
    DeadLetter,
    FailedAttempt,
    Gap,
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
    is_erased = claim is not None and claim.erased_at is not None
    await unit.attempts.add(
        FailedAttempt(
            consumer,
            message.id,
            message.attempt,
            failure.code,
            failure.failure_class.value,
            # An exception may quote the payload that was erased.
            "" if is_erased else failure.reason,
            failure.exception,
            _worker(this_process()),
            message.key,
            claim.failed_at or 0.0 if claim is not None and is_its_time else 0.0,
        )
    )


@cache
def _worker(process: str) -> str:
    owner = Owner.read(process)
    return "" if owner is None else str(owner)


@dataclass(slots=True)
class FailedMessage:
    """A message whose attempt failed, in the transaction that writes the failure."""

    unit: Unit
    consumer: Consumer
    message: Message
    failure: Classified
    gap: Gap | None = None
    """The missing versions that made it fail."""

    is_claimed: bool = False
    """This transaction took its claim, and turns it into the failure."""

    fence: int | None = None
    """The fence of a leased claim; if the claim has another one, the lease was lost."""

    from_waiting: bool = False
    """The message was read from the waiting table, and is still in it."""

    async def write(self) -> Outcome:
        """Write the attempt, and return what becomes of the message.

        If another worker or a person ended the message while it was tried, their decision stays:
        the outcome is `Skipped` if they completed it.  If another owner holds the message, it
        comes back.  If the claim says that the payload was erased, no part of it is written.
        """
        if self.message.is_duplicate:
            return await self._not_sent_again()
        settings = self.consumer.settings
        if self.gap is not None:
            await self.unit.versions.open_gap(self.gap)
            if settings.gaps is GapPolicy.PARK_KEY:
                return await self.park()
        match verdict(settings.retry, self.failure, self.message.attempt):
            case RetryIn(seconds):
                return await self._retry(seconds)
            case Exhausted() if self._given_up is GiveUp.PARK:
                return await self.park()
            case Hopeless() if settings.on_hopeless is GiveUp.PARK:
                return await self.park()
            case _:
                return await self._dead_letter()

    @property
    def _given_up(self) -> GiveUp:
        """Where it goes after its last attempt."""
        settings = self.consumer.settings
        is_poison = self.failure.failure_class is FailureClass.POISON
        return settings.on_poison or settings.on_exhausted if is_poison else settings.on_exhausted

    async def park(self) -> Outcome:
        """Write the attempt, and park the message, regardless of the retry policy."""
        claim = await self.fail(ClaimState.PARKED)
        if claim is None:
            return await self._ended()
        await self._let_in(Waits.PARKED, claim)
        return ParkedAway(self.failure.reason, self.failure)

    async def _retry(self, seconds: float) -> Outcome:
        claim = await self.fail(ClaimState.FAILED_RETRYABLE, seconds)
        if claim is None:
            return await self._ended()
        attempt = self.message.attempt
        if not (self.consumer.settings.stores_retries or self.from_waiting):
            return RetryLater(seconds, self.failure, attempt)
        if goes_by_topic(self.consumer, self.message, claim):
            await send_to_retry(self.unit, self.consumer, self.message, self.failure, claim.due_at)
            seconds += patience(self.consumer)
        await self._let_in(Waits.RETRY, claim, seconds)
        if claim.erased_at is None:
            return RetryStored(self.failure, attempt)
        parked = Failure(ClaimState.PARKED, attempt, self.failure.code, marker=ERASED)
        await self.unit.claims.mark_failed(self.consumer.name, self.message.id, parked)
        return ParkedAway(ERASED_REASON, self.failure)

    async def _dead_letter(self) -> Outcome:
        claim = await self.fail(ClaimState.FAILED_TERMINAL)
        if claim is None:
            return await self._ended()
        is_schema = self.failure.failure_class is FailureClass.SCHEMA
        told = Told.SCHEMA_INCOMPATIBLE if is_schema else Told.DLQ
        await self.file(await self.letter(told, claim))
        dead = DeadLettered(self.failure, told)
        name, message_id = self.consumer.name, self.message.id
        if self.from_waiting:
            await leave_waiting(self.unit, name, Ended(message_id, None, dead))
        else:
            await take_out(self.unit, name, message_id)
        return dead

    async def _not_sent_again(self) -> Outcome:
        """Write the failure of an invoked duplicate: its effect is durable, what it sends is not.

        Its claim stays COMPLETED, so the attempts are counted in the crash notes: they are limited
        as those of any other message.
        """
        unit, name, failure = self.unit, self.consumer.name, self.failure
        counter = _repetition_of(self.message)
        tries = await unit.members.suspect(name, counter, this_process())
        message = self.message = self.message.tried(tries)
        handled = await unit.claims.look_up(name, message.id)
        await keep_attempt(unit, name, message, failure, handled)
        found = verdict(self.consumer.settings.retry, failure, tries)
        if isinstance(found, RetryIn):
            now = await unit.waiting.get(name, message.id) if self.from_waiting else None
            if now is None:
                return RetryLater(found.seconds, failure, tries)
            # The broker does not deliver it again: the retry worker takes it when its row is due.
            again = replace(now, waits=Waits.RETRY, attempts=tries, reason=failure.reason)
            again = replace(again, error_code=failure.code, exception=failure.exception)
            await unit.waiting.put(again, found.seconds)
            return RetryStored(failure, tries)
        # Used-up attempts stay counted: if the rest of its batch brings the message back, it is
        # not tried that many times again.
        if isinstance(found, Hopeless):
            await forget_tries(unit, self.consumer, message)
        is_new = await self.file(await self.letter(Told.DLQ, handled))
        dead = DeadLettered(failure, is_new=is_new)
        if self.from_waiting:
            await leave_waiting(unit, name, Ended(message.id, None, dead))
        return dead

    async def fail(self, state: ClaimState, seconds: float = 0.0) -> ClaimRow | None:
        """Write the failure and the attempt; return the claim, or None if the message is over."""
        message, code = self.message, self.failure.code
        digest, source = message.digest, source_of(message)
        claim = await self._mark(Failure(state, message.attempt, code, seconds, digest, source))
        if claim is not None:
            await keep_attempt(self.unit, self.consumer.name, message, self.failure, claim)
            # The audit finds the message under its first coordinates.
            await mark(self.unit, self.consumer.name, Mark.REFUSED, came_by_retry(message))
        return claim

    async def _mark(self, failure: Failure) -> ClaimRow | None:
        unit, name, message_id = self.unit, self.consumer.name, self.message.id
        if self.is_claimed:
            return await unit.claims.undo(name, message_id, failure)
        if self.from_waiting:
            waiting = await unit.waiting.get(name, message_id)
            if waiting is not None and waiting.waits is Waits.BEHIND:
                # A waiting message may be PARKED in its claim.  The attempt reopened the claim,
                # but that was rolled back.
                await unit.claims.reopen(name, message_id)
        if not await unit.claims.mark_failed(name, message_id, failure, self.fence):
            return None
        return await unit.claims.look_up(name, message_id)

    async def _ended(self) -> Outcome:
        """Return the outcome of a failed attempt whose message another owner ended, or holds."""
        unit, consumer, message = self.unit, self.consumer, self.message
        row = await unit.claims.look_up(consumer.name, message.id)
        match refusal(row, message.digest, await unit.now()) if row else None:
            case Duplicate():
                return Skipped()
            case Conflict(expected):
                return await write_conflict(unit, consumer, message, expected)
            case Parked() | Terminal() as closed:
                return refused_as(closed)
            case _:
                # The other owner may still fail, so the message must not be acknowledged.
                return RetryLater(consumer.settings.held_retry_seconds, self.failure)

    async def _let_in(self, waits: Waits, claim: ClaimRow, seconds: float = 0.0) -> None:
        unit, consumer, message = self.unit, self.consumer, self.message
        held = holds_key(consumer, message) and not await overtakes(consumer, unit, message)
        waiting = replace(
            WaitingMessage.of(consumer.name, message, waits, held=held),
            attempts=message.attempt,
            reason=self.failure.reason,
            error_code=self.failure.code,
            exception=self.failure.exception,
        )
        if claim.erased_at is not None:
            waiting = parked_without_payload(waiting, claim.erased_at)
        await let_in(unit, message, waiting, seconds, is_new=not self.from_waiting)

    async def letter(self, told: Told, claim: ClaimRow | None) -> DeadLetter:
        """Return its dead letter; without payload if its claim says erased."""
        now = max(claim.updated_at, claim.failed_at or 0.0) if claim else await self.unit.now()
        first = claim.first_seen_at if claim else now
        failed = Failed(self.failure, told, first, now)
        letter = letter_of(self.consumer, self.message, failed)
        # A conflict has another payload than the claim: erasing the first did not erase it.
        if claim is None or claim.erased_at is None or told is Told.CONFLICT:
            return letter
        gone = replace(letter, payload=None, headers={}, reason=ERASED_REASON)
        return replace(gone, erased_at=claim.erased_at)

    async def file(self, letter: DeadLetter) -> bool:
        """Write its dead letter, and mark its offset; False if the message had one."""
        unit, name, came_from = self.unit, self.consumer.name, self.message.source
        is_new = await keep_letter(unit, self.consumer.settings, letter)
        if came_from is not None:
            first = letter
            if not is_new:
                first = await unit.dead_letters.get(name, letter.message_id) or letter
            await mark_kept(unit, name, came_from, first)
        return is_new


def refused_as(answer: Parked | Terminal) -> Refused:
    """Return the outcome of a delivery whose message waits for a person, or is a dead letter."""
    return Refused("parked" if isinstance(answer, Parked) else f"dead letter ({answer.error_code})")


def _repetition_of(message: Message) -> str:
    # Under an id of its own, because the crash notes of the message itself count deaths.
    return f"{CONFLICT}duplicate:{message.id}"


async def forget_tries(unit: Unit, consumer: Consumer, message: Message) -> None:
    """Reset the number of attempts of an invoked duplicate."""
    await unit.members.clear_notes(consumer.name, [_repetition_of(message)])


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


def conflict_with(expected: str, message: Message) -> Classified:
    """Return the failure of a message whose id is known with another payload."""
    return Classified(
        FailureClass.POISON,
        "PAYLOAD_CONFLICT",
        f"the id is known with the payload {expected[:12]}…, this one is {message.digest[:12]}…",
        "",
    )


def why_unread(record: Unreadable) -> tuple[Classified, Told]:
    """Return the failure of a record that cannot be read, and the name of its outcome."""
    is_schema = record.why is Unread.SCHEMA_INCOMPATIBLE
    code = "MESSAGE_ID_MISSING" if record.why is Unread.NO_ID else "DESERIALIZATION_FAILED"
    told = Told.SCHEMA_INCOMPATIBLE if is_schema else Told.DESERIALIZATION_FAILURE
    return Classified(FailureClass.SCHEMA, code, record.reason, ""), told


def unread_message(record: Unreadable) -> Message:
    """Return a record that cannot be read as a message, with its bytes and nothing decoded."""
    found = record.record
    if isinstance(found, StoredRecord):
        return found.message
    return Message(
        id=record.id,
        payload=None,
        raw=found.value or b"",
        key=None if found.key is None else text_of(found.key),
        headers=found.headers,
        source=found.at,
        timestamp=found.timestamp,
        digest=digest_of(found.value),
    )


async def write_conflict(
    unit: Unit, consumer: Consumer, message: Message, expected: str
) -> Conflicted:
    """Dead-letter a message whose id is known with another payload; the claim stays."""
    failure = conflict_with(expected, message)
    failed = FailedMessage(unit, consumer, message, failure)
    first = await unit.claims.look_up(consumer.name, message.id)
    letter = await failed.letter(Told.CONFLICT, first)
    # Under another id: a dead letter under the message's own id is about the first payload.
    its_own = conflict_id(message.id, message.digest)
    letter = replace(letter, message_id=its_own, expected_hash=expected)
    return Conflicted(expected, message.digest, await failed.file(letter))


async def write_unreadable(unit: Unit, consumer: Consumer, record: Unreadable) -> Outcome:
    """Dead-letter the bytes of a record that cannot be read, so that its offset may be passed.

    If other bytes are known under its id, as after a topic was made anew, it is a conflict.
    """
    message, (failure, told) = unread_message(record), why_unread(record)
    failed = FailedMessage(unit, consumer, message, failure)
    claim = await failed.fail(ClaimState.FAILED_TERMINAL)
    if claim is None:
        claim = await unit.claims.look_up(consumer.name, message.id)
        known = claim.payload_hash if claim is not None else ""
        if known not in ("", message.digest):
            return await write_conflict(unit, consumer, message, known)
    return DeadLettered(failure, told, await failed.file(await failed.letter(told, claim)))
