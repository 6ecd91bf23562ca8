"""The ledger contract, third part: several threads and processes at once.

The executable contract of a ledger.

    leases      who may write, and what the epoch refuses
    decisions   the arrows, the write-once decision, the mark
    races       threads and processes at once
    positions   where sources stand, and what may follow
    records     order, scopes, generations, pruning, acts

An implementation binds it in a few lines:

    class TestMemoryLedger(LedgerContract):
        def make_ledger(self):
            self.clock = SimulatedClock()
            return MemoryLedger(self.clock)

        def another(self, ledger):
            return ledger

        def expire(self, ledger, scope):
            self.clock.sleep(LEASE_SECONDS)
"""

from __future__ import annotations

import threading
from functools import partial

import pytest

from semel.errors import LeaseLost, NeedsOperator
from semel.pipeline.ledger import CycleState, Decision, Ledger
from semel.testing.contracts.ledger_decisions import DecisionRules
from semel.testing.contracts.ledger_leases import LedgerLeaseRules
from semel.testing.contracts.ledger_positions import PositionRules
from semel.testing.contracts.ledger_records import RecordRules
from semel.testing.contracts.ledger_world import (
    LedgerOwner,
    LedgerWorld,
    offsets,
    together,
)

ROUNDS = 10


class LedgerRaceRules(LedgerWorld):
    """Whatever meets, one decision wins and every process gets it."""

    def test_of_many_attempts_at_a_cycle_exactly_one_is_committed(self, ledger: Ledger) -> None:
        other = self.another(ledger)
        driver = LedgerOwner.of(ledger)
        for batch in range(ROUNDS):
            txns = [driver.reach(CycleState.PREPARED, batch) for _ in range(4)]
            stores = [ledger, other] * 2

            outcomes = together(
                *(
                    partial(store.decide_commit, driver.lease, txn)
                    for store, txn in zip(stores, txns, strict=True)
                )
            )

            states = [driver.state(txn) for txn in txns]
            won = [state is CycleState.COMMITTED for state in states]
            assert sum(won) == 1
            assert [outcome is None for outcome in outcomes] == won
            assert sum(isinstance(outcome, NeedsOperator) for outcome in outcomes) == 3
            assert driver.end() == 10 * batch + 10

    def test_of_commit_and_abort_exactly_one_wins(self, ledger: Ledger) -> None:
        other = self.another(ledger)
        driver = LedgerOwner.of(ledger)
        batch = 0
        for _ in range(ROUNDS):
            txn = driver.reach(CycleState.PREPARED, batch)

            committed, aborted = together(
                partial(ledger.decide_commit, driver.lease, txn),
                partial(other.decide_abort, txn, "race"),
            )

            if driver.state(txn) is CycleState.COMMITTED:
                assert (committed, aborted) == (None, Decision.COMMIT)
                batch += 1
            else:
                assert isinstance(committed, NeedsOperator)
                assert aborted is Decision.ABORT
            assert (driver.end() or 0) == 10 * batch

    def test_one_attempt_committed_by_many_is_committed_once(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        txn = driver.reach(CycleState.PREPARED)
        stores = [ledger, self.another(ledger)] * 3

        outcomes = together(*(partial(store.decide_commit, driver.lease, txn) for store in stores))

        assert outcomes == [None] * len(stores)
        assert driver.end() == 10

    def test_one_unknown_attempt_is_planned_or_aborted_but_never_both(self, ledger: Ledger) -> None:
        other = self.another(ledger)
        driver = LedgerOwner.of(ledger)
        for batch in range(ROUNDS):
            txn = driver.cycle(batch).attempt()

            planned, aborted = together(
                partial(ledger.plan, driver.lease, txn),
                partial(other.decide_abort, txn),
            )

            assert aborted is Decision.ABORT
            assert planned is None or isinstance(planned, NeedsOperator)
            assert driver.state(txn) is CycleState.ABORTED

    def test_a_takeover_comes_before_a_commit_or_after_it(self, ledger: Ledger) -> None:
        other = self.another(ledger)
        batch = 0
        for _ in range(ROUNDS):
            old = LedgerOwner.of(ledger)
            txn = old.reach(CycleState.PREPARED, batch)

            committed, new = together(
                partial(ledger.decide_commit, old.lease, txn),
                partial(LedgerOwner.of, other),
            )

            assert isinstance(new, LedgerOwner)
            if new.state(txn) is CycleState.COMMITTED:
                assert committed is None
                batch += 1
            else:
                assert isinstance(committed, LeaseLost)
            with pytest.raises(LeaseLost):
                ledger.renew(old.lease)

    def test_decision_and_positions_become_visible_together(self, ledger: Ledger) -> None:
        other = self.another(ledger)
        driver = LedgerOwner.of(ledger)
        done = threading.Event()

        def watch() -> int:
            looks = 0
            while not done.is_set() or looks == 0:
                looks += 1
                committed = [
                    batch for batch in range(ROUNDS) if other.committed(driver.cycle(batch))
                ]
                end = other.positions(driver.scope).ends.get(("0", "t/0"))
                known = max(committed, default=-1)
                assert (end.end if end else 0) >= 10 * known + 10
                if end is not None:
                    assert other.committed(driver.cycle(end.end // 10 - 1)) is not None
            return looks

        def work() -> None:
            try:
                for batch in range(ROUNDS):
                    driver.commit(offsets(10 * batch, 10 * batch + 10), batch)
            finally:
                done.set()

        looks, worked = together(watch, work)

        assert worked is None
        assert isinstance(looks, int), looks

    def test_a_heartbeat_renews_while_cycles_run(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        done = threading.Event()

        def beat() -> int:
            beats = 0
            while not done.is_set() or beats == 0:
                ledger.renew(driver.lease)
                beats += 1
            return beats

        def work() -> None:
            try:
                for batch in range(ROUNDS):
                    driver.commit(offsets(10 * batch, 10 * batch + 10), batch)
            finally:
                done.set()

        beats, worked = together(beat, work)

        assert worked is None
        assert isinstance(beats, int), beats
        assert driver.end() == 10 * ROUNDS


class LedgerContract(LedgerLeaseRules, DecisionRules, LedgerRaceRules, PositionRules, RecordRules):
    """Everything a `semel.pipeline.ledger.Ledger` must do; derive a test class from it."""
