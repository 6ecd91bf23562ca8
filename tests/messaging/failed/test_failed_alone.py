"""A message among others finds what it would find alone, and fails as it would alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Integer, func, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from semel.message import Message
from semel.messaging.failure import NonRetryableMessageError
from semel.messaging.handle.batch import consume_many
from semel.messaging.handler import consumer
from semel.messaging.outcome import DeadLettered, Handled
from tests.messaging.worlds import postgres_world, sqlite_world

MESSAGES = [Message(f"m{number}", {}, b"{}") for number in (1, 2, 3)]


class Base(DeclarativeBase):
    """The service's own tables."""


class Order(Base):
    """A row per order."""

    __tablename__ = "alone_order"
    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    paid: Mapped[int] = mapped_column(Integer, default=0)


ORDER = Base.metadata.tables["alone_order"]
COUNTED = select(func.count()).select_from(ORDER)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def world(request, tmp_path) -> Any:
    if request.param == "sqlite":
        return partial(sqlite_world, tmp_path)
    return partial(postgres_world, request.getfixturevalue("quick_postgres_server"))


class Ways:
    """What the three messages do, and how often each was called."""

    def __init__(self, *ways: Any) -> None:
        self.ways = {message.id: way for message, way in zip(MESSAGES, ways, strict=True)}
        self.calls: Counter[str] = Counter()
        self.held: list[Any] = []

    async def handle(self, world: Any) -> tuple[list[Any], set[int]]:
        """Handle them as one batch; return the outcomes, and the orders."""

        @consumer("c")
        async def handle(message: Message, session: Any) -> None:
            self.calls[message.id] += 1
            await self.ways[message.id](self, session)

        async with world() as opened:
            async with opened.database.engine.begin() as connection:
                await connection.run_sync(Base.metadata.drop_all)
                await connection.run_sync(Base.metadata.create_all)
                await connection.execute(insert(ORDER), {"id": 100})
            outcomes = await consume_many(handle, opened.database, MESSAGES)
            async with opened.database.begin() as unit:
                found = set((await unit.session.execute(select(Order.id))).scalars())
        return outcomes, found


async def does_nothing(ways: Ways, session: Any) -> None:
    pass


async def refuses(ways: Ways, session: Any) -> None:
    raise NonRetryableMessageError("never")


async def sends_a_row(ways: Ways, session: Any) -> None:
    await session.execute(insert(ORDER), {"id": 1})


async def sends_and_refuses(ways: Ways, session: Any) -> None:
    await session.execute(insert(ORDER), {"id": 2})
    raise NonRetryableMessageError("never")


async def adds_a_row(ways: Ways, session: Any) -> None:
    session.add(Order(id=1))


async def adds_a_twin(ways: Ways, session: Any) -> None:
    session.add(Order(id=100))


async def executes(session: Any) -> int:
    return (await session.execute(COUNTED)).scalar_one()


async def asks_for_a_scalar(session: Any) -> int:
    return await session.scalar(COUNTED)


async def asks_for_scalars(session: Any) -> int:
    return (await session.scalars(COUNTED)).one()


async def asks_for_scalars_inside(session: Any) -> int:
    return await session.run_sync(lambda inside: inside.scalars(COUNTED).one())


async def gets(session: Any) -> int:
    return 1 + (await session.get(Order, 1) is not None)


async def asks_the_connection(session: Any) -> int:
    return (await (await session.connection()).execute(COUNTED)).scalar_one()


ASKING = [
    executes,
    asks_for_a_scalar,
    asks_for_scalars,
    asks_for_scalars_inside,
    gets,
    asks_the_connection,
]


def wants_two_rows(asks: Any) -> Any:
    async def way(ways: Ways, session: Any) -> None:
        with session.no_autoflush:
            found = await asks(session)
        if found != 2:
            raise NonRetryableMessageError("an order is missing")

    return way


