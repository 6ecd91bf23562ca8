"""Storing incoming messages first, and handling them in the same transaction or later.

    store_and_handle   begin ─▶ store ─▶ handle ─▶ mark processed ─▶ commit ─▶ (ack)
    store              begin ─▶ store ─▶ commit ─▶ (ack)       … and an `InboxWorker`, later

An id is stored once for each consumer.  Whoever delivers acknowledges after the
answer: by then the message is durable here, or its effect is.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from semel.codec import SchemaIncompatible, Undecodable
from semel.crashpoints import CrashPoint, reach
from semel.errors import Fenced, InDoubt, Misuse, Retryable, reason_of
from semel.message import Message
from semel.messaging.consumer import Consumer
from semel.messaging.context import handling
from semel.messaging.database import Database, Unit
from semel.messaging.deadletters import DeadLetter
from semel.messaging.failing import write_conflict
from semel.messaging.failure import Classified
from semel.messaging.inbox import InboxMessage
from semel.messaging.outcome import Conflicted, Handled, Skipped, Told
from semel.messaging.retry import RetryIn, verdict

log = logging.getLogger("semel.messaging")

BATCH: Final = 20
POLL_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Stored:
    """The message is durable, and a worker handles it."""


NotNew: TypeAlias = Skipped | Conflicted


class Inbox:
    """The inbox of one consumer."""

    def __init__(self, consumer: Consumer, database: Database) -> None:
        """Name the consumer.

        Raises:
            Misuse: it takes batches, or checks versions: an inbox does neither.
        """
        if consumer.takes_batches or consumer.settings.versioned:
            raise Misuse(
                f"consumer {consumer.name}: an inbox handles messages one by one, "
                f"and does not check versions"
            )
        self.consumer = consumer
        self.database = database

    async def store(self, message: Message) -> Stored | NotNew:
        """Make a message durable, to be handled by an `InboxWorker`.

        Acknowledge after any answer: the message is here, was here before, or is kept among
        the dead letters because its id is known with another payload.

        Raises:
            Retryable: nothing was stored; do not acknowledge.
            InDoubt: nobody knows; do not acknowledge, storing it again is safe.
        """
        async with self.database.begin() as unit:
            known = await self._known(unit, message)
            reach(CrashPoint.MESSAGE_COMMIT_BEFORE, self.consumer.name)
        reach(CrashPoint.MESSAGE_COMMIT_AFTER, self.consumer.name)
        return known or Stored()

    async def store_and_handle(self, message: Message) -> Handled | NotNew:
        """Store and handle a message in one transaction.

        Whatever the handler raises is raised here, and nothing is kept: the broker delivers
        the message again.  A violated constraint of the handler's own tables is such a
        failure, never a duplicate.

        Raises:
            Retryable: nothing happened; do not acknowledge.
            InDoubt: nobody knows; do not acknowledge, the next delivery finds out.
        """
        async with self.database.begin() as unit:
            answer: Handled | NotNew | None = await self._known(unit, message)
            reach(CrashPoint.CLAIM_AFTER, self.consumer.name)
            if answer is None:
                answer = Handled(await handle(unit, self.consumer, message))
            reach(CrashPoint.MESSAGE_COMMIT_BEFORE, self.consumer.name)
        reach(CrashPoint.MESSAGE_COMMIT_AFTER, self.consumer.name)
        return answer

    async def try_again(self, message_id: str) -> bool:
        """Let workers try a message again that they had given up; its dead letter goes.

        False, and nothing changed, where they had not.
        """
        async with self.database.begin() as unit:
            if not await unit.inbox.try_again(self.consumer.name, message_id):
                return False
            await unit.dead_letters.remove(self.consumer.name, message_id)
            return True

    async def _known(self, unit: Unit, message: Message) -> NotNew | None:
        """Store a message; say what is known of its id where it is not new."""
        stored = InboxMessage.of(self.consumer.name, message)
        if await unit.inbox.store(stored):
            return None
        known = await unit.inbox.get(self.consumer.name, message.id)
        if known is None:
            # Retention deleted it between two statements.
            raise Retryable(f"consumer {self.consumer.name}: message {message.id!r} just left")
        if known.payload_hash and known.payload_hash != message.digest:
            return await write_conflict(unit, self.consumer, message, known.payload_hash)
        why = "duplicate" if known.processed_at is not None else "stored before"
        return Skipped(why, known.result)


async def handle(unit: Unit, consumer: Consumer, message: Message) -> Any:
    """Call the handler in the open transaction, and mark the message as processed."""
    with handling(consumer.name, message):
        result = await consumer.invoke(message, unit.session)
    reach(CrashPoint.HANDLE_AFTER, consumer.name)
    kept = json.dumps(result, default=str) if consumer.settings.keeps_results else None
    await unit.inbox.done(consumer.name, message.id, kept)
    return result


def message_of(consumer: Consumer, stored: InboxMessage) -> Message:
    """Make the message again that was stored.

    Raises:
        Undecodable: its payload cannot be read; it is a dead letter.
    """
    raw = stored.payload or b""
    payload = consumer.reading.codec.decode(raw, stored.headers)
    if consumer.reading.model is not None:
        try:
            payload = consumer.reading.model(payload)
        except Exception as error:
            raise Undecodable(reason_of(error)) from error
    return Message(
        stored.message_id,
        payload,
        raw,
        stored.key,
        stored.message_type,
        stored.headers,
        stored.source,
        stored.timestamp,
        schema_version=stored.schema_version,
        correlation_id=stored.correlation_id,
        attempt=stored.attempts + 1,
        digest=stored.payload_hash,
    )


class InboxWorker:
    """Handles stored messages, those of one key in the order of their arrival.

    Any number may work on one inbox.  A batch is one transaction with a savepoint for each
    message; what a crash interrupts is taken again.
    """

    def __init__(
        self,
        consumer: Consumer,
        database: Database,
        *,
        batch: int = BATCH,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self.consumer = Inbox(consumer, database).consumer
        self.database = database
        self._batch = batch
        self._poll_seconds = poll_seconds
        self._bell = asyncio.Event()
        self._is_stopped = False

    async def run(self) -> None:
        """Handle what is due until `stop`; a database that does not answer is asked again."""
        while not self._is_stopped:
            self._bell.clear()
            try:
                if await self.work_once():
                    continue
            except (Retryable, InDoubt, Fenced) as error:
                why = {"consumer": self.consumer.name, "reason": reason_of(error)}
                log.warning("inbox worker waits", extra=why)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._bell.wait(), self._poll_seconds)
        self._is_stopped = False

    async def run_until_empty(self) -> None:
        """Handle messages until none is left that will be tried."""
        while True:
            if await self.work_once():
                continue
            async with self.database.begin() as unit:
                if not await unit.inbox.pending(self.consumer.name):
                    return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._bell.wait(), self._poll_seconds)

    def stop(self) -> None:
        """Finish the batch in hand; `run` returns then."""
        self._is_stopped = True
        self._bell.set()

    def wake(self) -> None:
        """Look for new messages now; on the worker's own loop."""
        self._bell.set()

    async def work_once(self) -> int:
        """Handle one batch of what is due; return how many were tried.

        Raises:
            Retryable, InDoubt: the database did not answer; what is not committed is taken again.
        """
        return await self._work(self._batch)

    async def _work(self, limit: int) -> int:
        taken: Sequence[InboxMessage] = ()
        try:
            async with self.database.begin() as unit:
                taken = await unit.inbox.take_due(self.consumer.name, limit)
                for stored in taken:
                    await self._try(unit, stored)
                reach(CrashPoint.MESSAGE_COMMIT_BEFORE, self.consumer.name)
        except (Retryable, InDoubt, Fenced):
            raise
        except Exception as error:
            if not taken:
                raise
            # A constraint that is checked at the commit, which does not say whose it is.
            if len(taken) > 1:
                return sum([await self._work(1) for _ in taken])
            async with self.database.begin() as unit:
                await self._fail(unit, taken[0], error)
        reach(CrashPoint.MESSAGE_COMMIT_AFTER, self.consumer.name)
        return len(taken)

    async def _try(self, unit: Unit, stored: InboxMessage) -> None:
        try:
            message = message_of(self.consumer, stored)
            async with unit.savepoint():
                await handle(unit, self.consumer, message)
        except Exception as error:  # noqa: BLE001  whatever a handler raises is classified
            await self._fail(unit, stored, error)

    async def _fail(self, unit: Unit, stored: InboxMessage, error: Exception) -> None:
        """Write a failed attempt, and a dead letter where it was the last."""
        consumer = self.consumer
        rules = self.database.classification.extended(consumer.rules, consumer.codes)
        failure = rules.classify(error)
        fate = verdict(consumer.settings.retry, failure, stored.attempts + 1)
        delay = fate.seconds if isinstance(fate, RetryIn) else None
        why = f"{failure.code}: {failure.reason}"
        attempts = await unit.inbox.failed(consumer.name, stored.message_id, why, delay)
        nouns = {"consumer": consumer.name, "id": stored.message_id, "reason": why}
        if delay is None:
            now = await unit.now()
            letter = _letter(consumer, stored, failure, _told(error), attempts, now)
            await unit.dead_letters.put(letter)
            log.error("message is a dead letter", extra=nouns)
        else:
            log.warning("message failed", extra=nouns)


def _told(error: Exception) -> Told:
    if isinstance(error, SchemaIncompatible):
        return Told.SCHEMA_INCOMPATIBLE
    return Told.DESERIALIZATION_FAILURE if isinstance(error, Undecodable) else Told.DLQ


def _letter(
    consumer: Consumer,
    stored: InboxMessage,
    failure: Classified,
    told: Told,
    attempts: int,
    now: float,
) -> DeadLetter:
    source = stored.source
    return DeadLetter(
        consumer=consumer.name,
        message_id=stored.message_id,
        topic=source.topic if source else "",
        partition=source.partition if source else None,
        offset=source.offset if source else None,
        key=stored.key,
        payload=stored.payload,
        reason=failure.reason,
        exception=failure.exception,
        error_code=failure.code,
        attempts=attempts,
        first_failed_at=now,
        last_failed_at=now,
        headers=stored.headers,
        schema_version=stored.schema_version,
        correlation_id=stored.correlation_id,
        message_type=stored.message_type,
        timestamp=stored.timestamp,
        payload_hash=stored.payload_hash,
        owner=consumer.settings.dead_letter_owner,
        outcome=told.value,
    )
