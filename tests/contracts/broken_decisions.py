"""Memory sinks that commit, abort or keep their mark wrongly."""

from __future__ import annotations

from semel.memory.sink import MemorySink, Shown
from semel.pipeline.sink import SinkFatal, SinkOK, SinkRetryable
from semel.pipeline.txn import CycleId


class CommitsTwice(MemorySink):
    """Commit is not repeatable: the rows appear again."""

    def commit(self, txn, token):
        shown = self.store.visible.get(txn.cycle)
        outcome = super().commit(txn, token)
        if shown and isinstance(outcome, SinkOK):
            again = CycleId(txn.scope, txn.cycle.generation, txn.cycle.batch + 1000)
            self.store.visible[again] = shown
        return outcome


class ForgetsItsCommits(MemorySink):
    """A repeated commit is refused, because the proof is not kept."""

    def commit(self, txn, token):
        if txn not in self.store.prepared:
            return SinkFatal(f"{txn} is not prepared")
        return super().commit(txn, token)


class CommitsWhatIsLost(MemorySink):
    """Commit takes absence for done."""

    def commit(self, txn, token):
        if txn not in self.store.prepared and txn.cycle not in self.store.visible:
            return SinkOK()
        return super().commit(txn, token)


class CommitsWhatIsStaged(MemorySink):
    """Commit falls back to whatever was staged."""

    def commit(self, txn, token):
        if txn not in self.store.prepared and txn in self.store.staged:
            rows = [row for part in self.store.staged[txn].values() for row in part]
            receipts = [self._receipt(txn, rows)]
            return super().commit(txn, self.prepare(txn, receipts).token)
        return super().commit(txn, token)

    def _receipt(self, txn, rows):
        writer = self.stager(txn).open("late")
        writer.write(rows)
        return writer.finish()


class CommitsBothAttempts(MemorySink):
    """The proof is keyed by the attempt instead of the cycle."""

    def commit(self, txn, token):
        shown = self.store.visible.get(txn.cycle)
        if shown and shown.txn != txn and txn in self.store.prepared:
            elsewhere = CycleId(txn.scope, txn.cycle.generation, txn.cycle.batch + 1000)
            self.store.visible[elsewhere] = Shown(txn, self.store.prepared.pop(txn), 0.0)
            return SinkOK()
        return super().commit(txn, token)


class CommitsTheLastAttemptOfTheCycle(MemorySink):
    """What is prepared is looked for by cycle only."""

    def commit(self, txn, token):
        for other in reversed(list(self.store.prepared)):
            if other.cycle == txn.cycle:
                held = self.store.prepared[other]
                self.store.visible[txn.cycle] = Shown(txn, held, 0.0)
                self.store.prepared.pop(other)
                return SinkOK()
        return super().commit(txn, token)


class AbortDeletesCommittedRows(MemorySink):
    """Abort does not look whether the attempt is committed."""

    def abort(self, txn, token):
        self.store.visible.pop(txn.cycle, None)
        return super().abort(txn, token)


class AbortSaysOkAfterCommit(MemorySink):
    """Abort deletes nothing after a commit, but says that all is well."""

    def abort(self, txn, token):
        super().abort(txn, token)
        return SinkOK()


class AbortDropsTheWholeCycle(MemorySink):
    """Abort takes the cycle's other attempts along."""

    def abort(self, txn, token):
        outcome = super().abort(txn, token)
        for other in list(self.store.prepared):
            if other.cycle == txn.cycle:
                del self.store.prepared[other]
        return outcome


class AbortNeedsItsToken(MemorySink):
    """A crash before the token was kept leaves something that cannot be aborted."""

    def abort(self, txn, token):
        return super().abort(txn, token) if token else SinkOK()


class AbortNeedsSomethingToAbort(MemorySink):
    """Abort is not repeatable."""

    def abort(self, txn, token):
        if txn not in self.store.prepared and txn not in self.store.staged:
            return SinkFatal(f"{txn} is not here")
        return super().abort(txn, token)


