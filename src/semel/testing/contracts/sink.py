"""The contract of a two-phase sink, executable.

    class TestMySink(SinkContract):
        def make_sink(self): ...
        def visible_rows(self, sink): ...
        def leavings(self, sink): ...
        def lose(self, sink, txn): ...

Every operation is repeated, every operation is done by another process than
the one before it, and every token has been through JSON.
"""

from __future__ import annotations

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from semel.errors import Fenced
from semel.pipeline.sink import (
    CountsVisibleRows,
    DescribesGuarantee,
    Found,
    KnowsItsPlace,
    SinkFatal,
    SinkOK,
    SinkOutcome,
    Tenant,
    TwoPhaseSink,
    tally_of,
)
from semel.pipeline.txn import Scope, SinkTxnId
from semel.testing.contracts.sink_phases import (
    SinkAborts,
    SinkCommits,
    SinkIsLookedUp,
    SinkPrepares,
)
from semel.testing.contracts.sink_undo import SinkUndoes
from semel.testing.contracts.sink_world import (
    Capability,
    SinkWorld,
    is_fatal,
    is_found,
    is_ok,
    is_refused,
    through_json,
)


class SinkRecovers(SinkWorld):
    """Recover lists exactly this scope's prepared, unfinished transactions."""

    def test_recover_lists_nothing_in_an_empty_store(self) -> None:
        self.holds(self.process())

    def test_recover_lists_what_a_dead_process_prepared(self) -> None:
        sink, finished, first, second = self.process(), self.txn(1), self.txn(2), self.txn(2)
        self.committed(sink, finished, [1])
        self.prepared(sink, first, [2])
        self.prepared(sink, second, [3])

        sink = self.successor(sink)

        self.holds(sink, first, second)
        self.holds(sink, first, second)

    def test_recover_leaves_out_what_is_staged_aborted_or_finished(self) -> None:
        sink, finished, aborted, staged = self.process(), self.txn(1), self.txn(2), self.txn(2)
        self.committed(sink, finished, [1])
        is_ok(sink.abort(aborted, self.prepared(sink, aborted, [2])))
        self.stage(sink, staged, [3])

        self.holds(self.successor(sink))

    def test_recover_lists_a_loser_that_is_still_held_beside_the_winner(self) -> None:
        sink, winner, loser = self.process(), self.txn(), self.txn()
        self.prepared(sink, loser, [2])
        self.committed(sink, winner, [1])

        self.holds(self.successor(sink), loser)

    def test_recover_keeps_queries_apps_and_ledgers_apart(self) -> None:
        scopes = (self.scope, *self.other_scopes)
        sink = self.process(*scopes)
        held = {scope: self.txn(scope=scope) for scope in scopes}
        for number, txn in enumerate(held.values()):
            self.prepared(sink, txn, [number])

        sink = self.successor(sink, *scopes)

        for scope, txn in held.items():
            self.holds(sink, txn, scope=scope)
        self.holds(sink, scope=Scope("ledger-3", "payments", "main"))

    def test_a_sink_that_knows_its_place_tells_who_has_committed_there(self) -> None:
        elsewhere = Scope("ledger-9", self.scope.app, self.scope.query)
        scopes = (elsewhere, *self.other_scopes)
        sink = self.process(self.scope, *scopes)
        if not isinstance(sink, KnowsItsPlace):
            return
        self.prepared(sink, self.txn(scope=self.scope), [1])
        assert sink.tenants() == []

        shown = {scope: self.txn(7, scope=scope) for scope in scopes}
        for txn in shown.values():
            self.committed(sink, txn, [2])

        successor = self.successor(sink)
        assert isinstance(successor, KnowsItsPlace)
        assert successor.find_place() == sink.find_place()
        wanted = {Tenant(scope, sink.name, txn.label) for scope, txn in shown.items()}
        assert set(successor.tenants()) == wanted

    def test_a_renamed_tenant_keeps_its_mark_and_is_no_longer_known_by_its_old_name(self) -> None:
        sink = self.process()
        if not isinstance(sink, KnowsItsPlace):
            return
        txn, new = self.txn(7), Scope(self.scope.ledger, "renamed", self.scope.query)
        self.committed(sink, txn, [1])

        for _ in range(2):
            sink.rename(Tenant(self.scope, sink.name), Tenant(new, sink.name))

        again = self.successor(sink, new)
        assert isinstance(again, KnowsItsPlace)
        assert again.tenants() == [Tenant(new, again.name, txn.label)]
        assert again.mark(self.scope) is None
        mark = again.mark(new)
        assert mark is not None
        assert mark.label == txn.label
        self.committed(again, self.txn(8, scope=new), [2])
        self.shows(again, 1, 2)

    def test_scopes_commit_side_by_side(self) -> None:
        scopes = (self.scope, *self.other_scopes)
        sink = self.process(*scopes)

        for number, scope in enumerate(scopes):
            self.committed(sink, self.txn(scope=scope), [number])

        self.shows(sink, *range(len(scopes)))

    def test_everything_that_recover_lists_can_be_settled(self) -> None:
        sink = self.process()
        txns = [self.txn(batch) for batch in range(6)]
        tokens = {txn: self.prepared(sink, txn, [txn.cycle.batch]) for txn in txns}
        sink = self.successor(sink)

        for txn in sink.recover(self.scope):
            if txn.cycle.batch % 2:
                is_ok(sink.commit(txn, tokens[txn]))
            else:
                is_ok(sink.abort(txn, tokens[txn]))

        self.holds(sink)
        self.shows(sink, 1, 3, 5)
        self.leaves_nothing(sink)


