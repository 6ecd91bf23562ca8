"""One process's side of a scope: running its cycles, replaying them, and tidying up."""

from __future__ import annotations

import pytest

from semel.errors import SemelError
from semel.events import CycleEnded, Measurement, Metric, SinkReturned
from semel.memory.sink import MemorySink, MemoryStore
from semel.pipeline.cycle import CommitAborted, CommitFatal, CommitSucceeded, Step
from semel.pipeline.driver import CycleReplayed, Driver
from semel.pipeline.ledger import CycleState
from semel.pipeline.source import BatchRange
from semel.pipeline.twophase import Backoff
from semel.pipeline.txn import CycleId
from semel.testing.faults import Fault, FaultKind
from tests.unit.pipeline.driver_place import ROWS, Place


@pytest.fixture
def place() -> Place:
    return Place()


class TestRunning:
    def test_a_cycle_succeeds_and_shows_its_rows(self, place):
        driver = place.started()

        outcome = place.run(driver)

        assert isinstance(outcome, CommitSucceeded)
        assert place.visible == ROWS
        assert place.attempts(driver) == [CycleState.FINISHED]

    def test_an_aborted_attempt_is_followed_by_a_new_one(self, place):
        driver = place.started()
        place.sink_plan.faults.append(Fault("prepare", FaultKind.REFUSED))

        outcome = place.run(driver)

        assert isinstance(outcome, CommitSucceeded)
        assert place.attempts(driver) == [CycleState.ABORTED, CycleState.FINISHED]
        assert place.clock.slept == [driver.settings.cycle_backoff.wait_seconds(1)]
        assert place.visible == ROWS
        assert place.left == []

    def test_attempts_are_bounded(self, place):
        driver = place.started(cycle_backoff=Backoff(tries=3))
        place.sink_plan.faults += [Fault("prepare", FaultKind.REFUSED, n) for n in range(1, 9)]

        outcome = place.run(driver)

        assert isinstance(outcome, CommitAborted)
        assert outcome.reason.startswith("pre_commit_2pc: sink: ")
        assert place.attempts(driver) == [CycleState.ABORTED] * 3
        assert len(place.clock.slept) == 2
        assert driver.is_started

    def test_a_fatal_outcome_asks_for_a_new_start_which_carries_the_cycle_through(self, place):
        driver = place.started()
        place.sink_plan.faults.append(Fault("commit", FaultKind.FATAL))

        outcome = place.run(driver)
        assert isinstance(outcome, CommitFatal)
        assert [sink for sink, _ in outcome.stranded] == ["sink"]
        assert not driver.is_started
        driver.start()

        assert place.visible == ROWS
        assert isinstance(place.run(driver), CycleReplayed)

    def test_staging_that_fails_aborts_and_leaves_nothing(self, place):
        driver = place.started(cycle_backoff=Backoff(tries=2))

        def stage(txn):
            driver.sinks[0].stager(txn).open("0-0").write(ROWS)
            raise KeyError("no such column")

        outcome = place.run(driver, stage=stage)

        assert outcome == CommitAborted("flush: KeyError: 'no such column'")
        assert place.left == []
        kept = {record.reason for record in place.ledger.history(driver.scope)}
        assert kept == {"flush: KeyError: 'no such column'"}

    def test_a_range_that_cannot_be_read_aborts(self, place):
        driver = place.started(cycle_backoff=Backoff(tries=1))

        def read_range():
            raise FileNotFoundError("offsets/0")

        outcome = place.run(driver, read_range=read_range)

        assert outcome == CommitAborted("commit_offsets: FileNotFoundError: offsets/0")
        assert place.left == []

    def test_a_batch_that_does_not_start_where_the_ledger_ends_is_refused_before_staging(
        self, place
    ):
        driver = place.started()
        place.run(driver, 0)

        def stage(txn):
            raise AssertionError("nothing may be staged")

        outcome = place.run(driver, 1, lambda: BatchRange.of_offsets({"": (3, 5)}), stage)

        assert isinstance(outcome, CommitFatal)
        assert "gap, 2 to 3 was never committed" in outcome.reason

    def test_what_is_refused_before_its_first_attempt_is_counted_as_fatal_too(self, place):
        def gap():
            return BatchRange.of_offsets({"": (3, 5)})

        def other_range():
            return BatchRange.of_offsets({"": (0, 3)})

        for batch, read_range in ((1, gap), (0, other_range)):
            driver = place.started()
            place.run(driver, 0)
            place.seen.clear()
            refused = place.run(driver, batch, read_range)

            ended = [event for event in place.seen if isinstance(event, CycleEnded)]
            assert [(event.outcome, event.reason) for event in ended] == [("fatal", refused.reason)]
            driver.stop()

    def test_an_error_of_the_ledgers_driver_is_an_outcome(self, place):
        driver = place.started()
        place.ledger_plan.faults.append(Fault("committed", FaultKind.BROKEN))

        outcome = place.run(driver)

        assert isinstance(outcome, CommitFatal)
        assert outcome.reason.startswith("begin_txn: ConnectionBroke: ")
        assert [e.outcome for e in place.seen if isinstance(e, CycleEnded)] == ["fatal"]
        assert not driver.is_started


