"""The session in memory hands rows out and takes them in as a database does: as copies."""

from __future__ import annotations

import asyncio

from semel.memory.database import MemoryDatabase, MemorySession
from semel.message import Message
from semel.messaging.consumer import consumer
from semel.messaging.failure import RetryableMessageError
from semel.messaging.handling import handle_message
from semel.messaging.outcome import Handled
from semel.messaging.retry import RetryPolicy
from semel.messaging.settings import ConsumerSettings

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
