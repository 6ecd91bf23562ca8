"""The completeness audit: every offset is accounted for, or named."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.memory.broker import MemoryBroker
from semel.message import Partition
from semel.messaging.outcome import CYCLE, HOLE, Mark, OutcomeRange, Told, is_delivery
from semel.messaging.records import Waits
from semel.operate.completeness import (
    FOUND,
    KEPT,
    STANDINGS,
    Completeness,
    Extent,
    OffsetFound,
    Standing,
    Stretch,
    audit_completeness,
    audit_ranges,
)
from tests.messaging.places import InPostgres, InSqlite
from tests.messaging.worlds import memory_database
from tests.stores.world import in_world

P0 = Partition("payments", 0)


def ranges(*given: tuple[int, int, str]) -> list[OutcomeRange]:
    return [OutcomeRange(P0, first, last, outcome) for first, last, outcome in given]


def counts(audit) -> dict[str, int]:
    return {standing.value: number for standing, number in audit.counts.items() if number}


def test_whatever_can_become_of_an_offset_has_a_standing():
    assert set(STANDINGS) == {*Told, HOLE, CYCLE, *Mark, *OffsetFound}
    assert set(FOUND) == set(Waits)


def test_ranges_without_holes_are_complete():
    found = audit_ranges(
        P0,
        ranges((0, 4, "success"), (5, 5, "dlq"), (6, 6, HOLE), (7, 9, "duplicate_skipped")),
        Extent(first=0, committed=10, end=12),
    )

    assert found.is_complete
    assert counts(found) == {"handled": 5, "dead": 1, "hole": 1, "duplicate": 3}
    assert (found.total, found.not_reached, found.missing) == (10, 2, ())
    assert found.holes == (Stretch(6, 6),)


def test_offsets_in_no_range_are_missing_at_the_begin_in_the_middle_and_at_the_end():
    found = audit_ranges(
        P0, ranges((2, 3, "success"), (6, 7, "parked")), Extent(first=0, committed=10)
    )

    assert not found.is_complete
    assert found.missing == (Stretch(0, 1), Stretch(4, 5), Stretch(8, 9))


def test_an_offset_that_came_several_times_counts_once_as_the_most_that_became_of_it():
    found = audit_ranges(
        P0,
        ranges((0, 9, "success"), (5, 12, "duplicate_skipped"), (11, 14, "dlq"), (13, 13, HOLE)),
    )

    assert counts(found) == {"handled": 10, "duplicate": 1, "dead": 4}
    assert found.repeated == 8
    assert found.is_complete


def test_without_a_committed_offset_the_ranges_say_how_far_it_goes():
    found = audit_ranges(P0, ranges((7, 9, "success")))

    assert (found.first, found.until, found.is_complete) == (7, 10, True)


def test_a_partition_of_which_nothing_is_known_and_nothing_was_committed_is_complete():
    assert audit_ranges(P0, []).is_complete
    assert audit_ranges(P0, [], Extent(0, 3)).missing == (Stretch(0, 2),)


def test_a_mark_outranks_the_delivery_in_the_middle_of_a_range_and_is_no_repetition():
    known = ranges(
        (0, 99, "parked"),
        (0, 99, Mark.KEPT),
        (40, 59, Mark.HANDLED),
        (50, 50, Mark.SKIPPED),
        (70, 70, Mark.SKIPPED),
        (71, 71, Mark.DELETED),
        (72, 72, Mark.DUPLICATE),
    )
    found = ranges(
        (0, 39, OffsetFound.PARKED), (60, 68, OffsetFound.DEAD), (73, 99, OffsetFound.WAITING)
    )

    audit = audit_ranges(P0, known, found=found)

    assert counts(audit) == {
        "handled": 20,
        "skipped": 1,
        "deleted": 1,
        "duplicate": 1,
        "parked": 40,
        "dead": 9,
        "waiting": 27,
    }
    assert audit.lost == audit.missing == (Stretch(69, 69),)
    assert (audit.repeated, audit.ranges, audit.is_complete) == (0, 1, False)


def test_marks_alone_say_nothing_of_how_far_a_consumer_has_read():
    audit = audit_ranges(P0, ranges((0, 9, Mark.KEPT), (12, 14, "success"), (20, 20, Mark.HANDLED)))

    assert (audit.first, audit.until, audit.is_complete) == (12, 15, True)


OFFSETS = st.integers(0, 30)
OUTCOMES = st.sampled_from([*map(str, Told), HOLE, *map(str, Mark)])
PLACES = st.lists(st.tuples(OFFSETS, st.sampled_from(OffsetFound)), max_size=8)


@given(st.lists(st.tuples(OFFSETS, OFFSETS, OUTCOMES), max_size=8), OFFSETS, OFFSETS)
def test_the_sum_is_always_all_offsets(given_ranges, first, length):
    known = ranges(*((min(a, b), max(a, b), outcome) for a, b, outcome in given_ranges))

    found = audit_ranges(P0, known, Extent(first, first + length))

    covered = {o for r in known for o in range(r.first, r.last + 1)}
    missing = {o for s in found.missing for o in range(s.first, s.last + 1)}
    assert missing == set(range(first, first + length)) - covered
    assert sum(found.counts.values()) + len(missing) == found.total == length
    stands = [
        STANDINGS[strongest(known, offset)]
        for offset in covered & set(range(first, first + length))
    ]
    for standing in Standing:
        assert found.counts[standing] == stands.count(standing)


def strongest(known: list[OutcomeRange], offset: int) -> str:
    """Return what counts of an offset."""
    here = {one.outcome for one in known if one.first <= offset <= one.last}
    return min(here, key=list(STANDINGS).index)


@given(st.lists(st.tuples(OFFSETS, OFFSETS, OUTCOMES), max_size=8), PLACES)
def test_what_was_kept_did_not_end_and_is_nowhere_is_lost(given_ranges, places):
    known = ranges(*((min(a, b), max(a, b), outcome) for a, b, outcome in given_ranges))
    there = ranges(*((offset, offset, found) for offset, found in places))

    found = audit_ranges(P0, known, Extent(0, 31), there)

    lost = {o for s in found.lost for o in range(s.first, s.last + 1)}
    everything = [*known, *there]
    covered = {o for r in everything for o in range(r.first, r.last + 1)}
    assert lost == {o for o in covered if strongest(everything, o) in KEPT}
    came = [
        sum(r.first <= o <= r.last for r in known if is_delivery(r.outcome)) for o in covered - lost
    ]
    assert found.repeated == sum(times > 1 for times in came)


class Audits:
    """What holds on every database."""

    @in_world
    async def test_a_consumers_partitions_are_added_up(self, world):
        other = Partition("payments", 1)
        async with world.database.begin() as unit:
            await unit.outcomes.record("billing", ranges((0, 3, "success")))
            await unit.outcomes.record("billing", [OutcomeRange(other, 5, 6, "success")])
            await unit.outcomes.record("shipping", ranges((0, 99, "success")))

        found = await audit_completeness(
            world.database, "billing", {P0: Extent(0, 6, 9), Partition("new", 0): Extent(0, 0)}
        )

        assert [(str(a.partition), a.is_complete) for a in found] == [
            ("new/0", True),
            ("payments/0", False),
            ("payments/1", True),
        ]
        assert found[1].missing == (Stretch(4, 5),)


class TestAuditsInSqlite(InSqlite, Audits):
    pass


class TestAuditsInPostgres(InPostgres, Audits):
    pass


def audited(broker: MemoryBroker, known: list[OutcomeRange], extent: Extent):
    async def scenario():
        database = memory_database()
        async with database.begin() as unit:
            await unit.outcomes.record("billing", known)
        (found,) = await audit_completeness(database, "billing", {P0: extent}, broker.reader())
        return found

    return asyncio.run(scenario())


@pytest.fixture
def broker() -> MemoryBroker:
    """Offsets 0 and 1, a hole at 2, offset 3."""
    broker = MemoryBroker({"payments": 1})
    broker.put("payments", b"a")
    broker.put("payments", b"b")
    broker.skip(P0)
    broker.put("payments", b"c")
    return broker


def test_a_hole_where_the_broker_has_a_record_is_a_loss(broker):
    found = audited(
        broker, ranges((0, 0, "success"), (1, 2, HOLE), (3, 3, "success")), Extent(0, 4)
    )

    assert found.missing == (Stretch(1, 1),)
    assert counts(found) == {"handled": 2, "hole": 1}
    assert found.checked_holes


def test_an_unknown_offset_where_the_broker_has_no_record_is_a_hole(broker):
    found = audited(broker, ranges((0, 1, "success"), (3, 3, "success")), Extent(0, 4))

    assert found.is_complete
    assert found.holes == (Stretch(2, 2),)


def test_the_broker_says_how_much_is_not_reached(broker):
    found = audited(broker, ranges((0, 1, "success")), Extent(0, 2))

    assert (found.is_complete, found.not_reached) == (True, 2)


def test_where_the_log_was_deleted_the_notes_count(broker):
    broker.trim(P0, 3)
    found = audited(broker, ranges((0, 0, "success"), (2, 3, HOLE)), Extent(0, 4))

    assert found.missing == (Stretch(1, 1), Stretch(3, 3))
    assert found.holes == (Stretch(2, 2),)


def test_with_a_broker_the_audit_begins_where_its_log_does(broker):
    found = audited(broker, ranges((3, 3, "success")), Extent(committed=4))

    assert (found.first, found.is_complete) == (0, False)
    assert found.missing == (Stretch(0, 1),)


def test_an_explicit_first_offset_leaves_out_what_is_before(broker):
    found = audited(broker, ranges((3, 3, "success")), Extent(first=3, committed=4))

    assert (found.first, found.is_complete) == (3, True)


def test_what_is_known_from_before_the_logs_begin_still_counts(broker):
    broker.trim(P0, 3)
    found = audited(broker, ranges((0, 0, "success"), (3, 3, "success")), Extent())

    assert (found.first, found.missing) == (0, (Stretch(1, 2),))


def test_of_a_consumer_that_nobody_knows_nothing_is_known(broker):
    async def scenario():
        database = memory_database()
        nothing = await audit_completeness(database, "biling")
        asked = await audit_completeness(database, "biling", {P0: Extent()}, broker.reader())
        return nothing, asked

    nothing, asked = asyncio.run(scenario())

    assert nothing == []
    assert not Completeness("biling", nothing).known
    assert not Completeness("biling", asked).known
    assert Completeness("billing", [audited(broker, ranges((0, 1, "success")), Extent())]).known
