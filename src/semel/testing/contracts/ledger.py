"""The contract of a ledger, executable.

    leases      who may write, and what the epoch refuses
    decisions   the arrows, the write-once decision, the mark
    positions   where sources stand, and what may follow
    records     order, scopes, generations, pruning, acts
    races       threads and processes at once

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
from collections.abc import Callable
from functools import partial

import pytest

from semel.errors import LeaseLost, Misuse, NeedsOperator
from semel.pipeline.ledger import CycleState, Decision, Ledger
from semel.pipeline.source import BatchRange, Position, SourceKind, SourceRange, Span
from semel.pipeline.txn import SinkTxnId
from semel.testing.contracts.ledger_decisions import DecisionRules, LedgerLeaseRules
from semel.testing.contracts.ledger_world import (
    LedgerOwner,
    LedgerWorld,
    ephemeral,
    files,
    offsets,
    scope_of,
    together,
)

FAR: int = 2**62
"""Offsets have 64 bits."""


class PositionRules(LedgerWorld):
    """The positions are the truth: they move with a COMMIT, in one piece, or not at all."""

    def test_the_first_batch_may_start_anywhere(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        assert ledger.positions(driver.scope).is_empty

        driver.commit(offsets(FAR, FAR + 5))

        assert driver.end() == FAR + 5

    @pytest.mark.parametrize("state", [CycleState.PREPARED, CycleState.ABORTED])
    def test_only_a_commit_moves_the_positions(self, ledger: Ledger, state: CycleState) -> None:
        driver = LedgerOwner.of(ledger)
        txn = driver.reach(CycleState.PREPARED)
        if state is CycleState.ABORTED:
            ledger.decide_abort(txn)

        assert ledger.positions(driver.scope).is_empty

    @pytest.mark.parametrize(
        ("after", "words"),
        [
            (offsets(9, 20), "overlap"),
            (offsets(0, 10), "overlap"),
            (offsets(11, 20), "gap"),
            (offsets(10, 9), "before its start"),
            (offsets(10, 20, topic_id="two"), "created again"),
        ],
    )
    def test_a_batch_that_does_not_follow_is_refused_and_moves_nothing(
        self, ledger: Ledger, after: BatchRange, words: str
    ) -> None:
        driver = LedgerOwner.of(ledger)
        driver.commit(offsets(0, 10, topic_id="one"))
        txn = driver.reach(CycleState.PREPARED, 1, after)

        with pytest.raises(NeedsOperator, match=words):
            ledger.decide_commit(driver.lease, txn)

        assert driver.state(txn) is CycleState.PREPARED
        assert ledger.positions(driver.scope).ends == {("0", "t/0"): Position(10, "one")}

    def test_an_end_before_its_start_is_refused_in_the_first_batch_too(
        self, ledger: Ledger
    ) -> None:
        driver = LedgerOwner.of(ledger)
        txn = driver.reach(CycleState.PREPARED, 0, offsets(10, 9))

        with pytest.raises(NeedsOperator):
            ledger.decide_commit(driver.lease, txn)

    def test_a_batch_that_follows_is_committed(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        driver.commit(offsets(0, 10, topic_id="one"), 0)
        driver.commit(offsets(10, 10, topic_id="one"), 1)
        driver.commit(offsets(10, 25, topic_id="one"), 2)

        assert ledger.positions(driver.scope).ends == {("0", "t/0"): Position(25, "one")}

    def test_a_batch_whose_topic_has_no_known_id_is_refused(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        driver.commit(offsets(0, 10, topic_id="one"), 0)
        txn = driver.reach(CycleState.PREPARED, 1, offsets(10, 20))

        with pytest.raises(NeedsOperator, match="id cannot be read here"):
            ledger.decide_commit(driver.lease, txn)

        assert driver.end() == 10

    def test_an_empty_batch_is_a_batch(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)

        driver.commit(BatchRange())

        assert ledger.committed(driver.cycle()) is not None
        assert ledger.positions(driver.scope).is_empty

    def test_a_new_partition_may_join_and_a_quiet_one_keeps_its_place(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        driver.commit(BatchRange.of_offsets({"t/0": (0, 10), "t/1": (5, 6)}), 0)
        driver.commit(BatchRange.of_offsets({"t/0": (10, 12), "t/2": (7, 9)}), 1)

        assert [driver.end(partition) for partition in ("t/0", "t/1", "t/2")] == [12, 6, 9]

    def test_one_bad_partition_of_many_refuses_the_whole_batch(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        driver.commit(BatchRange.of_offsets({"t/0": (0, 10), "t/1": (0, 10)}), 0)
        read = BatchRange.of_offsets({"t/0": (10, 20), "t/1": (11, 20), "t/2": (0, 1)})
        txn = driver.reach(CycleState.PREPARED, 1, read)

        with pytest.raises(NeedsOperator):
            ledger.decide_commit(driver.lease, txn)

        assert [driver.end(partition) for partition in ("t/0", "t/1", "t/2")] == [10, 10, None]

    def test_sources_with_equal_partitions_stand_apart(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        read = BatchRange.of_offsets({"t/0": (0, 5)}, "0").sources
        read += BatchRange.of_offsets({"t/0": (7, 9)}, "1").sources

        driver.commit(BatchRange(read))

        assert (driver.end(source="0"), driver.end(source="1")) == (5, 9)

    def test_topic_ids_belong_to_their_topics(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        spans = {"a/b/0": Span(0, 1), "c/0": Span(0, 2)}
        source = SourceRange("0", SourceKind.OFFSETS, spans, topic_ids={"a/b": "x", "c": "y"})

        driver.commit(BatchRange((source,)))

        ends = ledger.positions(driver.scope).ends
        assert ends == {("0", "a/b/0"): Position(1, "x"), ("0", "c/0"): Position(2, "y")}

    def test_a_file_is_committed_once(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        driver.commit(files("/in/a", "/in/b ü"), 0)
        txn = driver.reach(CycleState.PREPARED, 1, files("/in/c", "/in/a"))

        with pytest.raises(NeedsOperator, match="/in/a"):
            ledger.decide_commit(driver.lease, txn)

        assert set(ledger.positions(driver.scope).paths["0"]) == {"/in/a", "/in/b ü"}

    def test_a_file_that_stands_twice_in_a_batch_is_refused(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        txn = driver.reach(CycleState.PREPARED, 0, files("/in/a", "/in/a"))

        with pytest.raises(NeedsOperator, match="twice"):
            ledger.decide_commit(driver.lease, txn)

        assert ledger.positions(driver.scope).is_empty

    def test_the_same_file_in_two_sources_is_two_files(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)

        driver.commit(BatchRange(files("/in/a").sources + files("/in/a", source="1").sources))

        paths = ledger.positions(driver.scope).paths
        assert {source: set(known) for source, known in paths.items()} == {
            "0": {"/in/a"},
            "1": {"/in/a"},
        }

    def test_of_a_batch_only_its_own_committed_files_are_listed(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        many = [f"/in/{number}" for number in range(2500)]
        driver.commit(files(*many), 0)

        asked = ledger.positions(driver.scope, files("/in/7", "/in/new"))
        all_asked = ledger.positions(driver.scope, files(*many, "/in/new"))

        assert set(asked.paths["0"]) == {"/in/7"}
        assert set(all_asked.paths["0"]) == set(many)

    def test_an_ephemeral_source_must_follow_itself_within_a_generation(
        self, ledger: Ledger
    ) -> None:
        driver = LedgerOwner.of(ledger)
        ledger.open_generation(driver.lease, "one")
        driver.commit(ephemeral(0, 5), 0)
        driver.commit(ephemeral(5, 9), 1)
        txn = driver.reach(CycleState.PREPARED, 2, ephemeral(0, 5))

        with pytest.raises(NeedsOperator):
            ledger.decide_commit(driver.lease, txn)

        assert driver.end("") == 9

    def test_an_ephemeral_source_starts_anew_in_a_new_generation(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        ledger.open_generation(driver.lease, "one")
        driver.commit(ephemeral(0, 5), 0)
        ledger.open_generation(driver.lease, "two")

        driver.commit(ephemeral(0, 3), 0, generation=2)
        assert driver.end("") == 3

        txn = driver.reach(CycleState.PREPARED, 1, ephemeral(0, 3), generation=2)
        with pytest.raises(NeedsOperator):
            ledger.decide_commit(driver.lease, txn)

    def test_offsets_must_follow_across_generations(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        ledger.open_generation(driver.lease, "one")
        driver.commit(offsets(0, 10), 0)
        ledger.open_generation(driver.lease, "two")
        again = driver.reach(CycleState.PREPARED, 0, offsets(0, 10), generation=2)

        with pytest.raises(NeedsOperator):
            ledger.decide_commit(driver.lease, again)

        driver.commit(offsets(10, 20), 0, generation=2)
        assert driver.end() == 20

    @pytest.mark.parametrize("after", [offsets, ephemeral])
    def test_adopted_positions_replace_every_end_and_no_file(
        self, ledger: Ledger, after: Callable[[int, int], BatchRange]
    ) -> None:
        driver = LedgerOwner.of(ledger)
        ledger.open_generation(driver.lease, "one")
        read = BatchRange.of_offsets({"t/0": (0, 10), "t/1": (0, 10)}).sources
        driver.commit(BatchRange(read + files("/in/a", source="1").sources))
        adopted = {("0", "t/0"): Position(500), ("0", ""): Position(500)}

        ledger.adopt_generation(driver.lease, "two", 7, adopted)

        assert ledger.positions(driver.scope).ends == adopted
        assert set(ledger.positions(driver.scope).paths["1"]) == {"/in/a"}
        wrong = driver.reach(CycleState.PREPARED, 7, after(0, 10), generation=2)
        with pytest.raises(NeedsOperator):
            ledger.decide_commit(driver.lease, wrong)
        driver.commit(after(500, 501), 7, generation=2)

    def test_adopting_nothing_forgets_every_end(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        ledger.open_generation(driver.lease, "one")
        driver.commit(BatchRange(offsets(0, 10).sources + files("/in/a", source="1").sources))

        ledger.adopt_generation(driver.lease, "two", 0, {})
        assert not ledger.positions(driver.scope).ends
        assert set(ledger.positions(driver.scope).paths["1"]) == {"/in/a"}

        ledger.adopt_generation(driver.lease, "two", 0, {}, paths={"1": ["/in/b"]})
        assert dict(ledger.positions(driver.scope).paths) == {"1": {"/in/b"}}

        ledger.adopt_generation(driver.lease, "two", 0, {}, paths={})
        assert ledger.positions(driver.scope).is_empty


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

    def test_a_renamed_app_keeps_everything_under_its_new_name(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)
        ledger.open_generation(driver.lease, "one")
        ledger.record_act(driver.scope, "ann", "look", "")
        done = driver.commit(BatchRange(offsets(0, 10).sources + files("/a", source="1").sources))
        tried = LedgerOwner.of(ledger, app="renamed")  # a start that was refused
        new = tried.scope
        ledger.record_act(new, "ann", "try", "")
        ledger.release(tried.lease)
        before = ledger.positions(driver.scope)

        assert ledger.rename_app(driver.lease, "renamed") == new

        assert ledger.scopes() == [new]
        assert ledger.positions(new) == before
        assert [act.act for act in ledger.acts(new)] == ["try", "look"]
        assert [record.txn.label for record in ledger.history(new)] == [done.label]
        assert ledger.generations(new)
        assert not ledger.history(driver.scope)
        record = ledger.scope_record(new)
        assert record is not None
        assert record.epoch >= driver.lease.epoch
        assert record.owner is None
        assert record.mark is not None
        assert record.mark.label == done.label
        with pytest.raises(LeaseLost):
            ledger.renew(driver.lease)
        assert LedgerOwner.of(ledger, app="renamed").lease.epoch > record.epoch

    def test_an_app_with_open_attempts_or_a_name_with_cycles_is_not_renamed(
        self, ledger: Ledger
    ) -> None:
        driver, other = LedgerOwner.of(ledger), LedgerOwner.of(ledger, app="refunds")
        ledger.open_generation(other.lease, "one")
        with pytest.raises(NeedsOperator):
            ledger.rename_app(driver.lease, "refunds")
        driver.reach(CycleState.COMMITTED)

        with pytest.raises(NeedsOperator):
            ledger.rename_app(driver.lease, "renamed")

        assert len(ledger.open_attempts(driver.scope)) == 1

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

        def watch() -> None:
            committed = [batch for batch in range(ROUNDS) if other.committed(driver.cycle(batch))]
            end = other.positions(driver.scope).ends.get(("0", "t/0"))
            known = max(committed, default=-1)
            assert (end.end if end else 0) >= 10 * known + 10
            if end is not None:
                assert other.committed(driver.cycle(end.end // 10 - 1)) is not None

        beside_cycles(driver, watch)

    def test_a_heartbeat_renews_while_cycles_run(self, ledger: Ledger) -> None:
        driver = LedgerOwner.of(ledger)

        beside_cycles(driver, lambda: ledger.renew(driver.lease))

        assert driver.end() == 10 * ROUNDS


def beside_cycles(driver: LedgerOwner, look: Callable[[], object]) -> None:
    """Commit cycles in one thread, and call *look* in another until they are done."""
    done = threading.Event()

    def watch() -> None:
        look()
        while not done.is_set():
            look()

    def work() -> None:
        try:
            for batch in range(ROUNDS):
                driver.commit(offsets(10 * batch, 10 * batch + 10), batch)
        finally:
            done.set()

    assert together(watch, work) == [None, None]


class LedgerContract(LedgerLeaseRules, DecisionRules, LedgerRaceRules, PositionRules, RecordRules):
    """Everything a `semel.pipeline.ledger.Ledger` must do; derive a test class from it."""
