"""The messages of a batch share a session: each reads what it would read in one of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from sqlalchemy import ForeignKey, func, select, text
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    mapped_column,
    relationship,
    selectinload,
)

from semel.codec import FromHeader, Reading
from semel.message import Message
from semel.messaging.handle.batch import consume_each, consume_many
from semel.messaging.handler import Consumer
from semel.messaging.receive.inbox import Inbox, InboxWorker
from semel.messaging.settings import ConsumerSettings
from semel.policy.vocabulary import BatchPolicy
from semel.sql.database import SqlDatabase
from tests.messaging.worlds import postgres_world, sqlite_world

MESSAGES = [Message(f"m{number}", {}, b"{}") for number in range(1, 6)]


class Base(DeclarativeBase):
    """The service's own tables."""


class Account(Base):
    """What may be spent; it and its entries refer to each other."""

    __tablename__ = "read_account"
    id: Mapped[str] = mapped_column(primary_key=True)
    balance: Mapped[int]
    entries: Mapped[list[Entry]] = relationship(back_populates="account")


class Entry(Base):
    """What was spent."""

    __tablename__ = "read_entry"
    id: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(default=0)
    account_id: Mapped[str] = mapped_column(ForeignKey("read_account.id"))
    account: Mapped[Account] = relationship(back_populates="entries")


ACCOUNT = Account.__table__
ENTRY = Entry.__table__


async def spends_with_a_statement(message: Message, session: Any) -> None:
    """Look at an object and write past it: a cycle of objects keeps it alive."""
    wanted = select(Account).options(selectinload(Account.entries)).with_for_update()
    account = (await session.execute(wanted)).scalar_one()
    if account.balance >= 60:
        session.add(Entry(id=message.id, account=account))
        await session.execute(ACCOUNT.update().values(balance=ACCOUNT.c.balance - 60))


async def spends_twice(message: Message, session: Any) -> None:
    """Change an object, then the row behind it."""
    account = await session.get(Account, "a")
    if account.balance >= 60:
        account.balance -= 30
        await session.flush()
        session.add(Entry(id=message.id, account=account))
        await session.execute(text("UPDATE read_account SET balance = balance - 30"))


async def counts_on_the_connection(message: Message, session: Any) -> None:
    connection = await session.connection()
    number = (await connection.execute(select(func.count()).select_from(ENTRY))).scalar_one()
    session.add(Entry(id=message.id, number=number, account_id="a"))


async def counts_in_the_session(message: Message, session: Any) -> None:
    number = (await session.execute(text("SELECT count(*) FROM read_entry"))).scalar_one()
    session.add(Entry(id=message.id, number=number, account_id="a"))


async def counts_before_it_sends(message: Message, session: Any) -> None:
    """With `autoflush` off, its own row is not counted, and all others are."""
    session.add(Entry(id=message.id, number=len(message.id), account_id="a"))
    number = (await session.execute(text("SELECT count(*) FROM read_entry"))).scalar_one()
    await session.execute(ACCOUNT.update().values(balance=number))


async def deletes_the_last_one(message: Message, session: Any) -> None:
    found = (await session.execute(select(Entry))).scalar_one_or_none()
    if found is not None:
        await session.delete(found)
    session.add(Entry(id=message.id, account_id="a"))
    if message.id == "m3":
        raise ValueError("the third fails")


HANDLERS = [
    spends_with_a_statement,
    spends_twice,
    counts_on_the_connection,
    counts_in_the_session,
    counts_before_it_sends,
    deletes_the_last_one,
]

Way = Callable[[Consumer, SqlDatabase], Awaitable[object]]


async def batch(consumer: Consumer, database: SqlDatabase) -> None:
    await consume_many(consumer, database, MESSAGES)


async def whole_batch(consumer: Consumer, database: SqlDatabase) -> None:
    whole = consumer.with_settings(ConsumerSettings(batch=BatchPolicy.FAIL_BATCH))
    await consume_many(whole, database, MESSAGES)


async def inbox(consumer: Consumer, database: SqlDatabase) -> None:
    for message in MESSAGES:
        await Inbox(consumer, database).store(message)
    await InboxWorker(consumer, database).run_until_empty()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def world(request, tmp_path) -> Any:
    if request.param == "sqlite":
        return partial(sqlite_world, tmp_path)
    return partial(postgres_world, request.getfixturevalue("quick_postgres_server"))


async def left_by(world: Any, handler: Any, way: Way, autoflush: bool) -> tuple[Any, Any]:
    """Return the rows that handling the messages leaves."""
    consumer = Consumer("c", handler, Reading(FromHeader("message-id")))
    async with world() as opened:
        database = SqlDatabase(
            opened.database.engine, session_options={"autoflush": autoflush}, lock_seconds=0.5
        )
        async with database.engine.begin() as connection:
            await connection.run_sync(Base.metadata.drop_all)
            await connection.run_sync(Base.metadata.create_all)
            await connection.execute(ACCOUNT.insert().values(id="a", balance=100))
        await way(consumer, database)
        async with database.begin() as unit:
            accounts = (await unit.session.execute(select(ACCOUNT))).all()
            entries = (await unit.session.execute(select(ENTRY).order_by(ENTRY.c.id))).all()
    return accounts, entries


CASES = [
    *((handler, batch, autoflush) for handler in HANDLERS for autoflush in (True, False)),
    (spends_with_a_statement, whole_batch, True),
    (spends_with_a_statement, inbox, True),
]


@pytest.mark.parametrize(("handler", "way", "autoflush"), CASES)
def test_a_handler_reads_the_same_with_others_as_alone(world, handler, way, autoflush):
    async def alone(consumer: Consumer, database: SqlDatabase) -> None:
        await consume_each(consumer, database, MESSAGES)

    expected = asyncio.run(left_by(world, handler, alone, autoflush))

    assert asyncio.run(left_by(world, handler, way, autoflush)) == expected


def test_what_a_handler_has_kept_of_a_row_stays_as_it_read_it(world):
    kept: list[Account] = []
    seen: list[int] = []

    async def handler(message: Message, session: Any) -> None:
        if not kept:
            kept.append(await session.get(Account, "a"))
        await session.execute(ACCOUNT.update().values(balance=ACCOUNT.c.balance - 1))
        seen.append(kept[0].balance)

    asyncio.run(left_by(world, handler, batch, autoflush=True))

    assert seen == [100] * 5
