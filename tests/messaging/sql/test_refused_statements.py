"""Statements that reach beyond the handler's own message are refused, on the first attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import text

from semel.codec import FromHeader
from semel.message import Message
from semel.messaging.handle.batch import consume_many
from semel.messaging.handler import consumer
from semel.messaging.outcome import DeadLettered, Handled
from tests.messaging.worlds import postgres_world, sqlite_world

MESSAGES = [Message(f"m{number}", {}, b"{}") for number in (1, 2, 3)]


async def begins(session: Any) -> None:
    async with session.begin():
        pass


async def goes_back(session: Any) -> None:
    await session.execute(text("ROLLBACK TO SAVEPOINT sa_savepoint_1"))


async def lets_go(session: Any) -> None:
    await (await session.connection()).exec_driver_sql('release "sa_savepoint_1"')


async def batch_with(way: Callable[[Any], Awaitable[None]], database: Any) -> tuple[Any, Any]:
    @consumer("c", id_from=FromHeader("message-id"))
    async def handle(message: Message, session: Any) -> None:
        await session.execute(text("INSERT INTO refused_effect VALUES (:id)"), {"id": message.id})
        if message.id == "m2":
            await way(session)

    async with database.engine.begin() as connection:
        await connection.execute(text("CREATE TABLE refused_effect (id TEXT)"))
    outcomes = await consume_many(handle, database, MESSAGES)
    async with database.engine.connect() as connection:
        effects = await connection.execute(text("SELECT id FROM refused_effect ORDER BY id"))
        return outcomes, list(effects.scalars())


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
@pytest.mark.parametrize("way", [begins, goes_back, lets_go], ids=lambda way: way.__name__)
def test_neighbours_keep_their_effects_and_the_handler_hears_why(request, tmp_path, kind, way):
    async def whole() -> tuple[Any, Any]:
        server = request.getfixturevalue("quick_postgres_server") if kind == "postgres" else None
        async with sqlite_world(tmp_path) if server is None else postgres_world(server) as world:
            return await batch_with(way, world.database)

    outcomes, effects = asyncio.run(whole())

    assert effects == ["m1", "m3"]
    assert [type(outcome) for outcome in outcomes] == [Handled, DeadLettered, Handled]
    assert outcomes[1].failure.code == "HANDLER_MISUSE"