async def pays_behind_its_object(ways: Ways, session: Any) -> None:
    ways.held.append(await session.get(Order, 100))
    await session.execute(
        update(ORDER).where(ORDER.c.id == 100).values(paid=1),
        execution_options={"synchronize_session": False},
    )


async def wants_it_paid(ways: Ways, session: Any) -> None:
    if not (await session.get(Order, 100)).paid:
        raise NonRetryableMessageError("it is not paid")


async def pays_the_object(ways: Ways, session: Any) -> None:
    (await session.get(Order, 100)).paid = 1


async def wants_the_row_paid(ways: Ways, session: Any) -> None:
    with session.no_autoflush:
        paid = (await session.execute(select(ORDER.c.paid).where(ORDER.c.id == 100))).scalar_one()
    if not paid:
        raise NonRetryableMessageError("its row says that it is not paid")


async def asks_and_takes_no_error(ways: Ways, session: Any) -> None:
    refused = False
    try:
        await session.execute(select(func.count(Order.id)))
    except IntegrityError:
        refused = True
    if refused:
        raise NonRetryableMessageError("the database refused")


def test_a_handler_that_fails_by_its_own_word_is_called_once(world):
    ways = Ways(sends_a_row, sends_and_refuses, does_nothing)

    outcomes, found = asyncio.run(ways.handle(world))

    assert [type(outcome) for outcome in outcomes] == [Handled, DeadLettered, Handled]
    assert found == {100, 1}
    assert ways.calls == {"m1": 2, "m2": 1, "m3": 1}


def test_the_first_of_a_batch_that_fails_is_called_once_and_no_other_twice(world):
    ways = Ways(sends_and_refuses, sends_a_row, does_nothing)

    outcomes, found = asyncio.run(ways.handle(world))

    assert [type(outcome) for outcome in outcomes] == [DeadLettered, Handled, Handled]
    assert found == {100, 1}
    assert ways.calls == {"m1": 1, "m2": 1, "m3": 1}


@pytest.mark.parametrize("asks", ASKING, ids=lambda asks: asks.__name__)
def test_whoever_asks_finds_the_rows_that_others_have_added(world, asks):
    ways = Ways(adds_a_row, wants_two_rows(asks), does_nothing)

    outcomes, _ = asyncio.run(ways.handle(world))

    assert [type(outcome) for outcome in outcomes] == [Handled] * 3
    assert ways.calls == {"m1": 1, "m2": 1, "m3": 1}


def test_what_fails_beside_rows_that_others_have_added_is_called_once(world):
    ways = Ways(adds_a_row, refuses, does_nothing)

    outcomes, found = asyncio.run(ways.handle(world))

    assert [type(outcome) for outcome in outcomes] == [Handled, DeadLettered, Handled]
    assert found == {100, 1}
    assert ways.calls == {"m1": 2, "m2": 1, "m3": 1}


@pytest.mark.parametrize("between", [does_nothing, sends_and_refuses], ids=["well", "one fails"])
def test_no_message_finds_an_object_that_another_has_read(world, between):
    ways = Ways(pays_behind_its_object, between, wants_it_paid)

    outcomes, _ = asyncio.run(ways.handle(world))

    assert isinstance(outcomes[0], Handled)
    assert isinstance(outcomes[2], Handled)
    assert all(order.paid == 0 for order in ways.held), "what was read stays readable"


def test_what_one_message_changes_in_an_object_the_next_one_finds_in_the_row(world):
    ways = Ways(pays_the_object, wants_the_row_paid, does_nothing)

    outcomes, _ = asyncio.run(ways.handle(world))

    assert [type(outcome) for outcome in outcomes] == [Handled] * 3


def test_what_fails_by_a_row_of_another_message_is_tried_again_alone(world):
    ways = Ways(adds_a_twin, asks_and_takes_no_error, does_nothing)

    outcomes, found = asyncio.run(ways.handle(world))

    assert [type(outcome) for outcome in outcomes] == [DeadLettered, Handled, Handled]
    assert found == {100}
