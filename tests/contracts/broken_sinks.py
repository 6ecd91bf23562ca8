"""Memory sinks that break one rule of the contract each."""

from __future__ import annotations

import datetime as dt
import uuid
from dataclasses import dataclass, replace
from typing import Any

from semel.errors import Fenced
from semel.memory.sink import MemorySink
from semel.memory.store import Shown
from semel.pipeline.sink import (
    Finding,
    Found,
    SinkFatal,
    SinkOK,
    SinkRetryable,
    Tally,
    digest_of,
)
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


class RecoversNothing(MemorySink):
    """Recover always answers: nothing."""

    def recover(self, scope):
        return []


class RecoversOtherScopes(MemorySink):
    """Recover lists everything in the store."""

    def recover(self, scope):
        return list(self.store.prepared)


class RecoversOtherLedgers(MemorySink):
    """Recover goes by app and query alone."""

    def recover(self, scope):
        return [
            txn
            for txn in self.store.prepared
            if (txn.scope.app, txn.scope.query) == (scope.app, scope.query)
        ]


class RecoversWhatIsStaged(MemorySink):
    """Recover takes staged rows for prepared ones."""

    def recover(self, scope):
        return [txn for txn in {*self.store.staged, *self.store.prepared} if txn.scope == scope]


class RecoversWhatIsFinished(MemorySink):
    """Recover goes on listing what has been committed."""

    def recover(self, scope):
        finished = [shown.txn for shown in self.store.visible.values()]
        return super().recover(scope) + [txn for txn in finished if txn.scope == scope]


class ShowsWhatIsPrepared(MemorySink):
    """Prepare makes rows visible at once."""

    def prepare(self, txn, receipts):
        outcome = super().prepare(txn, receipts)
        if isinstance(outcome, SinkOK) and txn in self.store.prepared:
            super().commit(txn, outcome.token)
        return outcome


class PreparesLosingTasks(MemorySink):
    """Prepare takes whatever was staged, not what the receipts say."""

    def prepare(self, txn, receipts):
        outcome = super().prepare(txn, receipts)
        held = self.store.prepared.get(txn)
        if held is not None:
            rows = [row for part in self.store.staged.get(txn, {}).values() for row in part]
            self.store.prepared[txn] = type(held)(held.digest, tuple(rows), held.tally, held.since)
        return outcome


class PreparesOtherRowsAgain(MemorySink):
    """A second prepare with other receipts is taken for a repetition."""

    def prepare(self, txn, receipts):
        held = self.store.prepared.get(txn)
        if held is not None and held.digest != digest_of(receipts):
            return SinkOK({"attempt": txn.attempt, "digest": held.digest, "rows": 0})
        return super().prepare(txn, receipts)


class RefusesToPrepareAgain(MemorySink):
    """Prepare is not repeatable."""

    def prepare(self, txn, receipts):
        if txn in self.store.prepared:
            return SinkFatal(f"{txn} is prepared already")
        return super().prepare(txn, receipts)


class ReplacesTheOtherAttempt(MemorySink):
    """What is prepared is keyed by the cycle, so the last one to prepare wins."""

    def prepare(self, txn, receipts):
        outcome = super().prepare(txn, receipts)
        for other in list(self.store.prepared):
            if other.cycle == txn.cycle and other != txn:
                del self.store.prepared[other]
        return outcome


class PreparesBesideACommit(MemorySink):
    """Prepare does not look whether another attempt committed."""

    def prepare(self, txn, receipts):
        shown = self.store.visible.get(txn.cycle)
        if shown and shown.txn != txn:
            return self._hold(txn, receipts, digest_of(receipts))
        return super().prepare(txn, receipts)


class PromisesWhatIsNotThere(MemorySink):
    """Prepare believes the receipts without looking for the rows."""

    def prepare(self, txn, receipts):
        outcome = super().prepare(txn, receipts)
        if isinstance(outcome, SinkFatal) and "gone or changed" in outcome.reason:
            return SinkOK({"attempt": txn.attempt, "digest": digest_of(receipts), "rows": 0})
        return outcome


