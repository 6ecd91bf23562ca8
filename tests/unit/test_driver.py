"""One process's side of a scope: owning it, running its cycles, and losing it."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from semel.errors import Fenced, LeaseHeld, Misuse
from semel.events import CycleEnded, Events, LeaseEnded, LeaseTaken
from semel.lease import Owner, Takeover
from semel.memory.ledger import MemoryLedger
from semel.memory.sink import MemorySink
from semel.memory.store import MemoryStore
from semel.pipeline.cycle import CommitAborted, CommitFatal, CommitSucceeded
from semel.pipeline.driver import CycleReplayed, Driver, Settings
from semel.pipeline.heartbeat import Heartbeat
from semel.pipeline.source import BatchRange
from semel.pipeline.states import CycleState
from semel.pipeline.twophase import Backoff, one_by_one
from semel.pipeline.txn import CycleId
from semel.testing.clock import SimulatedClock
from semel.testing.faults import Failing, Fault, FaultPlan, faulty_ledger, faulty_sink
from semel.testing.local import local_stage

ROWS = ["a", "b"]


class Place:
    """A ledger and a sink that several drivers use."""

    def __init__(self) -> None:
        self.clock = SimulatedClock()
        self.ledger = MemoryLedger(self.clock)
        self.store = MemoryStore(clock=self.clock)
        self.ledger_plan = FaultPlan()
        self.sink_plan = FaultPlan()
        self.seen = []
        self.events = Events()
        self.events.subscribe(self.seen.append)
        self.owners = 0

    def driver(self, **settings) -> Driver:
        self.owners += 1
        return Driver(
            "app",
            faulty_ledger(self.ledger, plan=self.ledger_plan),
            [faulty_sink(MemorySink("sink", store=self.store), plan=self.sink_plan)],
            settings=replace(Settings(lease_seconds=30.0), **settings),
            owner=Owner("elsewhere", "boot", self.owners, "0", f"owner-{self.owners}"),
            each=one_by_one,
            events=self.events,
            clock=self.clock,
        )

    def started(self, **settings) -> Driver:
        driver = self.driver(**settings)
        driver.start()
        driver.ledger.open_generation(driver.lease, "checkpoint")
        return driver

    def run(self, driver: Driver, batch: int = 0, read_range=None, stage=None):
        return driver.run_cycle(
            CycleId(driver.scope, 1, batch),
            read_range or (lambda: BatchRange.of_offsets({"": (batch * 2, batch * 2 + 2)})),
            stage or local_stage(driver.sinks, ROWS),
        )

    def attempts(self, driver: Driver, batch: int = 0):
        return [r.state for r in self.ledger.attempts(CycleId(driver.scope, 1, batch))]

    @property
    def visible(self):
        return sorted(MemorySink("sink", store=self.store).visible)

    @property
    def left(self):
        return [*self.store.staged, *self.store.prepared]


@pytest.fixture
def place() -> Place:
    return Place()


class TestOwning:
    def test_a_pipeline_needs_a_sink(self):
        with pytest.raises(Misuse, match="at least one sink"):
            Driver("app", MemoryLedger(), [])

    def test_two_sinks_need_two_names(self):
        with pytest.raises(Misuse, match="same name"):
            Driver("app", MemoryLedger(), [MemorySink("a"), MemorySink("a")])

    def test_cycles_need_a_start(self, place):
        driver = place.driver()

        outcome = place.run(driver)

        assert isinstance(outcome, CommitFatal)
        assert isinstance(outcome.cause, Misuse)
        assert not driver.is_started
        assert place.left == []

    def test_a_dead_owners_lease_is_waited_for(self, place):
        place.started()

        second = place.started()

        assert second.lease.epoch == 2
        assert 30.0 <= sum(place.clock.slept) <= 31.5
        taken = [e for e in place.seen if isinstance(e, LeaseTaken)]
        assert [e.epoch for e in taken] == [1, 2]
        assert taken[1].from_owner == "process 1 on elsewhere"

    def test_an_owner_that_keeps_renewing_is_alive_and_not_waited_for_twice(self, place):
        first = place.started()
        second = place.driver()
        sleep = place.clock.sleep

        def sleep_while_the_first_renews(seconds):
            sleep(seconds)
            place.ledger.renew(first.lease)

        place.clock.sleep = sleep_while_the_first_renews
        with pytest.raises(LeaseHeld):
            second.start()

        assert sum(place.clock.slept) <= 32
        assert first.lease.epoch == place.ledger.scope_record(first.scope).epoch

    def test_force_takes_the_scope_at_once(self, place):
        place.started()

        place.started(takeover=Takeover.FORCE)

        assert place.clock.slept == []

    def test_a_released_scope_is_taken_at_once(self, place):
        first = place.started()

        first.stop()
        place.started()

        assert place.clock.slept == []
        assert [e.how for e in place.seen if isinstance(e, LeaseEnded)] == ["released"]

    def test_stopping_twice_is_stopping_once(self, place):
        driver = place.started()

        driver.stop()
        driver.stop()

        assert not driver.is_started

    def test_a_start_that_failed_can_be_repeated_without_waiting(self, place):
        driver = place.driver()
        place.sink_plan.faults.append(Fault("fence", Failing.BROKEN))

        with pytest.raises(OSError, match="fence"):
            driver.start()
        assert not driver.is_started
        driver.start()

        assert driver.is_started
        assert place.clock.slept == []


class TestRunning:
    def test_a_cycle_succeeds_and_shows_its_rows(self, place):
        driver = place.started()

        outcome = place.run(driver)

        assert isinstance(outcome, CommitSucceeded)
        assert place.visible == ROWS
        assert place.attempts(driver) == [CycleState.FINISHED]

    def test_an_aborted_attempt_is_followed_by_a_new_one(self, place):
        driver = place.started()
        place.sink_plan.faults.append(Fault("prepare", Failing.REFUSED))

        outcome = place.run(driver)

        assert isinstance(outcome, CommitSucceeded)
        assert place.attempts(driver) == [CycleState.ABORTED, CycleState.FINISHED]
        assert place.clock.slept == [driver.settings.cycle_backoff.wait_seconds(1)]
        assert place.visible == ROWS
        assert place.left == []

    def test_attempts_are_bounded(self, place):
        driver = place.started(cycle_backoff=Backoff(tries=3))
        place.sink_plan.faults += [Fault("prepare", Failing.REFUSED, n) for n in range(1, 9)]

        outcome = place.run(driver)

        assert isinstance(outcome, CommitAborted)
        assert outcome.reason.startswith("pre_commit_2pc: sink: ")
        assert place.attempts(driver) == [CycleState.ABORTED] * 3
        assert len(place.clock.slept) == 2
        assert driver.is_started

    def test_a_fatal_outcome_asks_for_a_new_start_which_carries_the_cycle_through(self, place):
        driver = place.started()
        place.sink_plan.faults.append(Fault("commit", Failing.FATAL))

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

    def test_an_error_of_the_ledgers_driver_is_an_outcome(self, place):
        driver = place.started()
        place.ledger_plan.faults.append(Fault("committed", Failing.BROKEN))

        outcome = place.run(driver)

        assert isinstance(outcome, CommitFatal)
        assert outcome.reason.startswith("begin_txn: ConnectionBroke: ")
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


class TestLosing:
    def test_a_fenced_owner_says_so_and_changes_nothing(self, place):
        first = place.started()
        second = place.started(takeover=Takeover.FORCE)

        outcome = place.run(first)

        assert isinstance(outcome, CommitFatal)
        assert isinstance(outcome.cause, Fenced)
        assert place.attempts(first) == []
        assert isinstance(place.run(second), CommitSucceeded)
        assert ("lost", 1) in [(e.how, e.epoch) for e in place.seen if isinstance(e, LeaseEnded)]

    def test_an_owner_fenced_while_it_stages_says_so(self, place):
        first = place.started()
        staged = local_stage(first.sinks, ROWS)

        def stage_while_another_takes_over(txn):
            receipts = staged(txn)
            place.started(takeover=Takeover.FORCE)
            return receipts

        outcome = place.run(first, stage=stage_while_another_takes_over)

        assert isinstance(outcome, CommitFatal)
        assert isinstance(outcome.cause, Fenced)
        assert "fenced" in outcome.reason
        assert place.visible == []

    def test_a_fenced_owner_is_not_told_that_its_successors_cycle_was_its_own(self, place):
        first = place.started()
        second = place.started(takeover=Takeover.FORCE)
        place.run(second)

        outcome = place.run(first)

        assert isinstance(outcome, CommitFatal)
        assert isinstance(outcome.cause, Fenced)

    def test_a_sink_that_refuses_a_fenced_owner_is_recognised_as_fencing(self, place):
        first = place.started()
        stage = local_stage(first.sinks, ROWS)
        keep = first.ledger._inner.set_range

        def take_over_after_the_range(*arguments):
            keep(*arguments)
            place.started(takeover=Takeover.FORCE)

        place.ledger.set_range = take_over_after_the_range
        outcome = place.run(first, stage=stage)

        assert isinstance(outcome, CommitFatal)
        assert isinstance(outcome.cause, Fenced)
        assert "pre_commit_2pc: sink: " in outcome.reason

    def test_a_fatal_outcome_without_a_successor_is_not_called_fenced(self, place):
        driver = place.started()
        place.sink_plan.faults.append(Fault("prepare", Failing.FATAL))

        outcome = place.run(driver)

        assert isinstance(outcome, CommitFatal)
        assert not isinstance(outcome.cause, Fenced)

    def test_running_again_after_a_fatal_outcome_under_a_successor_is_still_an_outcome(self, place):
        driver = place.started()
        place.sink_plan.faults.append(Fault("prepare", Failing.FATAL))
        place.run(driver)
        place.started(takeover=Takeover.FORCE)

        outcome = place.run(driver)

        assert isinstance(outcome, CommitFatal)


class TestTidying:
    @pytest.mark.parametrize("failing", [Failing.REFUSED, Failing.BROKEN])
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
        place.sink_plan.faults.append(Fault("prepare", Failing.REFUSED))
        place.run(driver, 0)
        loser = place.ledger.attempts(CycleId(driver.scope, 1, 0))[0].txn
        driver.sinks[0].stager(loser).open("late-0").write(["late"])

        place.run(driver, 1)
        assert place.left == [loser]
        place.run(driver, 2)

        assert place.left == []


class TestHeartbeat:
    def until(self, condition):
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    @pytest.fixture
    def lease(self, place):
        driver = place.started(lease_seconds=0.03)
        return driver.lease

    def test_the_lease_is_renewed_until_it_is_stopped(self, place, lease):
        plan = FaultPlan()
        heartbeat = Heartbeat(faulty_ledger(place.ledger, plan=plan), lease).start()

        self.until(lambda: plan.calls["renew"] >= 3)
        heartbeat.stop()

        assert not heartbeat.lost

    def test_a_ledger_that_is_away_is_asked_again(self, place, lease):
        plan = FaultPlan([Fault("renew", Failing.REFUSED), Fault("renew", Failing.BROKEN, 2)])
        heartbeat = Heartbeat(faulty_ledger(place.ledger, plan=plan), lease).start()

        self.until(lambda: plan.calls["renew"] >= 4)
        heartbeat.stop()

        assert not heartbeat.lost

    def test_a_lost_lease_ends_it_and_is_an_event(self, place, lease):
        heartbeat = Heartbeat(place.ledger, lease, place.events).start()

        place.started(takeover=Takeover.FORCE)
        self.until(lambda: heartbeat.lost)
        self.until(lambda: any(isinstance(e, LeaseEnded) for e in place.seen))

        assert [e.how for e in place.seen if isinstance(e, LeaseEnded)] == ["lost"]

    def test_work_that_has_ended_releases_the_lease(self, place, lease):
        Heartbeat(place.ledger, lease, is_active=lambda: False).start()

        self.until(lambda: place.ledger.scope_record(lease.scope).owner is None)
