"""The ledger contract, fourth part: where the sources stand, and what may follow."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from semel.errors import NeedsOperator
from semel.pipeline.ledger import CycleState, Ledger
from semel.pipeline.source import BatchRange, Position, SourceKind, SourceRange, Span
from semel.testing.contracts.ledger_world import LedgerOwner, LedgerWorld, ephemeral, files, offsets

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

    def test_a_batch_whose_topic_cannot_be_told_is_refused(self, ledger: Ledger) -> None:
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