class SinkSweeps(SinkWorld):
    """Sweep removes what losers leave, whenever they leave it, and nothing else."""

    def test_sweep_removes_what_late_tasks_staged_after_the_abort(self) -> None:
        self.needs(Capability.LIST_LEAVINGS)
        sink, loser = self.process(), self.txn()
        is_ok(sink.abort(loser, self.prepared(sink, loser, [1])))
        self.stage(sink, loser, [2], [3])
        left = self.leavings_now(sink)  # nothing, where rows travel in receipts

        swept = self.successor(sink).sweep(self.scope, lambda txn: txn == loser)

        assert swept == ([loser] if left else [])
        self.leaves_nothing(self.make_sink())
        self.shows(self.make_sink())

    def test_sweep_removes_what_a_task_left_that_was_killed(self) -> None:
        self.needs(Capability.LIST_LEAVINGS)
        sink, loser = self.process(), self.txn()
        writer = sink.stager(loser).open("task-1")
        writer.write(self.make_batch([1, 2]))
        self.crash(sink)

        self.process().sweep(self.scope, lambda txn: txn == loser)

        self.leaves_nothing(self.make_sink())
        writer.discard()
        self.leaves_nothing(self.make_sink())

    def test_sweep_removes_what_losers_prepared(self) -> None:
        sink, loser, winner = self.process(), self.txn(), self.txn()
        self.prepared(sink, loser, [1])
        self.committed(sink, winner, [2])

        swept = self.successor(sink).sweep(self.scope, lambda txn: txn == loser)

        assert swept == [loser]
        self.holds(self.make_sink())
        self.leaves_nothing(self.make_sink())
        self.shows(self.make_sink(), 2)

    def test_sweeping_again_finds_nothing(self) -> None:
        sink, loser = self.process(), self.txn()
        self.prepared(sink, loser, [1])
        sink.sweep(self.scope, lambda txn: txn == loser)

        assert sink.sweep(self.scope, lambda txn: txn == loser) == []
        assert self.successor(sink).sweep(self.scope, lambda txn: True) == []

    def test_sweep_spares_attempts_that_are_not_losers(self) -> None:
        sink, held, staged, loser = self.process(), self.txn(), self.txn(), self.txn()
        token = self.prepared(sink, held, [1])
        receipts = self.stage(sink, staged, [2])
        self.prepared(sink, loser, [3])

        swept = sink.sweep(self.scope, lambda txn: txn == loser)

        assert swept == [loser]
        self.holds(sink, held)
        is_ok(sink.abort(held, token))
        is_ok(sink.commit(staged, self.prepare(sink, staged, receipts)))
        self.shows(sink, 2)

    def test_sweep_never_removes_what_readers_see(self) -> None:
        sink, first, second = self.process(), self.txn(1), self.txn(2)
        token = self.committed(sink, first, [1])
        self.committed(sink, second, [2])

        sink.sweep(self.scope, lambda txn: True)
        self.successor(sink).sweep(self.scope, lambda txn: True)

        sink = self.make_sink()
        self.shows(sink, 1, 2)
        is_found(sink.look_up(first, token), Found.VISIBLE)
        assert sink.mark(self.scope) == second

    def test_sweep_spares_other_scopes(self) -> None:
        scopes = (self.scope, *self.other_scopes)
        sink = self.process(*scopes)
        others = [self.txn(scope=scope) for scope in self.other_scopes]
        for number, txn in enumerate(others):
            self.prepared(sink, txn, [number])

        assert sink.sweep(self.scope, lambda txn: True) == []

        for txn in others:
            self.holds(sink, txn, scope=txn.scope)

    def test_sweep_asks_only_about_its_own_scope(self) -> None:
        scopes = (self.scope, *self.other_scopes)
        sink = self.process(*scopes)
        for number, scope in enumerate(scopes):
            self.prepared(sink, self.txn(scope=scope), [number])
        asked: list[SinkTxnId] = []

        def note(txn: SinkTxnId) -> bool:
            asked.append(txn)
            return False

        sink.sweep(self.scope, note)

        assert {txn.scope for txn in asked} == {self.scope}

    def test_losing_tasks_of_the_winner_leave_nothing_behind(self) -> None:
        sink, txn = self.process(), self.txn()
        receipts = self.stage(sink, txn, [1])
        self.stage(sink, txn, [1])
        token = self.prepare(sink, txn, receipts)
        is_ok(sink.commit(txn, token))
        self.stage(sink, txn, [1])

        sink.sweep(self.scope, lambda txn: False)

        self.leaves_nothing(sink)
        self.shows(sink, 1)
        is_ok(sink.commit(txn, token))


