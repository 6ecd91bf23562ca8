"""The executable contract of a store of claims.

    table      what a claim finds, and what it answers
    leases     owners, fences, expiry
    failures   what is written after an attempt, and by operators
    retention  what may be forgotten
    batches    many claims in one statement
    races      several transactions at once

An implementation says how an empty database is opened:

    class TestSqliteClaims(InSqlite, ClaimStoreContract):
        pass
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from semel.messaging.handle.claims import (
    ClaimAnswer,
    Claimed,
    ClaimFound,
    ClaimRequest,
    ClaimState,
    Conflict,
    Duplicate,
    HeldElsewhere,
    Locked,
)
from semel.testing.contracts.claims import STRANGE_IDS, ClaimingStore, ClaimsContract
from tests.stores.claims_failures import FailureRules, RetentionRules
from tests.stores.claims_leases import ClaimLeaseRules
from tests.stores.claims_table import WITH_A_ROW, TableRules
from tests.stores.claims_world import (
    CONSUMER,
    HASH,
    LEASE_SECONDS,
    MOMENT_SECONDS,
    OTHER_HASH,
    arranged,
    asking,
    beside,
    claim,
    fail,
    failing,
    known,
    lease,
    look_up,
    patiently,
    rolled_back,
)
from tests.stores.world import DatabaseContract, DatabaseWorld, in_world


class ClaimRaceRules(DatabaseContract):
    """Several transactions at once, about one message."""

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


WORKERS = 4
ROUNDS = 3


class BatchRules(DatabaseContract):
    """Many claims at once."""

    @in_world
    async def test_a_batch_answers_as_claims_one_by_one_would(self, world: DatabaseWorld) -> None:
        requests = {}
        async with AsyncExitStack() as stack:
            for found in (ClaimFound.NOTHING, ClaimFound.OTHER_PAYLOAD, *WITH_A_ROW):
                for number in range(2):
                    message_id = f"{number}: {found}"
                    await stack.enter_async_context(arranged(world, found, message_id))
                    payload_hash = OTHER_HASH if found is ClaimFound.OTHER_PAYLOAD else HASH
                    requests[message_id] = asking(message_id, payload_hash)
            shuffled = random.Random(1).sample(list(requests.values()), len(requests))

            one_by_one = []
            async with rolled_back(world) as unit:
                for request in shuffled:
                    one_by_one.append(await unit.claims.try_claim(CONSUMER, request))
            async with world.database.begin() as unit:
                at_once = await unit.claims.try_claim_many(CONSUMER, shuffled)

        assert [type(answer) for answer in at_once] == [type(answer) for answer in one_by_one]
        granted = [answer for answer in at_once if isinstance(answer, Claimed)]
        assert granted == [answer for answer in one_by_one if isinstance(answer, Claimed)]

    @in_world
    async def test_a_batch_is_claimed_with_its_transaction_or_not_at_all(
        self, world: DatabaseWorld
    ) -> None:
        requests = [asking(f"m{number}") for number in range(20)]
        async with rolled_back(world) as unit:
            await unit.claims.try_claim_many(CONSUMER, requests)
        async with world.database.begin() as unit:
            first = await unit.claims.try_claim_many(CONSUMER, requests)
        async with world.database.begin() as unit:
            second = await unit.claims.try_claim_many(CONSUMER, requests)

        assert first == [Claimed()] * 20
        assert second == [Duplicate()] * 20

    @in_world
    async def test_a_message_that_comes_twice_in_a_batch_is_claimed_once(
        self, world: DatabaseWorld
    ) -> None:
        requests = [asking("m"), asking("n"), asking("m"), asking("m", OTHER_HASH)]

        async with world.database.begin() as unit:
            answers = await unit.claims.try_claim_many(CONSUMER, requests)

        conflict = Conflict(expected=HASH, found=OTHER_HASH)
        assert answers == [Claimed(), Claimed(), Duplicate(), conflict]

    @in_world
    async def test_no_messages_are_claimed_by_an_empty_batch(self, world: DatabaseWorld) -> None:
        async with world.database.begin() as unit:
            assert await unit.claims.try_claim_many(CONSUMER, []) == []

    @in_world
    async def test_a_batch_takes_ids_of_every_kind(self, world: DatabaseWorld) -> None:
        requests = [asking(message_id) for message_id in STRANGE_IDS]

        async with world.database.begin() as unit:
            first = await unit.claims.try_claim_many(CONSUMER, requests)
        async with world.database.begin() as unit:
            second = await unit.claims.try_claim_many(CONSUMER, requests)

        assert first == [Claimed()] * len(requests)
        assert second == [Duplicate()] * len(requests)
        assert (await known(world, STRANGE_IDS[-1])).payload_hash == HASH

    @in_world
    async def test_a_batch_keeps_where_each_of_its_deliveries_stood(
        self, world: DatabaseWorld
    ) -> None:
        requests = [ClaimRequest(f"m{offset}", HASH, f"payments/0/{offset}") for offset in (3, 1)]

        async with world.database.begin() as unit:
            await unit.claims.try_claim_many(CONSUMER, requests)

        sources = [(await known(world, request.message_id)).source for request in requests]
        assert sources == ["payments/0/3", "payments/0/1"]

    @in_world
    async def test_a_batch_may_be_large(self, world: DatabaseWorld) -> None:
        requests = [asking(f"m{number}") for number in range(2500)]

        async with world.database.begin() as unit:
            first = await unit.claims.try_claim_many(CONSUMER, requests)
            second = await unit.claims.try_claim_many(CONSUMER, requests)

        assert first == [Claimed()] * 2500
        assert second == [Duplicate()] * 2500

    @in_world
    async def test_workers_with_the_same_ids_in_any_order_never_deadlock(
        self, world: DatabaseWorld
    ) -> None:
        for attempt in range(ROUNDS):
            ids = [f"{attempt}/{number}" for number in range(100)]
            for message_id in ids[:10]:
                await fail(world, message_id)

            wins = await asyncio.gather(*[_won(world, ids, seed) for seed in range(WORKERS)])

            assert sorted(id for won in wins for id in won) == sorted(ids)

    @in_world
    async def test_a_batch_takes_its_locks_in_order(self, world: DatabaseWorld) -> None:
        if not world.waits_for_locks:
            return
        # A busy machine may take longer than the lock timeout; it does not do so every time.
        assert any([await _last_is_free(world, number) for number in range(3)])

    @in_world
    async def test_a_batch_with_a_message_that_is_held_elsewhere_changes_nothing(
        self, world: DatabaseWorld
    ) -> None:
        async with world.database.begin() as holder:
            await holder.claims.try_claim(CONSUMER, asking("held"))

            with pytest.raises(Locked):
                await _claims(world, ["a", "held", "z"])

        assert isinstance(await claim(world, "held"), Duplicate)
        assert await look_up(world, "a") is None
        assert await look_up(world, "z") is None


async def _last_is_free(world: DatabaseWorld, number: int) -> bool:
    """Return whether a batch that waits for its second id in order has not come to its third."""
    first, held, last = f"{number} a", f"{number} m", f"{number} z"
    try:
        async with world.database.begin() as holder, world.database.begin() as other:
            await holder.claims.try_claim(CONSUMER, asking(held))
            batch = asyncio.create_task(_claims(world, [last, held, first]))
            await asyncio.wait({batch}, timeout=MOMENT_SECONDS)
            async with asyncio.timeout(2 * MOMENT_SECONDS):
                answer = await other.claims.try_claim(CONSUMER, asking(last))
        return isinstance(answer, Claimed) and await batch == [Duplicate(), Duplicate(), Claimed()]
    except (TimeoutError, Locked):
        await asyncio.gather(batch, return_exceptions=True)
        return False


async def _claims(world: DatabaseWorld, ids: list[str]) -> list[object]:
    async with world.database.begin() as unit:
        requests = [asking(message_id) for message_id in ids]
        return list(await unit.claims.try_claim_many(CONSUMER, requests))


async def _won(world: DatabaseWorld, ids: list[str], seed: int) -> list[str]:
    shuffled = random.Random(seed).sample(ids, len(ids))
    if world.waits_for_locks:
        answers = await _claims(world, shuffled)
    else:
        answers = await patiently(lambda: _claims(world, shuffled))
    return [id for id, answer in zip(shuffled, answers, strict=True) if isinstance(answer, Claimed)]


class ClaimStoreContract(
    TableRules,
    ClaimLeaseRules,
    FailureRules,
    RetentionRules,
    BatchRules,
    ClaimRaceRules,
    ClaimsContract,
):
    """Everything a `ProcessedMessageStore` must do; derive a test class from it."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        async with self.world() as self._world:
            self.waits_for_locks = self._world.waits_for_locks
            yield

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[ClaimingStore]:
        async with self._world.database.begin() as unit:
            yield unit.claims