class AbortForgetsWhatWasStaged(MemorySink):
    """Abort drops what was prepared and leaves what was only staged."""

    def abort(self, txn, token):
        staged = self.store.staged.get(txn)
        outcome = super().abort(txn, token)
        if staged is not None and txn.cycle not in self.store.visible:
            self.store.staged[txn] = staged
        return outcome


class ForgetsTheMark(MemorySink):
    """Commit does not keep the mark."""

    def commit(self, txn, token):
        outcome = super().commit(txn, token)
        self.store.marks.pop(txn.scope, None)
        return outcome


class LowersTheMark(MemorySink):
    """The mark is the last commit, not the highest."""

    def commit(self, txn, token):
        outcome = super().commit(txn, token)
        if isinstance(outcome, SinkOK):
            self.store.marks[txn.scope] = txn
        return outcome


class MarksByBatchAlone(MemorySink):
    """The mark does not know generations."""

    def mark(self, scope):
        shown = [s.txn for c, s in self.store.visible.items() if c.scope == scope]
        return max(shown, key=lambda txn: txn.cycle.batch, default=None)


class EmptyBatchesLeaveNoProof(MemorySink):
    """A batch without rows is skipped."""

    def prepare(self, txn, receipts):
        outcome = super().prepare(txn, receipts)
        held = self.store.prepared.get(txn)
        if held is not None and not held.rows:
            del self.store.prepared[txn]
        return outcome

    def commit(self, txn, token):
        return SinkOK() if token.get("rows") == 0 else super().commit(txn, token)


class SaysRetryableForever(MemorySink):
    """Lost is answered as if it could come back."""

    def commit(self, txn, token):
        outcome = super().commit(txn, token)
        return SinkRetryable(outcome.reason) if isinstance(outcome, SinkFatal) else outcome


class ObeysItsToken(MemorySink):
    """Whatever the token says is done."""

    def commit(self, txn, token):
        held = self.store.prepared.get(txn)
        if held is not None and token.get("digest") == held.digest:
            token = {"attempt": txn.attempt, "digest": held.digest, "rows": held.tally.rows}
        return super().commit(txn, token)


class AbortsWhatItsTokenNames(MemorySink):
    """A token without a known attempt aborts the whole scope."""

    def abort(self, txn, token):
        if token is not None and token.get("attempt") != txn.attempt:
            self.store.prepared.clear()
        return super().abort(txn, token)


DECISIONS = {
    ObeysItsToken: "a_token_that_was_changed_in_any_field_is_refused_and_nothing_is_touched",
    AbortsWhatItsTokenNames: "abort_with_a_changed_token_touches_nothing_but_its_own_attempt",
    CommitsTwice: "committing_again_is_the_same_as_committing_once",
    ForgetsItsCommits: "committing_again_is_the_same_as_committing_once",
    CommitsWhatIsLost: "committing_what_has_vanished_is_fatal",
    CommitsWhatIsStaged: "committing_what_was_only_staged_is_fatal",
    CommitsBothAttempts: "committing_is_fatal_once_another_attempt_is_committed",
    CommitsTheLastAttemptOfTheCycle: ("a_commit_shows_no_rows_but_those_of_its_own_transaction"),
    AbortDeletesCommittedRows: "aborting_after_the_commit_is_fatal_and_deletes_nothing",
    AbortSaysOkAfterCommit: "aborting_after_the_commit_is_fatal_and_deletes_nothing",
    AbortDropsTheWholeCycle: "abort_leaves_other_attempts_alone",
    AbortNeedsItsToken: (
        "another_process_aborts_what_a_dead_one_prepared_with_or_without_its_token"
    ),
    AbortNeedsSomethingToAbort: "aborting_what_never_was_is_ok",
    AbortForgetsWhatWasStaged: "abort_drops_what_was_only_staged",
    ForgetsTheMark: "the_mark_names_the_highest_committed_cycle_and_its_attempt",
    LowersTheMark: "repeating_an_old_commit_does_not_lower_the_mark",
    MarksByBatchAlone: "a_new_generation_outranks_every_batch_of_the_old_one",
    EmptyBatchesLeaveNoProof: "a_batch_without_rows_is_committed_with_a_proof",
    SaysRetryableForever: "committing_what_has_vanished_is_fatal",
}
"""Each of them, with the rule of the contract that names its fault."""
