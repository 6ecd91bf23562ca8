"""The ledger contract convicts ledgers that are broken on purpose, one per rule."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from semel.lease import Takeover
from semel.memory.ledger import MemoryLedger, _Held
from semel.pipeline.ledger import CycleState, Decision, ScopeLease
from semel.testing.clock import SimulatedClock
from semel.testing.contracts.ledger import LedgerContract
from semel.testing.contracts.ledger_world import LEASE_SECONDS


class ForgetsTheEpoch(MemoryLedger):
    """Writes for whoever asks."""

    def _fenced(self, lease, txn=None):
        held = self._of(lease.scope)
        current = ScopeLease(lease.scope, held.owner or lease.owner, held.epoch, lease.seconds)
        return super()._fenced(current, txn) if held.owner else held


class ChecksTheEpochOnceOnly(MemoryLedger):
    """Trusts an epoch that is at least the current one."""

    def _fenced(self, lease, txn=None):
        held = self._of(lease.scope)
        if lease.epoch > held.epoch:
            return held
        return super()._fenced(lease, txn)


class OverwritesTheDecision(MemoryLedger):
    """Lets a late ABORT win over a COMMIT."""

    def decide_abort(self, txn, reason=""):
        with self._lock:
            held = self._of(txn.scope)
            if known := held.attempts.get(txn):
                held.attempts[txn] = replace(known, state=CycleState.ABORTED, reason=reason)
                return Decision.ABORT
        return super().decide_abort(txn, reason)


class ForgetsUnknownAborts(MemoryLedger):
    """Answers ABORT for an unknown attempt without writing it down."""

    def decide_abort(self, txn, reason=""):
        if self.attempt(txn) is None:
            return Decision.ABORT
        return super().decide_abort(txn, reason)


class CommitsTwice(MemoryLedger):
    """Does not look for another COMMIT of the cycle."""

    def decide_commit(self, lease, txn):
        with self._lock:
            held = self._of(txn.scope)
            others = {t: r for t, r in held.attempts.items() if t.cycle == txn.cycle and t != txn}
            for other in others:
                del held.attempts[other]
            try:
                super().decide_commit(lease, txn)
            finally:
                held.attempts.update(others)


class IgnoresGaps(MemoryLedger):
    """Moves the positions to wherever the batch says."""

    def decide_commit(self, lease, txn):
        with self._lock:
            held = self._of(txn.scope)
            known = held.attempts.get(txn)
            if known and known.range and known.state is CycleState.PREPARED:
                held.ends.clear()
            super().decide_commit(lease, txn)


class LeavesThePositions(MemoryLedger):
    """Decides without moving the positions."""

    def decide_commit(self, lease, txn):
        with self._lock:
            before = dict(self._of(txn.scope).ends)
            super().decide_commit(lease, txn)
            self._of(txn.scope).ends = before


class LetsTheMarkPass(MemoryLedger):
    """Takes the last finished cycle for the mark."""

    def finish(self, lease, txn):
        with self._lock:
            super().finish(lease, txn)
            self._of(txn.scope).mark = txn


class PrunesTooMuch(MemoryLedger):
    """Forgets the committed files with their cycles."""

    def prune(self, scope, keep):
        with self._lock:
            gone = super().prune(scope, keep)
            self._of(scope).paths.clear()
            return gone


class MixesScopes(MemoryLedger):
    """Keeps all queries of an app together."""

    def _read(self, scope):
        return self._scopes.get(replace(scope, query="main")) or _Held()

    def _of(self, scope):
        return super()._of(replace(scope, query="main"))


class TakesLiveLeases(MemoryLedger):
    """Never waits."""

    def acquire(self, scope, owner, seconds, takeover=Takeover.FORCE):
        return super().acquire(scope, owner, seconds, Takeover.FORCE)


class ChecksBeforeItsTransaction(MemoryLedger):
    """Looks whether the attempt is undecided, and decides a moment later."""

    def decide_commit(self, lease, txn):
        known = self.attempt(txn)
        threading.Event().wait(0.002)
        with self._lock:
            if known is not None and known.state is CycleState.PREPARED:
                self._of(txn.scope).attempts[txn] = known
            super().decide_commit(lease, txn)


class RenamesWhatIsOpen(MemoryLedger):
    """Renames an app in the middle of a cycle."""

    def open_attempts(self, scope):
        return []


CONVICTED_BY = {
    RenamesWhatIsOpen: ("test_an_app_with_open_attempts_or_a_name_with_cycles_is_not_renamed"),
    ForgetsTheEpoch: "test_a_lost_lease_changes_nothing",
    ChecksTheEpochOnceOnly: "test_an_epoch_alone_is_not_a_lease",
    OverwritesTheDecision: "test_there_are_no_other_arrows",
    ForgetsUnknownAborts: "test_aborting_an_unknown_attempt_bars_it_permanently",
    CommitsTwice: "test_a_cycle_never_gets_a_second_commit",
    IgnoresGaps: "test_a_batch_that_does_not_follow_is_refused_and_moves_nothing",
    LeavesThePositions: "test_a_batch_that_follows_is_committed",
    LetsTheMarkPass: "test_the_mark_never_passes_an_unfinished_commit",
    PrunesTooMuch: "test_pruning_never_touches_what_is_not_over",
    MixesScopes: "test_scopes_never_touch_each_other",
    ChecksBeforeItsTransaction: "test_of_commit_and_abort_exactly_one_wins",
    TakesLiveLeases: "test_a_live_lease_is_refused_with_its_owner_and_the_time_left",
}


def contract_of(ledger_class):
    class Bound(LedgerContract):
        def make_ledger(self):
            self.clock = SimulatedClock()
            return ledger_class(self.clock)

        def another(self, ledger):
            return ledger

        def expire(self, ledger, scope):
            self.clock.advance(LEASE_SECONDS)

    return Bound


def test_a_right_ledger_is_not_convicted():
    assert contract_of(MemoryLedger).violations() == {}


@pytest.mark.parametrize("broken", CONVICTED_BY, ids=lambda broken: broken.__name__)
def test_a_broken_ledger_is_convicted_by_the_rule_it_breaks(broken):
    assert CONVICTED_BY[broken] in contract_of(broken).violations()
