"""Claims by hand, projections by version, and the skeleton of an adapter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from semel.codec import FromHeader
from semel.crashpoints import CrashPoint
from semel.message import Message
from semel.messaging.classic import MessageEnvelope
from semel.messaging.failure import (
    NonRetryableMessageError,
    RetryableMessageError,
    SequenceGap,
)
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.claims import (
    Claimed,
    ClaimRequest,
    ClaimState,
    Duplicate,
    Failure,
    NotClaimable,
)
from semel.messaging.handler import Consumer, consumer
from semel.messaging.outcome import Handled, RetryLater, Skipped
from semel.sql.claims import SqlAlchemyProcessedMessageStore
from semel.testing.crash import Crash, crash_at
from tests.scenarios.orders import Order, Projection, Shop, paid


@dataclass
class IdempotentMessageHandler:
    """Claims with a lease, delegates, and writes how it ended: what people write by hand."""

    shop: Shop
    delegate: Any
    consumer_name: str = "notifications"
    duplicates: list[str] = field(default_factory=list)

    async def handle(self, message: Message) -> None:
        async with self.shop.database.begin() as unit:
            answer = await unit.claims.lease(
                self.consumer_name, ClaimRequest.of(message), owner="me", seconds=60
            )
        if isinstance(answer, Duplicate):
            self.duplicates.append(message.id)
            return
        if not isinstance(answer, Claimed):
            # "Not claimed" is not "done": whoever has it may still fail.
            raise NotClaimable(self.consumer_name, message.id, answer)
        try:
            await self.delegate(message)
        except Exception:
            failure = Failure(ClaimState.FAILED_RETRYABLE, answer.attempt, "HANDLER_FAILED")
            async with self.shop.database.begin() as unit:
                await unit.claims.mark_failed(self.consumer_name, message.id, failure, answer.fence)
            raise
        async with self.shop.database.begin() as unit:
            await unit.claims.mark_completed(self.consumer_name, message.id, answer.fence)


def test_a_handler_by_hand_handles_once_and_a_failed_message_can_be_claimed_again(run):
    async def scenario(shop: Shop) -> None:
        sent: list[str] = []
        fails = [True]

        async def send(message: Message) -> None:
            if fails:
                fails.pop()
                raise RuntimeError("no provider")
            sent.append(message.id)

        handler = IdempotentMessageHandler(shop, send)
        with pytest.raises(RuntimeError):
            await handler.handle(paid(1))
        await handler.handle(paid(1))
        await handler.handle(paid(1))

        assert sent == ["evt-1"]
        assert handler.duplicates == ["evt-1"]
        claim = await shop.claim("notifications", "evt-1")
        assert claim is not None
        assert claim.state is ClaimState.COMPLETED

    run(scenario)


def test_a_handler_by_hand_does_not_take_a_message_that_another_one_has_for_done(run):
    async def scenario(shop: Shop) -> None:
        async def send(message: Message) -> None:
            with pytest.raises(NotClaimable):
                await handler.handle(message)

        handler = IdempotentMessageHandler(shop, send)

        await handler.handle(paid(1))

        assert handler.duplicates == []

    run(scenario)


async def apply(session: Any, case_id: str, version: int, status: str) -> None:
    """Update a projection by the version: old ones are skipped, gaps are refused."""
    found = await session.get(Projection, case_id, with_for_update=True)
    current = found.version if found else 0
    if version <= current:
        return
    if version != current + 1:
        raise SequenceGap(case_id, current + 1, version)
    if found is None:
        session.add(Projection(case_id=case_id, version=version, status=status))
    else:
        found.version, found.status = version, status


def projecting() -> Consumer:
    @consumer("projection", id_from=FromHeader("message-id"))
    async def handle(message: Message, session: Any) -> None:
        await apply(session, "CASE-100", message.payload["version"], message.payload["status"])

    return handle


def case(number: int, version: int, status: str) -> Message:
    payload = {"caseId": "CASE-100", "version": version, "status": status}
    return Message(f"evt-{number}", payload, f"{number}".encode(), "CASE-100")


def test_a_projection_by_version_skips_the_old_and_refuses_the_gap(run):
    async def scenario(shop: Shop) -> None:
        projection = projecting()

        created = await handle_message(projection, shop.database, case(1, 1, "created"))
        early = await handle_message(projection, shop.database, case(3, 3, "closed"))
        old = await handle_message(projection, shop.database, case(4, 1, "created again"))
        await handle_message(projection, shop.database, case(2, 2, "escalated"))
        await shop.age(3600)
        closed = await handle_message(projection, shop.database, case(3, 3, "closed"))

        assert isinstance(created, Handled)
        assert isinstance(early, RetryLater)
        assert early.failure is not None
        assert early.failure.code == "SEQUENCE_GAP"
        assert isinstance(old, Handled)
        assert isinstance(closed, Handled)
        found = await shop.projection("CASE-100")
        assert found is not None
        assert (found.version, found.status) == (3, "closed")

    run(scenario)


def test_a_redelivery_after_the_commit_does_not_apply_the_projection_again(run):
    async def scenario(shop: Shop) -> None:
        projection = projecting()
        with crash_at(CrashPoint.MESSAGE_COMMIT_AFTER), pytest.raises(Crash):
            await handle_message(projection, shop.database, case(123, 1, "escalated"))

        outcome = await handle_message(projection, shop.database, case(123, 1, "escalated"))

        assert isinstance(outcome, Skipped)
        found = await shop.projection("CASE-100")
        assert found is not None
        assert found.version == 1

    run(scenario)


@dataclass
class Acknowledged:
    """A broker that writes down what it was told."""

    told: list[Any] = field(default_factory=list)

    async def ack(self) -> None:
        self.told.append("ack")

    async def nack(self, seconds: float) -> None:
        self.told.append(seconds)


@dataclass
class CaseEscalatedConsumer:
    """The skeleton that people know, with its two mistakes mended.

    A claim that is held elsewhere is not acknowledged, and a retryable failure lets go of
    its claim, so that the redelivery is no duplicate.
    """

    shop: Shop
    handler: Any
    dead: list[str] = field(default_factory=list)

    async def on_message(self, envelope: MessageEnvelope[Any]) -> None:
        try:
            async with self.shop.session_factory() as session, session.begin():
                store = SqlAlchemyProcessedMessageStore(session)
                claimed = await store.claim(
                    consumer_name="case-escalated", event_id=envelope.message_id
                )
                if claimed:
                    await self.handler(envelope.payload, session)
        except NonRetryableMessageError:
            self.dead.append(envelope.message_id)
        except (RetryableMessageError, NotClaimable) as error:
            await envelope.nack_with_backoff(error)
            return
        await envelope.ack()


def envelope(event_id: str, broker: Acknowledged) -> MessageEnvelope[Any]:
    payload = {"event_id": event_id}
    return MessageEnvelope(event_id, "CASE-100", payload, {}, broker, backoff_seconds=lambda _: 7.5)


def test_the_skeleton_settles_every_delivery(run):
    async def scenario(shop: Shop) -> None:
        errors: list[Exception | None] = [
            RetryableMessageError("down"),
            None,
            None,
            NonRetryableMessageError("no such case"),
        ]

        async def handle(payload: Any, session: Any) -> None:
            session.add(Order(event_id=payload["event_id"]))
            error = errors.pop(0)
            if error is not None:
                raise error

        broker = Acknowledged()
        service = CaseEscalatedConsumer(shop, handle)
        for event in ("evt-123", "evt-123", "evt-123"):
            await service.on_message(envelope(event, broker))
        errors.pop(0)
        await service.on_message(envelope("evt-124", broker))

        assert broker.told == [7.5, "ack", "ack", "ack"]
        assert await shop.orders() == ["evt-123"]
        assert service.dead == ["evt-124"]

    run(scenario)


def test_an_event_that_comes_twice_is_notified_once(run):
    async def scenario(shop: Shop) -> None:
        async def handle(payload: Any, session: Any) -> None:
            session.add(Order(event_id=payload["event_id"]))

        broker = Acknowledged()
        service = CaseEscalatedConsumer(shop, handle)
        await service.on_message(envelope("evt-123", broker))
        await service.on_message(envelope("evt-123", broker))

        assert await shop.count("evt-123") == 1

    run(scenario)


def test_a_crash_behind_the_effect_and_before_the_ack_does_not_repeat_it(run):
    async def scenario(shop: Shop) -> None:
        async def handle(payload: Any, session: Any) -> None:
            await apply(session, "CASE-100", 1, "escalated")

        class DiesBeforeTheAck(Acknowledged):
            async def ack(self) -> None:
                raise Crash

        service = CaseEscalatedConsumer(shop, handle)
        with pytest.raises(Crash):
            await service.on_message(envelope("evt-123", DiesBeforeTheAck()))
        broker = Acknowledged()
        await service.on_message(envelope("evt-123", broker))

        found = await shop.projection("CASE-100")
        assert found is not None
        assert found.version == 1
        assert broker.told == ["ack"]

    run(scenario)
