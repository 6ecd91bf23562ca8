"""Memory sinks that recover, sweep, fence or look up wrongly."""

from __future__ import annotations

from dataclasses import replace

from semel.errors import Fenced
from semel.memory.sink import HeldRows, MemorySink
from semel.pipeline.sink import Found, SinkFatal, SinkFinding, SinkOK, Tally
from semel.pipeline.txn import CycleId


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
        return (
            SinkFinding(Found.VISIBLE, "no longer held") if finding.found is Found.GONE else finding
        )


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


class UndoesEverything(MemorySink):
    """Undo takes the rows of other cycles, too."""

    def undo(self, txn, token):
        outcome = super().undo(txn, token)
        for other in [cycle for cycle in self.store.visible if cycle != txn.cycle]:
            del self.store.visible[other]
        return outcome


class UndoesOnlyOnce(MemorySink):
    """Undo is not repeatable."""

    def undo(self, txn, token):
        if txn in self.store.undone:
            return SinkFatal(f"{txn} is not here")
        return super().undo(txn, token)


class UndoesWhenAsked(MemorySink):
    """The check of an undo is the undo."""

    def check_undo(self, txn, token):
        found = super().check_undo(txn, token)
        if not found and txn not in self.store.undone:
            self.store.visible[txn.cycle] = replace(
                self.store.visible[txn.cycle], held=HeldRows("", (), Tally(), 0.0)
            )
        return found


class UndoesWhatIsHeld(MemorySink):
    """Undo is taken for an abort."""

    def undo(self, txn, token):
        self.store.prepared.pop(txn, None)
        return SinkOK() if txn.cycle not in self.store.visible else super().undo(txn, token)


class UndoesWithoutProof(MemorySink):
    """Undo puts the rows back to where a commit finds them."""

    def undo(self, txn, token):
        shown = self.store.visible.get(txn.cycle)
        if shown is None:
            return super().undo(txn, token)
        self.store.prepared[txn] = self.store.visible.pop(txn.cycle).held
        return SinkOK()


LEAVINGS = {
    RecoversNothing: "recover_lists_what_a_dead_process_prepared",
    RecoversOtherScopes: "recover_keeps_queries_apps_and_ledgers_apart",
    RecoversOtherLedgers: "recover_keeps_queries_apps_and_ledgers_apart",
    RecoversWhatIsStaged: "recover_leaves_out_what_is_staged_aborted_or_finished",
    RecoversWhatIsFinished: "recover_leaves_out_what_is_staged_aborted_or_finished",
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
    LookUpGuesses: "look_up_says_gone_for_what_was_never_prepared",
    RefusesItsOwnEpoch: "fencing_again_with_the_same_epoch_is_fine",
    UndoesEverything: "undo_takes_away_the_rows_of_one_cycle_and_no_others",
    UndoesOnlyOnce: "undo_is_repeated_by_another_process",
    UndoesWhenAsked: "a_check_of_undo_changes_nothing",
    UndoesWhatIsHeld: "what_is_not_committed_is_not_undone",
    UndoesWithoutProof: "a_late_commit_does_not_bring_undone_rows_back",
    RecoversGhosts: "recover_lists_nothing_in_an_empty_store",
}
"""Each of them, with the rule of the contract that names its fault."""