class TestReplaying:
    def test_a_committed_cycle_is_not_run_again(self, place):
        driver = place.started()
        place.run(driver)

        def stage(txn):
            raise AssertionError("nothing may be staged")

        outcome = place.run(driver, stage=stage)

        assert isinstance(outcome, CycleReplayed)
        assert place.visible == ROWS
        assert [e.outcome for e in place.seen if isinstance(e, CycleEnded)] == [
            "succeeded",
            "replayed",
        ]

    def test_the_same_cycle_with_another_range_is_fatal(self, place):
        driver = place.started()
        place.run(driver)

        outcome = place.run(driver, read_range=lambda: BatchRange.of_offsets({"": (0, 3)}))

        assert isinstance(outcome, CommitFatal)
        assert "was committed with another source range" in outcome.reason
        assert place.visible == ROWS

    def test_a_range_that_cannot_be_read_on_a_replay_is_fatal_and_an_outcome(self, place):
        driver = place.started()
        place.run(driver)

        def read_range():
            raise FileNotFoundError("offsets/0")

        outcome = place.run(driver, read_range=read_range)

        assert isinstance(outcome, CommitFatal)
        assert outcome.reason == "begin_txn: FileNotFoundError: offsets/0"


class TestTidying:
    @pytest.mark.parametrize("failing", [FaultKind.REFUSED, FaultKind.BROKEN])
    @pytest.mark.parametrize("method", ["sweep", "prune"])
    def test_a_cycle_never_fails_for_it(self, place, method, failing):
        driver = place.started(tidy_every=1, keep_cycles=1)
        plan = place.ledger_plan if method == "prune" else place.sink_plan
        plan.faults.append(Fault(method, failing, plan.calls[method] + 1))

        outcomes = [place.run(driver, batch) for batch in range(3)]

        assert all(isinstance(outcome, CommitSucceeded) for outcome in outcomes)
        assert plan.faults == []

    def test_finished_cycles_are_forgotten_and_positions_are_not(self, place):
        driver = place.started(tidy_every=1, keep_cycles=1)

        for batch in range(4):
            place.run(driver, batch)

        assert [r.txn.cycle.batch for r in place.ledger.history(driver.scope)] == [3]
        assert place.ledger.positions(driver.scope).ends["0", ""].end == 8

    def test_finished_cycles_are_forgotten_by_processes_that_run_few_of_them(self, place):
        for batch in range(4):
            driver = place.started(keep_cycles=1)
            place.run(driver, batch)
            driver.stop()

        place.started(keep_cycles=1)

        assert [r.txn.cycle.batch for r in place.ledger.history(driver.scope)] == [3]

    def test_the_leavings_of_late_tasks_are_swept_from_time_to_time(self, place):
        driver = place.started(tidy_every=3)
        place.sink_plan.faults.append(Fault("prepare", FaultKind.REFUSED))
        place.run(driver, 0)
        loser = place.ledger.attempts(CycleId(driver.scope, 1, 0))[0].txn
        driver.sinks[0].stager(loser).open("late-0").write(["late"])

        place.run(driver, 1)
        assert place.left == [loser]
        place.run(driver, 2)

        assert place.left == []


class TestTelling:
    def test_cycles_and_steps_are_metrics(self, place):
        measured = []
        place.events.subscribe(measured.append, Measurement)
        driver = place.started()

        place.run(driver)
        place.sink_plan.faults += [Fault("prepare", FaultKind.FATAL, 2)]
        place.run(driver, 1)

        cycles = [one.labels for one in measured if one.metric is Metric.CYCLES]
        assert [labels["outcome"] for labels in cycles] == ["succeeded", "fatal"]
        steps = [one.labels["step"] for one in measured if one.metric is Metric.STEP_DURATION]
        assert steps[:7] == list(Step)

    def test_what_is_stranded_is_a_metric_by_sink_until_recovery_has_settled_it(self, place):
        measured = []
        place.events.subscribe(measured.append, Measurement)
        driver = place.started(commit_backoff=Backoff(tries=1))
        place.sink_plan.faults += [Fault("commit", FaultKind.REFUSED, n) for n in (1, 2)]

        place.run(driver)
        place.clock.advance(60)
        with pytest.raises(SemelError):
            place.started(commit_backoff=Backoff(tries=1))
        place.started()

        gauges = [
            (one.labels["sink"], one.value) for one in measured if one.metric is Metric.STRANDED
        ]
        ages = [one.value for one in measured if one.metric is Metric.STRANDED_OLDEST_SECONDS]
        assert gauges == [("sink", n) for n in (1, 1, 1, 0)]
        assert ages[0] == ages[-1] == 0
        assert ages[1] >= 60

    def test_a_sink_that_comes_back_is_told_which_cycles_it_missed(self, place):
        ledger, stores = place.ledger, {"left": MemoryStore(), "right": MemoryStore()}

        def run(batch, *names):
            sinks = [MemorySink(name, store=stores[name]) for name in names]
            driver = Driver("app", ledger, sinks, events=place.events, clock=place.clock)
            driver.start()
            if batch == 0:
                ledger.open_generation(driver.lease, "checkpoint")
            place.run(driver, batch)
            driver.stop()

        run(0, "left", "right")
        for batch in (1, 2, 3):
            run(batch, "left")
        assert not [event for event in place.seen if isinstance(event, SinkReturned)]
        run(4, "left", "right")
        run(5, "left", "right")

        (told,) = [event for event in place.seen if isinstance(event, SinkReturned)]
        assert (told.sink, told.missed) == ("right", 3)
        assert (told.first, told.last) == ("app/main/g1.b1", "app/main/g1.b3")
