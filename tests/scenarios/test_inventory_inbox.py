"""The inventory of BEE-10007: five units of X for order Y, delivered as often as you like."""

from __future__ import annotations

import asyncio
import json

import pytest
from sqlalchemy import Integer, String, UniqueConstraint, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from semel.crashpoints import CrashPoint
from semel.message import Message
from semel.messaging.handle.claims import Locked
from semel.messaging.handler import consumer
from semel.messaging.outcome import Handled, Skipped
from semel.messaging.receive.inbox import Inbox, InboxWorker
from semel.messaging.settings import ConsumerSettings, RetryPolicy
from semel.testing.crash import Crash, crash_at
from tests.messaging.outgoing import DATABASES, opened, run

SETTINGS = ConsumerSettings(
    retry=RetryPolicy(max_attempts=3, initial_delay_seconds=0.0, max_delay_seconds=0.0),
    keeps_results=True,
)


class Tables(DeclarativeBase):
    pass


class Reservation(Tables):
    __tablename__ = "inventory_reservations"
    __table_args__ = (UniqueConstraint("order_id"),)

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    order_id: Mapped[str] = mapped_column(String)
    product_id: Mapped[str] = mapped_column(String)
    quantity: Mapped[int] = mapped_column(Integer)


@consumer("inventory", policy=SETTINGS)
async def reserve(message, session):
    """Reserve what the message asks for."""
    order = message.payload
    session.add(
        Reservation(
            order_id=order["order_id"], product_id=order["product_id"], quantity=order["qty"]
        )
    )
    return {"reserved": order["qty"]}


def reservation(message_id="msg-abc-123", order="Y"):
    payload = {"product_id": "X", "qty": 5, "order_id": order}
    raw = json.dumps(payload).encode()
    return Message(message_id, payload, raw, key=order, type="inventory.reserve")


@pytest.fixture(params=DATABASES[1:])
def database(request):
    return opened(request.param, request)


def scenario(database, test):
    """Run a scenario in a database with the table of reservations."""

    async def whole(world):
        async with world.database.engine.begin() as connection:
            await connection.run_sync(Tables.metadata.drop_all)
            await connection.run_sync(Tables.metadata.create_all)
        await test(world)

    run(database, whole)


async def reserved(world):
    """Return how many units of X are reserved."""
    async with world.database.engine.connect() as connection:
        return (await connection.execute(select(func.sum(Reservation.quantity)))).scalar()


async def stored(world, message_id="msg-abc-123"):
    async with world.database.begin() as unit:
        return await unit.inbox.get("inventory", message_id)


def test_the_second_delivery_is_acknowledged_and_reserves_nothing(database):
    async def test(world):
        inbox = Inbox(reserve, world.database)

        first = await inbox.store_and_handle(reservation())
        second = await inbox.store_and_handle(reservation())

        assert first == Handled({"reserved": 5})
        assert second == Skipped("duplicate", '{"reserved": 5}')
        assert await reserved(world) == 5
        found = await stored(world)
        assert (found.message_type, found.processed_at is not None) == ("inventory.reserve", True)

    scenario(database, test)


def test_concurrent_deliveries_reserve_once(database):
    async def deliver(inbox):
        """Deliver until it may be acknowledged, as a broker does."""
        while True:
            try:
                return await inbox.store_and_handle(reservation())
            except Locked:
                continue

    async def test(world):
        inbox = Inbox(reserve, world.database)

        outcomes = await asyncio.gather(*(deliver(inbox) for _ in range(8)))

        assert sorted(type(outcome).__name__ for outcome in outcomes) == [
            "Handled",
            *["Skipped"] * 7,
        ]
        assert await reserved(world) == 5

    scenario(database, test)


@pytest.mark.parametrize(
    "point",
    [
        CrashPoint.CLAIM_AFTER,
        CrashPoint.HANDLE_AFTER,
        CrashPoint.MESSAGE_COMMIT_BEFORE,
        CrashPoint.MESSAGE_COMMIT_AFTER,
    ],
)
def test_a_crash_before_the_acknowledgement_reserves_once(database, point):
    async def test(world):
        inbox = Inbox(reserve, world.database)

        with crash_at(point), pytest.raises(Crash):
            await inbox.store_and_handle(reservation())
        redelivered = await inbox.store_and_handle(reservation())

        was_durable = point is CrashPoint.MESSAGE_COMMIT_AFTER
        assert isinstance(redelivered, Skipped if was_durable else Handled)
        assert await reserved(world) == 5

    scenario(database, test)


def test_a_second_message_for_the_order_is_a_failure_of_the_handler_and_no_duplicate(database):
    """The message's id deduplicates deliveries, UNIQUE(order_id) protects the business rule."""

    async def test(world):
        inbox = Inbox(reserve, world.database)
        await inbox.store_and_handle(reservation())

        with pytest.raises(IntegrityError):
            await inbox.store_and_handle(reservation("msg-def-456"))

        assert await stored(world, "msg-def-456") is None
        assert await reserved(world) == 5

    scenario(database, test)


def test_a_worker_makes_such_a_message_a_dead_letter_and_goes_on(database):
    async def test(world):
        inbox = Inbox(reserve, world.database)
        for message in (reservation(), reservation("msg-def-456"), reservation("msg-ghi", "Z")):
            await inbox.store(message)

        await InboxWorker(reserve, world.database, poll_seconds=0.01).run_until_empty()

        assert await reserved(world) == 10
        async with world.database.begin() as unit:
            dead = await unit.dead_letters.get("inventory", "msg-def-456")
        assert (dead.error_code, dead.attempts) == ("CONSTRAINT_VIOLATED", 1)
        refused = await stored(world, "msg-def-456")
        assert (refused.processed_at, refused.due_at) == (None, None)

    scenario(database, test)


def test_what_was_handled_long_ago_is_deleted_and_nothing_else(database):
    async def test(world):
        week = 7 * 24 * 3600
        inbox = Inbox(reserve, world.database)
        await inbox.store_and_handle(reservation())
        await world.age(week + 1)
        await inbox.store_and_handle(reservation("msg-new", "Z"))
        await inbox.store(reservation("msg-waiting", "W"))
        await world.age(1)

        async with world.database.begin() as unit:
            assert await unit.inbox.delete_processed("inventory", week, 1000) == 1

        assert await stored(world) is None
        assert await stored(world, "msg-new") is not None
        assert await stored(world, "msg-waiting") is not None

    scenario(database, test)