class SinkFences(SinkWorld):
    """A newer epoch makes every older process harmless."""

    def test_an_older_epoch_is_refused(self) -> None:
        new, old = self.make_sink(), self.make_sink()
        new.fence(self.scope, 5)

        assert is_fenced_out(old, self.scope, 4)
        assert is_fenced_out(new, self.scope, 4)
        assert is_fenced_out(self.make_sink(), self.scope, 1)

    def test_fencing_again_with_the_same_epoch_is_fine(self) -> None:
        first, second = self.make_sink(), self.make_sink()

        first.fence(self.scope, 5)
        first.fence(self.scope, 5)
        second.fence(self.scope, 5)

    def test_a_refused_fence_changes_nothing(self) -> None:
        sink, txn = self.make_sink(), self.txn()
        sink.fence(self.scope, 5)
        token = self.prepared(sink, txn, [1])

        assert is_fenced_out(self.make_sink(), self.scope, 4)

        is_ok(sink.commit(txn, token))
        self.shows(sink, 1)

    def test_a_fenced_process_can_prepare_nothing(self) -> None:
        zombie, txn = self.process(), self.txn()
        receipts = self.stage(zombie, txn, [1])
        successor = self.process()

        is_fatal(zombie.prepare(txn, receipts))

        self.holds(successor)
        self.shows(successor)

    def test_a_fenced_processs_commit_shows_no_loser(self) -> None:
        zombie, old, new = self.process(), self.txn(), self.txn()
        old_token = self.prepared(zombie, old, [1])
        successor = self.process()
        self.committed(successor, new, [2])

        is_refused(zombie.commit(old, old_token))

        self.shows(successor, 2)
        assert successor.mark(self.scope) == new

    def test_a_fenced_process_may_repeat_a_decided_commit_without_harm(self) -> None:
        zombie, txn = self.process(), self.txn()
        token = self.prepared(zombie, txn, [1])
        successor = self.process()
        is_ok(successor.commit(txn, token))

        zombie.commit(txn, token)

        self.shows(successor, 1)
        self.holds(successor)

    def test_a_fenced_process_commits_at_most_what_its_successor_would(self) -> None:
        zombie, txn = self.process(), self.txn()
        token = self.prepared(zombie, txn, [1])
        successor = self.process()

        outcome = zombie.commit(txn, token)

        self.shows(successor, *([1] if isinstance(outcome, SinkOK) else []))
        is_ok(successor.commit(txn, token))
        self.shows(successor, 1)

    def test_fencing_keeps_what_is_prepared_for_recovery(self) -> None:
        sink, txn = self.process(), self.txn()
        token = self.prepared(sink, txn, [1])

        successor = self.process()

        self.holds(successor, txn)
        is_ok(successor.commit(txn, token))
        self.shows(successor, 1)

    def test_scopes_do_not_fence_each_other(self) -> None:
        mine, txn = self.process(), self.txn()
        for scope in self.other_scopes:
            self.make_sink().fence(scope, 99)

        token = self.prepared(mine, txn, [1])

        is_ok(mine.commit(txn, token))
        self.shows(mine, 1)