class IgnoresTheMark(MemorySink):
    """Prepare would stage a cycle again whose proof is gone."""

    def prepare(self, txn, receipts):
        mark = self.store.marks.pop(txn.scope, None)
        outcome = super().prepare(txn, receipts)
        if mark:
            self.store.marks[txn.scope] = mark
        return outcome


class SweepsLiveAttempts(MemorySink):
    """Sweep takes everything."""

    def sweep(self, scope, is_loser):
        return super().sweep(scope, lambda txn: True)


class SweepsOtherScopes(MemorySink):
    """Sweep asks about everything in the store, whoever owns it."""

    def sweep(self, scope, is_loser):
        scopes = {txn.scope for txn in (*self.store.staged, *self.store.prepared)}
        return [
            txn for each in scopes for txn in super(SweepsOtherScopes, self).sweep(each, is_loser)
        ]


class SweepsNothing(MemorySink):
    """Sweep does nothing."""

    def sweep(self, scope, is_loser):
        return []


class SweepsOnlyWhatIsPrepared(MemorySink):
    """Sweep does not see what late tasks staged."""

    def sweep(self, scope, is_loser):
        losers = [txn for txn in self.recover(scope) if is_loser(txn)]
        for txn in losers:
            self.abort(txn, None)
        return losers


class SweepsWhatReadersSee(MemorySink):
    """Sweep believes the ledger that a pruned cycle was a loser."""

    def sweep(self, scope, is_loser):
        for cycle, shown in list(self.store.visible.items()):
            if cycle.scope == scope and is_loser(shown.txn):
                del self.store.visible[cycle]
        return super().sweep(scope, is_loser)


class ForgetsTheFence(MemorySink):
    """Fence accepts every epoch."""

    def fence(self, scope, epoch):
        self.store.epochs[scope] = epoch
        self._epochs[scope] = epoch


class LetsZombiesPrepare(MemorySink):
    """Prepare does not look at the fence."""

    def prepare(self, txn, receipts):
        self._epochs[txn.scope] = self.store.epochs.get(txn.scope, 0)
        return super().prepare(txn, receipts)


class FencesEverybody(MemorySink):
    """The epoch is kept per store instead of per scope."""

    def fence(self, scope, epoch):
        if any(epoch < seen for seen in self.store.epochs.values()):
            raise Fenced("a newer epoch exists")
        super().fence(scope, epoch)

    def prepare(self, txn, receipts):
        if self._epochs.get(txn.scope, 0) < max(self.store.epochs.values(), default=0):
            return SinkFatal(f"{txn}: a newer epoch exists")
        return super().prepare(txn, receipts)


class FenceDropsWhatIsPrepared(MemorySink):
    """A new owner clears the table before recovery has read it."""

    def fence(self, scope, epoch):
        super().fence(scope, epoch)
        self.store.prepared.clear()


class LookUpMutates(MemorySink):
    """Looking something up finishes it."""

    def look_up(self, txn, token):
        finding = super().look_up(txn, token)
        if finding.found is Found.GONE:
            self.store.staged.pop(txn, None)
        return finding


class LookUpRaises(MemorySink):
    """Look_up trusts its token."""

    def look_up(self, txn, token):
        if token is not None and token["attempt"] != txn.attempt:
            raise ValueError("not this attempt's token")
        return super().look_up(txn, token)


class LookUpGuesses(MemorySink):
    """Look_up takes absence for visible."""

    def look_up(self, txn, token):
        finding = super().look_up(txn, token)
        return Finding(Found.VISIBLE, "no longer held") if finding.found is Found.GONE else finding


class TokenIsNotJson(MemorySink):
    """The token holds a date."""

    def prepare(self, txn, receipts):
        outcome = super().prepare(txn, receipts)
        if isinstance(outcome, SinkOK):
            return SinkOK({**outcome.token, "at": dt.datetime(2026, 1, 1, tzinfo=dt.UTC)})
        return outcome


class TokenTellsASecret(MemorySink):
    """The token holds what it needs to log in."""

    def prepare(self, txn, receipts):
        outcome = super().prepare(txn, receipts)
        if isinstance(outcome, SinkOK):
            return SinkOK({**outcome.token, "password": "opensesame"})
        return outcome

    def commit(self, txn, token):
        return super().commit(txn, {k: v for k, v in token.items() if k != "password"})


