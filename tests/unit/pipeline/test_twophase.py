"""Any coordinator wired to any sinks: concurrency, retries in place, tokens before the decision."""

from __future__ import annotations

import threading

import pytest

from semel.errors import Fenced, Misuse, NeedsOperator, Permanent, Retryable
from semel.events import Events, SinkRetried
from semel.memory.sink import MemorySink
from semel.pipeline.cycle import CommitAborted, CommitFatal, CommitSucceeded, run_commit_cycle
from semel.pipeline.sink import SinkFatal, SinkOK, SinkRetryable
from semel.pipeline.twophase import (
    COMMIT_BACKOFF,
    Backoff,
    concurrently,
    guarded,
    one_by_one,
    with_two_phase_sinks,
)
from semel.testing.clock import SimulatedClock
from semel.testing.faults import Fault, FaultKind, FaultPlan, faulty_sink
from semel.testing.local import local_stage
from tests.recorder import RecordingCoordinator, ScriptedCoordinator, example_txn

TXN = example_txn()


class Keeper(ScriptedCoordinator):
    """A coordinator that keeps tokens, in the order of its other calls."""

    def __init__(self, script=None):
        super().__init__(script or {})
        self.kept = {}

    def keep_tokens(self, txn, tokens):
        self._answer("keep_tokens", None)
        self.kept = dict(tokens)


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


def wire(coordinator, sinks, clock, *, each=one_by_one, events=None, rows=("a", "b")):
    receipts = {}

    def stage():
        receipts.update(local_stage(sinks, list(rows))(TXN))

    coordinator.flush = stage
    wired = with_two_phase_sinks(
        coordinator,
        sinks,
        lambda txn, name: receipts[name],
        lambda: TXN,
        each=each,
        events=events or Events(),
        clock=clock,
    )
    return lambda: run_commit_cycle(wired, events=events or Events(), clock=clock)


def test_every_sink_shows_the_batch_after_one_decision(clock):
    left, right = MemorySink("left"), MemorySink("right")
    run = wire(RecordingCoordinator(), [left, right], clock)

    outcome = run()

    assert isinstance(outcome, CommitSucceeded)
    assert sorted(left.visible) == sorted(right.visible) == ["a", "b"]
    assert left.store.staged == right.store.prepared == {}


def test_tokens_are_kept_after_the_last_prepare_and_before_the_decision(clock):
    keeper = Keeper()
    run = wire(keeper, [MemorySink("left"), MemorySink("right")], clock)

    run()

    assert set(keeper.kept) == {"left", "right"}
    assert keeper.calls.index("keep_tokens") == keeper.calls.index("commit_txn") - 1


def test_tokens_that_cannot_be_kept_abort_the_cycle(clock):
    sinks = [MemorySink("left"), MemorySink("right")]
    keeper = Keeper({"keep_tokens": [OSError("disk full")]})

    outcome = wire(keeper, sinks, clock)()

    assert outcome == CommitAborted("pre_commit_2pc: OSError: disk full")
    assert "commit_txn" not in keeper.calls
    assert [s.visible for s in sinks] == [[], []]
    assert [s.store.prepared for s in sinks] == [{}, {}]


def test_no_token_is_kept_unless_every_sink_is_prepared(clock):
    keeper = Keeper()
    broken = faulty_sink(MemorySink("right"), Fault("prepare", FaultKind.REFUSED))

    outcome = wire(keeper, [MemorySink("left"), broken], clock)()

    assert isinstance(outcome, CommitAborted)
    assert "keep_tokens" not in keeper.calls


@pytest.mark.parametrize("failing", [FaultKind.REFUSED, FaultKind.FATAL, FaultKind.BROKEN])
def test_a_sink_that_cannot_prepare_does_not_keep_the_others_from_being_asked(failing, clock):
    plan = FaultPlan()
    first = faulty_sink(MemorySink("left"), Fault("prepare", failing))
    second = faulty_sink(MemorySink("right"), plan=plan)

    outcome = wire(RecordingCoordinator(), [first, second], clock)()

    assert isinstance(outcome, CommitFatal if failing is FaultKind.FATAL else CommitAborted)
    assert outcome.reason.startswith("pre_commit_2pc: left: ")
    assert plan.calls["prepare"] == plan.calls["abort"] == 1


def test_a_sink_that_cannot_commit_does_not_keep_the_others_from_committing(clock):
    stuck = faulty_sink(MemorySink("left"), Fault("commit", FaultKind.FATAL))
    right = MemorySink("right")

    outcome = wire(RecordingCoordinator(), [stuck, right], clock)()

    assert isinstance(outcome, CommitFatal)
    assert outcome.stranded == (("left", TXN),)
    assert sorted(right.visible) == ["a", "b"]


