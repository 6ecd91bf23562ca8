"""Engines with one rule broken, or with every defence of one rule taken away.

A rule that several parts defend is only convicted when all of them fall:
such a mutant lists them.
"""

from __future__ import annotations

from semel.memory.ledger import MemoryLedger
from semel.memory.sink import MemorySink, Shown
from semel.pipeline import recovery, rules
from semel.pipeline.cycle import FAILURES, AbortAnswer, Consequence, Step, StepFailure, _Run
from semel.pipeline.driver import Driver, LedgerCoordinator
from semel.pipeline.ledger import CycleState
from semel.pipeline.recovery import _Recovery
from semel.pipeline.sink import SinkOK
from semel.testing.world import Invariant, World
from tests.mutants import mutants

I = Invariant  # noqa: E741  the table below is read across


def recovery_forgets_to_sweep(patch):
    patch.setattr(recovery, "sweep", lambda *_: {})


def recovery_forgets_one_sink(patch):
    commit = _Recovery._commit
    patch.setattr(
        _Recovery,
        "_commit",
        lambda self, group, attempt: (
            None if group[0].name == "s2" else commit(self, group, attempt)
        ),
    )


def recovery_gives_up_what_is_committed(patch):
    decide = _Recovery._decided
    patch.setattr(_Recovery, "_decided", lambda self, left: (decide(self, left), ([*left], []))[1])


def recovery_forgets_what_is_undecided(patch):
    patch.setattr(
        _Recovery,
        "_decided",
        lambda self, left: ([], [attempt for attempt in left if attempt.state.is_committed]),
    )
    patch.setattr(_Recovery, "_settle_held", lambda self, sink: None)


def recovery_gives_up_its_successors_attempt(patch):
    def abort_all(self, lease, reason=""):
        left = [a.txn for a in self.open_attempts(lease.scope) if not a.state.is_decided]
        for txn in left:
            self.decide_abort(txn, reason)
        return left

    patch.setattr(MemoryLedger, "abort_undecided", abort_all)
    patch.setattr(_Recovery, "_refuse_newer", lambda self, attempt: None)


def sweep_takes_the_living_for_losers(patch):
    def is_loser(ledger, scope):
        verdict = is_really_loser(ledger, scope)
        living = (CycleState.PLANNED, CycleState.PREPARED)

        def takes(txn):
            known = ledger.attempt(txn)
            return verdict(txn) or (known is not None and known.state in living)

        return takes

    is_really_loser = recovery.is_loser
    patch.setattr(recovery, "is_loser", is_loser)


def abort_is_believed_to_be_won(patch):
    win = _Run._win_abort
    patch.setattr(_Run, "_win_abort", lambda self, why: (win(self, why), AbortAnswer.WON)[1])


def abort_is_read_and_not_won(patch):
    def read(self, reason):
        record = self.ledger.attempt(self.txn)
        return AbortAnswer.LOST if record and record.state.is_committed else AbortAnswer.WON

    patch.setattr(LedgerCoordinator, "abort_txn", read)


def unknown_is_taken_for_no(patch):
    patch.setitem(FAILURES, (Step.COMMIT_TXN, StepFailure.UNKNOWN), Consequence.ABORT)
    patch.setattr(_Run, "_abort_path", lambda self, reason: self._drop_staged())


def the_epoch_is_not_checked(patch):
    patch.setattr(rules, "check_lease", lambda *_: None)


def the_attempt_is_used_again(patch):
    patch.setattr(World, "_new_attempt", lambda self, cycle: cycle.attempt("same"))


def the_cycle_is_finished_before_its_sinks(patch):
    def finish_first(self):
        self.ledger.finish(self.lease, self.txn)
        return ()

    patch.setattr(LedgerCoordinator, "commit_2pc", finish_first)
    patch.setattr(_Recovery, "_settle_held", lambda self, sink: None)


def tokens_are_not_kept(patch):
    patch.setattr(
        LedgerCoordinator,
        "keep_tokens",
        lambda self, txn, tokens: self.ledger.set_prepared(self.lease, txn, {}, {}),
    )


def positions_stand_still(patch):
    patch.setattr(rules, "next_positions", lambda ends, batch: {})


def a_replay_is_run_again(patch):
    patch.setattr(Driver, "_replay", lambda self, *_: None)


def nobody_remembers_the_cycle(patch):
    """The replay, the positions, the plan, the decision and the sink's proof all forget it."""
    a_replay_is_run_again(patch)
    patch.setattr(Driver, "_refusal", lambda self, *_: None)
    patch.setattr(rules, "check_plan", lambda *_: None)
    patch.setattr(rules, "check_commit", lambda txn, known, *_: known.range)
    patch.setattr(recovery, "check_marks", lambda *_: None)

    def prepare(self, txn, receipts):
        return self._hold(txn, receipts, "digest")

    def commit(self, txn, token):
        held = self.store.prepared.pop(txn, None)
        self.store.staged.pop(txn, None)
        if held is not None:
            self.store.visible[txn] = Shown(txn, held, 0.0)
        return SinkOK()

    patch.setattr(MemorySink, "prepare", prepare)
    patch.setattr(MemorySink, "commit", commit)


def prepare_shows_the_rows(patch):
    prepare = MemorySink.prepare

    def and_show(self, txn, receipts):
        outcome = prepare(self, txn, receipts)
        if isinstance(outcome, SinkOK):
            self.commit(txn, outcome.token)
        return outcome

    patch.setattr(MemorySink, "prepare", and_show)


def lost_is_taken_for_done(patch):
    """The abort is not won, and the sink answers OK by absence."""
    abort_is_believed_to_be_won(patch)
    commit = MemorySink.commit

    def by_absence(self, txn, token):
        known = txn in self.store.prepared or txn.cycle in self.store.visible
        return commit(self, txn, token) if known else SinkOK()

    patch.setattr(MemorySink, "commit", by_absence)


def abort_deletes_what_is_committed(patch):
    """A woken owner aborts without having won, and the sink deletes what it shows."""
    abort_is_believed_to_be_won(patch)

    def abort(self, txn, token):
        self.store.visible.pop(txn.cycle, None)
        self.store.prepared.pop(txn, None)
        self.store.staged.pop(txn, None)
        return SinkOK()

    patch.setattr(MemorySink, "abort", abort)


MUTANTS = mutants(
    [
        (recovery_forgets_to_sweep, I.NOTHING_LEFT),
        (recovery_forgets_one_sink, I.ALL_COMMITTED),
        (recovery_gives_up_what_is_committed, I.PROGRESS),
        (recovery_forgets_what_is_undecided, I.NOTHING_LEFT),
        (recovery_gives_up_its_successors_attempt, I.FENCED),
        (sweep_takes_the_living_for_losers, I.FENCED),
        (abort_is_believed_to_be_won, I.PROGRESS),
        (abort_is_read_and_not_won, I.PROGRESS),
        (unknown_is_taken_for_no, I.PROGRESS),
        (the_epoch_is_not_checked, I.FENCED),
        (the_attempt_is_used_again, I.PROGRESS),
        (the_cycle_is_finished_before_its_sinks, I.ALL_COMMITTED),
        (tokens_are_not_kept, I.PROGRESS),
        (positions_stand_still, I.POSITIONS),
        (a_replay_is_run_again, I.PROGRESS),
        (nobody_remembers_the_cycle, I.NOTHING_TWICE),
        (prepare_shows_the_rows, I.ONLY_COMMITTED),
        (lost_is_taken_for_done, I.ALL_COMMITTED),
        (abort_deletes_what_is_committed, I.ALL_COMMITTED),
    ]
)
