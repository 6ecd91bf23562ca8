"""Passing gaps over: only versions that did not come are given up."""

from __future__ import annotations

import pytest

from semel.errors import Misuse
from semel.messaging.failure import NonRetryableMessageError
from semel.operate.explain import open_gaps, pass_over_gaps
from semel.policy.vocabulary import GapPolicy
from tests.messaging.handle.test_overtaking import Cases
from tests.messaging.places import InPostgres, InSqlite
from tests.stores.world import in_world


async def pass_over(cases: Cases) -> list[tuple[int, int]]:
    passed = await pass_over_gaps(
        cases.database, cases.consumer, "case-7", actor="ann", reason="never sent"
    )
    return [(gap.expected, gap.found) for gap in passed]


async def listed(cases: Cases) -> list[tuple[int, int]]:
    gaps = await open_gaps(cases.database, "cases", 10)
    return sorted((gap.expected, gap.found) for gap in gaps)


class PassingOver:
    @in_world
    async def test_a_version_that_waits_behind_a_later_one_is_applied(self, world):
        cases = Cases(world, GapPolicy.PARK_KEY)
        await cases.deliver(1, 5, 3)

        first = await pass_over(cases)
        left = await listed(cases)
        await cases.work_off()
        waiting = await cases.waiting()
        second = await pass_over(cases)
        await cases.release("v5")
        await cases.work_off()

        assert (first, left) == ([(2, 3)], [(4, 5)])
        assert waiting == ["v5"]
        assert second == [(4, 5)]
        assert cases.applied == [1, 3, 5]
        assert (await listed(cases), await cases.waiting()) == ([], [])

    @in_world
    async def test_what_is_missing_between_versions_that_wait_stays_listed(self, world):
        cases = Cases(world, GapPolicy.PARK_KEY)
        await cases.deliver(1, 12, 6, 3, 4, 8)

        passed = await pass_over(cases)
        left = await listed(cases)
        await cases.work_off()

        assert passed == [(2, 3)]
        assert left == [(5, 6), (7, 8), (9, 12)]
        assert cases.applied == [1, 3, 4]

    @in_world
    async def test_a_version_that_is_next_and_parked_is_not_passed_over(self, world):
        cases = Cases(world, GapPolicy.PARK_KEY)
        cases.failures[2] = [NonRetryableMessageError("broken")]
        await cases.deliver(1, 4, 2)

        with pytest.raises(Misuse, match="version 2 of the key 'case-7' is next, and waits"):
            await pass_over(cases)
        await cases.release("v2")
        await cases.work_off()

        assert await listed(cases) == [(2, 4)]
        assert cases.applied == [1, 2]

    @in_world
    async def test_a_key_of_which_nothing_was_applied_begins_with_the_lowest_that_waits(
        self, world
    ):
        cases = Cases(world, GapPolicy.PARK_KEY)
        await cases.deliver(5, 3)

        passed = await pass_over(cases)
        await cases.work_off()

        assert passed == [(1, 3)]
        assert cases.applied == [3]
        assert await listed(cases) == [(4, 5)]


class TestInSqlite(InSqlite, PassingOver):
    pass


class TestInPostgres(InPostgres, PassingOver):
    pass
