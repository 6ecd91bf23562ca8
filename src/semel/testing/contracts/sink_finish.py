"""The end of a sink's transaction, as tests: commit and abort in every state."""

from __future__ import annotations

from semel.pipeline.sink import Found, SinkOK
from semel.testing.contracts.sink_world import (
    Capability,
    SinkWorld,
    is_fatal,
    is_found,
    is_ok,
)


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

    def test_another_process_commits_what_a_dead_one_prepared(self) -> None:
        sink, txn = self.process(), self.txn()
        token = self.prepared(sink, txn, [1, 2], [3])

        sink = self.successor(sink)
        is_ok(sink.commit(txn, token))

        self.shows(sink, 1, 2, 3)
        self.holds(sink)

    def test_another_process_may_repeat_the_commit(self) -> None:
        sink, txn = self.process(), self.txn()
        token = self.committed(sink, txn, [1, 2])

        sink = self.successor(sink)
        is_ok(sink.commit(txn, token))

        self.shows(sink, 1, 2)
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

    def test_another_process_aborts_what_a_dead_one_prepared(self) -> None:
        sink, txn = self.process(), self.txn()
        token = self.prepared(sink, txn, [1])

        sink = self.successor(sink)
        is_ok(sink.abort(txn, token))

        self.holds(sink)
        self.leaves_nothing(sink)

    def test_aborting_needs_no_token(self) -> None:
        sink, txn = self.process(), self.txn()
        self.prepared(sink, txn, [1])

        sink = self.successor(sink)
        is_ok(sink.abort(txn, None))

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
