"""The rules of batches: many claims in one statement answer as claims one by one would.

The executable contract of a store of claims.

    table      what a claim finds, and what it answers
    leases     owners, fences, expiry
    failures   what is written after an attempt, and by operators
    retention  what may be forgotten
    batches    many claims in one statement
    races      several transactions at once

An implementation says how an empty database is opened:

    class TestMyClaims(ClaimsContract):
        @asynccontextmanager
        async def world(self):
            database = MyDatabase()
            yield DatabaseWorld(database, database.make_older, waits_for_locks=True)
"""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack

import pytest

from semel.messaging.handle.claims import (
    Claimed,
    ClaimFound,
    ClaimRequest,
    Conflict,
    Duplicate,
    Locked,
)
from semel.testing.contracts.claims_failures import FailureRules, RetentionRules
from semel.testing.contracts.claims_leases import ClaimLeaseRules
from semel.testing.contracts.claims_races import ClaimRaceRules
from semel.testing.contracts.claims_table import STRANGE_IDS, WITH_A_ROW, TableRules
from semel.testing.contracts.claims_world import (
    CONSUMER,
    HASH,
    MOMENT_SECONDS,
    OTHER_HASH,
    arranged,
    asking,
    claim,
    fail,
    known,
    look_up,
    patiently,
    rolled_back,
)
from semel.testing.contracts.messaging_world import DatabaseContract, DatabaseWorld, in_world

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


__all__ = ["ClaimsContract"]


class ClaimsContract(
    TableRules, ClaimLeaseRules, FailureRules, RetentionRules, BatchRules, ClaimRaceRules
):
    """Everything a `ProcessedMessageStore` must do; derive a test class from it."""
