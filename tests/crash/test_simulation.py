"""Every history of a small world, to depth two, on memory implementations and simulated time."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import pytest
from engine_mutants import MUTANTS

from semel.lease import Takeover
from semel.memory.sink import MemorySink, MemoryStore
from semel.pipeline.twophase import Backoff
from semel.testing.explore import (
    Census,
    explore_crashes,
    explore_faults,
    explore_late_tasks,
    explore_woken,
)
from semel.testing.faults import Fault
from semel.testing.world import Invariant, Violation, World
from tests.points import PIPELINE_POINTS

ELSEWHERE = ("files", "held", "kafka", "postgres", "s3", "table")
"""Crash points that begin so are inside these sinks, and are reached in their own tests."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Log lines of ten thousand histories cost more than the histories."""
    log = logging.getLogger("semel")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    yield
    log.setLevel(level)


def memory_world(
    sinks: int = 2,
    batches: int = 3,
    rows_per_batch: int = 2,
    tasks: int = 1,
    faults: Mapping[str, Sequence[Fault]] | None = None,
) -> World:
    """Make a world on memory implementations: sinks ``s1``, ``s2``, …, rows 0, 1, 2, …"""
    stores = [MemoryStore() for _ in range(sinks)]
    rows = rows_per_batch
    return World(
        [list(range(n * rows, (n + 1) * rows)) for n in range(batches)],
        lambda: [MemorySink(f"s{n}", store=store) for n, store in enumerate(stores, 1)],
        lambda sink: cast("MemorySink", sink).visible,
        lambda sink: _kept(cast("MemorySink", sink).store),
        tasks=tasks,
        faults=faults or {},
    )


def _kept(store: MemoryStore) -> list[object]:
    return [*store.staged, *store.prepared]


def one_batch(faults) -> World:
    return memory_world(batches=1, faults=faults)


def small(faults) -> World:
    return memory_world(batches=2, faults=faults)


def three_batches(faults) -> World:
    return memory_world(batches=3, faults=faults)


def three_sinks_and_two_tasks(faults) -> World:
    return memory_world(sinks=3, batches=3, tasks=2, faults=faults)


def forgetful(faults) -> World:
    world = memory_world(batches=3, faults=faults)
    world.settings = world.settings.__class__(
        lease_seconds=10.0, cycle_backoff=Backoff(tries=2), tidy_every=1, keep_cycles=1
    )
    return world


FAMILIES = {
    "a crash at every window": lambda: explore_crashes(three_sinks_and_two_tasks, depth=1),
    "a crash at every window, and one in the restart": lambda: explore_crashes(
        three_batches, depth=2
    ),
    "a crash at every window, with a ledger that forgets": lambda: explore_crashes(
        forgetful, depth=1
    ),
    "every fourth failure of a call, with a crash": lambda: explore_faults(
        small, crashes=1, every=4
    ),
    "a stopped owner that wakes, taken over by force": lambda: explore_woken(
        three_batches, Takeover.FORCE
    ),
    "a stopped owner that wakes, whose lease has ended": lambda: explore_woken(
        small, Takeover.WAIT
    ),
    "tasks that outlive their driver": lambda: explore_late_tasks(small),
}


@pytest.fixture(scope="module")
def censuses() -> dict[str, Census]:
    return {}


# Thousands of histories: a minute of work, which a busy machine may stretch.
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_history_loses_doubles_or_leaves_anything(family, censuses, record_property):
    began = time.process_time()

    censuses[family] = FAMILIES[family]()

    seconds = time.process_time() - began
    record_property("histories", censuses[family].histories)
    print(f"{family}: {censuses[family].histories} histories in {seconds:.1f} s")


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_no_failure_of_any_call_with_a_crash_loses_doubles_or_leaves_anything():
    assert explore_faults(small, crashes=1).histories > 10_000


def test_every_crash_point_of_the_heart_is_in_some_history(censuses):
    if set(censuses) != set(FAMILIES):
        pytest.skip("only together with every family")

    reached = set().union(*(census.points for census in censuses.values()))

    inside_a_sink = {point for point in PIPELINE_POINTS if point.step.split("_")[0] in ELSEWHERE}
    assert PIPELINE_POINTS - reached == inside_a_sink
    print(f"{sum(census.histories for census in censuses.values())} histories in all")


def walk_until_convicted() -> Violation | None:
    """Walk the shorter families until an invariant breaks."""
    try:
        explore_crashes(small, depth=1)
        explore_late_tasks(small, depth=1)
        explore_faults(one_batch, crashes=0, spare=["s1", "s2"])
        explore_woken(one_batch, Takeover.FORCE)
    except Violation as violation:
        return violation
    return None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_an_engine_with_a_broken_rule_is_convicted(mutant, monkeypatch):
    mutant.patch(monkeypatch)

    violation = walk_until_convicted()

    assert violation is not None
    assert violation.invariant in mutant.convicted_by, violation
    # Whoever cannot even run undisturbed is not mutated but broken.
    always = violation.invariant in (Invariant.ONLY_COMMITTED, Invariant.POSITIONS)
    assert always or violation.history != "undisturbed"


def test_every_invariant_convicts_some_engine():
    assert {i for mutant in MUTANTS for i in mutant.convicted_by} == set(Invariant)


def test_a_conviction_names_the_history_that_leads_to_it(monkeypatch):
    next(m for m in MUTANTS if m.name == "recovery_forgets_one_sink").patch(monkeypatch)

    with pytest.raises(Violation) as convicted:
        explore_crashes(small, depth=1)

    assert "missing in sink s2" in str(convicted.value)
    assert "history: " in str(convicted.value)
    assert convicted.value.history.startswith("commit_2pc:s2:before#")
