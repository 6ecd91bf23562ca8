"""Which rows a sink shows, and what its objects can do, as tests."""

from __future__ import annotations

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from semel.pipeline.sink import (
    CountsVisibleRows,
    DescribesGuarantee,
    Found,
    SinkFatal,
    SinkOutcome,
    TwoPhaseSink,
    tally_of,
)
from semel.testing.contracts.sink_world import (
    Capability,
    SinkWorld,
    is_fatal,
    is_found,
    is_ok,
    through_json,
)


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

    def test_a_batch_of_empty_tasks_is_committed_with_a_proof(self) -> None:
        sink, txn, rival = self.process(), self.txn(), self.txn()
        rival_token = self.prepared(sink, rival, [1])
        token = self.prepared(sink, txn, [], [])
        self.holds(sink, txn, rival)

        is_ok(self.successor(sink).commit(txn, token))

        sink = self.process()
        is_ok(sink.commit(txn, token))
        is_found(sink.look_up(txn, token), Found.VISIBLE)
        is_fatal(sink.commit(rival, rival_token))
        is_fatal(sink.abort(txn, token))
        self.shows(sink)

    def test_a_batch_without_tasks_is_committed_with_a_proof(self) -> None:
        sink, txn = self.process(), self.txn()
        token = self.prepare(sink, txn, [])
        self.holds(sink, txn)

        is_ok(sink.commit(txn, token))

        sink = self.successor(sink)
        is_found(sink.look_up(txn, token), Found.VISIBLE)
        is_fatal(sink.abort(txn, token))

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

    def test_no_secret_is_told(self) -> None:
        sink, txn = self.process(), self.txn()
        receipts = self.stage(sink, txn, [1])
        token = self.prepare(sink, txn, receipts)
        told = [
            json.dumps(token),
            repr(sink),
            str(sink),
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
