"""Renewal, and owners at once: a handler never outlives its lease."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from semel.errors import Retryable
from semel.message import Message
from semel.messaging.handle.claims import ClaimState
from semel.messaging.handle.lease import Lease, handle_leased
from semel.messaging.outcome import (
    Handled,
    Outcome,
    ParkedAway,
    RetryLater,
    Skipped,
)
from semel.policy.vocabulary import GiveUp
from semel.testing.crash import Crash
from tests.messaging.leases import leased, message
from tests.messaging.places import InPostgres, InSqlite, Scenarios
from tests.messaging.worlds import memory_database
from tests.stores.world import DatabaseWorld


class Silent:
    """A database that stops answering when it is told to."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside
        self.classification = inside.classification
        self.silent = False
        self.error: Exception | None = None

    @asynccontextmanager
    async def begin(self) -> Any:
        if self.error is not None:
            raise self.error
        if self.silent:
            await asyncio.Event().wait()
        async with self.inside.begin() as unit:
            yield unit


@dataclass
class Waiting:
    """A handler that waits until it is told to end, or is cancelled."""

    ended: asyncio.Event
    began: asyncio.Event
    cancelled: bool = False

    async def __call__(self, message: Message, lease: Lease) -> None:
        self.began.set()
        try:
            await self.ended.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


SHORT = 0.15
"""Seconds of a lease whose renewal a test waits for."""


def test_a_lease_is_renewed_for_as_long_as_its_handler_runs():
    async def scenario() -> None:
        database = memory_database()
        work = Waiting(asyncio.Event(), asyncio.Event())
        slow = leased(work, lease_seconds=SHORT)
        running = asyncio.create_task(handle_leased(slow, database, message(), "a"))
        await work.began.wait()
        await asyncio.sleep(3 * SHORT)

        other = await handle_leased(slow, database, message(), "b")
        work.ended.set()

        assert isinstance(other, RetryLater)
        assert isinstance(await asyncio.wait_for(running, 5), Handled)
        assert not work.cancelled

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["silent", "refuses"])
def test_a_database_that_does_not_answer_ends_the_handler_with_its_lease(how):
    async def scenario() -> None:
        database = Silent(memory_database())
        work = Waiting(asyncio.Event(), asyncio.Event())
        slow = leased(work, lease_seconds=SHORT)
        running = asyncio.create_task(handle_leased(slow, database, message(), "a"))
        await work.began.wait()
        database.silent = how == "silent"
        database.error = Retryable("no connection") if how == "refuses" else None

        outcome = await asyncio.wait_for(running, 10 * SHORT)

        assert work.cancelled
        assert isinstance(outcome, RetryLater)
        assert outcome.failure is not None
        assert outcome.failure.exception.endswith("ClaimLost")

    asyncio.run(scenario())


def test_a_renewal_that_fails_once_is_made_up_for():
    async def scenario() -> None:
        database = Silent(memory_database())
        work = Waiting(asyncio.Event(), asyncio.Event())
        slow = leased(work, lease_seconds=0.6)
        running = asyncio.create_task(handle_leased(slow, database, message(), "a"))
        await work.began.wait()
        database.error = Retryable("no connection")
        await asyncio.sleep(0.25)
        database.error = None
        await asyncio.sleep(0.6)
        work.ended.set()

        assert isinstance(await asyncio.wait_for(running, 5), Handled)
        assert not work.cancelled

    asyncio.run(scenario())


class LeasesOnADatabase(Scenarios):
    """What needs two owners at once, on every database."""

    def test_a_handler_whose_lease_was_taken_is_cancelled_and_its_completion_refused(self):
        async def scenario(world: DatabaseWorld) -> None:
            work = Waiting(asyncio.Event(), asyncio.Event())
            slow = leased(work, lease_seconds=0.6)
            first = asyncio.create_task(handle_leased(slow, world.database, message(), "a"))
            await asyncio.wait_for(work.began.wait(), 5)

            async def quick(message: Message, lease: Lease) -> str:
                return "by b"

            quicker = leased(quick, keeps_results=True)
            second: Outcome = RetryLater(0.0)
            for _ in range(50):
                # On a busy machine the first owner may renew between the two.
                await world.age(1000)
                second = await handle_leased(quicker, world.database, message(), "b")
                if isinstance(second, Handled):
                    break
            outcome = await asyncio.wait_for(first, 20)

            assert second == Handled("by b")
            assert work.cancelled
            assert isinstance(outcome, RetryLater)
            async with world.database.begin() as unit:
                row = await unit.claims.look_up("exports", "m1")
            assert row is not None
            assert (row.state, row.result) == (ClaimState.COMPLETED, '"by b"')

        self.run(scenario)

    def test_of_many_owners_at_once_one_handles_the_message(self):
        async def scenario(world: DatabaseWorld) -> None:
            calls: list[str] = []

            async def work(message: Message, lease: Lease) -> None:
                calls.append(lease.owner)
                await asyncio.sleep(0.02)

            export = leased(work)
            outcomes = await asyncio.gather(
                *(handle_leased(export, world.database, message(), f"o{n}") for n in range(6))
            )

            assert len(calls) == 1
            assert sum(isinstance(outcome, Handled) for outcome in outcomes) == 1
            assert all(isinstance(o, Handled | RetryLater | Skipped) for o in outcomes)

        self.run(scenario)

    def test_a_killer_is_parked_when_its_attempts_are_used_up(self):
        async def scenario(world: DatabaseWorld) -> None:
            async def work(message: Message, lease: Lease) -> None:
                raise Crash

            export = leased(work, on_exhausted=GiveUp.PARK)
            for number in range(3):
                with pytest.raises(Crash):
                    await handle_leased(export, world.database, message(), f"o{number}")
                await world.age(1000)

            outcome = await handle_leased(export, world.database, message(), "o3")

            assert isinstance(outcome, ParkedAway)

        self.run(scenario)


class TestLeasesOnSqlite(InSqlite, LeasesOnADatabase):
    pass


class TestLeasesOnPostgres(InPostgres, LeasesOnADatabase):
    pass
