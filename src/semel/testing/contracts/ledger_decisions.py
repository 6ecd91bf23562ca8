"""The ledger contract: who may write, and the write-once decision of every attempt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Final, TypeAlias

import pytest

from semel.errors import LeaseHeld, LeaseLost, Misuse, NeedsOperator
from semel.lease import Owner, Takeover
from semel.pipeline.ledger import ARROWS, CycleState, Decision, Ledger, ScopeLease
from semel.pipeline.source import BatchRange
from semel.pipeline.txn import CycleId, Scope, SinkTxnId
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

Write: TypeAlias = Callable[[Ledger, ScopeLease, SinkTxnId], object]

WRITES: Final[Mapping[str, tuple[CycleState, Write]]] = {
    "renew": (CycleState.PLANNED, lambda it, lease, txn: it.renew(lease)),
    "open_generation": (
        CycleState.PLANNED,
        lambda it, lease, txn: it.open_generation(lease, "other"),
    ),
    "adopt_generation": (
        CycleState.PLANNED,
        lambda it, lease, txn: it.adopt_generation(lease, "other", 0, {}, {}),
    ),
    "plan": (CycleState.PLANNED, lambda it, lease, txn: it.plan(lease, txn)),
    "plan anew": (CycleState.PLANNED, lambda it, lease, txn: it.plan(lease, txn.cycle.attempt())),
    "set_range": (
        CycleState.PLANNED,
        lambda it, lease, txn: it.set_range(lease, txn, offsets(0, 1)),
    ),
    "set_prepared": (
        CycleState.PLANNED,
        lambda it, lease, txn: it.set_prepared(lease, txn, TOKENS, ROWS),
    ),
    "decide_commit": (CycleState.PREPARED, lambda it, lease, txn: it.decide_commit(lease, txn)),
    "finish": (CycleState.COMMITTED, lambda it, lease, txn: it.finish(lease, txn)),
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

    def test_an_expired_lease_that_was_not_taken_still_writes(self, ledger: Ledger) -> None:
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


MOVES: Final[Mapping[CycleState, Callable[[LedgerOwner, SinkTxnId], object]]] = {
    CycleState.PREPARED: lambda driver, txn: driver.ledger.set_prepared(
        driver.lease, txn, TOKENS, ROWS
    ),
    CycleState.COMMITTED: lambda driver, txn: driver.ledger.decide_commit(driver.lease, txn),
    CycleState.ABORTED: lambda driver, txn: driver.ledger.decide_abort(txn, "given up"),
    CycleState.FINISHED: lambda driver, txn: driver.ledger.finish(driver.lease, txn),
}
"""The call that brings an attempt to each state."""

ARROWS_TAKEN: Final = [(old, new) for old in CycleState for new in MOVES if new in ARROWS[old]]

REPEATED: Final = [(state, state) for state in MOVES] + [
    (CycleState.FINISHED, CycleState.COMMITTED),  # COMMIT stands, whatever followed
]

REFUSED: Final = [
    arrow for arrow in product(CycleState, MOVES) if arrow not in ARROWS_TAKEN + REPEATED
]


class DecisionRules(LedgerWorld):
    """What may be written, and what is final."""

    @pytest.mark.parametrize(("old", "new"), ARROWS_TAKEN)
    def test_every_arrow_can_be_taken(
        self, ledger: Ledger, old: CycleState, new: CycleState
    ) -> None:
        driver = LedgerOwner.of(ledger)
        txn = driver.reach(old)
        if (old, new) == (CycleState.PLANNED, CycleState.PREPARED):
            ledger.set_range(driver.lease, txn, offsets(0, 10))

        MOVES[new](driver, txn)

        assert driver.state(txn) is new

    @pytest.mark.parametrize(("old", "new"), REPEATED)
    def test_every_step_may_be_repeated(
        self, ledger: Ledger, old: CycleState, new: CycleState
    ) -> None:
        driver = LedgerOwner.of(ledger)
        txn = driver.reach(old)
        before = driver.record(txn)

        MOVES[new](driver, txn)
        MOVES[new](driver, txn)

        assert driver.record(txn) == before
        assert driver.end() == (10 if old.is_committed else None)

    @pytest.mark.parametrize(("old", "new"), REFUSED)
    def test_there_are_no_other_arrows(
        self, ledger: Ledger, old: CycleState, new: CycleState
    ) -> None:
        driver = LedgerOwner.of(ledger)
        txn = driver.reach(old)
        before = (driver.record(txn), ledger.positions(driver.scope), driver.mark())

        if new is CycleState.ABORTED:
            assert ledger.decide_abort(txn) is Decision.COMMIT
        else:
            with pytest.raises(NeedsOperator):
                MOVES[new](driver, txn)

        assert (driver.record(txn), ledger.positions(driver.scope), driver.mark()) == before

    @pytest.mark.parametrize("state", CycleState)
    def test_planning_again_changes_nothing_and_revives_nothing(
        self, ledger: Ledger, state: CycleState
    ) -> None:
        driver = LedgerOwner.of(ledger)
        txn = driver.reach(state)
        before = driver.record(txn)

        if state.is_decided:
            with pytest.raises(NeedsOperator):
                ledger.plan(driver.lease, txn)
        else:
            ledger.plan(driver.lease, txn)

        assert driver.record(txn) == before

    @pytest.mark.parametrize("state", CycleState)
    def test_a_range_is_kept_once_and_only_before_the_decision(
        self, ledger: Ledger, state: CycleState
    ) -> None:
        driver = LedgerOwner.of(ledger)
        txn = driver.reach(state)

        if state.is_decided:
            with pytest.raises(NeedsOperator):
                ledger.set_range(driver.lease, txn, offsets(0, 10))
            return
        ledger.set_range(driver.lease, txn, offsets(0, 10))
        ledger.set_range(driver.lease, txn, offsets(0, 10))
        with pytest.raises(NeedsOperator):
            ledger.set_range(driver.lease, txn, offsets(0, 11))

        assert driver.record(txn).range == offsets(0, 10)

    @pytest.mark.parametrize("new", [state for state in MOVES if state is not CycleState.ABORTED])
    def test_an_attempt_that_was_never_planned_goes_nowhere(
        self, ledger: Ledger, new: CycleState
    ) -> None:
        driver = LedgerOwner.of(ledger)
        txn = driver.cycle().attempt()

        with pytest.raises(NeedsOperator):
            MOVES[new](driver, txn)
        with pytest.raises(NeedsOperator):
            ledger.set_range(driver.lease, txn, offsets(0, 10))

        assert ledger.attempt(txn) is None

    def test_without_a_range_there_is_no_commit(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        txn = driver.reach(CycleState.PLANNED)
        ledger.set_prepared(driver.lease, txn, TOKENS, ROWS)

        with pytest.raises(NeedsOperator):
            ledger.decide_commit(driver.lease, txn)

        assert driver.state(txn) is CycleState.PREPARED

    def test_tokens_come_back_as_they_were_given(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        txn = driver.reach(CycleState.FINISHED)

        record = self.another(ledger).attempt(txn)

        assert record is not None
        assert (record.tokens, record.rows) == (TOKENS, ROWS)
        assert (record.txn, record.epoch, record.range) == (txn, 1, offsets(0, 10))
        assert record.decided_at is not None
        assert record.finished_at is not None
        assert record.planned_at <= record.decided_at <= record.finished_at

    def test_other_tokens_for_a_prepared_attempt_are_refused(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        txn = driver.reach(CycleState.PREPARED)

        with pytest.raises(NeedsOperator):
            ledger.set_prepared(driver.lease, txn, {"left": {}}, ROWS)
        with pytest.raises(NeedsOperator):
            ledger.set_prepared(driver.lease, txn, TOKENS, {"left": 4})

        assert driver.record(txn).tokens == TOKENS

    def test_a_token_that_is_not_json_is_refused(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        txn = driver.reach(CycleState.PLANNED)

        with pytest.raises(Misuse):
            ledger.set_prepared(driver.lease, txn, {"left": {"x": object()}}, {})

        assert driver.state(txn) is CycleState.PLANNED

    @pytest.mark.parametrize("state", [CycleState.COMMITTED, CycleState.FINISHED])
    def test_a_cycle_never_gets_a_second_commit(self, ledger: Ledger, state: CycleState) -> None:
        driver = LedgerOwner.of(ledger)
        beside = driver.reach(CycleState.PREPARED, read=offsets(10, 20))
        winner = driver.reach(state)

        with pytest.raises(NeedsOperator):
            ledger.decide_commit(driver.lease, beside)
        with pytest.raises(NeedsOperator):
            driver.reach(CycleState.PLANNED)

        committed = ledger.committed(driver.cycle())
        assert committed is not None
        assert committed.txn == winner
        assert ledger.decide_abort(beside) is Decision.ABORT
        assert ledger.decide_abort(winner) is Decision.COMMIT

    def test_a_cycle_whose_attempts_were_aborted_can_be_committed(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        driver.reach(CycleState.ABORTED)
        driver.reach(CycleState.ABORTED)

        txn = driver.reach(CycleState.FINISHED)

        assert driver.mark() == txn

    def test_aborting_an_unknown_attempt_bars_it_permanently(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        txn = driver.cycle().attempt()

        assert ledger.decide_abort(txn, "its state is unknown") is Decision.ABORT
        with pytest.raises(NeedsOperator):
            ledger.plan(driver.lease, txn)

        record = driver.record(txn)
        assert (record.state, record.reason) == (CycleState.ABORTED, "its state is unknown")
        assert record.decided_at is not None

    def test_the_first_reason_of_an_abort_is_kept(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        txn = driver.reach(CycleState.PREPARED)

        ledger.decide_abort(txn, "flush: disk full")
        ledger.decide_abort(txn, "recovery")

        assert driver.record(txn).reason == "flush: disk full"
        assert driver.record(txn).tokens == TOKENS

    def test_abort_needs_no_lease_and_settles_a_predecessors_attempt(self, ledger: Ledger) -> None:
        first = LedgerOwner.of(ledger)
        txn = first.reach(CycleState.PREPARED)
        second = LedgerOwner.of(ledger)

        assert ledger.decide_abort(txn) is Decision.ABORT
        assert second.state(txn) is CycleState.ABORTED
        assert second.record(txn).epoch == first.lease.epoch

    def test_a_successor_gives_up_all_that_older_epochs_left_undecided(
        self, ledger: Ledger
    ) -> None:
        first = LedgerOwner.of(ledger)
        committed = first.reach(CycleState.COMMITTED)
        left = [first.reach(CycleState.PREPARED, batch=1), first.reach(CycleState.PLANNED, batch=2)]
        stranger = LedgerOwner.of(ledger, query="other")
        others = stranger.reach(CycleState.PREPARED)
        second = LedgerOwner.of(ledger)
        own = second.reach(CycleState.PLANNED, batch=3)

        assert ledger.abort_undecided(second.lease, "its owner is fenced") == left
        assert ledger.abort_undecided(second.lease) == []

        assert [second.state(txn) for txn in left] == [CycleState.ABORTED] * 2
        assert second.record(left[0]).reason == "its owner is fenced"
        assert second.state(committed) is CycleState.COMMITTED
        assert second.state(own) is CycleState.PLANNED
        assert stranger.state(others) is CycleState.PREPARED

    def test_a_fenced_owner_gives_nothing_up(self, ledger: Ledger) -> None:
        first = LedgerOwner.of(ledger)
        txn = first.reach(CycleState.PREPARED)
        second = LedgerOwner.of(ledger)

        with pytest.raises(LeaseLost):
            ledger.abort_undecided(first.lease)

        assert second.state(txn) is CycleState.PREPARED

    def test_a_successor_finishes_its_predecessors_commit(self, ledger: Ledger) -> None:
        txn = LedgerOwner.of(ledger).reach(CycleState.COMMITTED)
        successor = LedgerOwner.of(ledger)

        assert [record.txn for record in ledger.open_attempts(successor.scope)] == [txn]
        ledger.finish(successor.lease, txn)

        assert successor.mark() == txn
        assert ledger.open_attempts(successor.scope) == []

    def test_repeating_a_commit_that_stands_needs_no_lease(self, ledger: Ledger) -> None:
        first = LedgerOwner.of(ledger)
        txn = first.reach(CycleState.COMMITTED)
        LedgerOwner.of(ledger)

        ledger.decide_commit(first.lease, txn)

        assert first.end() == 10

    def test_the_mark_only_rises(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        first = driver.reach(CycleState.FINISHED, 0)
        second = driver.reach(CycleState.FINISHED, 1)

        ledger.finish(driver.lease, first)

        assert driver.mark() == second

    def test_the_mark_never_passes_an_unfinished_commit(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        zeroth = driver.reach(CycleState.FINISHED, 0)
        first = driver.reach(CycleState.COMMITTED, 1)
        second = driver.reach(CycleState.FINISHED, 2)

        assert driver.mark() == zeroth
        ledger.finish(driver.lease, first)

        assert driver.mark() == second

    @pytest.mark.parametrize("batch", [0, 1])
    def test_at_and_below_the_mark_nothing_is_planned(self, ledger: Ledger, batch: int) -> None:
        driver = LedgerOwner.of(ledger)
        driver.reach(CycleState.FINISHED, 1)

        with pytest.raises(NeedsOperator):
            driver.reach(CycleState.PLANNED, batch)

        assert ledger.attempts(driver.cycle(0)) == []

    def test_below_the_mark_nothing_is_committed(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        late = driver.reach(CycleState.PREPARED, 0, BatchRange())
        last = driver.reach(CycleState.FINISHED, 1)

        with pytest.raises(NeedsOperator):
            ledger.decide_commit(driver.lease, late)

        assert driver.state(late) is CycleState.PREPARED
        assert driver.mark() == last

    def test_outside_the_generation_in_use_nothing_is_planned(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        ledger.open_generation(driver.lease, "one")
        ledger.open_generation(driver.lease, "two")

        for generation in (1, 3):
            with pytest.raises(NeedsOperator):
                driver.reach(CycleState.PLANNED, generation=generation)

        planned = driver.reach(CycleState.PLANNED, generation=2)
        assert driver.state(planned) is CycleState.PLANNED

    def test_another_ledgers_scope_is_refused(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        foreign = CycleId(Scope("another-ledger", "payments", "main"), 1, 0).attempt()

        with pytest.raises(Misuse):
            ledger.acquire(foreign.scope, driver.lease.owner, 1)
        with pytest.raises(Misuse):
            ledger.plan(driver.lease, foreign)
        with pytest.raises(Misuse):
            ledger.decide_abort(foreign)

        assert ledger.attempt(foreign) is None
        assert ledger.scope_record(foreign.scope) is None
        assert ledger.history(driver.scope) == []

    def test_a_lease_of_another_query_writes_nothing(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        other = LedgerOwner.of(ledger, query="other")
        txn = driver.reach(CycleState.PREPARED)

        with pytest.raises(Misuse):
            ledger.decide_commit(other.lease, txn)

        assert driver.state(txn) is CycleState.PREPARED
