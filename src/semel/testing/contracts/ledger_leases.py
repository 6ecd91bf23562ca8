"""The ledger contract, first part: who owns a scope, and what the epoch refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import pytest

from semel.errors import LeaseHeld, LeaseLost
from semel.lease import Owner, Takeover
from semel.pipeline.ledger import CycleState, Ledger, ScopeLease
from semel.pipeline.txn import SinkTxnId
from semel.testing.contracts.ledger_world import (
    LEASE_SECONDS,
    ROWS,
    TOKENS,
    LedgerOwner,
    LedgerWorld,
    offsets,
    owner_elsewhere,
    owner_gone,
    scope_of,
    together,
)

WRITES: Final[
    Mapping[str, tuple[CycleState, Callable[[Ledger, ScopeLease, SinkTxnId], object]]]
] = {
    "renew": (CycleState.PLANNED, lambda ledger, lease, txn: ledger.renew(lease)),
    "open_generation": (
        CycleState.PLANNED,
        lambda ledger, lease, txn: ledger.open_generation(lease, "other"),
    ),
    "adopt_generation": (
        CycleState.PLANNED,
        lambda ledger, lease, txn: ledger.adopt_generation(lease, "other", 0, {}, {}),
    ),
    "plan": (CycleState.PLANNED, lambda ledger, lease, txn: ledger.plan(lease, txn)),
    "plan anew": (
        CycleState.PLANNED,
        lambda ledger, lease, txn: ledger.plan(lease, txn.cycle.attempt()),
    ),
    "set_range": (
        CycleState.PLANNED,
        lambda ledger, lease, txn: ledger.set_range(lease, txn, offsets(0, 1)),
    ),
    "set_prepared": (
        CycleState.PLANNED,
        lambda ledger, lease, txn: ledger.set_prepared(lease, txn, TOKENS, ROWS),
    ),
    "decide_commit": (
        CycleState.PREPARED,
        lambda ledger, lease, txn: ledger.decide_commit(lease, txn),
    ),
    "finish": (CycleState.COMMITTED, lambda ledger, lease, txn: ledger.finish(lease, txn)),
}
"""Every call that needs a lease, with a state in which it would otherwise write."""


class LedgerLeaseRules(LedgerWorld):
    """Who may write."""

    def test_the_first_owner_gets_the_first_epoch(self, ledger: Ledger) -> None:
        scope, owner = scope_of(ledger), owner_elsewhere()

        lease = ledger.acquire(scope, owner, LEASE_SECONDS)

        assert lease == ScopeLease(scope, owner, 1, LEASE_SECONDS)
        record = ledger.scope_record(scope)
        assert record is not None
        assert (record.scope, record.epoch, record.owner) == (scope, 1, owner)
        assert (record.mark, record.generation) == (None, 0)
        assert 0 < record.lease_left_seconds <= LEASE_SECONDS

    def test_a_scope_that_never_had_an_owner_is_not_known(self, ledger: Ledger) -> None:
        assert ledger.scope_record(scope_of(ledger)) is None
        assert ledger.scopes() == []

    def test_a_live_lease_is_refused_with_its_owner_and_the_time_left(self, ledger: Ledger) -> None:
        first = LedgerOwner.of(ledger)

        with pytest.raises(LeaseHeld) as refused:
            LedgerOwner.of(ledger, takeover=Takeover.WAIT)

        assert refused.value.owner == str(first.lease.owner)
        assert 0 < refused.value.seconds_left <= LEASE_SECONDS
        assert first.state(first.reach(CycleState.FINISHED)) is CycleState.FINISHED

    def test_an_expired_lease_is_taken_and_its_owner_fenced(self, ledger: Ledger) -> None:
        first = LedgerOwner.of(ledger)
        self.expire(ledger, first.scope)

        second = LedgerOwner.of(ledger, takeover=Takeover.WAIT)

        assert second.lease.epoch == 2
        with pytest.raises(LeaseLost):
            first.reach(CycleState.PLANNED)

    def test_an_expired_lease_that_nobody_took_still_writes(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        self.expire(ledger, driver.scope)

        assert driver.state(driver.reach(CycleState.FINISHED)) is CycleState.FINISHED

    def test_a_dead_process_of_this_host_is_followed_at_once(self, ledger: Ledger) -> None:
        ledger.acquire(scope_of(ledger), owner_gone(), LEASE_SECONDS)

        assert LedgerOwner.of(ledger, takeover=Takeover.WAIT).lease.epoch == 2

    def test_a_living_process_of_this_host_is_waited_for(self, ledger: Ledger) -> None:
        ledger.acquire(scope_of(ledger), Owner.here(), LEASE_SECONDS)

        with pytest.raises(LeaseHeld):
            LedgerOwner.of(ledger, takeover=Takeover.WAIT)

    def test_force_takes_a_live_lease(self, ledger: Ledger) -> None:
        first = LedgerOwner.of(ledger)

        second = LedgerOwner.of(ledger, takeover=Takeover.FORCE)

        assert second.lease.epoch == first.lease.epoch + 1
        with pytest.raises(LeaseLost) as lost:
            ledger.renew(first.lease)
        assert (lost.value.epoch, lost.value.current) == (1, 2)

    def test_the_same_owner_again_gets_a_new_epoch_and_loses_the_old(self, ledger: Ledger) -> None:
        scope, owner = scope_of(ledger), owner_elsewhere()
        old = ledger.acquire(scope, owner, LEASE_SECONDS)

        new = ledger.acquire(scope, owner, LEASE_SECONDS)

        assert new.epoch == old.epoch + 1
        ledger.renew(new)
        with pytest.raises(LeaseLost):
            ledger.renew(old)

    def test_renewing_makes_the_lease_live_again(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        self.expire(ledger, driver.scope)

        ledger.renew(driver.lease)
        ledger.renew(driver.lease)

        with pytest.raises(LeaseHeld):
            LedgerOwner.of(ledger, takeover=Takeover.WAIT)

    def test_a_released_scope_is_free_at_once_and_keeps_its_epoch(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)

        ledger.release(driver.lease)
        ledger.release(driver.lease)

        record = ledger.scope_record(driver.scope)
        assert record is not None
        assert (record.epoch, record.owner, record.lease_left_seconds) == (1, None, 0.0)
        assert LedgerOwner.of(ledger, takeover=Takeover.WAIT).lease.epoch == 2

    def test_a_released_lease_writes_nothing_more(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        ledger.release(driver.lease)

        with pytest.raises(LeaseLost):
            ledger.renew(driver.lease)
        with pytest.raises(LeaseLost):
            driver.reach(CycleState.PLANNED)

    def test_releasing_a_lost_lease_leaves_its_successor_alone(self, ledger: Ledger) -> None:
        first = LedgerOwner.of(ledger)
        second = LedgerOwner.of(ledger)

        ledger.release(first.lease)

        ledger.renew(second.lease)
        record = ledger.scope_record(second.scope)
        assert record is not None
        assert record.owner == second.lease.owner

    @pytest.mark.parametrize("write", WRITES)
    def test_a_lost_lease_changes_nothing(self, ledger: Ledger, write: str) -> None:
        state, call = WRITES[write]
        first = LedgerOwner.of(ledger)
        ledger.open_generation(first.lease, "checkpoint")
        txn = first.reach(state)
        second = LedgerOwner.of(ledger)
        before = (ledger.history(second.scope), ledger.positions(second.scope))

        with pytest.raises(LeaseLost):
            call(ledger, first.lease, txn)

        assert (ledger.history(second.scope), ledger.positions(second.scope)) == before
        assert [known.checkpoint for known in ledger.generations(second.scope)] == ["checkpoint"]
        assert second.mark() is None

    @pytest.mark.parametrize("write", WRITES)
    def test_an_epoch_alone_is_not_a_lease(self, ledger: Ledger, write: str) -> None:
        state, call = WRITES[write]
        driver = LedgerOwner.of(ledger)
        txn = driver.reach(state)
        before = ledger.history(driver.scope)

        for forged in (
            replace(driver.lease, owner=owner_elsewhere()),
            replace(driver.lease, epoch=driver.lease.epoch + 1),
        ):
            with pytest.raises(LeaseLost):
                call(ledger, forged, txn)

        assert ledger.history(driver.scope) == before

    def test_of_many_starts_at_once_exactly_one_gets_a_free_scope(self, ledger: Ledger) -> None:
        stores = [ledger, self.another(ledger)] * 4

        outcomes = together(
            *(partial(LedgerOwner.of, store, takeover=Takeover.WAIT) for store in stores)
        )

        assert sum(isinstance(outcome, LedgerOwner) for outcome in outcomes) == 1
        assert sum(isinstance(outcome, LeaseHeld) for outcome in outcomes) == len(stores) - 1

    def test_no_two_owners_ever_get_the_same_epoch(self, ledger: Ledger) -> None:
        stores = [ledger, self.another(ledger)] * 4

        outcomes = together(*(partial(LedgerOwner.of, store) for store in stores))

        epochs = sorted(o.lease.epoch for o in outcomes if isinstance(o, LedgerOwner))
        assert epochs == list(range(1, len(stores) + 1))
