"""The inbox: messages are stored first, and handled in the same transaction or by a worker later.

    store_and_handle   begin ─▶ store ─▶ handle ─▶ mark processed ─▶ commit ─▶ (ack)
    store              begin ─▶ store ─▶ commit ─▶ (ack)       … and an inbox's worker, later

An id is stored once for each consumer.  Acknowledge after the answer: then the message or its
effect is durable.  The worker takes stored messages from the table:

    take ─▶ handle, each in a savepoint ─▶ commit        a batch, in normal operation
    take ─▶ note the try ─▶ commit ─▶ handle alone       after an unclean stop

A worker's row, which a clean stop removes, has the number of its messages in flight.  The next
worker that finds the row handles that many alone, and dead-letters one that kills too often
(`semel.messaging.receive.crash`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from semel.clock import SYSTEM_CLOCK, Clock
from semel.codec import SchemaIncompatible, Undecodable
from semel.crashpoints import CrashPoint, reach
from semel.errors import Fenced, InDoubt, Misuse, Retryable
from semel.lease import Owner
from semel.message import Message, Partition, value_of
from semel.messaging.consumer import Consumer, unread
from semel.messaging.database import Database, TransactionEnded, Unit, is_refusal
from semel.messaging.failed.attempt_failed import keep_attempt_of_inbox, write_conflict
from semel.messaging.failed.deadletters import Failed, keep_letter, letter_of
from semel.messaging.failure import Classified, FailureClass, RetryIn, verdict
from semel.messaging.handle.attempt import Attempt, classify
from semel.messaging.handle.cancel import rung
from semel.messaging.handle.claims import (
    ClaimRow,
    Conflict,
    Duplicate,
    HeldElsewhere,
    Parked,
    Terminal,
    refusal,
)
from semel.messaging.outcome import (
    Conflicted,
    DeadLettered,
    Handled,
    Outcome,
    Refused,
    RetryStored,
    Skipped,
    Told,
    tell,
    tell_received,
)
from semel.messaging.receive.crash import (
    CRASHED,
    TURNS,
    Suspect,
    Writer,
    clear_own_notes,
    guarded,
    is_gone,
    noting_as,
)
from semel.messaging.records import InboxMessage, Member
from semel.messaging.redact import ERASED_REASON, reason_of
from semel.policy.vocabulary import Duplicates, GiveUp, Mode

log = logging.getLogger("semel.messaging")


@dataclass(frozen=True, slots=True)
class Stored:
    """The message is durable, and a worker handles it."""


NotNew: TypeAlias = Skipped | Refused | Conflicted


class Inbox:
    """The inbox of one consumer."""

    def __init__(self, consumer: Consumer, database: Database) -> None:
        """Use *consumer*.

        Raises:
            Misuse: it takes batches or leases, checks versions, parks messages, or is called for
                duplicates: an inbox supports none of these.
        """
        if consumer.takes_batches or consumer.settings.versioned:
            raise Misuse(
                f"consumer {consumer.name}: an inbox handles messages one by one, "
                f"and does not check versions"
            )
        if consumer.mode is Mode.LEASED:
            raise Misuse(
                f"consumer {consumer.name}: an inbox handles each message in one transaction, "
                f"and has no leases to give"
            )
        if GiveUp.PARK in (consumer.settings.on_exhausted, consumer.settings.on_hopeless):
            raise Misuse(
                f"consumer {consumer.name}: what an inbox gives up is a dead letter, and is never "
                f"parked; use GiveUp.DEAD_LETTER (onExhausted: dlq in a policy)"
            )
        if consumer.settings.duplicates is Duplicates.INVOKE:
            raise Misuse(
                f"consumer {consumer.name}: an inbox does not call the handler for a duplicate; "
                f"send through an outbox, and use Duplicates.SKIP"
            )
        self.consumer = consumer
        self.database = database

    async def store(self, message: Message) -> Stored | NotNew:
        """Make a message durable, to be handled by an `semel.messaging.receive.inbox.InboxWorker`.

        Acknowledge after any answer: the message is stored, was stored before, or is dead-lettered
        because its id is known with another payload.  If a replay handled it before it came, its
        claim shows that, and it is not stored.

        Raises:
            Retryable: nothing was stored; do not acknowledge.
            InDoubt: the commit is unknown; do not acknowledge, storing it again is safe.
        """
        async with self.database.begin() as unit:
            known = await self._known(unit, message)
            reach(CrashPoint.MESSAGE_COMMIT_BEFORE, self.consumer.name)
        reach(CrashPoint.MESSAGE_COMMIT_AFTER, self.consumer.name)
        tell_received(message, self.consumer.name)
        if known is None:
            # No event here: the worker reports the outcome.
            return Stored()
        tell(message, known, self.consumer.name)
        return known

    async def store_and_handle(self, message: Message) -> Handled | NotNew:
        """Store and handle a message in one transaction.

        An exception of the handler is raised here, and nothing is kept: the broker delivers the
        message again.  A violated constraint of the handler's own tables is such a failure,
        never a duplicate.

        Raises:
            Retryable: nothing happened; do not acknowledge.
            InDoubt: the commit is unknown; do not acknowledge, the next delivery finds out.
        """
        began = SYSTEM_CLOCK.monotonic()
        async with self.database.begin() as unit:
            answer: Handled | NotNew | None = await self._known(unit, message)
            reach(CrashPoint.CLAIM_AFTER, self.consumer.name)
            if answer is None:
                answer = Handled(await handle(unit, Attempt(self.consumer, message)))
            reach(CrashPoint.MESSAGE_COMMIT_BEFORE, self.consumer.name)
        reach(CrashPoint.MESSAGE_COMMIT_AFTER, self.consumer.name)
        tell_received(message, self.consumer.name)
        tell(message, answer, self.consumer.name, SYSTEM_CLOCK.monotonic() - began)
        return answer

    async def _known(self, unit: Unit, message: Message) -> NotNew | None:
        """Store a message; return what is known of its id if it is not new.

        Read the claim only after storing: a replay that handles the message holds its row in the
        inbox, so storing waits until the replay's claim is visible.
        """
        name = self.consumer.name
        if await unit.inbox.store(InboxMessage.of(name, message)):
            claim = await unit.claims.look_up(name, message.id)
            answer = None if claim is None else await self._claimed(unit, message, claim)
            if answer is not None:
                await unit.inbox.withdraw(name, message.id)
            return answer
        known = await unit.inbox.get(name, message.id)
        if known is None:
            # Retention deleted it between two statements.
            raise Retryable(f"consumer {name}: message {message.id!r} was deleted just now")
        if known.payload_hash and known.payload_hash != message.digest:
            return await write_conflict(unit, self.consumer, message, known.payload_hash)
        why = "duplicate" if known.processed_at is not None else "stored before"
        return Skipped(why, known.result)

    async def _claimed(self, unit: Unit, message: Message, claim: ClaimRow) -> NotNew | None:
        """Answer for a message that has a claim and was never stored; None: it may be stored.

        An inbox does not claim: the claim is from code that handles messages without an inbox,
        such as a replay of the broker's records, and may still have it in the waiting table.
        """
        name = self.consumer.name
        match refusal(claim, message.digest, await unit.now()):
            case Conflict(expected):
                return await write_conflict(unit, self.consumer, message, expected)
            case Duplicate(result):
                return Skipped("duplicate", result)
            case Terminal(error_code):
                return Refused(f"dead letter ({error_code})")
            case Parked():
                return Refused("parked")
            case HeldElsewhere(owner):
                raise Retryable(f"consumer {name}: {owner} is handling message {message.id!r}")
            case _:
                waits = await unit.waiting.get(name, message.id)
                return None if waits is None else Skipped("stored before")


async def handle(unit: Unit, attempt: Attempt) -> Any:
    """Call the handler in the open transaction, and mark the message as processed."""
    consumer = attempt.consumer
    await unit.begin_message()
    result = await attempt.invoke(unit.session)
    kept = json.dumps(result, default=str) if consumer.settings.keeps_results else None
    await unit.inbox.done(consumer.name, attempt.message.id, kept)
    return result


def message_of_inbox(consumer: Consumer, stored: InboxMessage) -> Message:
    """Rebuild a Message from a stored row.

    Raises:
        Undecodable: its payload cannot be read; it is a dead letter.
    """
    found = unread(stored)
    value = value_of(found.raw, stored.payload_hash)
    payload = consumer.reading.payload_of(value, stored.headers)
    return replace(found, payload=payload, attempt=stored.attempts + 1)


BATCH: Final = 20


POLL_SECONDS: Final = 1.0


ROW_SECONDS: Final = 60.0


PLACE: Final = Partition("inbox", 0)
"""The partition in a worker's row, because an inbox has none."""


