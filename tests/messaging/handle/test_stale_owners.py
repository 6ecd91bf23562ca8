"""Two owners of one message: who decides about a lease never writes over the other's."""

from __future__ import annotations

import asyncio

import pytest

from semel.message import Message
from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
from semel.messaging.handle.claims import Claimed, ClaimRequest, ClaimRow, ClaimState
from semel.messaging.handle.lease import Lease, handle_leased
from semel.messaging.outcome import Handled, Nack, ParkedAway, RetryLater, Skipped, settlement
from semel.policy.vocabulary import StalePolicy
from tests.messaging.leases import leased, message
from tests.messaging.places import InPostgres, InSqlite, Scenarios
from tests.stores.world import DatabaseWorld

SOON = 10.0


async def idle(message: Message, lease: Lease) -> None:
    pass


async def lease_by(world: DatabaseWorld, owner: str) -> int:
    async with world.database.begin() as unit:
        taken = await unit.claims.lease(
            "exports", ClaimRequest.of(message()), owner=owner, seconds=600
        )
    assert isinstance(taken, Claimed)
    return taken.fence


async def row(world: DatabaseWorld) -> ClaimRow:
    async with world.database.begin() as unit:
        found = await unit.claims.look_up("exports", "m1")
    assert found is not None
    return found


class SlowInspection:
    """Answers when it is told to."""

    def __init__(self, answer: bool | None) -> None:
        self.answer = answer
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def __call__(self, message: Message) -> bool | None:
        self.asked.set()
        await self.may_answer.wait()
        return self.answer


class OwnersOnADatabase(Scenarios):
    @pytest.mark.parametrize("answer", [True, False, None])
    def test_an_inspection_that_took_too_long_decides_nothing_about_the_next_owners_lease(
        self, answer
    ):
        async def scenario(world: DatabaseWorld) -> None:
            inspect = SlowInspection(answer)
            export = leased(idle, stale=StalePolicy.INSPECT, inspect=inspect)
            await lease_by(world, "dead")
            await world.age(1000)
            asking = asyncio.create_task(handle_leased(export, world.database, message(), "a"))
            await asyncio.wait_for(inspect.asked.wait(), SOON)
            fence = await lease_by(world, "b")
            inspect.may_answer.set()

            outcome = await asyncio.wait_for(asking, SOON)

            assert isinstance(outcome, RetryLater)
            found = await row(world)
            assert (found.state, found.owner) == (ClaimState.IN_PROGRESS, "b")
            assert found.fence == fence
            async with world.database.begin() as unit:
                assert await unit.waiting.get("exports", "m1") is None

        self.run(scenario)

    @pytest.mark.parametrize("answer", [True, False, None])
    def test_an_owner_that_was_only_slow_and_renews_during_the_inspection_keeps_its_lease(
        self, answer
    ):
        async def scenario(world: DatabaseWorld) -> None:
            inspect = SlowInspection(answer)
            export = leased(idle, stale=StalePolicy.INSPECT, inspect=inspect)
            fence = await lease_by(world, "slow")
            await world.age(1000)
            asking = asyncio.create_task(handle_leased(export, world.database, message(), "a"))
            await asyncio.wait_for(inspect.asked.wait(), SOON)
            async with world.database.begin() as unit:
                assert await unit.claims.renew("exports", "m1", fence, 600)
            inspect.may_answer.set()

            outcome = await asyncio.wait_for(asking, SOON)

            assert isinstance(outcome, RetryLater)
            async with world.database.begin() as unit:
                assert await unit.claims.mark_completed("exports", "m1", fence)

        self.run(scenario)

    @pytest.mark.parametrize(
        ("answer", "expected", "state"),
        [
            (True, Skipped, ClaimState.COMPLETED),
            (False, RetryLater, ClaimState.FAILED_RETRYABLE),
            (None, ParkedAway, ClaimState.PARKED),
        ],
    )
    def test_an_inspection_decides_about_a_lease_that_stayed_over(self, answer, expected, state):
        async def scenario(world: DatabaseWorld) -> None:
            async def inspect(message: Message) -> bool | None:
                # In no transaction of ours: it may take one, and as long as it needs.
                assert (await row(world)).state is ClaimState.IN_PROGRESS
                return answer

            export = leased(idle, stale=StalePolicy.INSPECT, inspect=inspect)
            await lease_by(world, "dead")
            await world.age(1000)

            outcome = await handle_leased(export, world.database, message(), "a")

            assert isinstance(outcome, expected)
            assert (await row(world)).state is state

        self.run(scenario)

    @pytest.mark.parametrize("error", [RetryableMessageError, NonRetryableMessageError])
    def test_a_failure_under_a_lost_lease_is_not_acknowledged_while_another_owner_is_at_it(
        self, error
    ):
        async def scenario(world: DatabaseWorld) -> None:
            async def work(message: Message, lease: Lease) -> None:
                await world.age(1000)
                await lease_by(world, "b")
                raise error("down")

            outcome = await handle_leased(leased(work), world.database, message(), "a")

            assert isinstance(settlement(outcome), Nack)
            found = await row(world)
            assert (found.state, found.owner) == (ClaimState.IN_PROGRESS, "b")

        self.run(scenario)

    def test_a_failure_under_a_lost_lease_is_a_duplicate_where_the_next_owner_is_done(self):
        async def scenario(world: DatabaseWorld) -> None:
            async def work(message: Message, lease: Lease) -> None:
                await world.age(1000)
                other = await handle_leased(leased(idle), world.database, message, "b")
                assert isinstance(other, Handled)
                raise RetryableMessageError("down")

            outcome = await handle_leased(leased(work), world.database, message(), "a")

            assert isinstance(outcome, Skipped)
            assert (await row(world)).state is ClaimState.COMPLETED

        self.run(scenario)


class TestOwnersInSqlite(InSqlite, OwnersOnADatabase):
    pass


class TestOwnersInPostgres(InPostgres, OwnersOnADatabase):
    pass
