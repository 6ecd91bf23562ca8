"""What the broker is told of a batch, and what is kept of its offsets, one settlement at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, get_args

import pytest

from semel.errors import Fenced, Retryable
from semel.memory.broker import BrokerFailure, Call, MemoryBroker
from semel.message import Partition
from semel.messaging.outcome import HOLE, MEANING, Handled, Outcome, RetryLater, Skipped
from semel.messaging.receive.offsets import Settling
from semel.testing.clock import SimulatedClock
from tests.messaging.worlds import memory_database

P0 = Partition("payments", 0)


class Place:
    """One member of a group, and what it settles."""

    def __init__(self, records: int = 0) -> None:
        self.clock = SimulatedClock()
        self.broker = MemoryBroker({"payments": 1}, clock=self.clock)
        self.database = memory_database(self.clock)
        self.put(records)

    def put(self, records: int) -> None:
        for _ in range(records):
            self.broker.put("payments", b"{}")

    async def join(self) -> None:
        self.member = await self.broker.subscribe("g", ["payments"])
        await self.broker.settled("g")
        self.settling = Settling("c", self.member, self.database, self.clock)

    async def settle(self, *outcomes: Outcome) -> list[int]:
        """Fetch as many records as there are outcomes, and settle them so."""
        records = await self.member.fetch(len(outcomes), 0.0)
        for record in records:
            await self.settling.deliver(record.at)
        found = zip((record.at for record in records), outcomes, strict=False)
        await self.settling.settle(dict(found))
        self.bring_back()
        return [record.at.offset for record in records]

    def bring_back(self) -> None:
        """Do what the runner does between two fetches."""
        for partition in self.settling.coming_back:
            self.settling.bring_back(partition)

    async def ranges(self) -> list[tuple[int, int, str]]:
        async with self.database.begin() as unit:
            return [(r.first, r.last, r.outcome) for r in await unit.outcomes.ranges("c", P0)]

    @property
    def committed(self) -> int:
        return self.broker.committed("g").get(P0, 0)


def run(place: Place, test: Callable[[], Awaitable[Any]]) -> None:
    async def whole() -> None:
        await place.join()
        try:
            await test()
        finally:
            await place.broker.close()

    asyncio.run(whole())


def test_what_became_of_a_record_first_stays_when_it_comes_again():
    place = Place(2)

    async def test() -> None:
        await place.settle(RetryLater(0.0), Handled())
        again = await place.settle(Handled(), Skipped("duplicate"))

        assert again == [0, 1]
        assert await place.ranges() == [(0, 1, "success")]

    run(place, test)


def test_what_comes_back_is_not_fetched_before_its_time():
    place = Place(2)

    async def test() -> None:
        await place.settle(Handled(), RetryLater(5.0))
        early, due_in = await place.settle(Handled()), place.settling.resume_due()
        place.clock.advance(5.0)
        assert place.settling.resume_due() is None

        assert (early, due_in) == ([], 5.0)
        assert await place.settle(Handled()) == [1]
        assert place.committed == 2

    run(place, test)


def test_the_first_that_comes_back_is_where_the_partition_goes_on():
    place = Place(3)

    async def test() -> None:
        await place.settle(RetryLater(1.0), Handled(), RetryLater(9.0))
        place.clock.advance(1.0)
        place.settling.resume_due()

        assert place.committed == 0
        assert await place.settle(Handled(), Skipped(), Handled()) == [0, 1, 2]
        assert place.committed == 3

    run(place, test)


def test_nothing_is_brought_back_of_a_partition_that_went():
    place = Place(1)

    async def test() -> None:
        [record] = await place.member.fetch(1, 0.0)
        await place.settling.deliver(record.at)
        await place.member.close()
        await place.settling.settle({record.at: RetryLater(5.0)})

        assert place.settling.resume_due() is None

    run(place, test)


def test_whoever_lost_a_partition_is_told_when_it_commits():
    place = Place(1)
    place.broker.fail(BrokerFailure(Call.COMMIT, error=Fenced("not yours")))

    async def test() -> None:
        with pytest.raises(Fenced):
            await place.settle(Handled())

    run(place, test)


def test_a_commit_that_failed_is_made_up_for_by_the_next_one():
    place = Place(2)
    place.broker.fail(BrokerFailure(Call.COMMIT, error=Retryable("away")))

    async def test() -> None:
        await place.settle(Handled())
        assert place.committed == 0

        await place.settle(Handled())

        assert place.committed == 2

    run(place, test)


def test_an_offset_is_a_hole_where_no_record_was_delivered_and_nowhere_else():
    place = Place()
    place.broker.skip(P0, 2)
    place.put(2)
    place.broker.skip(P0)
    place.put(1)

    async def test() -> None:
        await place.settle(Handled())
        await place.settle(Handled(), Handled())

        assert sorted(await place.ranges()) == [
            (0, 1, HOLE),
            (2, 3, "success"),
            (4, 4, HOLE),
            (5, 5, "success"),
        ]

    run(place, test)


def test_the_table_of_outcomes_has_a_row_for_every_kind():
    assert set(MEANING) == set(get_args(Outcome))
    assert [kind for kind, meaning in MEANING.items() if not meaning.ack] == [RetryLater]


class RolledBack(Exception):
    """Ends a batch's transaction without a commit."""


