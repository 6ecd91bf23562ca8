"""Databases with an outbox, and brokers that take, refuse and forget as a test tells them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from semel.errors import Retryable
from semel.messaging.database import Database, Unit
from semel.messaging.handle.claims import Locked
from semel.messaging.receive.broker import Outgoing
from semel.messaging.send.outbox import MESSAGE_ID_HEADER, OutboxEntry
from semel.messaging.send.relay import Relay
from semel.messaging.settings import RetryPolicy
from tests.messaging.worlds import postgres_world, sqlite_world
from tests.stores.world import DatabaseWorld

DATABASES = [
    "sqlite",
    pytest.param("postgres", marks=pytest.mark.postgres),
]
DEADLINE_SECONDS = 30.0

AT_ONCE = RetryPolicy(
    max_attempts=3, initial_delay_seconds=0.0, max_delay_seconds=0.0, jitter=False
)
"""Try again without a pause."""

OpenWorld = Callable[[], AbstractAsyncContextManager[DatabaseWorld]]


def opened(kind: str, request: pytest.FixtureRequest) -> OpenWorld:
    """Return how a database of this kind is opened."""
    if kind == "sqlite":
        folder = request.getfixturevalue("tmp_path")
        return lambda: sqlite_world(folder)
    server = request.getfixturevalue("quick_postgres_server")
    return lambda: postgres_world(server)


def run(open_world: OpenWorld, test: Callable[[DatabaseWorld], Awaitable[Any]]) -> Any:
    """Run a test on a loop and in a database of its own, for so long at most."""

    async def whole() -> Any:
        async with open_world() as world:
            return await asyncio.wait_for(test(world), DEADLINE_SECONDS)

    return asyncio.run(whole())


class Broker:
    """A publisher that keeps what it took, and fails as it was told."""

    def __init__(self) -> None:
        self.taken: list[Outgoing] = []
        self.batches: list[int] = []
        self.refusals: dict[str, list[Exception]] = {}
        """By message id: what its next publications are answered with."""

        self.outages = 0
        """So many calls find nobody."""

        self.batch_error: Exception | None = None
        """Raised for every batch of more than one message."""

        self.before: Callable[[Sequence[Outgoing]], Awaitable[None]] | None = None

    async def publish(self, batch: Sequence[Outgoing]) -> Sequence[Exception | None]:
        await asyncio.sleep(0)
        if self.before is not None:
            await self.before(batch)
        if self.outages:
            self.outages -= 1
            raise Retryable("nobody is there")
        if self.batch_error is not None and len(batch) > 1:
            raise self.batch_error
        self.batches.append(len(batch))
        failed: set[tuple[str, bytes]] = set()
        return [self._answer(message, failed) for message in batch]

    def _answer(self, message: Outgoing, failed: set[tuple[str, bytes]]) -> Exception | None:
        lane = (message.topic, message.key or b"")
        if message.key is not None and lane in failed:
            return Retryable("an earlier one of its key failed")
        if refusals := self.refusals.get(id_of(message)):
            failed.add(lane)
            return refusals.pop(0) if len(refusals) > 1 else refusals[0]
        self.taken.append(message)
        return None

    async def close(self) -> None:
        pass

    @property
    def ids(self) -> list[str]:
        """The ids of what was taken, repetitions included, in order."""
        return [id_of(message) for message in self.taken]


class Counted:
    """A database that counts its transactions."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.classification = database.classification
        self.transactions = 0

    def begin(self) -> AbstractAsyncContextManager[Unit]:
        self.transactions += 1
        return self._database.begin()


def id_of(message: Outgoing) -> str:
    return message.headers[MESSAGE_ID_HEADER].decode()


def entry(message_id: str, key: str | None = None, topic: str = "payments") -> OutboxEntry:
    return OutboxEntry(message_id, topic, message_id.encode(), key)


def keyed(names: Iterable[str]) -> list[OutboxEntry]:
    """Return an entry for each id of the form ``key-number``."""
    return [entry(name, name.partition("-")[0]) for name in names]


async def fill(world: DatabaseWorld, *entries: OutboxEntry) -> None:
    async def add() -> None:
        async with world.database.begin() as unit:
            await unit.outbox.add(entries)

    await patiently(add)


async def pass_time(world: DatabaseWorld, seconds: float) -> None:
    """Let time pass on the database's clock, also right after a crash."""
    await patiently(lambda: world.age(seconds))


async def patiently(act: Callable[[], Awaitable[None]]) -> None:
    """Do something as soon as SQLite's only lock is free: others may hold it for long."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while True:
            try:
                return await act()
            except (Locked, OperationalError):
                await asyncio.sleep(0.01)


async def pending(world: DatabaseWorld, outbox: str = "outbox") -> Sequence[OutboxEntry]:
    """Return what the relay of an outbox would send."""
    async with world.database.begin() as unit:
        return await unit.outbox.read(outbox, 0, 100)


async def left(world: DatabaseWorld) -> list[str]:
    """Return the ids that are still in the outbox, parked ones included."""
    async with world.database.begin() as unit:
        waiting = await unit.outbox.read("outbox", 0, 10_000)
        parked = await unit.outbox.parked("outbox", 10_000)
    return [e.message_id for e in sorted([*waiting, *parked], key=lambda e: e.place)]


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something is true."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():
            await asyncio.sleep(0.002)


def relay(world: DatabaseWorld, broker: Any, **options: Any) -> Relay:
    return Relay(world.database, broker, **{"retry": AT_ONCE, **options})


def by_key(ids: Sequence[str]) -> dict[str, list[str]]:
    """Sort ids of the form ``key-number`` by key, each once, in the order of their first time."""
    keys: dict[str, list[str]] = {}
    for one in dict.fromkeys(ids):
        keys.setdefault(one.rpartition("-")[0], []).append(one)
    return keys
