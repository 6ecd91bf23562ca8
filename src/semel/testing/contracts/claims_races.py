"""The rules of races: the second waits for the first, and gets its outcome."""

from __future__ import annotations

import asyncio

import pytest

from semel.messaging.handle.claims import (
    ClaimAnswer,
    Claimed,
    ClaimState,
    Duplicate,
    HeldElsewhere,
    Locked,
)
from semel.testing.contracts.claims_world import (
    CONSUMER,
    LEASE_SECONDS,
    asking,
    beside,
    claim,
    fail,
    failing,
    known,
    lease,
    rolled_back,
)
from semel.testing.contracts.messaging_world import DatabaseContract, DatabaseWorld, in_world


class ClaimRaceRules(DatabaseContract):
    """Several transactions at once, about one message."""

    @in_world
    async def test_the_second_waits_and_finds_what_the_first_has_committed(
        self, world: DatabaseWorld
    ) -> None:
        async with world.database.begin() as first:
            await first.claims.try_claim(CONSUMER, asking("m"))
            second = await beside(claim(world, "m"))

        assert await second == Duplicate()

    @in_world
    async def test_the_second_takes_over_what_the_first_has_rolled_back(
        self, world: DatabaseWorld
    ) -> None:
        async with rolled_back(world) as first:
            await first.claims.try_claim(CONSUMER, asking("m"))
            second = await beside(claim(world, "m"))

        assert await second == Claimed()

    @in_world
    async def test_of_all_who_wait_in_line_one_is_granted_the_claim(
        self, world: DatabaseWorld
    ) -> None:
        async with rolled_back(world) as first:
            await first.claims.try_claim(CONSUMER, asking("m"))
            second = await beside(claim(world, "m"))
            third = await beside(claim(world, "m"))

        answers = {type(await second), type(await third)}
        assert answers == {Claimed, Duplicate}

    @in_world
    async def test_whoever_waits_too_long_is_refused_and_harms_nothing(
        self, world: DatabaseWorld
    ) -> None:
        async with world.database.begin() as first:
            await first.claims.try_claim(CONSUMER, asking("m"))

            with pytest.raises(Locked):
                async with world.database.begin() as second:
                    await second.claims.try_claim(CONSUMER, asking("m"))

        row = await known(world, "m")
        assert (row.state, row.attempts) == (ClaimState.COMPLETED, 1)
        assert await claim(world, "m") == Duplicate()

    @in_world
    async def test_whoever_waits_too_long_for_a_failed_message_harms_nothing(
        self, world: DatabaseWorld
    ) -> None:
        await fail(world, "m")
        before = await known(world, "m")
        async with rolled_back(world) as first:
            await first.claims.try_claim(CONSUMER, asking("m"))
            with pytest.raises(Locked):
                async with world.database.begin() as second:
                    await second.claims.try_claim(CONSUMER, asking("m"))

        assert await known(world, "m") == before

    @in_world
    async def test_a_failed_message_is_tried_again_by_one(self, world: DatabaseWorld) -> None:
        await fail(world, "m")
        async with world.database.begin() as first:
            await first.claims.try_claim(CONSUMER, asking("m"))
            second = await beside(claim(world, "m"))

        assert await second == Duplicate()
        assert (await known(world, "m")).attempts == 2

    @in_world
    async def test_a_failed_message_is_tried_again_by_the_second_if_the_first_gives_up(
        self, world: DatabaseWorld
    ) -> None:
        await fail(world, "m")
        async with rolled_back(world) as first:
            await first.claims.try_claim(CONSUMER, asking("m"))
            second = await beside(claim(world, "m"))

        assert await second == Claimed(attempt=2)

    @in_world
    async def test_an_expired_lease_is_taken_over_by_one(self, world: DatabaseWorld) -> None:
        await lease(world, "m")
        await world.age(LEASE_SECONDS + 1)

        owners = [f"successor-{number}" for number in range(4)]
        answers: list[ClaimAnswer] = await asyncio.gather(
            *[lease(world, "m", owner=owner) for owner in owners]
        )

        granted = [answer for answer in answers if isinstance(answer, Claimed)]
        assert len(granted) == 1
        assert all(isinstance(each, Claimed | HeldElsewhere) for each in answers)
        row = await known(world, "m")
        assert (row.fence, row.attempts) == (granted[0].fence, 2)

    @in_world
    async def test_a_new_message_is_leased_by_one(self, world: DatabaseWorld) -> None:
        owners = [f"worker-{number}" for number in range(4)]

        answers: list[ClaimAnswer] = await asyncio.gather(
            *[lease(world, "m", owner=owner) for owner in owners]
        )

        granted = [answer for answer in answers if isinstance(answer, Claimed)]
        assert len(granted) == 1
        assert (await known(world, "m")).fence == granted[0].fence

    @in_world
    async def test_a_failure_that_waits_for_a_success_is_not_written(
        self, world: DatabaseWorld
    ) -> None:
        async with world.database.begin() as first:
            await first.claims.try_claim(CONSUMER, asking("m"))
            failure = await beside(fail(world, "m"))

        assert await failure is False
        assert (await known(world, "m")).state is ClaimState.COMPLETED

    @in_world
    async def test_a_stale_completion_that_waits_for_the_successor_is_refused(
        self, world: DatabaseWorld
    ) -> None:
        old = await lease(world, "m")
        assert isinstance(old, Claimed)
        await world.age(LEASE_SECONDS + 1)

        async def late() -> bool:
            async with world.database.begin() as unit:
                return await unit.claims.mark_completed(CONSUMER, "m", old.fence)

        async with world.database.begin() as successor:
            await successor.claims.lease(CONSUMER, asking("m"), owner="worker-2", seconds=60)
            completion = await beside(late())

        assert await completion is False
        assert (await known(world, "m")).owner == "worker-2"

    @in_world
    async def test_a_handled_message_makes_nobody_wait(self, world: DatabaseWorld) -> None:
        if not world.waits_for_locks:
            return
        await claim(world, "m")
        async with world.database.begin() as first, world.database.begin() as second:
            answers = [
                await first.claims.try_claim(CONSUMER, asking("m")),
                await second.claims.try_claim(CONSUMER, asking("m")),
                *await first.claims.try_claim_many(CONSUMER, [asking("m")]),
                *await second.claims.try_claim_many(CONSUMER, [asking("m")]),
            ]

        assert answers == [Duplicate()] * 4

    @in_world
    async def test_different_messages_do_not_wait_for_each_other(
        self, world: DatabaseWorld
    ) -> None:
        if not world.waits_for_locks:
            return
        async with world.database.begin() as first, world.database.begin() as second:
            answers = [
                await first.claims.try_claim(CONSUMER, asking("m")),
                await second.claims.try_claim(CONSUMER, asking("n")),
                await second.claims.try_claim("shipping", asking("m")),
            ]

        assert answers == [Claimed()] * 3

    @in_world
    async def test_retention_passes_by_what_somebody_is_changing(
        self, world: DatabaseWorld
    ) -> None:
        if not world.waits_for_locks:
            return
        await fail(world, "m", failing(ClaimState.FAILED_TERMINAL))
        await claim(world, "n")
        await world.age(100)
        async with world.database.begin() as operator, world.database.begin() as retention:
            await operator.claims.reopen(CONSUMER, "m")

            assert await retention.claims.delete_expired(CONSUMER, 1, 10) == 1

        assert await claim(world, "m") == Claimed(attempt=1)
