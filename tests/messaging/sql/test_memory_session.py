"""The session in memory hands rows out and takes them in as a database does: as copies."""

from __future__ import annotations

import asyncio

import pytest

from semel.memory.database import MemoryDatabase
from semel.memory.session import MemorySession
from semel.message import Message
from semel.messaging.consumer import consumer
from semel.messaging.failure import RetryableMessageError
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.claims import Locked
from semel.messaging.outcome import Handled
from semel.messaging.settings import ConsumerSettings, RetryPolicy

AT_ONCE = ConsumerSettings(retry=RetryPolicy(initial_delay_seconds=0, max_delay_seconds=0))


def test_what_a_failed_attempt_changed_in_a_row_is_taken_back():
    database = MemoryDatabase()
    failures = 2

    @consumer("c", policy=AT_ONCE)
    async def add_ten(message: Message, session: MemorySession) -> None:
        nonlocal failures
        account = session.get("account", 1) or {"balance": 0}
        account["balance"] += 10
        session.put("account", 1, account)
        if message.id == "b" and failures:
            failures -= 1
            raise RetryableMessageError("not yet")

    async def deliver() -> list[type]:
        given = [Message(name, {}, b"{}") for name in "abbb"]
        return [type(await handle_message(add_ten, database, message)) for message in given]

    assert asyncio.run(deliver())[-1] is Handled
    assert database.by_key("account") == {1: {"balance": 20}}


def test_a_row_changes_only_when_it_is_put():
    database = MemoryDatabase()

    async def change() -> None:
        async with database.begin() as unit:
            row = {"items": [1]}
            unit.session.put("orders", "a", row)
            row["items"].append(2)
            unit.session.get("orders", "a")["items"].append(3)
            unit.session.rows("orders")[0]["items"].append(4)

    asyncio.run(change())
    database.rows("orders")[0]["items"].append(5)
    database.by_key("orders")["a"]["items"].append(6)

    assert database.rows("orders") == [{"items": [1]}]


@pytest.mark.parametrize("turns", range(5))
def test_a_cancellation_that_comes_with_the_lock_is_not_lost(turns):
    async def scenario() -> None:
        database = MemoryDatabase()

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
        database = MemoryDatabase(lock_seconds=0.01)

        async with database.begin():
            with pytest.raises(Locked):
                async with database.begin():
                    pass
        async with database.begin():
            pass

    asyncio.run(scenario())


def test_whoever_makes_one_transaction_after_another_lets_others_have_theirs():
    async def scenario() -> None:
        database, is_over = MemoryDatabase(), asyncio.Event()

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
