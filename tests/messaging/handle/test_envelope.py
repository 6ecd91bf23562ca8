"""A message with its acknowledgement: every delivery is settled, once, after the commit."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import UUID

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from semel.codec import FromHeader
from semel.crashpoints import CrashPoint
from semel.errors import Misuse, Retryable
from semel.message import Coordinates, Message
from semel.messaging.classic import MessageEnvelope, consume_envelope
from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
from semel.messaging.handle.claims import ClaimRequest
from semel.messaging.handler import Consumer, consumer
from semel.messaging.outcome import Conflicted, DeadLettered, Handled, RetryLater, Skipped
from semel.messaging.records import DeadLetterFilter
from semel.messaging.settings import ConsumerSettings, RetryPolicy
from semel.sql.database import SqlDatabase
from semel.testing.crash import Crash, crash_at
from tests.messaging.worlds import Effect, effects, memory_database


@dataclass
class Broker:
    """Writes down what it was told, and what was durable by then."""

    database: SqlDatabase = field(default_factory=memory_database)
    told: list[Any] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    error: Exception | None = None

    async def ack(self) -> None:
        await self._hear("ack")

    async def nack(self, seconds: float) -> None:
        await self._hear(seconds)

    async def _hear(self, what: Any) -> None:
        self.rows.append(len(effects(self.database, "sent")))
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.told.append(what)


def envelope(broker: Broker, number: int = 1) -> MessageEnvelope[Any]:
    message = Message(f"m{number}", {"n": number}, b"{}", "k", source=Coordinates("t", 0, number))
    return MessageEnvelope(
        message.id, message.key, message.payload, {"trace": "abc"}, broker, message
    )


def sender(errors: list[Exception] | None = None) -> Consumer:
    policy = ConsumerSettings(retry=RetryPolicy(jitter=False, initial_delay_seconds=3))
    left = errors or []

    @consumer("mails", policy=policy, id_from=FromHeader("message-id"))
    async def handle(message: Message, session: AsyncSession) -> None:
        session.add(Effect("sent", message.id))
        if left:
            raise left.pop(0)

    return handle


def test_an_envelope_shows_what_came():
    found = envelope(Broker())

    assert (found.message_id, found.key, found.payload) == ("m1", "k", {"n": 1})
    assert found.context == {"trace": "abc"}
    assert not found.settled


def test_a_handled_message_is_acknowledged_after_its_effect_is_durable():
    async def scenario() -> None:
        broker = Broker()

        outcome = await consume_envelope(sender(), broker.database, envelope(broker))

        assert isinstance(outcome, Handled)
        assert broker.told == ["ack"]
        assert broker.rows == [1]

    asyncio.run(scenario())


def test_a_duplicate_is_acknowledged_and_sent_once():
    async def scenario() -> None:
        broker = Broker()
        mails = sender()

        for _ in range(2):
            last = await consume_envelope(mails, broker.database, envelope(broker))

        assert isinstance(last, Skipped)
        assert broker.told == ["ack", "ack"]
        assert effects(broker.database, "sent") == ["m1"]

    asyncio.run(scenario())


def test_a_retryable_failure_is_nacked_with_its_backoff():
    async def scenario() -> None:
        broker = Broker()

        outcome = await consume_envelope(
            sender([RetryableMessageError("down")]), broker.database, envelope(broker)
        )

        assert isinstance(outcome, RetryLater)
        assert broker.told == [3.0]
        assert effects(broker.database, "sent") == []

    asyncio.run(scenario())


def test_a_dead_letter_is_durable_before_it_is_acknowledged():
    async def scenario() -> None:
        broker = Broker()

        outcome = await consume_envelope(
            sender([NonRetryableMessageError("no")]), broker.database, envelope(broker)
        )

        assert isinstance(outcome, DeadLettered)
        assert broker.told == ["ack"]
        async with broker.database.begin() as unit:
            assert await unit.dead_letters.get("mails", "m1") is not None

    asyncio.run(scenario())


def test_a_message_that_is_held_elsewhere_is_not_acknowledged():
    async def scenario() -> None:
        broker = Broker()
        async with broker.database.begin() as unit:
            await unit.claims.lease("mails", ClaimRequest("m1"), owner="b", seconds=60)

        await consume_envelope(sender(), broker.database, envelope(broker))

        assert "ack" not in broker.told
        assert len(broker.told) == 1

    asyncio.run(scenario())


def test_a_crash_before_the_ack_leaves_the_effect_and_the_redelivery_skips_it():
    async def scenario() -> None:
        broker = Broker()
        mails = sender()
        with crash_at(CrashPoint.MESSAGE_COMMIT_AFTER), pytest.raises(Crash):
            await consume_envelope(mails, broker.database, envelope(broker))
        assert broker.told == []

        await consume_envelope(mails, broker.database, envelope(broker))

        assert effects(broker.database, "sent") == ["m1"]
        assert broker.told == ["ack"]

    asyncio.run(scenario())


def test_an_envelope_is_settled_once():
    async def scenario() -> None:
        broker = Broker()
        settled = envelope(broker)
        await settled.ack()

        with pytest.raises(Misuse, match="settled before"):
            await settled.ack()
        with pytest.raises(Misuse, match="settled before"):
            await settled.nack_with_backoff(ValueError())
        with pytest.raises(Misuse, match="settled before"):
            await consume_envelope(sender(), broker.database, settled)

        assert broker.told == ["ack"]
        assert effects(broker.database, "sent") == []

    asyncio.run(scenario())


def test_a_broker_that_could_not_be_told_may_be_told_again():
    async def scenario() -> None:
        broker = Broker(error=Retryable("no connection"))
        mails = sender()
        first = envelope(broker)

        with pytest.raises(Retryable):
            await consume_envelope(mails, broker.database, first)
        await consume_envelope(mails, broker.database, first)

        assert broker.told == ["ack"]
        assert effects(broker.database, "sent") == ["m1"]

    asyncio.run(scenario())


def test_the_backoff_may_depend_on_the_cause():
    async def scenario() -> None:
        broker = Broker()
        waiting = envelope(broker)
        waiting.backoff_seconds = lambda cause: 60.0 if isinstance(cause, OSError) else 1.0

        await waiting.nack_with_backoff(OSError())

        assert broker.told == [60.0]

    asyncio.run(scenario())


def test_the_five_fields_are_enough():
    async def scenario() -> None:
        broker, id = Broker(), cast("str", UUID(int=7))
        mails = sender([RetryableMessageError("later"), NonRetryableMessageError("never")])
        first: MessageEnvelope[Any] = MessageEnvelope(id, "k", {"n": 1}, {}, broker)
        other: MessageEnvelope[Any] = MessageEnvelope(id, "k", {"n": 2}, {}, broker)
        nobody: MessageEnvelope[Any] = MessageEnvelope("", "k", {"n": 2}, {}, broker)

        assert isinstance(await consume_envelope(mails, broker.database, first), RetryLater)
        assert isinstance(await consume_envelope(mails, broker.database, other), Conflicted)
        with pytest.raises(Misuse, match="a message id must be text"):
            await consume_envelope(mails, broker.database, nobody)

        assert broker.told == [3.0, "ack"]
        async with broker.database.begin() as unit:
            [letter] = await unit.dead_letters.find(DeadLetterFilter(), 9)
        assert letter.payload == b'{"n":2}'

    asyncio.run(scenario())
