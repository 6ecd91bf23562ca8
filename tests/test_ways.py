"""How far one message travels: modules, statements and transactions of its four ways.

    handled      fetched in a batch, handled, acknowledged
    waits        fetched, fails, and waits in the waiting table
    dead         retried, fails for the last time, and is a dead letter
    replayed     the dead letter is replayed, and handled

On SQLite in memory, and the second time: what runs once in a process is not counted.  Counted
are the modules of messaging, of operate and of the base that run a function.  A budget may only
fall; where a target is not reached yet, it stands beside today's number.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text

import semel
from semel.codec import FromHeader
from semel.memory.broker import MemoryBroker
from semel.message import Message
from semel.messaging.failed.retries import retry_due
from semel.messaging.failure import RetryableMessageError
from semel.messaging.handler import consumer
from semel.messaging.outcome import DeadLettered, Outcome
from semel.messaging.receive.runner import Runner
from semel.messaging.records import DeadLetterFilter, WaitingFilter
from semel.messaging.settings import (
    ConsumerSettings,
    Mode,
    RetryMode,
    RetryPolicy,
    RunnerSettings,
)
from semel.operate.replay import Replay, ReplaySettings
from semel.operate.replay_message import ReplayResult
from semel.operate.selection import Ids
from semel.sql.database import SqlDatabase
from semel.testing.clock import SimulatedClock
from tests.messaging.worlds import memory_database

PACKAGE = Path(semel.__file__).parent
COUNTED = ("messaging", "operate")
"""Beside the base modules, which stand in the package itself."""

TOPIC, NAME = "payments", "billing"
SETTINGS = ConsumerSettings(
    retry=RetryPolicy(
        mode=RetryMode.RETRY_TABLE, max_attempts=2, initial_delay_seconds=1.0, jitter=False
    )
)


@dataclass(slots=True)
class Way:
    """What one message needed."""

    modules: set[str] = field(default_factory=set)
    statements: list[str] = field(default_factory=list)
    transactions: int = 0


@dataclass(frozen=True, slots=True)
class Budget:
    """The most that a way may need."""

    modules: int
    statements: int
    transactions: int


BUDGETS = {
    "handled": Budget(modules=18, statements=6, transactions=1),
    "waits": Budget(modules=24, statements=10, transactions=1),
    "dead": Budget(modules=24, statements=18, transactions=3),
    # One transaction begins the replay, one notes the try, one handles the message and ends it in
    # all tables, and one ends the replay.
    "replayed": Budget(modules=21, statements=33, transactions=4),
}


class Scene:
    """A consumer whose handler fails for as long as it is broken."""

    def __init__(self) -> None:
        self.clock = SimulatedClock()
        self.database: SqlDatabase = memory_database(self.clock)
        self.broker = MemoryBroker({TOPIC: 1}, clock=self.clock)
        self.is_broken = False
        self.sent = 0

        @consumer(NAME, policy=SETTINGS, id_from=FromHeader("message-id"))
        async def handle(message: Message, session: Any) -> None:
            await session.execute(text("INSERT INTO test_effect (name, value) VALUES ('a', 1)"))
            if self.is_broken:
                raise RetryableMessageError("no answer")

        self.consumer = handle

    async def open(self) -> Scene:
        settings = RunnerSettings(mode=Mode.BATCHED, wait_seconds=0.0, member_seconds=86_400.0)
        subscription = await self.broker.subscribe(NAME, [TOPIC])
        await self.broker.settled(NAME)
        self.runner = Runner(self.consumer, subscription, self.database, settings, clock=self.clock)
        return self

    def send(self) -> str:
        self.sent += 1
        message_id = f"m{self.sent}"
        self.broker.put(TOPIC, b'{"n": 1}', headers={"message-id": message_id.encode()})
        return message_id

    async def retry(self) -> list[tuple[str, Outcome]]:
        self.clock.advance(60.0)
        return await retry_due(self.consumer, self.database)

    async def replay(self, message_id: str) -> None:
        again = Replay(
            self.consumer,
            self.database,
            Ids((message_id,)),
            ReplaySettings(canary=()),
            name=f"again {message_id}",
            actor="ann",
            clock=self.clock,
        )
        report = await again.run()
        assert report.counts[ReplayResult.HANDLED] == 1

    @contextmanager
    def measured(self) -> Iterator[Way]:
        """Count what the body needs."""
        way, engine = Way(), self.database.engine.sync_engine

        def called(frame: Any, what: str, argument: object) -> None:
            if what == "call" and (module := _module(frame.f_code.co_filename)):
                way.modules.add(module)

        def executed(connection: Any, cursor: Any, statement: str, *_: object) -> None:
            way.statements.append(statement)

        def began(connection: Any) -> None:
            way.transactions += 1

        event.listen(engine, "before_cursor_execute", executed)
        event.listen(engine, "begin", began)
        sys.setprofile(called)
        try:
            yield way
        finally:
            sys.setprofile(None)
            event.remove(engine, "before_cursor_execute", executed)
            event.remove(engine, "begin", began)


def _module(path: str) -> str | None:
    if not path.startswith(f"{PACKAGE}/"):
        return None
    parts = Path(path).relative_to(PACKAGE).parts
    return "/".join(parts) if len(parts) == 1 or parts[0] in COUNTED else None


async def _walk() -> dict[str, Way]:
    """Go every way twice, and return what the second time needed."""
    scene = await Scene().open()
    ways: dict[str, Way] = {}
    for _ in range(2):
        scene.is_broken = False
        scene.send()
        with scene.measured() as ways["handled"]:
            await scene.runner.run_until_idle()
        scene.is_broken = True
        message_id = scene.send()
        with scene.measured() as ways["waits"]:
            await scene.runner.run_until_idle()
        await _check(scene, waiting=1, letters=0)
        with scene.measured() as ways["dead"]:
            done = await scene.retry()
        assert [type(outcome) for _, outcome in done] == [DeadLettered]
        await _check(scene, waiting=0, letters=1)
        scene.is_broken = False
        with scene.measured() as ways["replayed"]:
            await scene.replay(message_id)
        await _check(scene, waiting=0, letters=0)
    assert scene.broker.lag(NAME, TOPIC) == 0
    return ways


async def _check(scene: Scene, waiting: int, letters: int) -> None:
    async with scene.database.begin() as unit:
        assert await unit.waiting.count(WaitingFilter(NAME)) == waiting
        assert len(await unit.dead_letters.find(DeadLetterFilter(NAME), 10)) == letters


@pytest.fixture(scope="module")
def ways() -> dict[str, Way]:
    return asyncio.run(_walk())


@pytest.mark.parametrize("name", BUDGETS)
def test_a_way_keeps_to_its_budget(ways: dict[str, Way], name: str) -> None:
    way, budget = ways[name], BUDGETS[name]
    found = Budget(len(way.modules), len(way.statements), way.transactions)
    told = "\n".join([*sorted(way.modules), *way.statements])

    assert found.modules <= budget.modules, told
    assert found.statements <= budget.statements, told
    assert found.transactions <= budget.transactions, told
