"""The ledger contract, fifth part: what is kept, in which order, for whom, and for how long."""

from __future__ import annotations

import pytest

from semel.errors import Misuse, NeedsOperator
from semel.pipeline.ledger import CycleState, Decision, Ledger
from semel.pipeline.source import Position
from semel.pipeline.txn import SinkTxnId
from semel.testing.contracts.ledger_world import LedgerOwner, LedgerWorld, files, offsets, scope_of


class RecordRules(LedgerWorld):
    """Records, generations, scopes, pruning and acts."""

    def test_a_second_object_sees_the_same_ledger(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        txn = driver.reach(CycleState.FINISHED)
        other = self.another(ledger)

        assert other.ledger_id == ledger.ledger_id
        assert other.attempt(txn) == ledger.attempt(txn)
        assert other.scopes() == [driver.scope]
        assert other.url == ledger.url

    def test_a_closed_ledger_can_be_used_again(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)

        ledger.close()
        ledger.close()

        driver.commit(offsets(0, 10))
        assert driver.end() == 10

    def test_a_checkpoint_keeps_its_generation_and_a_new_one_gets_the_next(
        self, ledger: Ledger
    ) -> None:
        driver = LedgerOwner.of(ledger)

        first = ledger.open_generation(driver.lease, "one", first_batch=3)
        again = ledger.open_generation(driver.lease, "one", first_batch=9)
        second = ledger.open_generation(driver.lease, "two")

        assert (first.number, first.checkpoint, first.first_batch) == (1, "one", 3)
        assert again == first
        assert (second.number, second.first_batch) == (2, 0)
        assert ledger.generations(driver.scope) == [first, second]

    def test_the_generation_in_use_is_the_one_opened_last(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        in_use = []
        for checkpoint in ("one", "two", "one"):
            ledger.open_generation(driver.lease, checkpoint)
            record = ledger.scope_record(driver.scope)
            in_use.append(record and record.generation)

        assert in_use == [1, 2, 1]

    def test_adopting_makes_a_new_generation_of_the_same_checkpoint(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        first = ledger.open_generation(driver.lease, "one")

        second = ledger.adopt_generation(driver.lease, "one", 5, {("0", "t/0"): Position(99)})
        again = ledger.open_generation(driver.lease, "one")

        assert (second.number, second.first_batch, again) == (2, 5, second)
        assert ledger.generations(driver.scope) == [first, second]
        assert driver.end() == 99
        driver.commit(offsets(99, 100), 5, generation=2)

    def test_a_cycles_attempts_are_listed_oldest_first(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        txns = [driver.reach(CycleState.ABORTED, 4) for _ in range(5)]
        driver.reach(CycleState.PLANNED, 5)
        txns.append(driver.reach(CycleState.COMMITTED, 4))

        assert [record.txn for record in ledger.attempts(driver.cycle(4))] == txns
        assert ledger.attempts(driver.cycle(9)) == []

    def test_open_attempts_are_listed_in_the_order_of_cycles(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        tenth = driver.reach(CycleState.PLANNED, 10)
        second = driver.reach(CycleState.PREPARED, 2)
        first = driver.reach(CycleState.COMMITTED, 1)
        again = driver.reach(CycleState.PLANNED, 2)
        driver.reach(CycleState.ABORTED, 3)
        driver.reach(CycleState.FINISHED, 0, files("/in/a"))

        listed = [record.txn for record in ledger.open_attempts(driver.scope)]

        assert listed == [first, second, again, tenth]

    def test_history_lists_the_newest_attempts_first(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        txns = [driver.reach(CycleState.ABORTED, batch) for batch in (3, 1, 2)]

        assert [record.txn for record in ledger.history(driver.scope)] == txns[::-1]
        assert [record.txn for record in ledger.history(driver.scope, 2)] == txns[:0:-1]

    def test_scopes_are_listed_by_name(self, ledger: Ledger) -> None:
        names = [("b", "x"), ("a", "z"), ("a", "y")]
        scopes = [LedgerOwner.of(ledger, app, query).scope for app, query in names]

        assert ledger.scopes() == scopes[::-1]

    @pytest.mark.parametrize("other", [("payments", "other"), ("refunds", "main")])
    def test_scopes_never_touch_each_other(self, ledger: Ledger, other: tuple[str, str]) -> None:
        driver = LedgerOwner.of(ledger)
        ledger.open_generation(driver.lease, "one")
        txn = driver.reach(CycleState.COMMITTED, 0)
        ledger.record_act(driver.scope, "ann", "adopt", "because")
        before = (
            ledger.history(driver.scope),
            ledger.positions(driver.scope),
            ledger.generations(driver.scope),
            ledger.acts(driver.scope),
        )

        stranger = LedgerOwner.of(ledger, *other)
        assert stranger.lease.epoch == 1
        for look in (ledger.history, ledger.generations, ledger.acts, ledger.open_attempts):
            assert look(stranger.scope) == []
        assert ledger.positions(stranger.scope).is_empty
        ledger.adopt_generation(stranger.lease, "other", 0, {}, paths={})
        mine = stranger.commit(offsets(700, 701), 0)
        stranger.commit(offsets(701, 702), 1)
        twin = SinkTxnId(stranger.cycle(7), txn.attempt)
        ledger.decide_abort(twin)
        ledger.prune(stranger.scope, 0)
        ledger.record_act(stranger.scope, "bob", "recover", "why not")
        ledger.release(stranger.lease)

        ledger.renew(driver.lease)
        assert driver.mark() is None
        assert ledger.attempt(mine) is None
        assert driver.state(txn) is CycleState.COMMITTED
        assert before == (
            ledger.history(driver.scope),
            ledger.positions(driver.scope),
            ledger.generations(driver.scope),
            ledger.acts(driver.scope),
        )

    def test_pruning_forgets_what_is_over_but_the_newest_cycles(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        for batch in range(5):
            driver.reach(CycleState.ABORTED, batch)
            driver.reach(CycleState.FINISHED, batch)

        gone = ledger.prune(driver.scope, keep=2)

        assert gone == 6
        left = [record.txn.cycle.batch for record in ledger.history(driver.scope)]
        assert left == [4, 4, 3, 3]
        assert ledger.committed(driver.cycle(0)) is None
        assert ledger.committed(driver.cycle(4)) is not None
        assert ledger.prune(driver.scope, keep=2) == 0

    @pytest.mark.parametrize("keep", [0, 1])
    def test_pruning_keeps_the_marks_own_cycle(self, ledger: Ledger, keep: int) -> None:
        driver = LedgerOwner.of(ledger)
        driver.reach(CycleState.FINISHED, 0)
        last = driver.reach(CycleState.FINISHED, 1)

        assert ledger.prune(driver.scope, keep) == 1

        assert [record.txn for record in ledger.history(driver.scope)] == [last]
        assert ledger.decide_abort(last) is Decision.COMMIT

    def test_pruning_never_touches_what_is_not_over(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        ledger.open_generation(driver.lease, "one")
        stray = driver.reach(CycleState.PLANNED, 0)
        held = driver.reach(CycleState.PREPARED, 0)
        driver.commit(offsets(0, 10), 0)
        driver.commit(files("/in/a"), 1)
        last = driver.commit(files("/in/b"), 2)
        stuck = driver.reach(CycleState.COMMITTED, 3, offsets(10, 20))
        above = driver.reach(CycleState.ABORTED, 4)
        ledger.record_act(driver.scope, "ann", "adopt", "because")
        positions = ledger.positions(driver.scope)

        ledger.prune(driver.scope, keep=0)

        left = {record.txn for record in ledger.history(driver.scope)}
        assert left == {stray, held, last, stuck, above}
        assert ledger.positions(driver.scope) == positions
        assert driver.mark() == last
        assert len(ledger.generations(driver.scope)) == len(ledger.acts(driver.scope)) == 1

    def test_without_a_mark_nothing_is_pruned(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        driver.reach(CycleState.ABORTED)

        assert ledger.prune(driver.scope, keep=0) == 0
        with pytest.raises(Misuse):
            ledger.prune(driver.scope, keep=-1)

    def test_a_pruned_cycle_cannot_be_planned_nor_aborted_by_mistake(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        pruned = driver.reach(CycleState.FINISHED, 0)
        last = driver.reach(CycleState.FINISHED, 1)
        ledger.prune(driver.scope, keep=0)

        with pytest.raises(NeedsOperator):
            driver.reach(CycleState.PLANNED, 0)
        with pytest.raises(NeedsOperator):
            ledger.decide_abort(pruned)

        assert ledger.attempt(pruned) is None
        assert ledger.decide_abort(last.cycle.attempt()) is Decision.ABORT

    def test_acts_are_listed_newest_first_with_who_and_why(self, ledger: Ledger) -> None:
        scope = scope_of(ledger)

        ledger.record_act(scope, "ann", "adopt", "moved the checkpoint", {"to": ["b", 1]})
        ledger.record_act(scope, "bob", "recover", "pager")

        newest, oldest = ledger.acts(scope)
        assert (newest.who, newest.act, newest.why, newest.detail) == (
            "bob",
            "recover",
            "pager",
            {},
        )
        assert (oldest.scope, oldest.detail) == (scope, {"to": ["b", 1]})
        assert oldest.at <= newest.at
        assert ledger.scopes() == []