class InboxWorker:
    """Handles stored messages, those of one key in the order of their arrival.

    Any number of workers may share one inbox.  A batch is one transaction with a savepoint for
    each message; after a crash its messages are taken again.
    """

    def __init__(
        self,
        consumer: Consumer,
        database: Database,
        *,
        batch: int = BATCH,
        poll_seconds: float = POLL_SECONDS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.consumer = Inbox(consumer, database).consumer
        self.database = database
        self._batch = batch
        self._poll_seconds = poll_seconds
        self._writer = Writer(uuid.uuid4().hex)
        self._row = _Row(consumer.name, database, batch, clock)
        self._bell = asyncio.Event()
        self._is_stopped = False

    async def run(self) -> None:
        """Handle what is due until `stop`; try again if the database does not answer.

        Also if it refuses: then each refusal is logged.
        """
        while not self._is_stopped:
            self._bell.clear()
            try:
                if await self.work_once():
                    continue
            except (Retryable, InDoubt, Fenced) as error:
                why = {"consumer": self.consumer.name, "reason": reason_of(error)}
                log.warning("inbox worker waits", extra=why)
            except Exception as error:
                if not is_refusal(self.database, self.consumer.name, error):
                    raise
            await self._rest()
        self._is_stopped = False
        await self._leave()

    async def run_until_empty(self) -> None:
        """Handle messages until none is left that will be tried."""
        while True:
            if await self.work_once():
                continue
            async with self.database.begin() as unit:
                if not await unit.inbox.pending(self.consumer.name):
                    break
            await self._rest()
        await self._leave()

    def stop(self) -> None:
        """Finish the current batch, then return from `run`."""
        self._is_stopped = True
        self._bell.set()

    def wake(self) -> None:
        """Look for new messages now; call it on the worker's event loop."""
        self._bell.set()

    async def work_once(self) -> int:
        """Handle one batch of what is due; return how many were tried.

        Raises:
            Retryable, InDoubt: the database did not answer; what is not committed is taken again.
        """
        await self._row.keep()
        await self._writer.clear_the_rest(self.consumer.name, self.database)
        if self._row.suspects:
            async with TURNS.alone():
                with noting_as(self._writer):
                    return await self._work_alone()
        async with TURNS.beside_others():
            return await self._work(self._batch)

    async def _work_alone(self) -> int:
        """Handle one message while nothing else runs in the process."""
        async with self.database.begin() as unit:
            taken = await unit.inbox.take_due(self.consumer.name, 1)
        if taken:
            await self._guarded(taken[0])
        await self._row.handled_alone(len(taken))
        return len(taken)

    async def _guarded(self, stored: InboxMessage) -> None:
        """Handle a message that may kill the process; dead-letter it if it did so too often."""
        consumer, limit = self.consumer, self.consumer.settings.poison_attempts

        async def quarantine(unit: Unit, runs: object) -> Outcome | None:
            why = f"the process died {limit} times while it handled this message alone"
            failure = Classified(FailureClass.POISON, CRASHED, why, "")
            return await self._dead_letter(unit, stored, failure, Told.DLQ)

        def tell_quarantined(outcome: Outcome) -> None:
            tell(stored, outcome, consumer.name)

        suspect = Suspect(stored.message_id, limit, quarantine, tell_quarantined)
        await guarded(
            consumer, self.database, suspect, lambda: self._work(1, only=stored.message_id)
        )

    async def _work(self, limit: int, only: str | None = None) -> int:
        """Handle what is due; with *only*, just this message, and clear its crash note."""
        taken: Sequence[InboxMessage] = ()
        ended: list[_Ended] = []
        try:
            async with self.database.begin() as unit:
                taken = await unit.inbox.take_due(self.consumer.name, limit)
                for stored in taken:
                    if only in (None, stored.message_id):
                        ended.append(await self._try(unit, stored))
                if only is not None:
                    await clear_own_notes(unit, self.consumer.name, [only])
                reach(CrashPoint.MESSAGE_COMMIT_BEFORE, self.consumer.name)
        except (Retryable, InDoubt, Fenced, TransactionEnded):
            raise
        except Exception as error:
            if not taken:
                raise
            # A deferred constraint failed at the commit, which does not name the message.
            if len(taken) > 1:
                return sum([await self._work(1) for _ in taken])
            async with self.database.begin() as unit:
                outcome = await self._fail(unit, taken[0], error)
            ended = [_Ended(taken[0], outcome, sum(one.seconds for one in ended))]
        reach(CrashPoint.MESSAGE_COMMIT_AFTER, self.consumer.name)
        for one in ended:
            if one.outcome is not None:
                tell(one.stored, one.outcome, self.consumer.name, one.seconds)
        return len(taken)

    async def _try(self, unit: Unit, stored: InboxMessage) -> _Ended:
        began = SYSTEM_CLOCK.monotonic()
        outcome: Outcome | None
        message: Message | None = None
        try:
            message = message_of_inbox(self.consumer, stored)
            async with unit.savepoint():
                outcome = Handled(await handle(unit, Attempt(self.consumer, message)))
        except TransactionEnded:
            raise  # the effects of its neighbours may be durable: the worker stops
        except Exception as error:
            if message is None and isinstance(error, Retryable):
                raise  # what is needed to read it does not answer, which is no attempt
            # Every exception of a handler is classified.
            outcome = await self._fail(unit, stored, error)
        return _Ended(stored, outcome, SYSTEM_CLOCK.monotonic() - began)

    async def _fail(self, unit: Unit, stored: InboxMessage, error: Exception) -> Outcome | None:
        """Write a failed attempt, and a dead letter if it was the last.

        None, and nothing written, if another worker has handled the message meanwhile.
        """
        consumer = self.consumer
        failure = classify(consumer, self.database, error)
        if isinstance(error, Undecodable):
            # The same code as for a delivery that cannot be read.
            failure = replace(
                failure, failure_class=FailureClass.SCHEMA, code="DESERIALIZATION_FAILED"
            )
        fate = verdict(consumer.settings.retry, failure, stored.attempts + 1)
        if not isinstance(fate, RetryIn):
            return await self._dead_letter(unit, stored, failure, _told(error, failure))
        why = f"{failure.code}: {failure.reason}"
        attempts = await unit.inbox.failed(consumer.name, stored.message_id, why, fate.seconds)
        await keep_attempt_of_inbox(unit, consumer.name, stored.message_id, failure)
        nouns = {"consumer": consumer.name, "id": stored.message_id, "reason": why}
        log.warning("message failed", extra=nouns)
        return RetryStored(failure, attempts)

    async def _dead_letter(
        self, unit: Unit, stored: InboxMessage, failure: Classified, told: Told
    ) -> Outcome | None:
        name, why = self.consumer.name, f"{failure.code}: {failure.reason}"
        attempts = await unit.inbox.failed(name, stored.message_id, why, None)
        # The row is locked until the commit.  But before that the message may have been erased, or
        # handled by another worker after the attempt's own transaction was rolled back.
        kept = await keep_attempt_of_inbox(unit, name, stored.message_id, failure)
        if kept is None:
            return None
        now = await unit.now()
        message = unread(kept).tried(attempts)
        letter = letter_of(self.consumer, message, Failed(failure, told, now, now))
        letter = replace(letter, payload=kept.payload, erased_at=kept.erased_at)
        if kept.erased_at is not None:
            letter = replace(letter, reason=ERASED_REASON)
        await keep_letter(unit, self.consumer.settings, letter)
        nouns = {"consumer": name, "id": stored.message_id, "reason": why}
        log.error("message is a dead letter", extra=nouns)
        return DeadLettered(failure, told)

    async def _leave(self) -> None:
        await self._writer.clear_the_rest(self.consumer.name, self.database)
        await self._row.leave()

    async def _rest(self) -> None:
        await rung(self._bell, self._poll_seconds)


@dataclass(frozen=True, slots=True)
class _Ended:
    """One attempt of a transaction; its event is emitted after the commit."""

    stored: InboxMessage
    outcome: Outcome | None
    seconds: float


class _Row:
    """The row of a running worker, and the number of suspects that others left."""

    def __init__(self, consumer: str, database: Database, in_flight: int, clock: Clock) -> None:
        self.suspects = 0
        """How many messages are handled alone before any batch."""

        self._consumer = consumer
        self._database = database
        self._in_flight = in_flight
        self._clock = clock
        self._member: Member | None = None
        self._dead: Sequence[Member] = ()
        self._renew_at = 0.0

    async def keep(self) -> None:
        """Write the row before any message is handled, and renew it while there is work."""
        if self._member is not None and self._clock.monotonic() < self._renew_at:
            return
        renew_at = self._clock.monotonic() + ROW_SECONDS / 3
        owner = Owner.here()
        name, written = owner.instance, json.dumps(owner.to_json())
        member = self._member or Member(
            self._consumer, name, written, frozenset({PLACE}), self._in_flight
        )
        async with self._database.begin() as unit:
            if self._member is None:
                others = await unit.members.others(self._consumer, name, [PLACE])
                now = await unit.now()
                self._dead = [m for m in others if m.expires_at <= now or is_gone(m)]
                self.suspects = sum(other.in_flight for other in self._dead)
            await unit.members.enter(member, ROW_SECONDS)
        self._member, self._renew_at = member, renew_at
        if self.suspects:
            nouns = {"consumer": self._consumer, "messages": self.suspects}
            log.warning("unclean stop found: one message at a time", extra=nouns)

    async def handled_alone(self, messages: int) -> None:
        """Count messages that were handled alone; the last one, or 0, ends this mode."""
        self.suspects = self.suspects - messages if messages else 0
        if self.suspects <= 0:
            self.suspects = 0
            async with self._database.begin() as unit:
                for member in self._dead:
                    await unit.members.leave(self._consumer, member.name)

    async def leave(self) -> None:
        """Remove the row: the worker ends cleanly."""
        member, self._member = self._member, None
        if member is not None:
            async with self._database.begin() as unit:
                await unit.members.leave(self._consumer, member.name)


def _told(error: Exception, failure: Classified) -> Told:
    if isinstance(error, Undecodable) and not isinstance(error, SchemaIncompatible):
        return Told.DESERIALIZATION_FAILURE
    is_of_schema = failure.failure_class is FailureClass.SCHEMA
    return Told.SCHEMA_INCOMPATIBLE if is_of_schema else Told.DLQ