class SinkMarks(SinkWorld):
    """The mark is the highest committed cycle, and survives."""

    def test_there_is_no_mark_before_the_first_commit(self) -> None:
        sink, txn, aborted = self.process(), self.txn(), self.txn()
        assert sink.mark(self.scope) is None

        self.prepared(sink, txn, [1])
        is_ok(sink.abort(aborted, self.prepared(sink, aborted, [2])))

        assert sink.mark(self.scope) is None

    def test_the_mark_names_the_highest_committed_cycle_and_its_attempt(self) -> None:
        sink, first, second = self.process(), self.txn(1), self.txn(2)
        self.committed(sink, first, [1])
        assert sink.mark(self.scope) == first
        self.committed(sink, second, [2])

        assert sink.mark(self.scope) == second
        assert self.successor(sink).mark(self.scope) == second

    def test_repeating_an_old_commit_does_not_lower_the_mark(self) -> None:
        sink, first, second = self.process(), self.txn(9), self.txn(10)
        token = self.committed(sink, first, [1])
        self.committed(sink, second, [2])

        is_ok(sink.commit(first, token))

        assert sink.mark(self.scope) == second

    def test_a_new_generation_outranks_every_batch_of_the_old_one(self) -> None:
        sink, old, new = self.process(), self.txn(41, generation=1), self.txn(0, generation=2)
        self.committed(sink, old, [1])
        self.committed(sink, new, [2])

        assert sink.mark(self.scope) == new
        self.shows(sink, 1, 2)

    def test_a_batch_without_rows_raises_the_mark(self) -> None:
        sink, txn = self.process(), self.txn(3)

        is_ok(sink.commit(txn, self.prepare(sink, txn, [])))

        assert self.successor(sink).mark(self.scope) == txn

    def test_scopes_have_their_own_marks(self) -> None:
        scopes = (self.scope, *self.other_scopes)
        sink = self.process(*scopes)
        txn = self.txn(7)
        self.committed(sink, txn, [1])

        assert [sink.mark(scope) for scope in self.other_scopes] == [None, None, None]
        assert sink.mark(self.scope) == txn


def is_fenced_out(sink: TwoPhaseSink, scope: Scope, epoch: int) -> bool:
    """Return whether the sink refuses this epoch."""
    try:
        sink.fence(scope, epoch)
    except Fenced:
        return True
    return False


