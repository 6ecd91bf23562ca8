"""Which checkpoint may go on where the ledger ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from semel.lease import Owner
from semel.memory.ledger import MemoryLedger
from semel.pipeline.generation import (
    Adoptable,
    CheckpointRefused,
    CheckpointView,
    adopt,
    settle_generation,
)
from semel.pipeline.source import BatchRange, Position, SourceKind, SourceRange, Span
from semel.pipeline.txn import CycleId, Scope
from semel.testing.clock import SimulatedClock


class Place:
    def __init__(self) -> None:
        self.ledger = MemoryLedger(SimulatedClock())
        self.scope = Scope(self.ledger.ledger_id, "app", "main")
        self.lease = self.ledger.acquire(self.scope, Owner.here(), 30.0)

    def settle(self, view: CheckpointView):
        return settle_generation(self.ledger, self.lease, view)

    def commit(self, generation: int, batch: int, read: BatchRange) -> None:
        txn = CycleId(self.scope, generation, batch).attempt()
        self.ledger.plan(self.lease, txn)
        self.ledger.set_range(self.lease, txn, read)
        self.ledger.set_prepared(self.lease, txn, {}, {})
        self.ledger.decide_commit(self.lease, txn)
        self.ledger.finish(self.lease, txn)


def offsets(start: int, end: int) -> BatchRange:
    return BatchRange.of_offsets({"events/0": (start, end)})


NEW = CheckpointView("c1", batch=0, range=offsets(0, 10), last_finished=None, is_stateful=False)


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.fixture
def used(place) -> Place:
    """A scope whose first checkpoint has committed offsets 0 to 10 as batch 0."""
    place.settle(NEW)
    place.commit(1, 0, offsets(0, 10))
    return place


def test_the_first_checkpoint_is_generation_one(place):
    assert place.settle(NEW).number == 1


def test_a_known_checkpoint_keeps_its_generation(used):
    view = replace(NEW, batch=1, range=offsets(10, 20), last_finished=0)

    assert used.settle(view).number == 1
    assert len(used.ledger.generations(used.scope)) == 1


def test_a_new_checkpoint_that_starts_where_the_ledger_ends_is_the_next_generation(used):
    assert used.settle(replace(NEW, id="c2", range=offsets(10, 20))).number == 2


@pytest.mark.parametrize(
    ("start", "problem"),
    [(5, "overlap, 5 to 10 is committed already"), (12, "gap, 10 to 12 was never committed")],
)
def test_a_new_checkpoint_that_starts_elsewhere_is_refused_with_the_range(used, start, problem):
    with pytest.raises(CheckpointRefused, match=problem) as refused:
        used.settle(replace(NEW, id="c2", range=offsets(start, 20)))

    assert "semel adopt" in str(refused.value)
    assert len(used.ledger.generations(used.scope)) == 1


def test_a_new_checkpoint_of_a_stateful_query_has_lost_its_state(used):
    view = replace(NEW, id="c2", range=offsets(10, 20), is_stateful=True)

    with pytest.raises(CheckpointRefused, match="--state-lost"):
        used.settle(view)


def test_a_new_checkpoint_over_a_source_without_durable_positions_is_refused(used):
    rate = SourceRange("0", SourceKind.EPHEMERAL, {"": Span(0, 5)})

    with pytest.raises(CheckpointRefused, match="without durable positions"):
        used.settle(replace(NEW, id="c2", range=BatchRange((rate,))))


def test_a_new_checkpoint_that_reads_committed_files_again_is_refused(place):
    def files(*paths):
        return BatchRange((SourceRange("0", SourceKind.FILES, paths=paths),))

    place.settle(replace(NEW, range=files("a")))
    place.commit(1, 0, files("a"))

    with pytest.raises(CheckpointRefused, match="a is committed already"):
        place.settle(replace(NEW, id="c2", range=files("a", "b")))
    assert place.settle(replace(NEW, id="c2", range=files("b"))).number == 2


def test_an_old_checkpoint_is_refused_once_a_newer_one_was_used(used):
    used.settle(replace(NEW, id="c2", range=offsets(10, 20)))

    with pytest.raises(CheckpointRefused, match="generation 2 has been used since"):
        used.settle(replace(NEW, batch=1, range=offsets(10, 20), last_finished=0))


def test_a_checkpoint_with_a_past_of_its_own_is_refused(place):
    with pytest.raises(CheckpointRefused, match="batches up to 41"):
        place.settle(replace(NEW, batch=42, last_finished=41))


def test_a_query_with_a_new_name_is_told_to_keep_the_old_one_and_not_to_begin_anew(used):
    renamed = Scope(used.scope.ledger, "app", "entries")
    lease = used.ledger.acquire(renamed, Owner.here(), 30.0)
    view = replace(NEW, batch=1, range=offsets(10, 20), last_finished=0)

    with pytest.raises(CheckpointRefused, match=r"belongs to app/main; .*call it 'main' again"):
        settle_generation(used.ledger, lease, view)


def test_a_batch_that_spark_calls_done_without_a_commit_is_refused(used):
    view = replace(NEW, batch=2, range=offsets(20, 30), last_finished=1)

    with pytest.raises(CheckpointRefused, match=r"the ledger has no COMMIT for app/main/g1\.b1"):
        used.settle(view)


def test_a_batch_that_spark_calls_done_and_the_ledger_has_pruned_is_fine(used):
    used.commit(1, 1, offsets(10, 20))
    used.ledger.prune(used.scope, keep=1)

    view = replace(NEW, batch=1, range=offsets(10, 20), last_finished=0)

    assert used.settle(view).number == 1


def test_batches_before_an_adopted_checkpoints_first_are_not_asked_for(place):
    place.ledger.adopt_generation(place.lease, "c9", 42, {})

    view = replace(NEW, id="c9", batch=42, last_finished=41)

    assert place.settle(view).number == 1


def test_a_new_checkpoint_whose_sources_changed_places_is_refused(used):
    other, same = (
        BatchRange.of_offsets({"b/0": (0, 5)}),
        BatchRange.of_offsets({"events/0": (0, 10)}, "1"),
    )
    swapped = replace(NEW, id="c2", range=BatchRange((*other.sources, *same.sources)))

    with pytest.raises(CheckpointRefused, match="has it as source 0"):
        used.settle(swapped)


def test_files_committed_as_another_sources_are_not_read_again(place):
    def files(**paths: str) -> BatchRange:
        return BatchRange(
            tuple(SourceRange(s[1:], SourceKind.FILES, paths=(p,)) for s, p in paths.items())
        )

    place.settle(replace(NEW, range=files(s0="a/1", s1="b/1")))
    place.commit(1, 0, files(s0="a/1", s1="b/1"))

    with pytest.raises(CheckpointRefused, match="b/1 is committed already, as one of source 1"):
        place.settle(replace(NEW, id="c2", range=files(s0="b/1", s1="a/1")))
    with pytest.raises(CheckpointRefused, match="b/1 is committed already, as one of source 1"):
        place.settle(replace(NEW, id="c2", range=files(s0="b/1")))


def test_a_new_partition_of_a_known_topic_must_start_at_its_beginning(used):
    def grown(start: int) -> CheckpointView:
        read = BatchRange.of_offsets({"events/0": (10, 20), "events/1": (start, 9)})
        return replace(NEW, id="c2", range=read)

    with pytest.raises(CheckpointRefused, match="events/1: gap, 0 to 5"):
        used.settle(grown(5))
    assert used.settle(grown(0)).number == 2


@pytest.mark.parametrize(
    ("view", "problem"),
    [
        (replace(NEW, id="c2", range=offsets(10, 20), is_stateful=True), "has lost its state"),
        (replace(NEW, id="c2", range=offsets(0, 10)), "overlap, 0 to 10"),
        (
            replace(
                NEW,
                id="c2",
                range=BatchRange.of_offsets({"events/0": (0, 10)}, source="1"),
            ),
            "the order has changed",
        ),
    ],
)
def test_an_adopted_checkpoint_that_was_never_used_cannot_be_exchanged_for_a_new_one(
    place, view, problem
):
    place.ledger.release(place.lease)
    taken_over = Adoptable("c1", 5, {("0", "events/0"): Position(10)}, is_stateful=False)
    adopt(place.ledger, place.scope, taken_over, who="ann", why="moving to semel")
    place.lease = place.ledger.acquire(place.scope, Owner.here(), 30.0)

    with pytest.raises(CheckpointRefused, match=problem):
        place.settle(view)

    next_batch = replace(NEW, batch=5, range=offsets(10, 20), last_finished=4)
    assert place.settle(next_batch).number == 1


def test_an_adopted_source_without_durable_positions_cannot_start_anew(place):
    place.ledger.release(place.lease)
    adopt(place.ledger, place.scope, Adoptable("c1", 5, {}, False), who="ann", why="moving")
    place.lease = place.ledger.acquire(place.scope, Owner.here(), 30.0)
    rate = BatchRange((SourceRange("0", SourceKind.EPHEMERAL, {"": Span(0, 10)}),))

    with pytest.raises(CheckpointRefused, match="without durable positions"):
        place.settle(replace(NEW, id="c2", range=rate))
