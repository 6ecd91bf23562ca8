"""A sink that joins late gets the rows of the cycles before it, each once."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semel.crashpoints import CrashPoint
from semel.errors import LeaseHeld, Misuse, NeedsOperator
from semel.files.sink import FilesSink
from semel.lease import Owner, Takeover
from semel.memory.ledger import MemoryLedger
from semel.memory.sink import MemorySink
from semel.operate.backfill import Forgotten, add_sink, past_of
from semel.operate.resolution import Choice, Way, plan_resolution, resolve
from semel.operate.status import Pipeline, fill_scope, status_of
from semel.pipeline.cycle import CommitSucceeded
from semel.pipeline.driver import Driver, Heartbeat, Settings
from semel.pipeline.sink import SinkFatal
from semel.pipeline.source import BatchRange, SourceKind, SourceRange
from semel.pipeline.txn import CycleId, Scope
from semel.testing.crash import Crash, crash_at
from semel.testing.local import local_stage
from tests.points import PIPELINE_POINTS

WHO = {"who": "ann", "why": "analysts moved"}


class Upserting(MemorySink):
    """A sink in which a later row replaces an earlier one."""

    replaces_rows = True


class Shop:
    """A pipeline that runs without its new sink at first."""

    def __init__(self, new=None, settings=None):
        self.ledger = MemoryLedger()
        self.old, self.new = MemorySink("old"), new or MemorySink("new")
        self.settings = settings or Settings()
        self.batch, self.generation = 0, 1
        self.reread = []

    def driver(self, *sinks):
        return Driver("shop", self.ledger, sinks, settings=self.settings)

    def run(self, *sinks, batches=1):
        driver = self.driver(*sinks)
        driver.start()
        self.ledger.open_generation(driver.lease, f"checkpoint-{self.generation}")
        for _ in range(batches):
            at = self.batch
            cycle = CycleId(driver.scope, self.generation, at)
            outcome = driver.run_cycle(
                cycle,
                lambda at=at: BatchRange.of_offsets({"orders/0": (at * 2, at * 2 + 2)}),
                local_stage(sinks, rows(at * 2, at * 2 + 2)),
            )
            assert isinstance(outcome, CommitSucceeded), outcome
            self.batch += 1
        driver.stop()

    @property
    def pipeline(self):
        return Pipeline.of(self.driver(self.old, self.new))

    def fill(self, **more):
        return add_sink(self.pipeline, "new", self.stage_past, **WHO, **more)

    def stage_past(self, sink, past):
        spans = [span for source in past.range.sources for span in source.spans.values()]
        self.reread.append(past.cycle.label)
        return local_stage([sink], [row for s in spans for row in rows(s.start, s.end)])


def rows(start, end):
    return [f"row {n:02}" for n in range(start, end)]


def test_the_past_comes_once_before_the_sink_takes_part():
    shop = Shop()
    shop.run(shop.old, batches=3)

    done = shop.fill()

    assert (done.cycles, done.rows, done.first, done.last) == (3, 6, "g1.b0", "g1.b2")
    assert done.needs_attention, "the pipeline has not run with it yet"
    shop.run(shop.old, shop.new, batches=2)
    again = shop.fill()
    assert (again.cycles, again.filled_before, again.needs_attention) == (0, 3, False)
    assert sorted(shop.new.visible) == sorted(shop.old.visible) == rows(0, 10)


def test_the_past_comes_once_while_the_pipeline_runs():
    shop = Shop()
    shop.run(shop.old, batches=2)
    shop.run(shop.old, shop.new, batches=2)
    live = shop.driver(shop.old, shop.new)
    live.start()

    done = shop.fill()

    assert (done.cycles, done.needs_attention) == (2, False)
    assert sorted(shop.new.visible) == rows(0, 8)
    live.stop()
    shop.run(shop.old, shop.new)
    assert sorted(shop.new.visible) == rows(0, 10)


def test_cycles_without_a_sink_that_was_away_come_too():
    shop = Shop()
    shop.run(shop.old, shop.new)
    shop.run(shop.old, batches=2)
    shop.run(shop.old, shop.new)
    shop.generation, shop.batch = 2, shop.batch
    shop.run(shop.old)

    done = shop.fill()

    assert shop.reread == ["g1.b1", "g1.b2", "g2.b4"]
    assert (done.cycles, done.needs_attention) == (3, True)
    assert sorted(shop.new.visible) == rows(0, 10)


def stuck(shop, *sinks):
    """Lose the driver after the decision of the next cycle."""
    driver = shop.driver(*sinks)
    driver.start()
    shop.ledger.open_generation(driver.lease, "checkpoint-1")
    at = shop.batch
    with crash_at(CrashPoint.COMMIT_2PC_BEFORE, "new"), pytest.raises(Crash):
        driver.run_cycle(
            CycleId(driver.scope, 1, at),
            lambda: BatchRange.of_offsets({"orders/0": (at * 2, at * 2 + 2)}),
            local_stage(sinks, rows(at * 2, at * 2 + 2)),
        )
    shop.batch += 1
    return f"g1.b{at}"


def give_up(shop, label, *sinks, way=Way.WITHOUT):
    pipeline = Pipeline.of(shop.driver(*sinks))
    choice = Choice(way, "new")
    record, plan = plan_resolution(pipeline, label, choice)
    return resolve(pipeline, record, plan, choice, **WHO, takeover=Takeover.FORCE).finished


def test_a_cycle_whose_rows_a_sink_has_lost_is_given_up_and_comes_again():
    shop = Shop()
    shop.run(shop.old, shop.new)
    label = stuck(shop, shop.old, shop.new)
    shop.new.store.prepared.clear()
    assert shop.fill(takeover=Takeover.FORCE).cycles == 0, "it is not given up yet"

    assert give_up(shop, label, shop.old, shop.new)
    shop.run(shop.old, shop.new)
    done = shop.fill()

    assert (shop.reread, done.cycles, done.needs_attention) == (["g1.b1"], 1, False)
    assert sorted(shop.new.visible) == sorted(shop.old.visible) == rows(0, 6)
    assert shop.fill().cycles == 0


class Refusing(MemorySink):
    """A sink whose other side refuses the rows of some cycles, once they are decided."""

    refused = ()

    def commit(self, txn, token):
        no = txn.cycle.label in self.refused
        return SinkFatal("422: row 3 has no currency") if no else super().commit(txn, token)


def given_up_of(shop):
    return status_of(shop.ledger, [shop.pipeline.scope]).scopes[0].given_up


def test_rows_that_a_sink_will_never_take_are_abandoned_said_and_can_come_again():
    shop = Shop(Refusing("new"))
    shop.run(shop.old, shop.new)
    shop.new.refused = ("g1.b1",)
    label = stuck(shop, shop.old, shop.new)
    with pytest.raises(Misuse, match="or --abandon if the sink will never take them"):
        give_up(shop, label, shop.old, shop.new)

    assert give_up(shop, label, shop.old, shop.new, way=Way.ABANDON)
    shop.run(shop.old, shop.new)

    assert sorted(shop.old.visible) == rows(0, 6)
    assert sorted(shop.new.visible) == rows(0, 2) + rows(4, 6)
    assert given_up_of(shop) == {"new": 2}
    shop.new.refused = ()
    assert shop.fill().cycles == 1
    assert sorted(shop.new.visible) == rows(0, 6)
    assert given_up_of(shop) == {}


def test_a_sink_that_takes_the_rows_after_all_abandons_none():
    shop = Shop()
    label = stuck(shop, shop.old, shop.new)

    assert give_up(shop, label, shop.old, shop.new, way=Way.ABANDON)

    assert sorted(shop.new.visible) == rows(0, 2)
    assert given_up_of(shop) == {}
    assert shop.fill().cycles == 0


@pytest.mark.parametrize("dropped", [False, True])
def test_an_abandonment_that_died_is_repeated(dropped):
    class Dying(Refusing):
        dies = True

        def abort(self, txn, token):
            if self.dies:
                self.dies = False
                if dropped:
                    super().abort(txn, token)
                raise Crash
            return super().abort(txn, token)

    shop = Shop(Dying("new"))
    shop.new.refused = ("g1.b0",)
    label = stuck(shop, shop.old, shop.new)
    with pytest.raises(Crash):
        give_up(shop, label, shop.old, shop.new, way=Way.ABANDON)
    assert given_up_of(shop) == {}

    assert give_up(shop, label, shop.old, shop.new, way=Way.ABANDON)

    shop.run(shop.old, shop.new)
    assert sorted(shop.new.visible) == rows(2, 4)
    assert given_up_of(shop) == {"new": 2}


def test_rows_that_are_held_in_one_transaction_with_others_are_not_abandoned_alone():
    class Sharing(Refusing):
        transaction_key = "one database"

        def join(self, sinks):
            self.group = {sink.name: sink for sink in sinks}

        def find_parents(self):
            return ()

        def prepare_all(self, txn, receipts):
            return {name: self.group[name].prepare(txn, own) for name, own in receipts.items()}

        def commit_all(self, txn, tokens):
            return {name: self.group[name].commit(txn, own) for name, own in tokens.items()}

    shop = Shop(Sharing("new"))
    sinks = shop.old, shop.new, Sharing("other")
    label = stuck(shop, *sinks)

    with pytest.raises(Misuse, match="shares a transaction with sink 'other'"):
        give_up(shop, label, *sinks, way=Way.ABANDON)


def test_a_given_up_cycle_that_a_sink_still_holds_comes_from_the_sink_and_not_twice():
    shop = Shop()
    label = stuck(shop, shop.old, shop.new)
    assert give_up(shop, label, shop.old)

    with pytest.raises(NeedsOperator, match="semel recover"):
        shop.fill()
    shop.run(shop.old, shop.new)

    assert shop.fill().cycles == 0
    assert sorted(shop.new.visible) == sorted(shop.old.visible) == rows(0, 4)


# Where the fill itself writes; a window that it does not pass lets it end.
POINTS = sorted(p for p in PIPELINE_POINTS if p.step.split("_")[0] not in ("postgres", "kafka"))


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_while_filling_loses_and_repeats_no_row(point):
    shop = Shop(settings=Settings(lease_seconds=0.2))
    shop.run(shop.old, batches=2)

    with crash_at(point, "new" if "{" in point else None):
        try:
            shop.fill()
        except Crash:
            assert len(shop.new.visible) in (0, 2, 4)
    shop.fill()

    assert sorted(shop.new.visible) == rows(0, 4)
    target = fill_scope(shop.pipeline.scope, "new")
    assert shop.ledger.open_attempts(target) == []
    assert shop.new.recover(target) == []


def test_a_sink_that_knows_its_place_may_be_filled_before_and_after_its_first_start(tmp_path):
    def make_new():
        return FilesSink(tmp_path / "new", name="new")

    def staged(sinks, batch):
        return local_stage(sinks, [{"id": batch}], tasks=1, as_batch=pa.RecordBatch.from_pylist)

    ledger, old = MemoryLedger(), FilesSink(tmp_path / "old", name="old")

    def run(batch, *sinks):
        driver = Driver("shop", ledger, sinks)
        driver.start()
        ledger.open_generation(driver.lease, "checkpoint")
        batch_range = BatchRange.of_offsets({"orders/0": (batch, batch + 1)})
        cycle = CycleId(driver.scope, 1, batch)
        outcome = driver.run_cycle(cycle, lambda: batch_range, staged(sinks, batch))
        assert isinstance(outcome, CommitSucceeded), outcome
        driver.stop()

    def fill():
        pipeline = Pipeline.of(Driver("shop", ledger, [old, make_new()]))
        again = lambda sink, past: staged([sink], past.cycle.batch)  # noqa: E731  as short as it is
        return add_sink(pipeline, "new", again, **WHO).cycles

    run(0, old)
    assert fill() == 1
    run(1, old, make_new())
    run(2, old)
    run(3, old, make_new())
    assert fill() == 1

    found = pq.read_table(tmp_path / "new", partitioning=None)["id"].to_pylist()
    assert sorted(found) == [0, 1, 2, 3]


def test_a_cycle_that_cannot_be_read_again_stops_the_fill_where_it_is():
    shop = Shop(settings=Settings(cycle_backoff=Settings().cycle_backoff.__class__(tries=1)))
    shop.run(shop.old, batches=3)
    stage_past = shop.stage_past

    def failing(sink, past):
        if past.cycle.batch == 1:
            raise OSError("the file is gone")
        return stage_past(sink, past)

    shop.stage_past = failing
    with pytest.raises(OSError, match="the file is gone"):
        shop.fill()
    assert sorted(shop.new.visible) == rows(0, 2)

    shop.stage_past = stage_past
    assert shop.fill().filled_before == 1
    assert sorted(shop.new.visible) == rows(0, 6)


def test_a_sink_that_replaces_rows_is_filled_before_it_takes_part():
    shop = Shop(Upserting("new"))
    shop.run(shop.old)
    shop.run(shop.old, shop.new)

    with pytest.raises(NeedsOperator, match="would replace newer rows"):
        shop.fill()

    early = Shop(Upserting("new"))
    early.run(early.old)
    early.fill()
    early.run(early.old, early.new)
    assert early.fill().cycles == 0


def test_cycles_that_the_ledger_has_forgotten_come_as_one_from_the_beginning_or_not_at_all():
    shop = Shop()
    shop.run(shop.old, batches=6)
    shop.ledger.prune(shop.pipeline.scope, 2)

    with pytest.raises(NeedsOperator, match=r"forgotten the cycles up to g1\.b3.*--from-beginning"):
        shop.fill()
    shop.fill(forgotten=Forgotten.FROM_THE_BEGINNING)

    assert shop.reread == ["g1.b3", "g1.b4", "g1.b5"]
    assert sorted(shop.new.visible) == rows(0, 12)
    shop.run(shop.old, batches=4)
    shop.ledger.prune(shop.pipeline.scope, 2)
    with pytest.raises(NeedsOperator, match=r"after g1\.b5, up to which sink 'new' was filled"):
        shop.fill(forgotten=Forgotten.FROM_THE_BEGINNING)


def test_forgotten_files_are_those_that_no_remembered_cycle_has_read():
    ledger, old = MemoryLedger(), MemorySink("old")
    driver = Driver("shop", ledger, [old])
    driver.start()
    ledger.open_generation(driver.lease, "checkpoint")
    for batch in range(4):
        read = SourceRange("0", SourceKind.FILES, paths=(f"in/{batch}.json",))
        driver.run_cycle(
            CycleId(driver.scope, 1, batch),
            lambda read=read: BatchRange((read,)),
            local_stage([old], [f"row {batch}"]),
        )
    ledger.prune(driver.scope, 1)
    pipeline = Pipeline.of(driver)

    past = past_of(pipeline, MemorySink("new"), Forgotten.FROM_THE_BEGINNING)

    assert [one.range.sources[0].paths for one in past] == [
        ("in/0.json", "in/1.json", "in/2.json"),
        ("in/3.json",),
    ]


def test_a_source_that_cannot_be_read_again_is_named():
    ledger, old = MemoryLedger(), MemorySink("old")
    driver = Driver("shop", ledger, [old])
    driver.start()
    ledger.open_generation(driver.lease, "checkpoint")
    rate = BatchRange((SourceRange("0", SourceKind.EPHEMERAL, raw="[0, 1]"),))
    driver.run_cycle(CycleId(driver.scope, 1, 0), lambda: rate, local_stage([old], ["a"]))

    with pytest.raises(NeedsOperator, match="cannot be read again"):
        past_of(Pipeline.of(driver), MemorySink("new"))


def test_two_fills_of_one_sink_do_not_run_together():
    shop = Shop()
    shop.run(shop.old)
    target = fill_scope(shop.pipeline.scope, "new")
    lease = shop.ledger.acquire(target, Owner("elsewhere", "boot", 1, "0", "other"), 0.3)
    beat = Heartbeat(shop.ledger, lease).start()

    with pytest.raises(LeaseHeld, match="elsewhere"):
        shop.fill()

    beat.stop()
    shop.ledger.release(lease)
    assert shop.fill().cycles == 1


def test_only_a_sink_of_the_pipeline_can_be_filled_and_the_act_is_kept():
    shop = Shop()
    shop.run(shop.old)
    with pytest.raises(Misuse, match="add it to the program first"):
        add_sink(shop.pipeline, "other", shop.stage_past, **WHO)

    shop.fill()

    act = shop.ledger.acts(shop.pipeline.scope)[0]
    assert (act.act, act.who, act.why) == ("sink-add", "ann", "analysts moved")
    assert act.detail["query"] == "main-fill-new"
    assert CrashPoint.COMMIT_TXN_AFTER in POINTS


def test_the_scope_of_a_fill_has_a_valid_name_for_any_sink():
    long = fill_scope(Scope("ledger", "shop", "q" * 40), "s" * 40)

    assert len(long.query) == 40
    assert long != fill_scope(Scope("ledger", "shop", "q" * 40), "t" * 40)
