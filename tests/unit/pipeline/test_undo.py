"""A finished cycle is undone in all its sinks or in none, once, whatever dies."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semel.crashpoints import CrashPoint
from semel.errors import LeaseHeld, Misuse, NeedsOperator
from semel.files.sink import FilesSink
from semel.lease import Owner
from semel.ledger.sqlite import SqliteLedger
from semel.memory.ledger import MemoryLedger
from semel.memory.sink import MemorySink
from semel.operate.backfill import add_sink
from semel.operate.doctor import Patient, diagnose
from semel.operate.resolution import plan_undo, undo
from semel.operate.status import Pipeline, undo_scope, undone
from semel.operate.verification import FINE, cycles_to_verify, verify
from semel.pipeline.cycle import CommitSucceeded
from semel.pipeline.driver import Driver, Heartbeat, Settings
from semel.pipeline.sink import SinkFatal
from semel.pipeline.source import BatchRange
from semel.pipeline.txn import CycleId
from semel.testing.crash import Crash, crash_at
from semel.testing.local import local_stage
from tests.points import PIPELINE_POINTS

WHO = {"who": "ann", "why": "wrong rates"}


class Topic(MemorySink):
    """A sink whose rows nobody can take back."""

    check_undo = None


class Shop:
    """A pipeline that has run three cycles with its sinks."""

    def __init__(self, *sinks, batches=3, lease_seconds=30.0):
        self.ledger = MemoryLedger()
        self.sinks = sinks or (MemorySink("left"), MemorySink("right"))
        self.settings = Settings(lease_seconds=lease_seconds)
        self.batch = 0
        self.run(batches)

    def driver(self, *sinks):
        return Driver("shop", self.ledger, sinks or self.sinks, settings=self.settings)

    @property
    def pipeline(self):
        return Pipeline.of(self.driver())

    def run(self, batches=1):
        driver = self.driver()
        driver.start()
        self.ledger.open_generation(driver.lease, "checkpoint-1")
        for _ in range(batches):
            outcome = self.cycle(driver, self.batch)
            assert isinstance(outcome, CommitSucceeded), outcome
            self.batch += 1
        driver.stop()

    def cycle(self, driver, batch):
        return driver.run_cycle(
            CycleId(driver.scope, 1, batch),
            lambda: BatchRange.of_offsets({"orders/0": (batch * 2, batch * 2 + 2)}),
            local_stage(self.sinks, rows(batch)),
        )

    def seen(self):
        return [sorted(sink.visible) for sink in self.sinks]


def rows(*batches):
    return [f"row {batch}-{n}" for batch in batches for n in range(2)]


def test_the_rows_of_one_cycle_are_gone_from_every_sink_and_the_pipeline_goes_on():
    shop = Shop()

    assert [one.will for one in plan_undo(shop.pipeline, "g1.b1").sinks] == ["undo", "undo"]
    assert shop.seen() == [rows(0, 1, 2)] * 2, "a plan changes nothing"
    done = undo(shop.pipeline, "g1.b1", **WHO)
    shop.run()

    assert shop.seen() == [rows(0, 2, 3)] * 2
    decided = shop.ledger.history(undo_scope(shop.pipeline.scope))
    assert [(one.state, one.rows) for one in decided] == [("finished", {"left": 2, "right": 2})]
    assert done.decided_by == "shop/main-undo"
    acts = [act for act in shop.ledger.acts(shop.pipeline.scope) if act.act.startswith("cycle")]
    assert [(act.act, act.who, act.why) for act in acts] == [
        ("cycle-undo-done", "ann", "wrong rates"),
        ("cycle-undo", "ann", "wrong rates"),
    ]


def test_the_newest_cycle_can_be_undone_while_the_pipeline_runs():
    shop = Shop()
    live = shop.driver()
    live.start()

    undo(shop.pipeline, "g1.b2", **WHO)
    shop.cycle(live, 3)
    replayed = shop.cycle(live, 2)

    assert shop.seen() == [rows(0, 1, 3)] * 2
    patient = Patient(live.scope, shop.sinks, shop.settings)
    assert diagnose(shop.ledger, [patient]).scopes[0].problems == []
    assert type(replayed).__name__ == "CycleReplayed"
    live.stop()


def test_a_second_undo_does_nothing_and_says_so():
    shop = Shop()
    undo(shop.pipeline, "g1.b1", **WHO)
    acts = shop.ledger.acts(shop.pipeline.scope)

    again = undo(shop.pipeline, "g1.b1", who="bob", why="to be sure")

    assert again.plan.undone_before
    assert shop.ledger.acts(shop.pipeline.scope) == acts
    assert len(shop.ledger.history(undo_scope(shop.pipeline.scope))) == 1
    undo(shop.pipeline, "g1.b0", **WHO)
    assert shop.seen() == [rows(2)] * 2


def test_a_sink_that_cannot_keeps_the_cycle_everywhere_unless_it_is_left_as_it_is():
    shop = Shop(MemorySink("left"), Topic("events"))

    plan = plan_undo(shop.pipeline, "g1.b1")
    assert plan.needs_attention
    with pytest.raises(NeedsOperator, match="events: Topic has no way to take away"):
        undo(shop.pipeline, "g1.b1", **WHO)
    assert shop.seen() == [rows(0, 1, 2)] * 2
    assert undone(shop.ledger, shop.pipeline.scope) == set()

    undo(shop.pipeline, "g1.b1", ["events"], **WHO)

    assert shop.seen() == [rows(0, 2), rows(0, 1, 2)]
    assert {sink for _, sink in undone(shop.ledger, shop.pipeline.scope)} == {"left"}


@pytest.mark.parametrize(
    ("label", "without", "words"),
    [
        ("g1.b9", [], "not finished"),
        ("b9", [], "write it as g1.b42"),
        ("g1.b1", ["middle"], "'middle' has no rows"),
        ("g1.b1", ["left", "right"], "no sink is left"),
    ],
)
def test_what_cannot_be_undone_is_refused(label, without, words):
    shop = Shop()

    with pytest.raises(Misuse, match=words):
        undo(shop.pipeline, label, without, **WHO)

    assert shop.seen() == [rows(0, 1, 2)] * 2


def test_a_cycle_that_is_not_finished_is_refused():
    shop = Shop()
    driver = shop.driver()
    driver.start()
    with crash_at(CrashPoint.COMMIT_2PC_BEFORE, "right"), pytest.raises(Crash):
        shop.cycle(driver, 3)

    with pytest.raises(Misuse, match="not finished"):
        undo(shop.pipeline, "g1.b3", **WHO)


def test_a_sink_that_was_taken_out_of_the_program_is_named():
    shop = Shop()
    pipeline = Pipeline.of(shop.driver(shop.sinks[0]))

    with pytest.raises(NeedsOperator, match="right: it is not configured any more"):
        undo(pipeline, "g1.b1", **WHO)


# Where the undo itself writes; a window that it does not pass lets it end.
POINTS = sorted(p for p in PIPELINE_POINTS if p.step.split("_")[0] not in ("postgres", "kafka"))


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_leaves_all_the_rows_or_none_and_the_same_command_ends_it(point):
    shop = Shop(lease_seconds=0.2)

    with crash_at(point):
        try:
            undo(shop.pipeline, "g1.b1", **WHO)
        except Crash:
            assert shop.seen()[0] in (rows(0, 2), rows(0, 1, 2))
    undo(shop.pipeline, "g1.b1", **WHO)

    assert shop.seen() == [rows(0, 2)] * 2
    assert shop.ledger.open_attempts(undo_scope(shop.pipeline.scope)) == []
    done = [act for act in shop.ledger.acts(shop.pipeline.scope) if act.act == "cycle-undo-done"]
    assert [[one["sink"] for one in act.detail["sinks"]] for act in done] == [["left", "right"]]


def test_rows_that_somebody_rewrote_in_the_window_are_named_and_can_be_left_out():
    class Compacted(MemorySink):
        compacted = False

        def undo(self, txn, token):
            return SinkFatal("rewritten") if self.compacted else super().undo(txn, token)

    shop = Shop(MemorySink("left"), Compacted("right"))
    shop.sinks[1].compacted = True
    for _ in range(2):
        with pytest.raises(NeedsOperator, match=r"rewritten.*--cycle g1\.b1 --without right"):
            undo(shop.pipeline, "g1.b1", **WHO)
    with pytest.raises(NeedsOperator, match="rewritten"):
        undo(shop.pipeline, "g1.b0", ["right"], **WHO)

    undo(shop.pipeline, "g1.b1", ["right"], **WHO)

    assert shop.seen() == [rows(0, 2), rows(0, 1, 2)]
    assert {sink for _, sink in undone(shop.ledger, shop.pipeline.scope)} == {"left"}


def test_rows_that_a_late_sink_was_filled_with_go_too_and_do_not_come_back():
    shop = Shop(MemorySink("left"))
    late, later = MemorySink("late"), MemorySink("later")

    def fill(sink):
        pipeline = Pipeline.of(shop.driver(*shop.sinks, sink))
        again = lambda sink, past: local_stage([sink], rows(past.cycle.batch))  # noqa: E731  short
        return add_sink(pipeline, sink.name, again, **WHO).cycles

    assert fill(late) == 3
    shop.sinks = shop.sinks[0], late
    undo(shop.pipeline, "g1.b1", **WHO)

    assert shop.seen() == [rows(0, 2)] * 2
    assert fill(later) == 2
    assert sorted(later.visible) == rows(0, 2)


def test_verification_wants_no_rows_of_an_undone_cycle():
    shop = Shop()
    undo(shop.pipeline, "g1.b1", ["right"], **WHO)

    found = verify(shop.pipeline, cycles_to_verify(shop.pipeline, 3))

    assert {one.verdict for one in found.checks} <= FINE
    told = [(one.cycle, one.sink) for one in found.checks if one.reason == "it was undone"]
    assert told == [("g1.b1", "left")]


def test_two_undos_do_not_run_together():
    shop = Shop(lease_seconds=0.3)
    owner = Owner("elsewhere", "boot", 1, "0", "other")
    lease = shop.ledger.acquire(undo_scope(shop.pipeline.scope), owner, 0.3)
    beat = Heartbeat(shop.ledger, lease).start()

    with pytest.raises(LeaseHeld, match="elsewhere"):
        undo(shop.pipeline, "g1.b1", **WHO)

    beat.stop()


@pytest.mark.parametrize(
    ("point", "at"), [(CrashPoint.COMMIT_TXN_AFTER, None), (CrashPoint.COMMIT_2PC_BEFORE, "right")]
)
def test_another_process_ends_an_undo_of_files_with_a_ledger_on_disk(tmp_path, point, at):
    def sinks():
        return [FilesSink(tmp_path / name, name=name) for name in ("left", "right")]

    def seen():
        tables = [pq.read_table(tmp_path / name, partitioning=None) for name in ("left", "right")]
        return [sorted(table["id"].to_pylist()) for table in tables]

    def driver():
        settings = Settings(lease_seconds=0.2)
        return Driver("shop", SqliteLedger(tmp_path / "shop.ledger"), sinks(), settings=settings)

    live = driver()
    live.start()
    live.ledger.open_generation(live.lease, "checkpoint-1")
    for batch in range(3):
        stage = local_stage(
            live.sinks, [{"id": batch}], tasks=1, as_batch=pa.RecordBatch.from_pylist
        )
        read = BatchRange.of_offsets({"orders/0": (batch, batch + 1)})
        live.run_cycle(CycleId(live.scope, 1, batch), lambda read=read: read, stage)
    live.stop()

    with crash_at(point, at), pytest.raises(Crash):
        undo(Pipeline.of(driver()), "g1.b1", **WHO)
    assert seen()[1] == [0, 1, 2]
    again = undo(Pipeline.of(driver()), "g1.b1", **WHO)

    assert again.plan.undone_before
    assert seen() == [[0, 2], [0, 2]]
    assert len(undone(live.ledger, live.scope)) == 2
