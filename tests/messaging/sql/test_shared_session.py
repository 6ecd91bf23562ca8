"""The messages of a batch share a session: none throws away what another has left in it."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Integer, select
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from semel.codec import FromHeader
from semel.message import Message
from semel.messaging.handle.batch import consume_many
from semel.messaging.handler import consumer
from semel.messaging.outcome import DeadLettered, Handled
from semel.messaging.settings import ConsumerSettings, RetryPolicy
from tests.messaging.worlds import postgres_world, sqlite_world

ONCE = ConsumerSettings(retry=RetryPolicy(max_attempts=1))
MESSAGES = [Message(f"m{number}", {}, b"{}") for number in (1, 2, 3)]


class Base(DeclarativeBase):
    """The service's own tables."""


class Account(Base):
    """A row per account."""

    __tablename__ = "shared_account"
    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    paid: Mapped[int] = mapped_column(Integer, default=0)


async def forgets_all(session: Any) -> None:
    session.expunge_all()


async def reads_all_again(session: Any) -> None:
    session.expire_all()


async def forgets_all_inside(session: Any) -> None:
    await session.run_sync(lambda inside: inside.expunge_all())


async def forgets_one(session: Any) -> None:
    session.expunge(await session.get(Account, 1))


async def reads_one_again(session: Any) -> None:
    session.expire(await session.get(Account, 1))


ALL = [forgets_all, reads_all_again, forgets_all_inside]
ONE = [forgets_one, reads_one_again]


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def world(request, tmp_path) -> Any:
    if request.param == "sqlite":
        return partial(sqlite_world, tmp_path)
    return partial(postgres_world, request.getfixturevalue("quick_postgres_server"))


async def paid(world: Any, way: Any, *, flushes: bool = False) -> tuple[list[Any], dict[int, int]]:
    """Let m1 and m3 pay into two accounts, one of them new, and m2 do what it does between."""

    @consumer("c", policy=ONCE, id_from=FromHeader("message-id"))
    async def handle(message: Message, session: Any) -> None:
        if message.id == "m2":
            if flushes:
                await session.flush()
            return await way(session)
        known = await session.get(Account, 1)
        known.paid += 1
        session.add(Account(id=int(message.id[1:]) + 10, paid=1))
        return None

    async with world() as opened:
        async with opened.database.engine.begin() as connection:
            await connection.run_sync(Base.metadata.drop_all)
            await connection.run_sync(Base.metadata.create_all)
        async with opened.database.begin() as unit:
            unit.session.add(Account(id=1))
        outcomes = await consume_many(handle, opened.database, MESSAGES)
        async with opened.database.begin() as unit:
            rows = (await unit.session.execute(select(Account.id, Account.paid))).all()
    return outcomes, {row.id: row.paid for row in rows}


@pytest.mark.parametrize("flushes", [False, True], ids=["as it is", "flushes before"])
@pytest.mark.parametrize("way", [*ALL, *ONE], ids=lambda way: way.__name__)
def test_what_others_have_not_sent_yet_is_not_thrown_away(world, way, flushes):
    outcomes, rows = asyncio.run(paid(world, way, flushes=flushes))

    assert rows == {1: 2, 11: 1, 13: 1}
    assert [type(outcome) for outcome in outcomes] == [Handled] * 3


@pytest.mark.parametrize("way", ALL, ids=lambda way: way.__name__)
def test_what_it_has_not_sent_yet_itself_is_not_thrown_away_either(world, way):
    async def undecided(session: Any) -> None:
        session.add(Account(id=12, paid=1))
        await way(session)

    outcomes, rows = asyncio.run(paid(world, undecided))

    assert rows == {1: 2, 11: 1, 13: 1}
    assert [type(outcome) for outcome in outcomes] == [Handled, DeadLettered, Handled]
    assert outcomes[1].failure.code == "HANDLER_MISUSE"
