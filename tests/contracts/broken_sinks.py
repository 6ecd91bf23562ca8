"""Memory sinks that break one rule of the contract each.

Wrong decisions and wrong leavings have modules of their own; whatever else is wrong is here.
"""

from __future__ import annotations

import datetime as dt
import uuid
from dataclasses import dataclass, replace
from typing import Any

from broken_decisions import DECISIONS
from broken_leavings import LEAVINGS

from semel.memory.sink import MemorySink
from semel.pipeline.sink import SinkFatal, SinkOK, Tally, digest_of


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
        if isinstance(outcome, SinkFatal) and "are missing or changed" in outcome.reason:
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


class TokenListsTheTasks(MemorySink):
    """The token has a name for every task."""

    def prepare(self, txn, receipts):
        outcome = super().prepare(txn, receipts)
        if isinstance(outcome, SinkOK):
            return SinkOK({**outcome.token, "tasks": [receipt.task for receipt in receipts]})
        return outcome


class TokenHoldsTheRows(MemorySink):
    """The token grows with the batch."""

    def prepare(self, txn, receipts):
        outcome = super().prepare(txn, receipts)
        if isinstance(outcome, SinkOK) and txn in self.store.prepared:
            return SinkOK({**outcome.token, "all": repr(self.store.prepared[txn].rows)})
        return outcome

    def commit(self, txn, token):
        return super().commit(txn, {k: v for k, v in token.items() if k != "all"})


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


class LosesEqualRows(MemorySink):
    """Rows are kept in a set."""

    @property
    def visible(self):
        return list({row["id"]: row for row in super().visible}.values())


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


class HasANewNameEveryTime(MemorySink):
    """Another process cannot find the sink's tokens by its name."""

    def __init__(self, **settings):
        super().__init__(f"memory-{uuid.uuid4().hex[:8]}", **settings)


class KeepsItsGuaranteeToItself(MemorySink):
    """Nobody learns what readers see."""

    def guarantee(self):
        return replace(super().guarantee(), readers_see="")


CONVICTED_BY = {
    **DECISIONS,
    **LEAVINGS,
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
    TokenIsNotJson: "a_token_is_json",
    TokenTellsASecret: "no_secret_is_shown",
    TokenListsTheTasks: "a_token_is_small_however_many_tasks_it_stands_for",
    TokenHoldsTheRows: "a_token_is_small_however_many_rows_it_stands_for",
    KeepsStateInTheObject: "another_process_commits_what_a_dead_one_prepared",
    CannotBePickled: "a_sink_can_be_pickled_at_any_time",
    LosesEqualRows: "equal_rows_are_all_kept",
    ShowsWhatIsStaged: "staged_rows_are_not_visible",
    LittersForEveryTask: "a_discarded_writer_leaves_nothing",
    SaltsItsTallies: "receipts_of_equal_rows_add_up_to_equal_tallies",
    HasANewNameEveryTime: "a_sink_has_a_name",
    KeepsItsGuaranteeToItself: "a_sink_states_its_guarantee_with_its_scope",
}
"""Every broken sink, with the rule of the contract that names its fault."""
