"""A sink's transaction, as tests: prepare, look_up, commit and abort in every state."""

from __future__ import annotations

from semel.pipeline.sink import Found, Receipt, SinkFatal, SinkOK, SinkRetryable
from semel.testing.contracts.sink_world import (
    Capability,
    SinkWorld,
    changed_tokens,
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
        """Nor does it in another order of the receipts, or in another process."""
        sink = self.process()
        for batch, again in enumerate(("as before", "in another order", "in another process")):
            txn = self.txn(batch)
            receipts = self.stage(sink, txn, [3 * batch], [3 * batch + 1], [3 * batch + 2])
            self.prepare(sink, txn, receipts)

            if again == "in another process":
                sink = self.successor(sink)
            token = self.prepare(sink, txn, receipts[:: -1 if again == "in another order" else 1])

            self.holds(sink, txn)
            is_ok(sink.commit(txn, token))
        self.shows(sink, *range(9))

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

    def test_look_up_says_gone_for_what_was_never_prepared(self) -> None:
        """It is unknown, or only staged, or the loser of a committed cycle."""
        sink, winner, loser, staged = self.process(), self.txn(), self.txn(), self.txn(1)
        self.stage(sink, staged, [1])

        is_found(sink.look_up(loser, None), Found.GONE)
        is_found(sink.look_up(staged, None), Found.GONE)
        self.committed(sink, winner, [2])
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


class SinkCommits(SinkWorld):
    """Commit × every state."""

    def test_commit_makes_exactly_the_prepared_rows_visible(self) -> None:
        sink, txn = self.process(), self.txn()
        token = self.prepared(sink, txn, [1, 2], [3])

        is_ok(sink.commit(txn, token))

        self.shows(sink, 1, 2, 3)
        self.holds(sink)
        is_found(sink.look_up(txn, token), Found.VISIBLE)

    def test_committing_again_is_the_same_as_committing_once(self) -> None:
        sink, txn = self.process(), self.txn()
        token = self.committed(sink, txn, [1, 2])

        is_ok(sink.commit(txn, token))
        is_ok(sink.commit(txn, token))
        self.shows(sink, 1, 2)

        sink = self.successor(sink)
        is_ok(sink.commit(txn, token))
        self.shows(sink, 1, 2)
        self.holds(sink)

    def test_another_process_commits_what_a_dead_one_prepared(self) -> None:
        sink, txn = self.process(), self.txn()
        token = self.prepared(sink, txn, [1, 2], [3])

        sink = self.successor(sink)
        is_ok(sink.commit(txn, token))

        self.shows(sink, 1, 2, 3)
        self.holds(sink)

    def test_an_old_commit_may_be_repeated_after_later_cycles(self) -> None:
        sink, first, second = self.process(), self.txn(1), self.txn(2)
        token = self.committed(sink, first, [1])
        self.committed(sink, second, [2])

        is_ok(self.successor(sink).commit(first, token))

        self.shows(self.make_sink(), 1, 2)

    def test_committing_what_was_never_prepared_is_fatal(self) -> None:
        sink, txn = self.process(), self.txn()
        token = self.prepared(sink, self.txn(), [1])

        is_fatal(sink.commit(txn, token))
        is_fatal(self.successor(sink).commit(txn, token))

        self.shows(self.make_sink())

    def test_committing_what_was_only_staged_is_fatal(self) -> None:
        sink, txn, other = self.process(), self.txn(), self.txn()
        self.stage(sink, txn, [1])
        token = self.prepared(sink, other, [2])
        is_ok(sink.abort(other, token))

        is_fatal(sink.commit(txn, token))

        self.shows(sink)

    def test_committing_an_aborted_attempt_is_fatal(self) -> None:
        sink, txn = self.process(), self.txn()
        token = self.prepared(sink, txn, [1])
        is_ok(sink.abort(txn, token))

        is_fatal(sink.commit(txn, token))
        is_fatal(self.successor(sink).commit(txn, token))

        self.shows(self.make_sink())

    def test_committing_what_has_vanished_is_fatal(self) -> None:
        self.needs(Capability.LOSE_PREPARED)
        sink, txn = self.process(), self.txn()
        token = self.prepared(sink, txn, [1, 2])
        self.crash(sink)
        self.lose(self.make_sink(), txn)

        sink = self.process()
        is_fatal(sink.commit(txn, token))

        is_found(sink.look_up(txn, token), Found.GONE)
        self.shows(sink)

    def test_committing_is_fatal_once_another_attempt_is_committed(self) -> None:
        sink, winner, loser = self.process(), self.txn(), self.txn()
        loser_token = self.prepared(sink, loser, [2])
        self.committed(sink, winner, [1])

        is_fatal(sink.commit(loser, loser_token))
        is_fatal(self.successor(sink).commit(loser, loser_token))

        self.shows(self.make_sink(), 1)

    def test_a_commit_shows_no_rows_but_those_of_its_own_transaction(self) -> None:
        sink, mine, other = self.process(), self.txn(), self.txn()
        self.prepared(sink, mine, [1])
        others_token = self.prepared(sink, other, [2])

        outcome = sink.commit(mine, others_token)

        self.shows(sink, *([1] if isinstance(outcome, SinkOK) else []))

    def test_a_token_that_was_changed_in_any_field_is_refused_and_nothing_is_touched(self) -> None:
        """A token is evidence: what is written, and where, comes from the sink's settings."""
        self.needs(Capability.COMPARE_TOKENS)
        sink, txn, other = self.process(), self.txn(1), self.txn(2)
        token = self.prepared(sink, txn, [1, 2], [3])
        self.prepared(sink, other, [4])
        left = self.leavings_now(sink)

        for again in range(2):  # held, then visible
            for field, changed in changed_tokens(token):
                outcome = sink.commit(txn, changed)
                assert isinstance(outcome, SinkFatal), f"{field} was changed: {outcome}"
                self.shows(sink, *((1, 2, 3) if again else ()))
                assert again or self.leavings_now(sink) == left, f"{field} was changed"
            is_ok(sink.commit(txn, token))
        self.holds(sink, other)

    def test_cycles_add_up(self) -> None:
        sink = self.process()

        for batch in range(4):
            self.committed(sink, self.txn(batch), [batch * 10, batch * 10 + 1])

        self.shows(sink, *(batch * 10 + i for batch in range(4) for i in range(2)))
        self.leaves_nothing(sink)


class SinkAborts(SinkWorld):
    """Abort × every state."""

    def test_abort_drops_what_was_prepared(self) -> None:
        sink, txn = self.process(), self.txn()
        token = self.prepared(sink, txn, [1, 2], [3])

        is_ok(sink.abort(txn, token))

        is_found(sink.look_up(txn, token), Found.GONE)
        self.holds(sink)
        self.shows(sink)
        self.leaves_nothing(sink)

    def test_aborting_again_is_ok(self) -> None:
        sink, txn = self.process(), self.txn()
        token = self.prepared(sink, txn, [1])

        is_ok(sink.abort(txn, token))
        is_ok(sink.abort(txn, token))
        is_ok(self.successor(sink).abort(txn, None))

        self.shows(self.make_sink())

    def test_another_process_aborts_what_a_dead_one_prepared_with_or_without_its_token(
        self,
    ) -> None:
        sink, first, second = self.process(), self.txn(1), self.txn(2)
        token = self.prepared(sink, first, [1])
        self.prepared(sink, second, [2])

        sink = self.successor(sink)
        is_ok(sink.abort(first, token))
        self.holds(sink, second)
        is_ok(sink.abort(second, None))

        self.holds(sink)
        self.leaves_nothing(sink)

    def test_aborting_what_never_was_is_ok(self) -> None:
        sink = self.process()

        is_ok(sink.abort(self.txn(), None))

        self.leaves_nothing(sink)

    def test_abort_drops_what_was_only_staged(self) -> None:
        sink, txn = self.process(), self.txn()
        self.stage(sink, txn, [1], [2])

        is_ok(self.successor(sink).abort(txn, None))

        self.leaves_nothing(self.make_sink())

    def test_abort_with_a_changed_token_touches_nothing_but_its_own_attempt(self) -> None:
        sink, shown, kept = self.process(), self.txn(1), self.txn(2)
        self.committed(sink, shown, [1])
        kept_token = self.prepared(sink, kept, [2])
        token = self.prepared(sink, self.txn(2), [3])

        for _, changed in changed_tokens(token):
            sink.abort(self.txn(2), changed)
            is_fatal(sink.abort(shown, changed))

        is_ok(sink.commit(kept, kept_token))
        self.shows(sink, 1, 2)

    def test_abort_leaves_other_attempts_alone(self) -> None:
        sink, dropped, kept = self.process(), self.txn(), self.txn()
        dropped_token = self.prepared(sink, dropped, [1])
        kept_token = self.prepared(sink, kept, [2])

        is_ok(sink.abort(dropped, dropped_token))

        self.holds(sink, kept)
        is_ok(sink.commit(kept, kept_token))
        self.shows(sink, 2)

    def test_abort_leaves_what_another_attempt_staged_alone(self) -> None:
        sink, dropped, kept = self.process(), self.txn(), self.txn()
        receipts = self.stage(sink, kept, [2])
        self.prepared(sink, dropped, [1])

        is_ok(sink.abort(dropped, None))

        token = self.prepare(sink, kept, receipts)
        is_ok(sink.commit(kept, token))
        self.shows(sink, 2)

    def test_abort_leaves_other_scopes_alone(self) -> None:
        other = self.other_scopes[2]
        sink = self.process(self.scope, other)
        mine = self.txn()
        same_names = self.cycle(scope=other).attempt(mine.attempt)
        self.prepared(sink, mine, [1])
        token = self.prepared(sink, same_names, [2])

        is_ok(sink.abort(mine, None))

        is_ok(sink.commit(same_names, token))
        self.shows(sink, 2)

    def test_aborting_after_the_commit_is_fatal_and_deletes_nothing(self) -> None:
        sink, txn = self.process(), self.txn()
        token = self.committed(sink, txn, [1, 2])

        is_fatal(sink.abort(txn, token))
        is_fatal(sink.abort(txn, None))
        sink = self.successor(sink)
        is_fatal(sink.abort(txn, token))

        self.shows(sink, 1, 2)
        is_found(sink.look_up(txn, token), Found.VISIBLE)
        is_ok(sink.commit(txn, token))

    def test_aborting_the_loser_does_not_touch_the_winner(self) -> None:
        sink, winner, loser = self.process(), self.txn(), self.txn()
        loser_token = self.prepared(sink, loser, [2])
        winner_token = self.committed(sink, winner, [1])

        is_ok(sink.abort(loser, loser_token))

        self.shows(sink, 1)
        self.holds(sink)
        is_found(sink.look_up(winner, winner_token), Found.VISIBLE)
        self.leaves_nothing(sink)
