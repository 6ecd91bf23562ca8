"""Storing incoming messages first, and handling them in the same transaction or later.

    store_and_handle   begin ─▶ store ─▶ handle ─▶ mark processed ─▶ commit ─▶ (ack)
    store              begin ─▶ store ─▶ commit ─▶ (ack)       … and an inbox's worker, later

An id is stored once for each consumer.  Whoever delivers acknowledges after the
answer: by then the message is durable here, or its effect is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from semel.clock import SYSTEM_CLOCK
from semel.crashpoints import CrashPoint, reach
from semel.errors import Misuse, Retryable
from semel.message import Message, value_of
from semel.messaging.claims import (
    ClaimRow,
    Conflict,
    Duplicate,
    HeldElsewhere,
    Parked,
    Terminal,
    refusal,
)
from semel.messaging.consumer import Consumer
from semel.messaging.context import handling
from semel.messaging.database import Database, Unit
from semel.messaging.failing import write_conflict
from semel.messaging.inbox import InboxMessage
from semel.messaging.kept import unread
from semel.messaging.outcome import Conflicted, Handled, Refused, Skipped
from semel.messaging.retry import GiveUp
from semel.messaging.settings import Duplicates, Mode
from semel.messaging.telling import tell, tell_received


@dataclass(frozen=True, slots=True)
class Stored:
    """The message is durable, and a worker handles it."""


NotNew: TypeAlias = Skipped | Refused | Conflicted


class Inbox:
    """The inbox of one consumer."""

    def __init__(self, consumer: Consumer, database: Database) -> None:
        """Name the consumer.

        Raises:
            Misuse: it takes batches or leases, checks versions, parks messages, or is called for
                duplicates: an inbox does none of it.
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
        """Make a message durable, to be handled by an `semel.messaging.inbox_worker.InboxWorker`.

        Acknowledge after any answer: the message is here, was here before, or is kept among
        the dead letters because its id is known with another payload.  Where a replay handled
        it before it came, its claim says so: then it is not stored.

        Raises:
            Retryable: nothing was stored; do not acknowledge.
            InDoubt: nobody knows; do not acknowledge, storing it again is safe.
        """
        async with self.database.begin() as unit:
            known = await self._known(unit, message)
            reach(CrashPoint.MESSAGE_COMMIT_BEFORE, self.consumer.name)
        reach(CrashPoint.MESSAGE_COMMIT_AFTER, self.consumer.name)
        tell_received(message, self.consumer.name)
        if known is None:
            # Its worker tells what becomes of it.
            return Stored()
        tell(message, known, self.consumer.name)
        return known

    async def store_and_handle(self, message: Message) -> Handled | NotNew:
        """Store and handle a message in one transaction.

        Whatever the handler raises is raised here, and nothing is kept: the broker delivers
        the message again.  A violated constraint of the handler's own tables is such a
        failure, never a duplicate.

        Raises:
            Retryable: nothing happened; do not acknowledge.
            InDoubt: nobody knows; do not acknowledge, the next delivery finds out.
        """
        began = SYSTEM_CLOCK.monotonic()
        async with self.database.begin() as unit:
            answer: Handled | NotNew | None = await self._known(unit, message)
            reach(CrashPoint.CLAIM_AFTER, self.consumer.name)
            if answer is None:
                answer = Handled(await handle(unit, self.consumer, message))
            reach(CrashPoint.MESSAGE_COMMIT_BEFORE, self.consumer.name)
        reach(CrashPoint.MESSAGE_COMMIT_AFTER, self.consumer.name)
        tell_received(message, self.consumer.name)
        tell(message, answer, self.consumer.name, SYSTEM_CLOCK.monotonic() - began)
        return answer

    async def _known(self, unit: Unit, message: Message) -> NotNew | None:
        """Store a message; say what is known of its id where it is not new.

        Its claim is looked at behind that: a replay that is handling the message has its place
        in the inbox, so that storing it waits until the claim can be seen.
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
            raise Retryable(f"consumer {name}: message {message.id!r} just left")
        if known.payload_hash and known.payload_hash != message.digest:
            return await write_conflict(unit, self.consumer, message, known.payload_hash)
        why = "duplicate" if known.processed_at is not None else "stored before"
        return Skipped(why, known.result)

    async def _claimed(self, unit: Unit, message: Message, claim: ClaimRow) -> NotNew | None:
        """Answer for a message that has a claim and was never stored; None: it may be stored.

        Nothing in an inbox claims: whoever did so handled it without one, as a replay of the
        broker's records does, and may still have it in the waiting room.
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
                raise Retryable(f"consumer {name}: {owner} is at message {message.id!r}")
            case _:
                waits = await unit.waiting.get(name, message.id)
                return None if waits is None else Skipped("stored before")


async def handle(unit: Unit, consumer: Consumer, message: Message) -> Any:
    """Call the handler in the open transaction, and mark the message as processed."""
    await unit.begin_message()
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
    found = unread(stored)
    value = value_of(found.raw, stored.payload_hash)
    payload = consumer.reading.payload_of(value, stored.headers)
    return replace(found, payload=payload, attempt=stored.attempts + 1)
