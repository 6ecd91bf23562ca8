"""Repeated messages: skipped or invoked, with and without an outbox, and delivered at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import insert, select
from sqlalchemy.exc import DBAPIError, IntegrityError

from semel.codec import FromHeader
from semel.crashpoints import CrashPoint
from semel.memory.broker import MemoryBroker
from semel.message import Message
from semel.messaging.failure import (
    RetryableMessageError,
)
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handler import Consumer, consumer
from semel.messaging.outcome import Handled, RetryLater, Skipped
from semel.messaging.receive.broker import Outgoing
from semel.messaging.settings import ConsumerSettings
from semel.outboxes import Outbox
from semel.policy.vocabulary import Duplicates
from semel.sql.claims import SqlAlchemyProcessedMessageStore
from semel.testing.crash import Crash, crash_at
from tests.scenarios.orders import Order, Shop, paid


def publishing(broker: MemoryBroker, duplicates: Duplicates) -> Consumer:
    """A service without an outbox: it writes, then tells a broker, both in its handler."""

    @consumer(
        "users",
        policy=ConsumerSettings(duplicates=duplicates),
        id_from=FromHeader("message-id"),
    )
    async def handle(message: Message, session: Any) -> None:
        if not message.is_duplicate:
            session.add(Order(event_id=message.id))
            await session.flush()
        if message.id in broken:
            broken.remove(message.id)
            return  # the announcement got lost on its way
        publisher = broker.publisher()
        await publisher.publish([Outgoing("announced", message.id.encode())])

    broken = {"evt-1"}
    return handle


def announced(broker: MemoryBroker) -> list[bytes | None]:
    return [record.value for record in broker.records("announced")]


def test_without_an_outbox_a_skipped_duplicate_never_sends_what_was_lost(run):
    async def scenario(shop: Shop) -> None:
        broker = MemoryBroker({"announced": 1})
        users = publishing(broker, Duplicates.SKIP)

        await handle_message(users, shop.database, paid(1))
        await handle_message(users, shop.database, paid(1))

        assert await shop.orders() == ["evt-1"]
        assert announced(broker) == []

    run(scenario)


def test_without_an_outbox_an_invoked_duplicate_writes_nothing_and_sends_again(run):
    async def scenario(shop: Shop) -> None:
        broker = MemoryBroker({"announced": 1})
        users = publishing(broker, Duplicates.INVOKE)

        first = await handle_message(users, shop.database, paid(1))
        second = await handle_message(users, shop.database, paid(1))
        await handle_message(users, shop.database, paid(1))

        assert isinstance(first, Handled)
        assert isinstance(second, Skipped)
        assert await shop.orders() == ["evt-1"]
        assert announced(broker) == [b"evt-1", b"evt-1"]

    run(scenario)


def sending(duplicates: Duplicates, seen: list[bool]) -> Consumer:
    """A service with an outbox: what it announces is durable with what it writes."""
    outbox = Outbox()

    @consumer(
        "users",
        policy=ConsumerSettings(duplicates=duplicates),
        id_from=FromHeader("message-id"),
    )
    async def handle(message: Message, session: Any) -> None:
        seen.append(message.is_duplicate)
        if not message.is_duplicate:
            session.add(Order(event_id=message.id))
        await outbox.add(session, "announced", {"user": message.id})

    return handle


async def waiting_to_leave(shop: Shop) -> list[str]:
    async with shop.database.begin() as unit:
        return [entry.message_id for entry in await unit.outbox.read("outbox", 0, 100)]


def test_with_an_outbox_a_duplicate_may_be_skipped_and_nothing_is_lost(run):
    async def scenario(shop: Shop) -> None:
        seen: list[bool] = []
        users = sending(Duplicates.SKIP, seen)

        with crash_at(CrashPoint.MESSAGE_COMMIT_AFTER), pytest.raises(Crash):
            await handle_message(users, shop.database, paid(1))
        await handle_message(users, shop.database, paid(1))

        assert seen == [False]
        assert await shop.orders() == ["evt-1"]
        assert len(await waiting_to_leave(shop)) == 1

    run(scenario)


def test_with_an_outbox_an_invoked_duplicate_sends_under_the_same_id(run):
    async def scenario(shop: Shop) -> None:
        seen: list[bool] = []
        users = sending(Duplicates.INVOKE, seen)

        await handle_message(users, shop.database, paid(1))
        before = await waiting_to_leave(shop)
        await handle_message(users, shop.database, paid(1))

        assert seen == [False, True]
        assert all(isinstance(flag, bool) for flag in seen)
        assert await waiting_to_leave(shop) == before
        assert await shop.orders() == ["evt-1"]

    run(scenario)


def test_a_handler_that_rolls_back_sends_nothing(run):
    async def scenario(shop: Shop) -> None:
        outbox = Outbox()

        @consumer("users", id_from=FromHeader("message-id"))
        async def handle(message: Message, session: Any) -> None:
            await outbox.add(session, "announced", {"user": message.id})
            raise RetryableMessageError("down")

        await handle_message(handle, shop.database, paid(1))

        assert await waiting_to_leave(shop) == []

    run(scenario)


def test_the_result_of_a_message_is_kept_and_old_records_are_deleted(run):
    async def scenario(shop: Shop) -> None:
        @consumer(
            "dedup", policy=ConsumerSettings(keeps_results=True), id_from=FromHeader("message-id")
        )
        async def handle(message: Message) -> dict[str, int]:
            return {"stock": 42}

        await handle_message(handle, shop.database, paid(1))
        await shop.age(8 * 86_400)
        await handle_message(handle, shop.database, paid(2))

        assert await handle_message(handle, shop.database, paid(1)) == Skipped(
            "duplicate", '{"stock": 42}'
        )
        async with shop.database.begin() as unit:
            assert await unit.claims.delete_expired("dedup", 7 * 86_400, 1000) == 1
        assert await shop.claim("dedup", "evt-1") is None
        assert await shop.claim("dedup", "evt-2") is not None

    run(scenario)


def test_duplicates_that_come_at_once_have_one_effect(run):
    async def scenario(shop: Shop) -> None:
        @consumer("dedup", id_from=FromHeader("message-id"))
        async def handle(message: Message, session: Any) -> None:
            session.add(Order(event_id=message.id))

        async def until_settled() -> None:
            while isinstance(await handle_message(handle, shop.database, paid(1)), RetryLater):
                await asyncio.sleep(0.01)

        async with asyncio.timeout(30):
            await asyncio.gather(*(until_settled() for _ in range(12)))

        assert await shop.orders() == ["evt-1"]

    run(scenario)


@pytest.mark.postgres
@pytest.mark.parametrize("ends", ["commits", "rolls back"])
def test_the_second_of_two_claims_waits_for_the_first_and_does_as_that_ends(run_on_postgres, ends):
    async def scenario(shop: Shop) -> None:
        async def second() -> bool:
            async with shop.session_factory() as session, session.begin():
                store = SqlAlchemyProcessedMessageStore(session)
                return await store.claim(consumer_name="dedup", event_id="evt-1")

        async with shop.session_factory() as session:
            store = SqlAlchemyProcessedMessageStore(session)
            assert await store.claim(consumer_name="dedup", event_id="evt-1") is True
            waiting = asyncio.create_task(second())
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await (session.commit() if ends == "commits" else session.rollback())

        assert await waiting is (ends == "rolls back")

    run_on_postgres(scenario)


@pytest.mark.postgres
def test_a_unique_violation_that_is_caught_has_ended_the_transaction(run_on_postgres):
    """What many documents recommend, and what PostgreSQL says to it."""

    async def scenario(shop: Shop) -> None:
        async with shop.session_factory() as session, session.begin():
            await session.execute(insert(Order).values(number=1, event_id="evt-1"))
        async with shop.session_factory() as session:
            with pytest.raises(IntegrityError):
                await session.execute(insert(Order).values(number=1, event_id="evt-1"))
            with pytest.raises(DBAPIError, match="aborted"):
                await session.execute(select(Order))

    run_on_postgres(scenario)
