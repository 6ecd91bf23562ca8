"""What a handler's task writes after its handler has ended is in nobody's transaction."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import String, select, text
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from semel.codec import FromHeader
from semel.errors import Misuse
from semel.message import Message
from semel.messaging.failure import RetryableMessageError
from semel.messaging.handle.batch import consume_many
from semel.messaging.handler import consumer
from semel.messaging.outcome import Handled, RetryLater
from semel.messaging.settings import ConsumerSettings, RetryPolicy
from tests.messaging.places import InPostgres, InSqlite

POLICY = ConsumerSettings(
    retry=RetryPolicy(initial_delay_seconds=0.0, max_delay_seconds=0.0, jitter=False)
)
MESSAGES = [Message(f"m{number}", {}, b"{}", f"k{number}") for number in (1, 2)]


class Base(DeclarativeBase):
    """The service's own tables."""


class Paid(Base):
    """A row per effect."""

    __tablename__ = "late_paid"
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(9))


async def by_statement(session: Any, id: str) -> None:
    await session.execute(text("INSERT INTO late_paid (id) VALUES (:id)"), {"id": id})


async def by_connection(session: Any, id: str) -> None:
    connection = await session.connection()
    await connection.execute(text("INSERT INTO late_paid (id) VALUES (:id)"), {"id": id})


async def by_object(session: Any, id: str) -> None:
    session.add(Paid(id=id))


async def late_effects(database: Any, write: Any) -> None:
    """Let m1 fail while a task of it is still about to write, and m2 wait for that task."""
    go, tasks = asyncio.Event(), list[asyncio.Task[None]]()

    async def later(session: Any) -> None:
        await go.wait()
        await write(session, "m1")

    @consumer("c", policy=POLICY, id_from=FromHeader("message-id"))
    async def handle(message: Message, session: Any) -> None:
        if message.id == "m1" and message.attempt == 1:
            tasks.append(asyncio.create_task(later(session)))
            raise RetryableMessageError("the other half failed")
        if tasks:
            go.set()
            await asyncio.wait(tasks)
        await write(session, message.id)

    first = await consume_many(handle, database, MESSAGES)
    second = await consume_many(handle, database, MESSAGES[:1])

    assert [type(outcome) for outcome in (*first, *second)] == [RetryLater, Handled, Handled]
    # SQLAlchemy itself refuses some of what would be done at the same time.
    assert {type(task.exception()) for task in tasks} <= {Misuse, InvalidRequestError}


class LateTasks:
    world: Any

    @pytest.mark.parametrize("write", [by_statement, by_connection, by_object])
    def test_a_failed_message_has_no_effect_beside_its_neighbours(self, write):
        async def scenario() -> None:
            async with self.world() as world:
                async with world.database.engine.begin() as connection:
                    await connection.run_sync(Base.metadata.create_all)
                await late_effects(world.database, write)
                async with world.database.begin() as unit:
                    paid = (await unit.session.execute(select(Paid.id))).scalars()
                    assert sorted(paid) == ["m1", "m2"]

        asyncio.run(scenario())

    def test_a_task_that_outlives_its_handler_may_have_transactions_of_its_own(self):
        async def scenario() -> None:
            async with self.world() as world:
                tasks = list[asyncio.Task[float]]()

                async def on_its_own() -> float:
                    await asyncio.sleep(0.01)
                    async with world.database.begin() as unit:
                        return await unit.now()

                @consumer("c", id_from=FromHeader("message-id"))
                async def handle(message: Message, session: Any) -> None:
                    tasks.append(asyncio.create_task(on_its_own()))

                await consume_many(handle, world.database, MESSAGES)
                assert min(await asyncio.gather(*tasks)) > 0

        asyncio.run(scenario())


class TestInSqlite(InSqlite, LateTasks):
    pass


class TestInPostgres(InPostgres, LateTasks):
    pass
