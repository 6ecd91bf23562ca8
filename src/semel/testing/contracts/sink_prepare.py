"""The beginning of a sink's transaction, as tests: prepare and look_up in every state."""

from __future__ import annotations

from semel.pipeline.sink import Found, Receipt, SinkFatal, SinkOK, SinkRetryable
from semel.testing.contracts.sink_world import (
    SinkWorld,
    is_fatal,
    is_found,
    is_ok,
    is_refused,
)


class SinkPrepares(SinkWorld):
    """Prepare × every state."""

    def test_staged_rows_are_not_visible(self) -> None:
        sink = self.process()

        self.stage(sink, self.txn(), [1, 2], [3])

        self.shows(sink)

    def test_prepared_rows_are_held_and_not_visible(self) -> None:
        sink, txn = self.process(), self.txn()

        token = self.prepared(sink, txn, [1, 2], [3])

        self.shows(sink)
        is_found(sink.look_up(txn, token), Found.HELD)

    def test_preparing_again_changes_nothing(self) -> None:
        sink, txn = self.process(), self.txn()
        receipts = self.stage(sink, txn, [1, 2], [3])
        self.prepare(sink, txn, receipts)

        token = self.prepare(sink, txn, receipts)

        self.holds(sink, txn)
        is_ok(sink.commit(txn, token))
        self.shows(sink, 1, 2, 3)

    def test_preparing_again_with_the_receipts_in_another_order_changes_nothing(self) -> None:
        sink, txn = self.process(), self.txn()
        receipts = self.stage(sink, txn, [1], [2], [3])
        self.prepare(sink, txn, receipts)

        token = self.prepare(sink, txn, receipts[::-1])

        is_ok(sink.commit(txn, token))
        self.shows(sink, 1, 2, 3)

    def test_preparing_again_in_another_process_changes_nothing(self) -> None:
        sink, txn = self.process(), self.txn()
        receipts = self.stage(sink, txn, [1, 2])
        self.prepare(sink, txn, receipts)

        sink = self.successor(sink)
        token = self.prepare(sink, txn, receipts)

        is_ok(sink.commit(txn, token))
        self.shows(sink, 1, 2)

    def test_preparing_again_with_other_rows_is_fatal_and_keeps_what_was_prepared(self) -> None:
        sink, txn = self.process(), self.txn()
        first, second = self.stage(sink, txn, [1], [2])
        token = self.prepare(sink, txn, [first])

        is_fatal(sink.prepare(txn, [first, second]))
        is_fatal(sink.prepare(txn, []))

        is_ok(sink.commit(txn, token))
        self.shows(sink, 1)

    def test_preparing_rows_that_are_not_there_is_never_a_promise(self) -> None:
        sink, txn = self.process(), self.txn()
        writer = sink.stager(txn).open("task-1")
        writer.write(self.make_batch([1, 2]))
        receipt = Receipt.from_json(writer.finish().to_json())
        writer.discard()

        outcome = sink.prepare(txn, [receipt])

        if isinstance(outcome, SinkOK):  # the rows may have travelled in the receipt
            is_ok(sink.commit(txn, outcome.token or {}))
            self.shows(sink, 1, 2)
        else:
            self.shows(sink)

    def test_a_second_attempt_is_prepared_beside_the_first(self) -> None:
        sink, first, second = self.process(), self.txn(), self.txn()
        first_token = self.prepared(sink, first, [1])

        second_token = self.prepared(sink, second, [2])

        is_found(sink.look_up(first, first_token), Found.HELD)
        is_found(sink.look_up(second, second_token), Found.HELD)
        is_ok(sink.commit(second, second_token))
        self.shows(sink, 2)

    def test_a_woken_zombie_does_not_replace_its_successors_work(self) -> None:
        zombie, old, new = self.process(), self.txn(), self.txn()
        receipts = self.stage(zombie, old, [1])
        successor = self.process()
        token = self.prepared(successor, new, [2])

        is_refused(zombie.prepare(old, receipts))

        is_found(successor.look_up(new, token), Found.HELD)
        is_ok(successor.commit(new, token))
        self.shows(successor, 2)

    def test_a_zombie_that_had_prepared_does_not_disturb_its_successor(self) -> None:
        zombie, old, new = self.process(), self.txn(), self.txn()
        receipts = self.stage(zombie, old, [1])
        self.prepare(zombie, old, receipts)
        successor = self.process()
        token = self.prepared(successor, new, [2])

        zombie.prepare(old, receipts)
        is_ok(successor.commit(new, token))

        self.shows(successor, 2)

    def test_preparing_is_fatal_once_another_attempt_is_committed(self) -> None:
        sink, winner, loser = self.process(), self.txn(), self.txn()
        self.committed(sink, winner, [1])
        receipts = self.stage(sink, loser, [2])

        is_fatal(sink.prepare(loser, receipts))

        sink = self.successor(sink)
        is_fatal(sink.prepare(loser, receipts))
        self.shows(sink, 1)

    def test_preparing_the_committed_attempt_changes_nothing(self) -> None:
        sink, txn = self.process(), self.txn()
        receipts = self.stage(sink, txn, [1, 2])
        token = self.prepare(sink, txn, receipts)
        is_ok(sink.commit(txn, token))

        is_ok(sink.prepare(txn, receipts))

        sink = self.successor(sink)
        is_ok(sink.prepare(txn, receipts))
        is_ok(sink.commit(txn, token))
        self.holds(sink)
        self.shows(sink, 1, 2)

    def test_preparing_an_aborted_attempt_is_fatal_or_swept(self) -> None:
        sink, txn = self.process(), self.txn()
        receipts = self.stage(sink, txn, [1])
        token = self.prepare(sink, txn, receipts)
        is_ok(sink.abort(txn, token))

        outcome = sink.prepare(txn, receipts)

        assert not isinstance(outcome, SinkRetryable), outcome
        sink.sweep(self.scope, lambda found: found == txn)
        self.holds(sink)
        self.shows(sink)
        self.leaves_nothing(sink)

    def test_preparing_below_the_mark_is_fatal(self) -> None:
        sink, late = self.process(), self.txn(3)
        self.committed(sink, self.txn(4), [1])

        outcome = sink.prepare(late, self.stage(sink, late, [2]))

        is_fatal(outcome)
        self.shows(sink, 1)


