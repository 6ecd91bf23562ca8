"""The executable contract of the outcome ranges."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from functools import partial
from typing import Final

from semel.message import Coordinates, Partition
from semel.messaging.outcome import Mark, OutcomeRange
from tests.stores.claims_world import CONSUMER, patiently, rolled_back
from tests.stores.world import DatabaseContract, DatabaseWorld, in_world

P0: Final = Partition("payments", 0)
P1: Final = Partition("payments", 1)
ELSEWHERE: Final = Partition("refunds", 0)


async def _record(world: DatabaseWorld, *ranges: OutcomeRange) -> None:
    async with world.database.begin() as unit:
        await unit.outcomes.record(CONSUMER, ranges)


async def _kept(world: DatabaseWorld, partition: Partition = P0) -> list[tuple[int, int, str]]:
    async with world.database.begin() as unit:
        found = await unit.outcomes.ranges(CONSUMER, partition)
    return [(each.first, each.last, each.outcome) for each in found]


def _handled(first: int, last: int, partition: Partition = P0) -> OutcomeRange:
    return OutcomeRange(partition, first, last, "success")


class OutcomesContract(DatabaseContract):
    """Everything `semel.messaging.database.OutcomeStore` must do."""

    @in_world
    async def test_neighbours_of_one_outcome_are_one_range(self, world: DatabaseWorld) -> None:
        for first in range(0, 100, 10):
            await _record(world, _handled(first, first + 9))

        assert await _kept(world) == [(0, 99, "success")]

    @in_world
    async def test_other_outcomes_and_gaps_begin_a_new_range(self, world: DatabaseWorld) -> None:
        await _record(world, _handled(0, 4), OutcomeRange(P0, 5, 5, "parked"), _handled(6, 9))
        await _record(world, _handled(20, 29))

        assert await _kept(world) == [
            (0, 4, "success"),
            (5, 5, "parked"),
            (6, 9, "success"),
            (20, 29, "success"),
        ]

    @in_world
    async def test_an_offset_that_was_delivered_again_is_in_several_ranges(
        self, world: DatabaseWorld
    ) -> None:
        await _record(world, _handled(0, 9))
        await _record(world, OutcomeRange(P0, 5, 9, "duplicate_skipped"), _handled(10, 14))
        await _record(world, _handled(5, 9), _handled(10, 12))

        assert await _kept(world) == [
            (0, 14, "success"),
            (5, 9, "duplicate_skipped"),
            (5, 12, "success"),
        ]

    @in_world
    async def test_an_offset_is_asked_for_the_ranges_that_it_is_in(
        self, world: DatabaseWorld
    ) -> None:
        again = OutcomeRange(P0, 5, 5, "duplicate_skipped")
        await _record(world, _handled(0, 9), again, _handled(5, 9, P1))
        await _record(world, OutcomeRange(P0, 4, 4, "duplicate_skipped"), again)
        async with world.database.begin() as unit:
            await unit.outcomes.record("shipping", [_handled(5, 5)])
            found = {
                offset: await unit.outcomes.covering(CONSUMER, Coordinates("payments", 0, offset))
                for offset in (0, 5, 9, 10)
            }

        assert {offset: [one.outcome for one in ranges] for offset, ranges in found.items()} == {
            0: ["success"],
            5: ["success", "duplicate_skipped", "duplicate_skipped"],
            9: ["success"],
            10: [],
        }

    @in_world
    async def test_consumers_and_partitions_have_ranges_of_their_own(
        self, world: DatabaseWorld
    ) -> None:
        await _record(world, _handled(0, 4), _handled(5, 9, P1), _handled(5, 9, ELSEWHERE))
        async with world.database.begin() as unit:
            await unit.outcomes.record("shipping", [_handled(5, 9)])
            partitions = await unit.outcomes.partitions(CONSUMER)
            of_shipping = await unit.outcomes.partitions("shipping")

        assert await _kept(world) == [(0, 4, "success")]
        assert list(partitions) == [P0, P1, ELSEWHERE]
        assert list(of_shipping) == [P0]

    @in_world
    async def test_ranges_are_kept_with_their_transaction_or_not_at_all(
        self, world: DatabaseWorld
    ) -> None:
        await _record(world, _handled(0, 4))
        async with rolled_back(world) as unit:
            await unit.outcomes.record(CONSUMER, [_handled(5, 9), _handled(20, 29)])

        assert await _kept(world) == [(0, 4, "success")]

    @in_world
    async def test_pruning_forgets_what_lies_wholly_below_an_offset(
        self, world: DatabaseWorld
    ) -> None:
        await _record(world, _handled(0, 4), _handled(6, 8), _handled(10, 19), _handled(30, 39))
        await _record(world, _handled(0, 4, P1))

        pruned, left = [], []
        for _ in range(3):
            async with world.database.begin() as unit:
                pruned.append(await unit.outcomes.prune(CONSUMER, P0, 15, 1))
            left.append(len(await _kept(world)))

        assert (pruned, left) == ([1, 1, 0], [3, 2, 2])
        assert await _kept(world) == [(10, 19, "success"), (30, 39, "success")]
        assert await _kept(world, P1) == [(0, 4, "success")]

    @in_world
    async def test_how_messages_ended_is_forgotten_behind_what_says_that_they_were_kept(
        self, world: DatabaseWorld
    ) -> None:
        ended, skipped = Mark.HANDLED.value, Mark.SKIPPED.value
        kept = OutcomeRange(P0, 10, 19, Mark.KEPT.value)
        await _record(world, OutcomeRange(P0, 0, 4, "dlq"), kept)
        await _record(world, OutcomeRange(P0, 2, 2, ended), OutcomeRange(P0, 12, 12, skipped))

        pruned = []
        for below in (15, 20):
            async with world.database.begin() as unit:
                pruned.append(await unit.outcomes.prune(CONSUMER, P0, below, 10))
            if below == 15:
                assert await _kept(world) == [(10, 19, "kept"), (12, 12, skipped)]

        assert pruned == [2, 2]
        assert await _kept(world) == []

    @in_world
    async def test_two_processes_that_extend_one_range_lose_nothing(
        self, world: DatabaseWorld
    ) -> None:
        await _record(world, _handled(0, 9))
        async with world.database.begin() as owner:
            await owner.outcomes.record(CONSUMER, [_handled(10, 19)])
            late = asyncio.create_task(_record(world, _handled(10, 14)))
            await asyncio.wait({late}, timeout=0.1)
        await late

        assert await _kept(world) == [(0, 19, "success"), (10, 14, "success")]

    @in_world
    async def test_many_processes_count_every_delivery(self, world: DatabaseWorld) -> None:
        chance = random.Random(11)
        batches: list[OutcomeRange] = []
        for _ in range(40):
            first = chance.randrange(30)
            outcome = chance.choice(["success", "duplicate_skipped"])
            batches.append(OutcomeRange(P0, first, first + chance.randrange(6), outcome))

        async def process(mine: list[OutcomeRange]) -> None:
            for each in mine:
                await patiently(partial(_record, world, each))

        await asyncio.gather(*[process(batches[number::4]) for number in range(4)])

        kept = await _kept(world)
        assert _deliveries(kept) == _deliveries([(b.first, b.last, b.outcome) for b in batches])


def _deliveries(ranges: list[tuple[int, int, str]]) -> Counter[tuple[int, str]]:
    return Counter(
        (offset, outcome) for first, last, outcome in ranges for offset in range(first, last + 1)
    )