@pytest.mark.parametrize("failing", [FaultKind.REFUSED, FaultKind.BROKEN, FaultKind.LOST_REPLY])
def test_a_commit_without_an_answer_is_tried_again_in_place(failing, clock):
    sink = MemorySink("left")
    seen = []
    events = Events()
    events.subscribe(seen.append)
    faults = [Fault("commit", failing, occurrence) for occurrence in (1, 2)]
    run = wire(RecordingCoordinator(), [faulty_sink(sink, *faults)], clock, events=events)

    outcome = run()

    assert isinstance(outcome, CommitSucceeded)
    assert sorted(sink.visible) == ["a", "b"]
    assert clock.slept == [COMMIT_BACKOFF.wait_seconds(n) for n in (1, 2)]
    retried = [(e.sink, e.attempt_number) for e in seen if isinstance(e, SinkRetried)]
    assert retried == [("left", 1), ("left", 2)]


def test_tries_in_place_are_bounded_and_nobody_waits_after_the_last(clock):
    plan = FaultPlan()
    faults = [Fault("commit", FaultKind.REFUSED, n) for n in range(1, 20)]
    sink = faulty_sink(MemorySink("left"), *faults, plan=plan)

    outcome = wire(RecordingCoordinator(), [sink], clock)()

    assert isinstance(outcome, CommitFatal)
    assert plan.calls["commit"] == COMMIT_BACKOFF.tries
    assert len(clock.slept) == COMMIT_BACKOFF.tries - 1


def test_a_fatal_answer_is_not_tried_again(clock):
    plan = FaultPlan([Fault("commit", FaultKind.FATAL)])

    outcome = wire(RecordingCoordinator(), [faulty_sink(MemorySink("left"), plan=plan)], clock)()

    assert isinstance(outcome, CommitFatal)
    assert plan.calls["commit"] == 1
    assert clock.slept == []


def test_waits_grow_to_their_limit():
    backoff = Backoff(tries=9, first_seconds=1, factor=2, most_seconds=5)

    assert [backoff.wait_seconds(n) for n in range(1, 6)] == [1, 2, 4, 5, 5]


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (Permanent("no table"), SinkFatal("no table")),
        (Fenced("newer owner"), SinkFatal("newer owner")),
        (NeedsOperator("contradiction"), SinkFatal("contradiction")),
        (Misuse("wrong"), SinkFatal("wrong")),
        (Retryable("later"), SinkRetryable("later")),
        (OSError("reset"), SinkRetryable("OSError: reset")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_exception_of_a_sink_is_an_answer_and_never_ok(error, answer):
    def call():
        raise error

    assert guarded(call) == answer


class Meeting(MemorySink):
    """Waits in prepare and in commit until every other sink is there, too."""

    def __init__(self, name, barrier):
        super().__init__(name)
        self._barrier = barrier

    def prepare(self, txn, receipts):
        self._barrier.wait(10)
        return super().prepare(txn, receipts)

    def commit(self, txn, token):
        self._barrier.wait(10)
        return super().commit(txn, token)


def test_sinks_prepare_and_commit_at_the_same_time(clock):
    barrier = threading.Barrier(3)
    sinks = [Meeting(name, barrier) for name in ("a", "b", "c")]

    outcome = wire(RecordingCoordinator(), sinks, clock, each=concurrently)()

    assert isinstance(outcome, CommitSucceeded)
    assert [sorted(sink.visible) for sink in sinks] == [["a", "b"]] * 3


def test_answers_come_in_the_order_of_the_sinks_whoever_is_first(clock):
    calls = [lambda n=n: SinkOK({"n": n}) for n in range(5)]

    assert concurrently(calls) == one_by_one(calls) == [SinkOK({"n": n}) for n in range(5)]


def test_each_cycle_asks_for_its_own_transaction(clock):
    txns = iter([example_txn(0, "a1"), example_txn(1, "a2")])
    seen = []
    sink = MemorySink("left")
    sink.prepare = lambda txn, receipts: seen.append(txn) or SinkFatal("enough")
    wired = with_two_phase_sinks(
        RecordingCoordinator(), [sink], lambda txn, name: [], lambda: next(txns), each=one_by_one
    )

    run_commit_cycle(wired)
    run_commit_cycle(wired)

    assert [txn.label for txn in seen] == ["g1.b0.a1", "g1.b1.a2"]