class TokenHoldsTheRows(MemorySink):
    """The token grows with the batch."""

    def prepare(self, txn, receipts):
        outcome = super().prepare(txn, receipts)
        if isinstance(outcome, SinkOK) and txn in self.store.prepared:
            return SinkOK({**outcome.token, "all": repr(self.store.prepared[txn].rows)})
        return outcome

    def commit(self, txn, token):
        return super().commit(txn, {k: v for k, v in token.items() if k != "all"})


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


class KeepsStateInTheObject(MemorySink):
    """What was prepared is known to one process only."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._known = set()

    def prepare(self, txn, receipts):
        self._known.add(txn)
        return super().prepare(txn, receipts)

    def commit(self, txn, token):
        if txn not in self._known:
            return SinkFatal(f"{txn} was not prepared here")
        return super().commit(txn, token)


class CannotBePickled(MemorySink):
    """The sink holds a connection."""

    def __getstate__(self):
        raise TypeError("cannot pickle a connection")


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


class LosesEqualRows(MemorySink):
    """Rows are kept in a set."""

    @property
    def visible(self):
        return list({row["id"]: row for row in super().visible}.values())


class SaysRetryableForever(MemorySink):
    """Lost is answered as if it could come back."""

    def commit(self, txn, token):
        outcome = super().commit(txn, token)
        return SinkRetryable(outcome.reason) if isinstance(outcome, SinkFatal) else outcome


class ShowsWhatIsStaged(MemorySink):
    """Readers see rows as soon as a task writes them."""

    @property
    def visible(self):
        tasks = [task for tasks in self.store.staged.values() for task in tasks.values()]
        return [*super().visible, *(row for rows in tasks for row in rows)]


class LittersForEveryTask(MemorySink):
    """Something stays of a task that discards its rows."""

    def stager(self, txn):
        self.store.staged.setdefault(txn, {})["litter"] = []
        return super().stager(txn)


class SaltsItsTallies(MemorySink):
    """The hash of the rows depends on how they were spread over tasks."""

    def stager(self, txn):
        return SaltingStager(super().stager(txn))


@dataclass
class SaltingStager:
    inner: Any

    def open(self, task):
        writer = self.inner.open(task)
        writer.finish = lambda finish=writer.finish: salted(finish())
        return writer


def salted(receipt):
    return replace(receipt, tally=Tally(receipt.tally.rows, receipt.tally.hash + 1))


class RefusesItsOwnEpoch(MemorySink):
    """A repeated fence is taken for another owner's."""

    def fence(self, scope, epoch):
        if self.store.epochs.get(scope) == epoch:
            raise Fenced(f"{scope} is fenced already")
        super().fence(scope, epoch)


class RecoversGhosts(MemorySink):
    """Recover lists something where nothing is."""

    def recover(self, scope):
        return super().recover(scope) or [CycleId(scope, 1, 1).attempt()]


class HasANewNameEveryTime(MemorySink):
    """Another process cannot find the sink's tokens by its name."""

    def __init__(self, **settings):
        super().__init__(f"memory-{uuid.uuid4().hex[:8]}", **settings)


class KeepsItsGuaranteeToItself(MemorySink):
    """Nobody learns what readers see."""

    def guarantee(self):
        return replace(super().guarantee(), readers_see="")


