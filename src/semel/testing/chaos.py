"""Prove a sink of your own: every crash, every failing call, every owner that wakes too late.

    def test_my_sink_loses_nothing_and_doubles_nothing(tmp_path):
        proof = prove(
            make_sink=lambda place: MySink(tmp_path / place, name="mine"),
            visible_rows=lambda sink: sink.read_everything(),
        )

        print(proof)

The sink works beside a memory sink under one ledger, so that it is also seen
whether both show the same batches.  `semel.testing.SinkContract`
says which rule of the contract is broken; this says what it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, cast

from semel.errors import require
from semel.lease import Takeover
from semel.memory.sink import MemorySink, MemoryStore
from semel.pipeline.sink import Batch, TwoPhaseSink
from semel.testing.explore import (
    Census,
    Faults,
    MakeWorld,
    explore_crashes,
    explore_faults,
    explore_late_tasks,
    explore_woken,
)
from semel.testing.world import LEDGER, World

WITNESS: Final = "witness"
"""The name of the memory sink that works beside the one to be proved."""

OTHERS: Final = (WITNESS, LEDGER)
"""What works without fault beside the sink to be proved."""

MakeSink = Callable[[str], TwoPhaseSink]
"""Makes a new sink object for a place: the same place again is the same destination."""

VisibleRows = Callable[[Any], Iterable[Any]]
"""Reads what readers of the sink see now, as the rows that were written."""


@dataclass(frozen=True, slots=True)
class ChaosReport:
    """How many histories the sink survived."""

    crashes: int
    faults: int
    woken: int
    late_tasks: int

    @property
    def histories(self) -> int:
        """All of them."""
        return self.crashes + self.faults + self.woken + self.late_tasks

    def __str__(self) -> str:
        return (
            f"{self.histories} histories: {self.crashes} with crashes, {self.faults} with failing "
            f"calls, {self.woken} with woken owners, {self.late_tasks} with late tasks"
        )


def prove(
    make_sink: MakeSink,
    visible_rows: VisibleRows,
    *,
    rows: Sequence[Sequence[Any]] | None = None,
    as_batch: Callable[[Sequence[Any]], Batch] | None = None,
    left_behind: Callable[[Any], Sequence[object]] | None = None,
    depth: int = 1,
    every: int = 1,
) -> ChaosReport:
    """Run a driver over the sink through every history to *depth*; return how many there were.

    There are some six hundred to depth 1; of a slow sink, walk *every* n-th.

    *rows* are the source's batches, by default two of two rows with an ``id`` and a ``name``;
    *as_batch* makes what the sink's stager is given, by default a `pyarrow.RecordBatch`.
    *left_behind* lists what the sink keeps and does not show; by default the sink is asked.

    Raises:
        Violation: what was lost, doubled or left behind, and the history that leads there.
    """
    make_world = world_of(make_sink, visible_rows, rows, as_batch, left_behind)
    told = {kind: explore(make_world, depth, every) for kind, explore in EXPLORATIONS.items()}
    return ChaosReport(**{kind: census.histories for kind, census in told.items()})


EXPLORATIONS: Final[Mapping[str, Callable[[MakeWorld, int, int], Census]]] = {
    "crashes": explore_crashes,
    "faults": lambda make_world, depth, every: explore_faults(
        make_world, crashes=depth - 1, spare=OTHERS, every=every
    ),
    "woken": lambda make_world, depth, every: explore_woken(
        make_world, Takeover.FORCE, depth, every
    ),
    "late_tasks": explore_late_tasks,
}
"""By kind of history."""


def world_of(
    make_sink: MakeSink,
    visible_rows: VisibleRows,
    rows: Sequence[Sequence[Any]] | None = None,
    as_batch: Callable[[Sequence[Any]], Batch] | None = None,
    left_behind: Callable[[Any], Sequence[object]] | None = None,
) -> MakeWorld:
    """Say how a world is made for the sink; every world has a place of its own."""

    def make_world(faults: Faults) -> World:
        place = f"world-{next(_PLACES)}"
        store = MemoryStore()
        return World(
            rows or EXAMPLE_ROWS,
            lambda: [make_sink(place), MemorySink(WITNESS, store=store)],
            lambda sink: _visible(sink, visible_rows),
            None if left_behind is None else lambda sink: _left(sink, left_behind),
            as_batch or _arrow,
            faults,
        )

    return make_world


_PLACES = count(1)

EXAMPLE_ROWS: Final = (
    ({"id": 1, "name": "one"}, {"id": 2, "name": "two"}),
    ({"id": 3, "name": "three"}, {"id": 4, "name": "four"}),
)


class ChaosContract:
    """The same as tests of a class: give `make_sink` and `visible_rows`."""

    depth = 1
    every = 1
    """Of a slow sink, walk every n-th history only."""

    def make_sink(self, place: str) -> TwoPhaseSink:
        """Make a new sink object for *place*; the same place again is the same destination."""
        raise NotImplementedError

    def visible_rows(self, sink: Any) -> Iterable[Any]:
        """Read what readers of the sink see now."""
        raise NotImplementedError

    def test_a_crash_at_any_window_loses_and_doubles_nothing(self) -> None:
        self._explore("crashes")

    def test_a_failure_of_any_call_loses_and_doubles_nothing(self) -> None:
        self._explore("faults")

    def test_an_owner_that_wakes_after_a_takeover_changes_nothing(self) -> None:
        self._explore("woken")

    def test_tasks_that_outlive_their_driver_leave_nothing_behind(self) -> None:
        self._explore("late_tasks")

    def _explore(self, kind: str) -> None:
        make_world = world_of(self.make_sink, self.visible_rows)
        assert EXPLORATIONS[kind](make_world, self.depth, self.every).histories > 1


def _visible(sink: TwoPhaseSink, visible_rows: VisibleRows) -> list[Any]:
    if sink.name == WITNESS:
        return cast("MemorySink", sink).visible
    return list(visible_rows(sink))


def _left(sink: TwoPhaseSink, left_behind: Callable[[Any], Sequence[object]]) -> Sequence[object]:
    if sink.name == WITNESS:
        store = cast("MemorySink", sink).store
        return [*store.staged, *store.prepared]
    return left_behind(sink)


def _arrow(rows: Sequence[Any]) -> Batch:
    return require("pyarrow", "files").RecordBatch.from_pylist(list(rows))
