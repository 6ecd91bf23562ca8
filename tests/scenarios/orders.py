"""A service of somebody who owns the sessions: a table, and a database of each kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from sqlalchemy import Integer, Text, func, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from semel.message import Coordinates, Message
from semel.messaging.handle.claims import ClaimRow
from semel.sql.database import SqlDatabase
from tests.stores.world import DatabaseWorld


class Base(DeclarativeBase):
    """The service's own tables."""


class Order(Base):
    """What handling a message writes; the same message twice would write two rows."""

    __tablename__ = "orders"
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    event_id: Mapped[str] = mapped_column(Text)


class Projection(Base):
    """One row per case, with the version that was applied last."""

    __tablename__ = "projection"
    case_id: Mapped[str] = mapped_column(Text, primary_key=True)
    version: Mapped[int] = mapped_column(Integer)
    status: Mapped[str] = mapped_column(Text)


@dataclass(frozen=True)
class Shop:
    """The database of one test, as the service sees it."""

    database: SqlDatabase
    session_factory: async_sessionmaker[AsyncSession]
    age: Callable[[float], Awaitable[None]]

    async def orders(self) -> list[str]:
        async with self.session_factory() as session:
            found = await session.scalars(select(Order.event_id).order_by(Order.number))
            return list(found)

    async def count(self, event_id: str) -> int:
        async with self.session_factory() as session:
            matching = select(func.count()).select_from(Order).where(Order.event_id == event_id)
            return (await session.execute(matching)).scalar_one()

    async def projection(self, case_id: str) -> Projection | None:
        async with self.session_factory() as session:
            return await session.get(Projection, case_id)

    async def claim(self, consumer: str, event_id: str) -> ClaimRow | None:
        async with self.database.begin() as unit:
            found: ClaimRow | None = await unit.claims.look_up(consumer, event_id)
            return found


World: TypeAlias = Callable[[], AbstractAsyncContextManager[DatabaseWorld]]
InShop: TypeAlias = Callable[[Callable[[Shop], Awaitable[None]]], None]


@asynccontextmanager
async def opened_shop(world: World) -> AsyncIterator[Shop]:
    async with world() as opened:
        database: Any = opened.database
        async with database.engine.begin() as connection:
            await connection.run_sync(Base.metadata.drop_all)
            await connection.run_sync(Base.metadata.create_all)
        factory = async_sessionmaker(database.engine, expire_on_commit=False)
        yield Shop(database, factory, opened.age)


def in_shop(world: World) -> InShop:
    """Make a function that runs a scenario in a shop of its own."""

    def run(scenario: Callable[[Shop], Awaitable[None]]) -> None:
        async def whole() -> None:
            async with opened_shop(world) as shop:
                await scenario(shop)

        asyncio.run(whole())

    return run


def paid(number: int = 1, **options: Any) -> Message:
    """A message as a runner reads it."""
    return Message(
        f"evt-{number}",
        {"event_id": f"evt-{number}"},
        f'{{"event_id": "evt-{number}"}}'.encode(),
        headers={"message-id": f"evt-{number}".encode()},
        source=Coordinates("orders", 0, number),
        **options,
    )