class SinkShowsRows(SinkWorld):
    """Exactly the rows of the receipts given to prepare become visible."""

    def test_only_the_winning_task_attempts_rows_become_visible(self) -> None:
        sink, txn = self.process(), self.txn()
        losing = self.run_task(sink, txn, [[1, 2]])
        winning = self.run_task(sink, txn, [[1, 2]])
        self.run_task(sink, txn, [[9]])

        token = self.prepare(sink, txn, [winning])
        is_ok(sink.commit(txn, token))

        assert losing.task != winning.task
        self.shows(sink, 1, 2)

    def test_a_discarded_writers_rows_never_become_visible(self) -> None:
        sink, txn = self.process(), self.txn()
        writer = sink.stager(txn).open("task-1")
        writer.write(self.make_batch([1]))
        writer.discard()
        writer.discard()

        self.committed(sink, txn, [2])

        self.shows(sink, 2)

    def test_a_discarded_writer_leaves_nothing(self) -> None:
        sink = self.process()
        writer = sink.stager(self.txn()).open("task-1")
        writer.write(self.make_batch([1]))

        writer.discard()

        self.leaves_nothing(sink)

    def test_a_task_may_write_many_batches_and_empty_ones(self) -> None:
        sink, txn = self.process(), self.txn()

        receipt = self.run_task(sink, txn, [[], [1, 2], [], [3], []])
        is_ok(sink.commit(txn, self.prepare(sink, txn, [receipt])))

        assert receipt.tally.rows == 3
        self.shows(sink, 1, 2, 3)

    def test_tasks_without_rows_take_part(self) -> None:
        sink, txn = self.process(), self.txn()
        silent = self.run_task(sink, txn, [])
        empty = self.run_task(sink, txn, [[]])
        full = self.run_task(sink, txn, [[1]])

        is_ok(sink.commit(txn, self.prepare(sink, txn, [silent, empty, full])))

        assert [receipt.tally.rows for receipt in (silent, empty, full)] == [0, 0, 1]
        self.shows(sink, 1)
        self.leaves_nothing(sink)

    def test_a_batch_without_rows_is_committed_with_a_proof(self) -> None:
        all_tasks: tuple[list[list[int]], ...] = ([], [[], []])
        for batch, tasks in enumerate(all_tasks):
            sink, txn, rival = self.process(), self.txn(batch), self.txn(batch)
            rival_token = self.prepared(sink, rival, [1])
            token = self.prepared(sink, txn, *tasks)
            self.holds(sink, txn, rival)

            is_ok(self.successor(sink).commit(txn, token))

            sink = self.process()
            is_ok(sink.commit(txn, token))
            is_found(sink.look_up(txn, token), Found.VISIBLE)
            is_fatal(sink.commit(rival, rival_token))
            is_fatal(sink.abort(txn, token))
            self.shows(sink)
            is_ok(sink.abort(rival, rival_token))

    def test_many_tasks_make_one_batch(self) -> None:
        sink, txn = self.process(), self.txn()

        self.committed(sink, txn, *([number] for number in range(32)))

        self.shows(sink, *range(32))
        self.leaves_nothing(sink)

    def test_tasks_may_stage_at_the_same_time(self) -> None:
        sink, txn = self.process(), self.txn()
        with ThreadPoolExecutor(4) as pool:
            receipts = list(
                pool.map(lambda n: self.run_task(sink, txn, [[n], [n + 100]]), range(8))
            )

        is_ok(sink.commit(txn, self.prepare(sink, txn, receipts)))

        self.shows(sink, *range(8), *range(100, 108))

    def test_equal_rows_are_all_kept(self) -> None:
        self.needs(Capability.KEEP_EQUAL_ROWS)
        sink, txn = self.process(), self.txn()

        self.committed(sink, txn, [1, 1], [1])

        self.shows(sink, 1, 1, 1)

    def test_receipts_of_equal_rows_add_up_to_equal_tallies(self) -> None:
        sink, txn = self.process(), self.txn()

        together = self.stage(sink, txn, [1, 2, 3, 4])
        apart = self.stage(sink, txn, [4, 2], [], [3], [1])
        different = self.stage(sink, txn, [1, 2, 3, 5])

        assert tally_of(together) == tally_of(apart)
        assert tally_of(together).rows == 4
        assert tally_of(different) != tally_of(together)

    def test_visible_rows_tally_with_the_receipts(self) -> None:
        sink, txn = self.process(), self.txn()
        receipts = self.stage(sink, txn, [1, 2], [], [3])
        token = self.prepare(sink, txn, receipts)
        is_ok(sink.commit(txn, token))
        self.committed(sink, self.txn(1), [4])

        sink = self.successor(sink)

        if isinstance(sink, CountsVisibleRows):
            assert sink.visible_tally(txn.cycle, token) in (tally_of(receipts), None)

    def test_two_processes_that_commit_at_the_same_time_show_the_rows_once(self) -> None:
        first, txn = self.process(), self.txn()
        token = self.prepared(first, txn, [1, 2])
        self.crash(first)
        together = Barrier(2, timeout=30)

        def commit(sink: TwoPhaseSink) -> SinkOutcome:
            together.wait()
            return sink.commit(txn, token)

        with ThreadPoolExecutor(2) as pool:
            outcomes = list(pool.map(commit, [self.process(), self.process()]))

        assert not any(isinstance(outcome, SinkFatal) for outcome in outcomes), outcomes
        is_ok(self.process().commit(txn, token))
        self.shows(self.make_sink(), 1, 2)


