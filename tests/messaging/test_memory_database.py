"""SQLite in memory: one connection, whose units come one after the other, and data that stays."""

from __future__ import annotations

import asyncio
import gc
import sqlite3

import pytest
from sqlalchemy import text

from semel.errors import Misuse
from semel.messaging.handle.claims import Claimed, ClaimRequest, Locked
from semel.sql import schema
from semel.sql.database import SqlDatabase, open_existing
from semel.sql.engine import open_engine
from tests.messaging.worlds import Effect, effects, keeper_of, memory_database


def test_a_database_in_memory_is_made_and_used_as_any_other():
    async def scenario() -> None:
        database = SqlDatabase("sqlite://")
        with pytest.raises(schema.SchemaUnusable):
            async with database.begin():
                pass

        await schema.create(database.engine)

        async with database.begin() as unit:
            assert await unit.claims.try_claim("c", ClaimRequest("m1")) == Claimed()
        async with database.begin() as unit:
            assert await unit.claims.look_up("c", "m1") is not None
        assert await schema.check(database.engine) == []
        await database.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "sqlite+aiosqlite://"])
def test_every_database_in_memory_is_its_own(url):
    async def scenario() -> None:
        first, second = SqlDatabase(url), SqlDatabase(url)
        await schema.create(first.engine)

        with pytest.raises(schema.SchemaUnusable):
            async with second.begin():
                pass
        await first.close()
        await second.close()

    asyncio.run(scenario())


def test_many_units_at_once_come_one_after_the_other():
    async def scenario() -> None:
        database = memory_database()

        async def work(number: int) -> None:
            async with database.begin() as unit:
                found = await unit.session.execute(text("SELECT count(*) FROM test_effect"))
                unit.session.add(Effect("seen", found.scalar_one()))
                await asyncio.sleep(0)

        await asyncio.gather(*(work(number) for number in range(20)))

        assert effects(database, "seen") == list(range(20))

    asyncio.run(scenario())


def test_what_is_committed_stays_when_the_connection_is_given_up():
    async def scenario() -> None:
        database = memory_database()
        async with database.begin() as unit:
            unit.session.add(Effect("kept", 1))
        async with database.engine.connect() as connection:
            await connection.invalidate()

        async with database.begin() as unit:
            found = await unit.session.execute(text("SELECT name FROM test_effect"))
            assert list(found.scalars()) == ["kept"]

    asyncio.run(scenario())


def test_a_unit_that_is_cancelled_in_a_statement_leaves_nothing_and_the_next_one_works():
    async def scenario() -> None:
        database = memory_database()
        many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 3000000)"

        async def work() -> None:
            async with database.begin() as unit:
                unit.session.add(Effect("lost", 1))
                await unit.session.execute(text(f"{many} SELECT count(*) FROM n"))

        working = asyncio.create_task(work())
        await asyncio.sleep(0.05)
        working.cancel()
        await asyncio.wait({working})

        async with asyncio.timeout(10):
            while True:
                try:
                    async with database.begin() as unit:
                        unit.session.add(Effect("kept", 1))
                    break
                except Locked:
                    await asyncio.sleep(0.01)
        assert (effects(database, "lost"), effects(database, "kept")) == ([], [1])

    asyncio.run(scenario())


def test_the_memory_is_given_back_with_the_engine():
    engine = open_engine("sqlite://")
    keeper = keeper_of(engine)

    del engine
    gc.collect()

    with pytest.raises(sqlite3.ProgrammingError):
        keeper.execute("SELECT 1")


def test_a_command_finds_no_database_in_memory():
    with pytest.raises(Misuse, match="there is no file :memory:"):
        asyncio.run(open_existing("sqlite://"))


@pytest.mark.parametrize("turns", range(5))
def test_a_cancellation_that_comes_with_the_lock_is_not_lost(turns):
    async def scenario() -> None:
        database = memory_database()

        async def work() -> None:
            async with database.begin():
                await asyncio.Event().wait()

        async with database.begin():
            waiting = asyncio.create_task(work())
            await asyncio.sleep(0.01)
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting}, timeout=1.0)

        assert waiting.cancelled()
        async with asyncio.timeout(1), database.begin():
            pass

    asyncio.run(scenario())


def test_a_transaction_that_waits_too_long_for_another_one_is_held_elsewhere():
    async def scenario() -> None:
        database = memory_database(lock_seconds=0.01)

        async with database.begin():
            with pytest.raises(Locked):
                async with database.begin():
                    pass
        async with database.begin():
            pass

    asyncio.run(scenario())


def test_whoever_makes_one_transaction_after_another_lets_others_have_theirs():
    async def scenario() -> None:
        database, is_over = memory_database(), asyncio.Event()

        async def end() -> None:
            async with database.begin():
                is_over.set()

        ending = asyncio.create_task(end())
        for _ in range(100):
            async with database.begin():
                pass
            if is_over.is_set():
                break

        assert is_over.is_set()
        await ending

    asyncio.run(scenario())