class SinkIsLookedUp(SinkWorld):
    """Look_up × every state: read-only, and always with an answer."""

    def test_look_up_says_gone_for_what_is_only_staged(self) -> None:
        sink, txn = self.process(), self.txn()
        self.stage(sink, txn, [1])

        is_found(sink.look_up(txn, None), Found.GONE)

    def test_look_up_says_gone_for_what_never_was(self) -> None:
        is_found(self.process().look_up(self.txn(), None), Found.GONE)

    def test_look_up_says_gone_for_the_loser_of_a_committed_cycle(self) -> None:
        sink, winner, loser = self.process(), self.txn(), self.txn()
        self.committed(sink, winner, [1])

        is_found(sink.look_up(loser, None), Found.GONE)

    def test_another_process_finds_the_same_with_or_without_the_token(self) -> None:
        sink, held, shown = self.process(), self.txn(2), self.txn(1)
        shown_token = self.committed(sink, shown, [1])
        held_token = self.prepared(sink, held, [2])

        sink = self.successor(sink)

        is_found(sink.look_up(held, held_token), Found.HELD)
        is_found(sink.look_up(held, None), Found.HELD)
        is_found(sink.look_up(shown, shown_token), Found.VISIBLE)
        is_found(sink.look_up(shown, None), Found.VISIBLE)

    def test_look_up_changes_nothing(self) -> None:
        sink, held, shown, staged = self.process(), self.txn(2), self.txn(1), self.txn(2)
        self.committed(sink, shown, [1])
        token = self.prepared(sink, held, [2])
        self.stage(sink, staged, [3])
        sink = self.successor(sink)
        left = self.leavings_now(sink)

        for txn in (held, shown, staged, self.txn(2), self.txn(3)):
            sink.look_up(txn, None)
            sink.look_up(txn, token)

        assert self.leavings_now(sink) == left
        self.shows(sink, 1)
        self.holds(sink, held)
        assert sink.mark(self.scope) == shown
        is_ok(sink.commit(held, token))
        self.shows(sink, 1, 2)

    def test_look_up_answers_even_with_a_broken_token(self) -> None:
        sink, txn = self.process(), self.txn()
        self.prepared(sink, txn, [1])

        for token in ({}, {"attempt": None}, {"digest": 7, "files": "none", "rows": []}):
            assert sink.look_up(txn, token).found in Found

    def test_a_fatal_outcome_says_why(self) -> None:
        sink, txn = self.process(), self.txn()
        token = self.committed(sink, txn, [1])

        outcome = sink.abort(txn, token)

        assert isinstance(outcome, SinkFatal)
        assert txn.cycle.label in outcome.reason or str(txn.cycle) in outcome.reason
