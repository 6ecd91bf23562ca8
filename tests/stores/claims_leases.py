"""The rules of leases: how long they last, and that only the last owner can write."""

from __future__ import annotations

import time
from unittest.mock import patch

from semel.messaging.handle.claims import Claimed, ClaimState, Duplicate, HeldElsewhere, Stale
from semel.policy.vocabulary import StalePolicy
from tests.stores.claims_world import (
    CONSUMER,
    LEASE_SECONDS,
    OWNER,
    beside,
    claim,
    fail,
    failing,
    known,
    lease,
)
from tests.stores.world import DatabaseContract, DatabaseWorld, in_world


async def _fence(world: DatabaseWorld, message_id: str, owner: str = OWNER) -> int:
    answer = await lease(world, message_id, owner=owner)
    assert isinstance(answer, Claimed)
    return answer.fence


async def _completed(world: DatabaseWorld, message_id: str, fence: int) -> bool:
    async with world.database.begin() as unit:
        return await unit.claims.mark_completed(CONSUMER, message_id, fence)


class ClaimLeaseRules(DatabaseContract):
    """Claims that are committed before they are handled."""

    @in_world
    async def test_a_lease_is_in_progress_until_its_owner_completes_it(
        self, world: DatabaseWorld
    ) -> None:
        fence = await _fence(world, "m")
        leased = await known(world, "m")
        done = await _completed(world, "m", fence)

        assert (leased.state, leased.owner, leased.attempts) == (ClaimState.IN_PROGRESS, OWNER, 1)
        assert leased.fence == fence
        assert done
        assert (await known(world, "m")).state is ClaimState.COMPLETED
        assert isinstance(await lease(world, "m"), Duplicate)

    @in_world
    async def test_claims_in_progress_are_listed_by_the_end_of_their_leases(
        self, world: DatabaseWorld
    ) -> None:
        long = "m" * 1000
        await lease(world, "late", seconds=LEASE_SECONDS * 3)
        await lease(world, long, seconds=LEASE_SECONDS)
        await _completed(world, "done", await _fence(world, "done"))
        await claim(world, "new")
        await world.age(LEASE_SECONDS * 2)

        async with world.database.begin() as unit:
            every = await unit.claims.in_progress(CONSUMER, 10)
            first = await unit.claims.in_progress(CONSUMER, 1)
            expired = await unit.claims.in_progress(CONSUMER, 10, expired=True)
            of_others = await unit.claims.in_progress("another", 10)

        assert [row.message_id for row in every] == [long, "late"]
        assert [row.owner for row in every] == [OWNER, OWNER]
        assert first == every[:1]
        assert [row.message_id for row in expired] == [long]
        assert of_others == []

    @in_world
    async def test_a_lease_that_is_renewed_lasts_from_then_on(self, world: DatabaseWorld) -> None:
        fence = await _fence(world, "m")
        await world.age(LEASE_SECONDS - 10)
        async with world.database.begin() as unit:
            renewed = await unit.claims.renew(CONSUMER, "m", fence, LEASE_SECONDS)
        await world.age(LEASE_SECONDS - 10)

        assert renewed
        assert isinstance(await lease(world, "m", owner="worker-2"), HeldElsewhere)
        await world.age(20)
        assert isinstance(await lease(world, "m", owner="worker-2"), Claimed)

    @in_world
    async def test_a_lease_that_ran_out_and_that_nobody_took_is_still_its_owners(
        self, world: DatabaseWorld
    ) -> None:
        fence = await _fence(world, "m")
        await world.age(LEASE_SECONDS + 1)
        async with world.database.begin() as unit:
            renewed = await unit.claims.renew(CONSUMER, "m", fence, LEASE_SECONDS)
        await world.age(LEASE_SECONDS + 1)

        assert renewed
        assert await _completed(world, "m", fence)

    @in_world
    async def test_whoever_takes_over_is_told_from_whom_and_counts_an_attempt(
        self, world: DatabaseWorld
    ) -> None:
        fence = await _fence(world, "m")
        await world.age(LEASE_SECONDS + 1)

        answer = await lease(world, "m", owner="worker-2")

        assert isinstance(answer, Claimed)
        assert (answer.attempt, answer.from_owner) == (2, OWNER)
        assert answer.fence > fence
        assert (await known(world, "m")).owner == "worker-2"

    @in_world
    async def test_a_stale_owner_changes_nothing(self, world: DatabaseWorld) -> None:
        old = await _fence(world, "m")
        await world.age(LEASE_SECONDS + 1)
        await _fence(world, "m", "worker-2")
        before = await known(world, "m")

        async with world.database.begin() as unit:
            acts = [
                await unit.claims.renew(CONSUMER, "m", old, LEASE_SECONDS),
                await unit.claims.mark_completed(CONSUMER, "m", old, "1"),
                await unit.claims.mark_failed(CONSUMER, "m", failing(), old),
            ]

        assert acts == [False, False, False]
        assert await known(world, "m") == before

    @in_world
    async def test_an_owner_whose_message_was_handled_by_somebody_else_changes_nothing(
        self, world: DatabaseWorld
    ) -> None:
        old = await _fence(world, "m")
        await world.age(LEASE_SECONDS + 1)
        await claim(world, "m")
        before = await known(world, "m")

        async with world.database.begin() as unit:
            acts = [
                await unit.claims.renew(CONSUMER, "m", old, LEASE_SECONDS),
                await unit.claims.mark_completed(CONSUMER, "m", old, "1"),
                await unit.claims.mark_failed(CONSUMER, "m", failing(), old),
            ]

        assert acts == [False, False, False]
        assert await known(world, "m") == before

    @in_world
    async def test_an_owner_fails_under_its_own_fence(self, world: DatabaseWorld) -> None:
        fence = await _fence(world, "m")

        async with world.database.begin() as unit:
            written = await unit.claims.mark_failed(CONSUMER, "m", failing(), fence)

        row = await known(world, "m")
        assert written
        assert (row.state, row.owner) == (ClaimState.FAILED_RETRYABLE, "")
        assert not await _completed(world, "m", fence), "a lease that is over completes nothing"

    @in_world
    async def test_fences_rise_and_are_never_given_again(self, world: DatabaseWorld) -> None:
        fences = [await _fence(world, "m")]
        await world.age(LEASE_SECONDS + 1)
        fences.append(await _fence(world, "m", "worker-2"))
        await fail(world, "m")
        fences.append(await _fence(world, "m"))
        await _completed(world, "m", fences[-1])
        await _a_moment_later(world)
        async with world.database.begin() as unit:
            await unit.claims.delete_expired(CONSUMER, 0.5, 10)
        fences.append(await _fence(world, "m"))

        assert fences == sorted(set(fences))

    @in_world
    async def test_every_stale_policy_but_reclaim_leaves_an_expired_lease_alone(
        self, world: DatabaseWorld
    ) -> None:
        for policy in StalePolicy:
            message_id = f"stale: {policy}"
            await lease(world, message_id)
            await world.age(LEASE_SECONDS + 30)
            before = await known(world, message_id)

            answer = await lease(world, message_id, owner="worker-2", stale=policy)

            if policy is StalePolicy.RECLAIM:
                assert isinstance(answer, Claimed)
                continue
            assert isinstance(answer, Stale), policy
            assert (answer.owner, answer.attempts) == (OWNER, 1)
            assert answer.fence == before.fence, policy
            assert 29 < answer.seconds_ago < 60
            assert await known(world, message_id) == before, policy

    @in_world
    async def test_only_a_lease_that_ran_out_under_its_fence_can_be_locked(
        self, world: DatabaseWorld
    ) -> None:
        async def locked(fence: int) -> bool:
            async with world.database.begin() as unit:
                return await unit.claims.lock_expired(CONSUMER, "m", fence)

        old = await _fence(world, "m")
        live = await locked(old)
        await world.age(LEASE_SECONDS + 1)
        before = await known(world, "m")
        expired, other = await locked(old), await locked(old + 1)
        after = await known(world, "m")
        async with world.database.begin() as unit:
            await unit.claims.renew(CONSUMER, "m", old, LEASE_SECONDS)
        renewed = await locked(old)
        await world.age(LEASE_SECONDS + 1)
        new = await _fence(world, "m", "worker-2")
        await world.age(LEASE_SECONDS + 1)
        taken = await locked(old)
        await _completed(world, "m", new)

        assert (live, expired, other, renewed, taken) == (False, True, False, False, False)
        assert await locked(new) is False, "it is completed"
        assert after == before

    @in_world
    async def test_an_owner_cannot_renew_what_another_is_deciding_about(
        self, world: DatabaseWorld
    ) -> None:
        fence = await _fence(world, "m")
        await world.age(LEASE_SECONDS + 1)

        async def renewed() -> bool:
            async with world.database.begin() as unit:
                return await unit.claims.renew(CONSUMER, "m", fence, LEASE_SECONDS)

        async with world.database.begin() as unit:
            assert await unit.claims.lock_expired(CONSUMER, "m", fence)
            renewing = await beside(renewed())
            await unit.claims.mark_failed(CONSUMER, "m", failing(), fence)

        assert await renewing is False
        assert (await known(world, "m")).state is ClaimState.FAILED_RETRYABLE

    @in_world
    async def test_a_stale_policy_says_nothing_about_failures_that_are_due(
        self, world: DatabaseWorld
    ) -> None:
        await fail(world, "m")

        assert isinstance(await lease(world, "m", stale=StalePolicy.ABANDON), Claimed)

    @in_world
    async def test_the_clock_of_a_worker_changes_nothing(self, world: DatabaseWorld) -> None:
        real = time.time
        with patch("time.time", lambda: real() - 3600):
            await lease(world, "slow worker")
            await fail(world, "slow worker fails", failing(delay=30))
        with patch("time.time", lambda: real() + 3600):
            await lease(world, "fast worker")
            live = await lease(world, "slow worker", owner="worker-2")
            later = await claim(world, "slow worker fails")
        await world.age(LEASE_SECONDS + 1)

        assert isinstance(live, HeldElsewhere)
        assert not isinstance(later, Claimed)
        assert isinstance(await lease(world, "fast worker", owner="worker-2"), Claimed)
        assert isinstance(await claim(world, "slow worker fails"), Claimed)


async def _a_moment_later(world: DatabaseWorld) -> None:
    """Let a second pass for the claims, and the clock tick: that of SQLite has milliseconds."""
    await world.age(1)
    async with world.database.begin() as unit:
        begun = await unit.now()
        for _ in range(100):
            if await unit.now() > begun:
                return
