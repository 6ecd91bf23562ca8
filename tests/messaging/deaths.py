"""A service that is started again after every death, and what kills it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from semel.codec import JsonCodec
from semel.errors import Misuse, Retryable
from semel.memory.broker import MemoryBroker
from semel.memory.broker_groups import Patience
from semel.message import Coordinates, Message
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.claims import ClaimState
from semel.messaging.handler import Consumer
from semel.messaging.receive.runner import Runner
from semel.messaging.records import DeadLetterFilter
from semel.messaging.settings import ConsumerSettings, RetryPolicy, RunnerSettings
from semel.policy.vocabulary import RetryMode
from tests.messaging.processes import next_process
from tests.stores.world import DatabaseWorld

QUICK = RunnerSettings(wait_seconds=0.01, stop_seconds=0.2)
LIMIT = 2
ID = {"message-id": b"m1"}
POLICY = ConsumerSettings(
    retry=RetryPolicy(max_attempts=9, initial_delay_seconds=0.0, max_delay_seconds=0.0),
    held_retry_seconds=0.01,
    poison_attempts=LIMIT,
)
IN_TABLE = replace(POLICY, retry=replace(POLICY.retry, mode=RetryMode.RETRY_TABLE))


class Killed(BaseException):
    """The process is gone: nothing that it would do afterwards happens."""


class Deadly(JsonCodec):
    """A codec that does not outlive some payloads."""

    def __init__(self) -> None:
        self.kills = True

    def decode(self, raw: bytes, headers: Mapping[str, bytes]) -> Any:
        if self.kills and b"deadly" in raw:
            raise Killed
        if b"misuse" in raw:
            raise Misuse("the codec was not set up")
        return super().decode(raw, headers)


class Starts:
    """A service that is started again after every death."""

    def __init__(self, world: DatabaseWorld) -> None:
        self.database = world.database
        self.broker = MemoryBroker({"payments": 1}, patience=Patience(session_seconds=0.05))

    def send(self, *messages: tuple[str, bytes]) -> None:
        for id, raw in messages:
            self.broker.put("payments", raw, headers={"message-id": id.encode()})

    async def deaths(self, chosen: Consumer, most: int = 10) -> int:
        """Start it until it has worked everything off; return how often it died."""
        for deaths in range(most):
            subscription = await self.broker.subscribe("billing", ["payments"])
            await self.broker.settled("billing")
            runner = Runner(chosen, subscription, self.database, QUICK)
            try:
                await asyncio.wait_for(runner.run_until_idle(), 10)
            except Killed:
                next_process()
                continue
            finally:
                self.broker.kill(subscription)
            return deaths
        raise AssertionError(f"it died {most} times")

    async def state(self, id: str) -> ClaimState | None:
        async with self.database.begin() as unit:
            row = await unit.claims.look_up("billing", id)
        return None if row is None else row.state

    async def letters(self) -> list[Any]:
        async with self.database.begin() as unit:
            return list(await unit.dead_letters.find(DeadLetterFilter(), 10))

    async def tries(self, id: str) -> int:
        """Count the tries that are noted of an id."""
        async with self.database.begin() as unit:
            note = (await unit.members.notes("billing", [id])).get(id)
        return 0 if note is None else note.tries


async def wait(chosen: Consumer, database: Any, *ids: str) -> None:
    """Let messages fail once, into the waiting room."""
    for number, id in enumerate(ids):
        headers, at = {"message-id": id.encode()}, Coordinates("payments", 0, number)
        message = Message(id, {}, b"{}", id, headers=headers, source=at)
        await handle_message(chosen, database, message)


class Refusing:
    """A database of which some transactions, by their number, do not begin."""

    def __init__(self, database: Any) -> None:
        self._database = database
        self.classification = database.classification
        self.refuse()

    def refuse(self, *numbers: int) -> None:
        self._refused, self._number = numbers, 0

    @asynccontextmanager
    async def begin(self) -> Any:
        self._number += 1
        if self._number in self._refused:
            raise Retryable("the connection was lost")
        async with self._database.begin() as unit:
            yield unit