class SinkObjects(SinkWorld):
    """What travels between processes: tokens, stagers, the sink itself."""

    def test_a_token_is_json(self) -> None:
        sink, txn = self.process(), self.txn()

        outcome = sink.prepare(txn, self.stage(sink, txn, [1], [2]))

        token = getattr(outcome, "token", None)
        assert token is not None
        assert through_json(token) == token

    def test_a_token_is_small_however_many_rows_it_stands_for(self) -> None:
        sink, small, large = self.process(), self.txn(), self.txn()

        one = self.prepared(sink, small, [1])
        many = self.prepared(sink, large, range(2000))

        assert len(json.dumps(many)) < len(json.dumps(one)) + 1000

    def test_a_token_is_small_however_many_tasks_it_stands_for(self) -> None:
        sink, small, large = self.process(), self.txn(1), self.txn(2)

        few = self.prepared(sink, small, [1], [2])
        many = self.prepared(sink, large, *([number] for number in range(20)))

        # Less than the shortest name for each task: a batch may have a thousand.
        assert len(json.dumps(many)) < len(json.dumps(few)) + 50

    def test_no_secret_is_shown(self) -> None:
        sink, txn = self.process(), self.txn()
        receipts = self.stage(sink, txn, [1])
        token = self.prepare(sink, txn, receipts)
        told = [
            json.dumps(token),
            repr(sink),
            str(sink),
            repr(sink.stager(txn)),
            repr(sink.stager(txn).open("task")),
            sink.find_place() if isinstance(sink, KnowsItsPlace) else "",
            repr(sink.guarantee()) if isinstance(sink, DescribesGuarantee) else "",
            repr(sink.look_up(txn, token)),
            *(receipt.to_json() for receipt in receipts),
            repr(sink.commit(self.txn(), token)),
            repr(sink.commit(txn, token)),
            repr(sink.abort(txn, token)),
            repr(sink.look_up(txn, token)),
        ]

        assert [secret for secret in self.secrets if any(secret in text for text in told)] == []

    def test_a_sink_can_be_pickled_at_any_time(self) -> None:
        sink, txn = self.process(), self.txn()
        receipts = self.stage(pickle.loads(pickle.dumps(sink)), txn, [1])
        token = self.prepare(sink, txn, receipts)

        copy = pickle.loads(pickle.dumps(sink))

        assert copy.name == sink.name
        assert copy.rows == sink.rows
        is_found(copy.look_up(txn, token), Found.HELD)
        self.crash(sink)
        is_ok(copy.commit(txn, token))
        self.shows(copy, 1)

    def test_a_sink_can_be_closed_and_used_again(self) -> None:
        sink, txn = self.process(), self.txn()
        token = self.prepared(sink, txn, [1])

        sink.close()
        sink.close()
        is_found(sink.look_up(txn, token), Found.HELD)
        is_ok(sink.commit(txn, token))
        sink.close()

        self.shows(self.make_sink(), 1)

    def test_a_sink_can_be_checked_before_and_after_its_first_batch(self) -> None:
        sink = self.process()
        sink.check(None)
        sink.check(self.schema())
        self.committed(sink, self.txn(), [1])

        sink.check(self.schema())

        self.leaves_nothing(sink)
        self.shows(sink, 1)

    def test_a_sink_has_a_name(self) -> None:
        sink = self.make_sink()

        assert sink.name
        assert sink.name == self.make_sink().name

    def test_a_sink_states_its_guarantee_with_its_scope(self) -> None:
        sink = self.process()

        if isinstance(sink, DescribesGuarantee):
            guarantee = sink.guarantee()
            assert guarantee.effect
            assert guarantee.readers_see


class SinkContract(
    SinkPrepares,
    SinkCommits,
    SinkAborts,
    SinkIsLookedUp,
    SinkRecovers,
    SinkSweeps,
    SinkFences,
    SinkMarks,
    SinkShowsRows,
    SinkObjects,
    SinkUndoes,
):
    """Subclass it in a test module, override the hooks of `SinkWorld`, and run pytest."""
