"""A message is never parked over the head of an owner that holds it under a living lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from semel.message import Coordinates, Message, digest_of
from semel.messaging.failed.retries import retry_due
from semel.messaging.failure import RetryableMessageError
from semel.messaging.handle.claims import ClaimRequest, ClaimState, NotClaimable
from semel.messaging.handle.lease import handle_leased
from semel.messaging.handler import Consumer, consumer
from semel.messaging.outcome import Handled, ParkedAway, RetryLater
from semel.messaging.settings import ConsumerSettings, RetryPolicy
from semel.policy.vocabulary import Mode, RetryMode
from tests.messaging.places import InPostgres, InSqlite
from tests.messaging.processes import gone
from tests.stores.world import DatabaseContract, in_world

AT_ONCE = RetryPolicy(
    initial_delay_seconds=0.0, max_delay_seconds=0.0, mode=RetryMode.RETRY_TABLE, jitter=False
)
POLICY = ConsumerSettings(retry=AT_ONCE, held_retry_seconds=0.01, poison_attempts=2)
M1 = Message("m1", {}, b"{}", headers={"message-id": b"m1"}, source=Coordinates("exports", 0, 0))


class Exports:
    """A leased consumer whose second attempt takes as long as the test wants."""

    def __init__(self, database: Any) -> None:
        self.database = database
        self.began = asyncio.Event()
        self.may_end = asyncio.Event()
        self.consumer: Consumer = consumer("exports", policy=POLICY, mode=Mode.LEASED)(self.handle)

    async def handle(self, message: Message, lease: Any) -> None:
        if message.attempt == 1:
            raise RetryableMessageError("down")
        self.began.set()
        await self.may_end.wait()

    async def wait(self) -> None:
        """Let the message fail once, into the waiting room."""
        await handle_leased(self.consumer, self.database, M1, "a")

    async def retry(self) -> Any:
        ((_, outcome),) = await retry_due(self.consumer, self.database, handle=self.leased)
        return outcome

    async def leased(self, message: Message, waiting: Any) -> Any:
        return await handle_leased(self.consumer, self.database, message, "a", waiting=waiting)

    async def state(self) -> ClaimState:
        async with self.database.begin() as unit:
            row = await unit.claims.look_up("exports", "m1")
        return row.state


class ParkingOwned(DatabaseContract):
    @in_world
    async def test_a_worker_that_cannot_handle_a_message_leaves_it_to_its_owner(self, world):
        exports = Exports(world.database)

        async def broken(message: Message, waiting: Any) -> Any:
            raise RuntimeError("a bug in here")

        await exports.wait()
        owner = asyncio.create_task(exports.retry())
        await asyncio.wait_for(exports.began.wait(), 5)
        ((_, other),) = await retry_due(exports.consumer, world.database, handle=broken)
        exports.may_end.set()

        assert isinstance(other, RetryLater)
        assert isinstance(await owner, Handled)
        assert await exports.state() is ClaimState.COMPLETED

    @in_world
    async def test_a_worker_that_cannot_handle_a_message_parks_what_nobody_holds(self, world):
        exports = Exports(world.database)

        async def broken(message: Message, waiting: Any) -> Any:
            raise RuntimeError("a bug in here")

        await exports.wait()
        async with world.database.begin() as unit:
            request = ClaimRequest("m1", digest_of(b"{}"))
            dead = await unit.claims.lease("exports", request, owner="a", seconds=60)
        await world.age(61)
        ((_, outcome),) = await retry_due(exports.consumer, world.database, handle=broken)
        async with world.database.begin() as unit:
            completed = await unit.claims.mark_completed("exports", "m1", dead.fence)

        assert isinstance(outcome, ParkedAway)
        assert not completed
        assert await exports.state() is ClaimState.PARKED


class TestInSqlite(InSqlite, ParkingOwned):
    pass


class TestInPostgres(InPostgres, ParkingOwned):
    @in_world
    async def test_a_killer_that_was_leased_since_it_was_looked_at_is_its_owners(self, world):
        exports = Exports(world.database)

        async def lease() -> int:
            async with world.database.begin() as unit:
                request = ClaimRequest("m1", digest_of(b"{}"))
                return (await unit.claims.lease("exports", request, owner="b", seconds=60)).fence

        await exports.wait()
        async with world.database.begin() as unit:
            for _ in range(POLICY.poison_attempts + 1):
                await unit.members.suspect("exports", "m1", gone())
        exports.database = counting = Counting(world.database, lease)
        with pytest.raises(NotClaimable):
            await exports.retry()
        async with world.database.begin() as unit:
            completed = await unit.claims.mark_completed("exports", "m1", counting.found)

        assert completed


class Counting:
    """A database in which somebody acts while the tries of a suspect are counted."""

    def __init__(self, inside: Any, act: Callable[[], Awaitable[int]]) -> None:
        self.inside = inside
        self.classification = inside.classification
        self.act = act
        self.found: int | None = None
        self.counted = 0

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        async with self.inside.begin() as unit:
            suspect = unit.members.suspect

            async def counting(*which: str) -> int:
                self.counted += 1
                # The first time it is only found out that it must be tried alone.
                if self.counted == 2:
                    self.found = await self.act()
                return int(await suspect(*which))

            unit.members.suspect = counting
            yield unit
