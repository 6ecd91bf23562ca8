"""A handler that ends while a statement of its session still runs: nobody else pays for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import text

from semel.codec import FromHeader
from semel.message import Message
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.claims import ClaimState
from semel.messaging.handler import consumer
from semel.messaging.outcome import Handled, RetryLater
from semel.messaging.settings import ConsumerSettings, RetryPolicy
from semel.sql.database import SqlDatabase
from tests.messaging.worlds import postgres_world

TRIES = 3
POLICY = ConsumerSettings(
    retry=RetryPolicy(
        max_attempts=TRIES, initial_delay_seconds=0.0, max_delay_seconds=0.0, jitter=False
    )
)
SLOW = text("SELECT pg_sleep(0.2)")


class Late:
    """A handler that leaves a statement running behind, and then fails or does not."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.left: list[asyncio.Task[Any]] = []
        self.consumer = consumer("c", policy=POLICY, id_from=FromHeader("message-id"))(self.handle)

    async def handle(self, message: Message, session: Any) -> None:
        await session.execute(text("INSERT INTO paid VALUES (:id)"), {"id": message.id})
        if message.id != "late":
            return
        self.left.append(asyncio.create_task(session.execute(SLOW)))
        await asyncio.sleep(0.02)
        if self.fails:
            raise ValueError("no")


@pytest.mark.postgres
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "fails"])
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_its_message_ends_and_the_connection_is_nobodys_trouble(
    quick_postgres_server, driver, fails
):
    late = Late(fails)

    async def test() -> None:
        async with postgres_world(quick_postgres_server) as world:
            url = world.database.engine.url.set(drivername=f"postgresql+{driver}")
            database = SqlDatabase(url.render_as_string(hide_password=False), lock_seconds=0.5)
            async with world.database.begin() as unit:
                await unit.session.execute(text("CREATE TABLE paid (id VARCHAR(9))"))

            for _ in range(TRIES):
                last = await handle_message(late.consumer, database, Message("late", {}, b"{}"))
            others = [
                await handle_message(late.consumer, database, Message(f"m{n}", {}, b"{}"))
                for n in range(3)
            ]
            await asyncio.gather(*late.left, return_exceptions=True)
            async with world.database.begin() as unit:
                row = await unit.claims.look_up("c", "late")
                paid = list((await unit.session.execute(text("SELECT id FROM paid"))).scalars())
            await database.close()

            assert not isinstance(last, RetryLater), last
            assert [type(outcome) for outcome in others] == [Handled] * 3
            assert row is not None
            assert paid.count("late") == (row.state is ClaimState.COMPLETED)
            assert sorted(paid)[-3:] == ["m0", "m1", "m2"]

    asyncio.run(test())
