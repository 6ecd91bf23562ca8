"""Savepoints become fewer while nothing fails, and frequent again with the next failure."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from typing import Any

import pytest

from semel.message import Message
from semel.messaging.failure import NonRetryableMessageError
from semel.messaging.handle.batch import consume_many
from semel.messaging.handler import Consumer, Pace, consumer
from semel.messaging.outcome import DeadLettered, Handled, Outcome
from semel.sql.database import SqlDatabase, SqlUnit
from tests.messaging.worlds import memory_database


def batch(count: int, start: int = 0) -> list[Message]:
    return [Message(f"m-{number}", number, b"x") for number in range(start, start + count)]


def handled(by: Consumer, database: SqlDatabase, messages: list[Message]) -> list[Outcome]:
    return asyncio.run(consume_many(by, database, messages))


def failing_at(*numbers: int) -> tuple[Consumer, Counter[int]]:
    calls: Counter[int] = Counter()

    @consumer("billing")
    async def handle(message: Message, session: Any) -> None:
        calls[message.payload] += 1
        if message.payload in numbers:
            raise NonRetryableMessageError("never")

    return handle, calls


@pytest.fixture
def savepoints(monkeypatch) -> list[None]:
    seen: list[None] = []
    honest = SqlUnit.savepoint

    @asynccontextmanager
    async def counted(self: SqlUnit) -> Any:
        seen.append(None)
        async with honest(self):
            yield

    monkeypatch.setattr(SqlUnit, "savepoint", counted)
    return seen


def test_the_size_grows_with_the_root_of_what_went_well():
    pace = Pace()
    assert pace.size(20) == 20

    pace.went_well(200)
    assert pace.size(20) == 20
    pace.went_well(600)
    assert pace.size(20) == 40
    pace.went_well(124_200)
    assert pace.size(20) == 500

    pace.failed()
    assert pace.size(20) == 20


def test_savepoints_become_fewer_while_nothing_fails(savepoints):
    handle, _ = failing_at()
    database = memory_database()

    handled(handle, database, batch(100))
    assert len(savepoints) == 5
    handle.pace.went_well(5_000)
    savepoints.clear()
    handled(handle, database, batch(100, start=100))

    assert len(savepoints) == 1


def test_a_failure_repeats_what_shared_its_savepoint_and_makes_the_next_ones_small(
    savepoints,
):
    handle, calls = failing_at(60)
    handle.pace.went_well(5_000)

    outcomes = handled(handle, memory_database(), batch(100))

    assert [type(one) for one in outcomes] == [Handled] * 60 + [DeadLettered] + [Handled] * 39
    assert calls == Counter({n: 2 if n < 60 else 1 for n in range(100)})
    # The whole batch, those before the culprit, and the rest by twenties.
    assert len(savepoints) == 2 + 2


def test_each_consumer_has_its_own_pace():
    good, _ = failing_at()
    bad, _ = failing_at(*range(100))
    database = memory_database()

    handled(good, database, batch(50))
    handled(bad, memory_database(), batch(50))

    assert good.pace.size(1) == 10
    assert bad.pace.size(1) == 1
    assert good.with_settings(good.settings).pace is not good.pace
