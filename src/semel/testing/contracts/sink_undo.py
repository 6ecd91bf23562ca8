"""The rules of a sink that can take the rows of a committed cycle away."""

from __future__ import annotations

import unittest
from typing import Any

from semel.pipeline.sink import Found, Token, UndoesCycles
from semel.pipeline.txn import SinkTxnId
from semel.testing.contracts.sink_world import SinkWorld, is_fatal, is_found, is_ok


class SinkUndoes(SinkWorld):
    """An undone cycle stays undone, and no other row is touched."""

    def undoing(self) -> Any:
        """Start a process, if its sink can undo cycles."""
        sink = self.process()
        if not isinstance(sink, UndoesCycles):
            raise unittest.SkipTest(f"{type(sink).__name__} takes no rows away")
        return sink

    def three(self, sink: Any) -> list[tuple[SinkTxnId, Token]]:
        """Commit three cycles."""
        txns = [self.txn(batch) for batch in (1, 2, 3)]
        return [(txn, self.committed(sink, txn, [txn.cycle.batch])) for txn in txns]

    def test_undo_takes_away_the_rows_of_one_cycle_and_no_others(self) -> None:
        sink = self.undoing()
        (first, token), _, (last, last_token) = self.three(sink)

        for txn, its_token in ((first, token), (last, last_token)):
            assert sink.check_undo(txn, its_token) == ""
            is_ok(sink.undo(txn, its_token))

        self.shows(sink, 2)
        is_found(sink.look_up(first, token), Found.GONE)

    def test_undo_is_repeated_by_another_process(self) -> None:
        sink = self.undoing()
        (txn, token), *_ = self.three(sink)
        is_ok(sink.undo(txn, token))

        again: Any = self.successor(sink)

        assert again.check_undo(txn, token), "it is undone, and said to be possible again"
        is_ok(again.undo(txn, token))
        is_ok(sink.undo(txn, token))
        self.shows(again, 2, 3)

    def test_a_check_of_undo_changes_nothing(self) -> None:
        sink = self.undoing()
        (txn, token), *_ = self.three(sink)

        assert sink.check_undo(txn, token) == ""

        self.shows(sink, 1, 2, 3)
        is_found(sink.look_up(txn, token), Found.VISIBLE)

    def test_what_is_not_committed_is_not_undone(self) -> None:
        sink = self.undoing()
        txn, loser = self.txn(), self.txn()
        lost, token = self.prepared(sink, loser, [2]), self.prepared(sink, txn, [1])

        assert sink.check_undo(txn, token)
        is_fatal(sink.undo(txn, token))
        self.holds(sink, txn, loser)
        is_ok(sink.commit(txn, token))

        assert sink.check_undo(loser, lost)
        is_fatal(sink.undo(loser, lost))
        self.shows(sink, 1)

    def test_a_late_commit_does_not_bring_undone_rows_back(self) -> None:
        sink = self.undoing()
        txn = self.txn(1)
        receipts = self.stage(sink, txn, [1])
        token = self.prepare(sink, txn, receipts)
        is_ok(sink.commit(txn, token))
        is_ok(sink.undo(txn, token))

        for late in (sink, self.successor(sink)):
            late.prepare(txn, receipts)
            late.commit(txn, token)

        late.sweep(self.scope, lambda txn: False)
        self.shows(late)
        assert late.mark(self.scope) == txn
        self.committed(late, self.txn(2), [2])
        self.shows(late, 2)
