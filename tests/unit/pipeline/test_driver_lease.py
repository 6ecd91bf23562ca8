"""One process's side of a scope: owning it, keeping it, and losing it."""

from __future__ import annotations

import time

import pytest

from semel import ExactlyOnce
from semel.errors import Fenced, LeaseHeld, Misuse, NeedsOperator, SemelError
from semel.events import LeaseEnded, LeaseTaken
from semel.lease import Takeover
from semel.memory.ledger import MemoryLedger
from semel.memory.sink import MemorySink
from semel.pipeline.cycle import CommitFatal, CommitSucceeded
from semel.pipeline.driver import Driver, Heartbeat
from semel.testing.faults import ConnectionBroke, Fault, FaultKind, FaultPlan, faulty_ledger
from semel.testing.local import local_stage
from tests.unit.pipeline.driver_place import ROWS, Place


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

    @pytest.mark.parametrize("kind", [FaultKind.REFUSED, FaultKind.FATAL])
    def test_a_start_that_fails_lets_the_next_one_start_at_once(self, place, kind):
        place.sink_plan.faults.append(Fault("recover", kind))

        with pytest.raises((SemelError, ConnectionBroke)):
            place.driver().start()

        assert place.started().lease.epoch == 2
        assert place.clock.slept == []

    def test_the_refusal_of_recovery_is_kept_on_the_pipeline(self):
        sink, refused = MemorySink(), NeedsOperator("the marks contradict each other")

        def refuse(scope, epoch):
            raise refused

        sink.fence = refuse
        pipeline = ExactlyOnce("app", MemoryLedger(), [sink])

        with pytest.raises(NeedsOperator):
            pipeline.recover()

        assert pipeline.failure is refused

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
        place.sink_plan.faults.append(Fault("fence", FaultKind.BROKEN))

        with pytest.raises(OSError, match="fence"):
            driver.start()
        assert not driver.is_started
        driver.start()

        assert driver.is_started
        assert place.clock.slept == []


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
        place.sink_plan.faults.append(Fault("prepare", FaultKind.FATAL))

        outcome = place.run(driver)

        assert isinstance(outcome, CommitFatal)
        assert not isinstance(outcome.cause, Fenced)

    def test_running_again_after_a_fatal_outcome_under_a_successor_is_still_an_outcome(self, place):
        driver = place.started()
        place.sink_plan.faults.append(Fault("prepare", FaultKind.FATAL))
        place.run(driver)
        place.started(takeover=Takeover.FORCE)

        outcome = place.run(driver)

        assert isinstance(outcome, CommitFatal)


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
        plan = FaultPlan([Fault("renew", FaultKind.REFUSED), Fault("renew", FaultKind.BROKEN, 2)])
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
