"""A service on a broker in memory, with a database of either kind, that can be told to fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

from sqlalchemy import Column, Integer, MetaData, Table, Text, insert, select

from semel.codec import FromHeader, FromPayload, Reading
from semel.memory.broker import MemoryBroker
from semel.memory.broker_groups import Patience
from semel.message import Message, Partition
from semel.messaging.handle.claims import ClaimRow
from semel.messaging.handler import Consumer, consumer
from semel.messaging.outcome import is_delivery
from semel.messaging.receive.runner import Runner
from semel.messaging.records import (
    DeadLetter,
    DeadLetterFilter,
    WaitingFilter,
    WaitingMessage,
    Waits,
)
from semel.messaging.settings import ConsumerSettings, RetryPolicy, RunnerSettings
from semel.policy.vocabulary import Mode
from tests.stores.world import DatabaseWorld

SINGLE = RunnerSettings(wait_seconds=0.01, stop_seconds=5.0)
BATCHED = RunnerSettings(mode=Mode.BATCHED, wait_seconds=0.01, stop_seconds=5.0)
POLICY = RetryPolicy(
    max_attempts=3, initial_delay_seconds=0.02, max_delay_seconds=0.05, jitter=False
)
SHORT = Patience(session_seconds=0.15)
TOPIC = "cases"
GROUP = "projection"
READING = Reading(FromHeader("message-id"), version_from=FromPayload("version"))

effects = MetaData()
effect = Table(
    "effect",
    effects,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("id", Text),
)


class Service:
    """One topic, one consumer, and what became of its messages."""

    def __init__(
        self, database: Any, partitions: int = 1, patience: Patience = SHORT, **settings: Any
    ) -> None:
        self.broker = MemoryBroker({TOPIC: partitions}, patience=patience)
        self.database = database
        self.fail: Callable[[Message], None] = lambda message: None
        self.wait: Callable[[Message], Awaitable[object]] = lambda message: asyncio.sleep(0)
        self.calls: list[str] = []
        chosen = ConsumerSettings(**{"retry": POLICY, "held_retry_seconds": 0.01, **settings})

        @consumer(GROUP, policy=chosen, reading=READING)
        async def handle(message: Message, session: Any) -> None:
            self.calls.append(message.id)
            await session.execute(insert(effect).values(id=message.id))
            await self.wait(message)
            self.fail(message)

        self.consumer: Consumer = handle

    def send(self, *numbers: int, key: str | None = None, **options: Any) -> None:
        for number in numbers:
            version = options.get("version", number)
            self.broker.put(
                TOPIC,
                f'{{"n": {number}, "version": {version}, "type": "escalated"}}'.encode(),
                key=None if key is None else key.encode(),
                headers={"message-id": f"m{number}".encode()},
                partition=options.get("partition"),
            )

    async def runner(
        self, settings: RunnerSettings = SINGLE, database: Any = None, watch: Any = None
    ) -> Runner:
        subscription: Any = await self.broker.subscribe(GROUP, [TOPIC])
        await self.broker.settled(GROUP)
        if watch is not None:
            subscription = watch(subscription)
        return Runner(self.consumer, subscription, database or self.database, settings)

    async def work(self, settings: RunnerSettings = SINGLE, **options: Any) -> None:
        """Run until everything is settled and nothing waits for its time; stop cleanly."""
        runner = await self.runner(settings, **options)
        running = asyncio.create_task(runner.run())
        try:
            async with asyncio.timeout(30):
                while not running.done() and not await self._is_done():
                    await asyncio.sleep(0.01)
        finally:
            runner.stop()
            await running

    async def _is_done(self) -> bool:
        if self.broker.lag(GROUP, TOPIC):
            return False
        async with self.database.begin() as unit:
            return not await unit.waiting.count(WaitingFilter(GROUP, waits=Waits.RETRY))

    async def die(self, runner: Runner) -> None:
        """Let nothing be heard of a member any more, as after a kill."""
        subscription: Any = runner.subscription
        self.broker.kill(getattr(subscription, "inside", subscription))
        self.broker.rebalance(GROUP)

    @property
    def committed(self) -> dict[int, int]:
        return {place.number: o for place, o in self.broker.committed(GROUP).items()}

    async def effects(self) -> list[str]:
        async with self.database.begin() as unit:
            rows = await unit.session.execute(select(effect.c.id).order_by(effect.c.number))
            return list(rows.scalars())

    async def claim(self, number: int) -> ClaimRow | None:
        async with self.database.begin() as unit:
            found: ClaimRow | None = await unit.claims.look_up(GROUP, f"m{number}")
            return found

    async def letters(self) -> list[DeadLetter]:
        async with self.database.begin() as unit:
            return list(await unit.dead_letters.find(DeadLetterFilter(), 100))

    async def waiting(self) -> list[WaitingMessage]:
        async with self.database.begin() as unit:
            return list(await unit.waiting.find(WaitingFilter(), 100))

    async def outcomes(self, partition: int = 0) -> dict[int, set[str]]:
        """Say of each offset what became of its deliveries."""
        async with self.database.begin() as unit:
            ranges = await unit.outcomes.ranges(GROUP, Partition(TOPIC, partition))
        found: dict[int, set[str]] = {}
        for kept in filter(lambda one: is_delivery(one.outcome), ranges):
            for offset in range(kept.first, kept.last + 1):
                found.setdefault(offset, set()).add(kept.outcome)
        return found


World: TypeAlias = Callable[[], AbstractAsyncContextManager[DatabaseWorld]]
Serve: TypeAlias = Callable[..., None]


@asynccontextmanager
async def opened(world: World, **options: Any) -> AsyncIterator[Service]:
    async with world() as found:
        database: Any = found.database
        async with database.engine.begin() as connection:
            await connection.run_sync(effects.drop_all)
            await connection.run_sync(effects.create_all)
        service = Service(database, **options)
        yield service
        await service.broker.close()


def served(world: World) -> Serve:
    """Make a function that runs a scenario with a service of its own."""

    def serve(scenario: Callable[[Service], Awaitable[None]], **options: Any) -> None:
        async def whole() -> None:
            async with opened(world, **options) as service:
                await scenario(service)

        asyncio.run(whole())

    return serve