async def in_a_batch(place: Place, *outcomes: Outcome, fails: bool = False) -> None:
    """Fetch and settle; the transaction of the batch writes the marks, and may fail behind it."""
    records = await place.member.fetch(len(outcomes), 0.0)
    for record in records:
        await place.settling.deliver(record.at)
    offsets = [record.at for record in records]
    marks = place.settling.marks({}, offsets)
    with suppress(RolledBack):
        async with place.database.begin() as unit:
            await marks.write(unit, outcomes)
            if fails:
                raise RolledBack
        marks.are_durable()
    await place.settling.settle(dict(zip(offsets, outcomes, strict=True)))
    place.bring_back()


@pytest.mark.parametrize("fails", [False, True], ids=["committed", "rolled back"])
def test_marks_of_a_batch_are_written_once_whether_or_not_its_transaction_commits(fails):
    place = Place(4)

    async def test() -> None:
        await in_a_batch(place, Handled(), Skipped(), fails=fails)
        await in_a_batch(place, Handled(), Handled())

        assert await place.ranges() == [
            (0, 0, "success"),
            (1, 1, "duplicate_skipped"),
            (2, 3, "success"),
        ]
        assert place.committed == 4

    run(place, test)


def test_a_batch_marks_nothing_behind_a_message_that_comes_back():
    place = Place(3)

    async def test() -> None:
        await in_a_batch(place, Handled(), RetryLater(0.0), Handled())
        assert await place.ranges() == [(0, 0, "success")]
        assert place.committed == 1

        await in_a_batch(place, Handled(), Skipped())
        assert await place.ranges() == [(0, 2, "success")]
        assert place.committed == 3

    run(place, test)


def test_a_message_that_comes_back_late_does_not_pass_over_one_before_it():
    """The second failure is settled after the partition went back to the first one."""
    place = Place(2)

    async def test() -> None:
        records = await place.member.fetch(2, 0.0)
        first, second = [record.at for record in records]
        for at in (first, second):
            await place.settling.deliver(at)
        await place.settling.settle({first: RetryLater(0.0)})
        place.bring_back()

        await place.settling.settle({second: RetryLater(0.0)})
        place.bring_back()

        assert await place.settle(Handled(), Handled()) == [0, 1]
        assert place.committed == 2

    run(place, test)


def test_a_partition_that_was_lost_and_came_back_begins_again():
    place = Place(2)

    async def test() -> None:
        records = await place.member.fetch(2, 0.0)
        news = [await place.settling.deliver(record.at) for record in records]

        assert news == [True, False]
        with pytest.raises(Fenced):
            await place.settling.deliver(records[0].at)

    run(place, test)


def test_a_commit_that_failed_is_known_until_it_is_repeated():
    place = Place(1)

    async def test() -> None:
        place.broker.fail(BrokerFailure(Call.COMMIT))
        await place.settle(Handled())
        assert (place.committed, place.settling.is_behind) == (0, True)

        await place.settling.settle({})
        assert (place.committed, place.settling.is_behind) == (1, False)

    run(place, test)