CONVICTED_BY = {
    CommitsTwice: "committing_again_is_the_same_as_committing_once",
    ForgetsItsCommits: "another_process_may_repeat_the_commit",
    CommitsWhatIsLost: "committing_what_has_vanished_is_fatal",
    CommitsWhatIsStaged: "committing_what_was_only_staged_is_fatal",
    CommitsBothAttempts: "committing_is_fatal_once_another_attempt_is_committed",
    CommitsTheLastAttemptOfTheCycle: ("a_commit_shows_no_rows_but_those_of_its_own_transaction"),
    AbortDeletesCommittedRows: "aborting_after_the_commit_is_fatal_and_deletes_nothing",
    AbortSaysOkAfterCommit: "aborting_after_the_commit_is_fatal_and_deletes_nothing",
    AbortDropsTheWholeCycle: "abort_leaves_other_attempts_alone",
    AbortNeedsItsToken: "aborting_needs_no_token",
    AbortNeedsSomethingToAbort: "aborting_what_never_was_is_ok",
    AbortForgetsWhatWasStaged: "abort_drops_what_was_only_staged",
    RecoversNothing: "recover_lists_what_a_dead_process_prepared",
    RecoversOtherScopes: "recover_keeps_queries_apps_and_ledgers_apart",
    RecoversOtherLedgers: "recover_keeps_queries_apps_and_ledgers_apart",
    RecoversWhatIsStaged: "recover_leaves_out_what_is_staged_aborted_or_finished",
    RecoversWhatIsFinished: "recover_leaves_out_what_is_staged_aborted_or_finished",
    ShowsWhatIsPrepared: "prepared_rows_are_held_and_not_visible",
    PreparesLosingTasks: "only_the_winning_task_attempts_rows_become_visible",
    PreparesOtherRowsAgain: (
        "preparing_again_with_other_rows_is_fatal_and_keeps_what_was_prepared"
    ),
    RefusesToPrepareAgain: "preparing_again_changes_nothing",
    ReplacesTheOtherAttempt: "a_second_attempt_is_prepared_beside_the_first",
    PreparesBesideACommit: "preparing_is_fatal_once_another_attempt_is_committed",
    PromisesWhatIsNotThere: "preparing_rows_that_are_not_there_is_never_a_promise",
    IgnoresTheMark: "preparing_below_the_mark_is_fatal",
    SweepsLiveAttempts: "sweep_spares_attempts_that_are_not_losers",
    SweepsOtherScopes: "sweep_spares_other_scopes",
    SweepsNothing: "sweep_removes_what_losers_prepared",
    SweepsOnlyWhatIsPrepared: "sweep_removes_what_late_tasks_staged_after_the_abort",
    SweepsWhatReadersSee: "sweep_never_removes_what_readers_see",
    ForgetsTheFence: "an_older_epoch_is_refused",
    LetsZombiesPrepare: "a_fenced_process_can_prepare_nothing",
    FencesEverybody: "scopes_do_not_fence_each_other",
    FenceDropsWhatIsPrepared: "fencing_keeps_what_is_prepared_for_recovery",
    LookUpMutates: "look_up_changes_nothing",
    LookUpRaises: "look_up_answers_even_with_a_broken_token",
    LookUpGuesses: "look_up_says_gone_for_what_never_was",
    TokenIsNotJson: "a_token_is_json",
    TokenTellsASecret: "no_secret_is_told",
    TokenHoldsTheRows: "a_token_is_small_however_many_rows_it_stands_for",
    ForgetsTheMark: "the_mark_names_the_highest_committed_cycle_and_its_attempt",
    LowersTheMark: "repeating_an_old_commit_does_not_lower_the_mark",
    MarksByBatchAlone: "a_new_generation_outranks_every_batch_of_the_old_one",
    KeepsStateInTheObject: "another_process_commits_what_a_dead_one_prepared",
    CannotBePickled: "a_sink_can_be_pickled_at_any_time",
    EmptyBatchesLeaveNoProof: "a_batch_without_tasks_is_committed_with_a_proof",
    LosesEqualRows: "equal_rows_are_all_kept",
    SaysRetryableForever: "committing_what_has_vanished_is_fatal",
    ShowsWhatIsStaged: "staged_rows_are_not_visible",
    LittersForEveryTask: "a_discarded_writer_leaves_nothing",
    SaltsItsTallies: "receipts_of_equal_rows_add_up_to_equal_tallies",
    RefusesItsOwnEpoch: "fencing_again_with_the_same_epoch_is_fine",
    RecoversGhosts: "recover_lists_nothing_in_an_empty_store",
    HasANewNameEveryTime: "a_sink_has_a_name",
    KeepsItsGuaranteeToItself: "a_sink_states_its_guarantee_with_its_scope",
}
"""Every broken sink, with the rule of the contract that names its fault."""
