"""`ExactlyOnce` in a real query, with sinks and a ledger in memory."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from semel import ExactlyOnce, Settings
from semel.errors import LeaseHeld, Misuse, NeedsOperator
from semel.events import CycleEnded, Event, Events
from semel.lease import Owner
from semel.memory.ledger import MemoryLedger
from semel.memory.sink import MemorySink
from semel.pipeline.adopt import adopt
from semel.pipeline.driver import CycleReplayed
from semel.pipeline.generation import CheckpointRefused
from semel.pipeline.sink import SinkFatal, SinkOutcome, SinkRetryable, Token
from semel.pipeline.states import CycleState
from semel.pipeline.twophase import Backoff
from semel.pipeline.txn import SinkTxnId
from semel.spark import Exit
from semel.spark.checkpoint import open_checkpoint
from semel.spark.query import REAL_TIME_BYPASS
from tests.spark.world import World, ids_in

pytestmark = pytest.mark.spark

AT_ONCE = Backoff(tries=2, first_seconds=0.0)
IMPATIENT = Settings(cycle_backoff=AT_ONCE, commit_backoff=AT_ONCE)


@pytest.fixture
def world(spark: SparkSession, tmp_path: Path) -> World:
    return World(spark, tmp_path)


@pytest.fixture
def ledger() -> MemoryLedger:
    return MemoryLedger()


def deduplicated(df: DataFrame) -> DataFrame:
    timed = df.withColumn("time", F.timestamp_seconds("at")).withWatermark("time", "1 hour")
    return timed.dropDuplicatesWithinWatermark(["id"]).drop("time")


def counted(df: DataFrame) -> DataFrame:
    """Close a window of ten ids when the watermark passes it: rows come in later batches."""
    timed = df.withColumn("time", F.timestamp_seconds("at")).withWatermark("time", "0 seconds")
    windows = timed.groupBy(F.window("time", "10 seconds")).agg(F.count("*").alias("n"))
    return windows.select(F.unix_timestamp("window.start").alias("id"), "n")


def test_every_sink_gets_its_rows_of_every_batch_once(world: World, ledger: MemoryLedger) -> None:
    all_rows = MemorySink("all")
    some = MemorySink("some", rows=F.when(F.col("amount") > 100, F.struct("id")))
    several = MemorySink("several", rows="array(struct(id, 1 as n), struct(id, 2 as n), null)")
    for first in range(0, 30, 10):
        world.put(*range(first, first + 10))

    world.run(ExactlyOnce("app", ledger, [all_rows, some, several]))

    assert ids_in(all_rows.visible) == world.ids
    assert ids_in(some.visible) == list(range(11, 30))
    assert ids_in(several.visible) == sorted(world.ids * 2)
    assert set(all_rows.visible[0]) == {"id", "amount", "at"}


def test_all_sinks_are_fed_by_one_pass_of_the_plan(world: World, ledger: MemoryLedger) -> None:
    seen = world.spark.sparkContext.accumulator(0)

    def look(iterator):  # type: ignore[no-untyped-def]
        for batch in iterator:
            seen.add(batch.num_rows)
            yield batch

    world.put(*range(10))
    sinks = [MemorySink(f"sink{i}") for i in range(4)]

    world.run(ExactlyOnce("app", ledger, sinks), shape=lambda df: df.mapInArrow(look, df.schema))

    assert seen.value == 10
    assert all(ids_in(sink.visible) == world.ids for sink in sinks)


def test_a_replayed_batch_is_skipped_and_the_query_goes_on(
    world: World, ledger: MemoryLedger
) -> None:
    sink = MemorySink()
    world.put(*range(10))
    world.run(ExactlyOnce("app", ledger, [sink]))
    world.forget_commit(0)

    again = ExactlyOnce("app", ledger, [sink])
    world.run(again)

    assert isinstance(again.outcome, CycleReplayed)
    world.put(*range(10, 20))
    world.run(again)
    assert ids_in(sink.visible) == world.ids


@pytest.mark.parametrize("provider", ["HDFSBackedStateStoreProvider", "RocksDBStateStoreProvider"])
def test_a_replayed_batch_of_a_stateful_query_keeps_its_state(
    world: World, ledger: MemoryLedger, provider: str
) -> None:
    key = "spark.sql.streaming.stateStore.providerClass"
    world.spark.conf.set(key, f"org.apache.spark.sql.execution.streaming.state.{provider}")
    try:
        sink = MemorySink()
        world.put(*range(10))
        world.run(ExactlyOnce("app", ledger, [sink]), shape=deduplicated)
        newest = max(int(p.name) for p in (world.checkpoint() / "commits").glob("[0-9]*"))
        world.forget_commit(newest)

        world.put(*range(5, 15))
        world.run(ExactlyOnce("app", ledger, [sink]), shape=deduplicated)
        world.put(*range(12, 18))
        world.run(ExactlyOnce("app", ledger, [sink]), shape=deduplicated)
    finally:
        world.spark.conf.unset(key)

    assert ids_in(sink.visible) == list(range(18))


def test_a_batch_without_input_still_shows_the_rows_that_it_emits(
    world: World, ledger: MemoryLedger
) -> None:
    sink = MemorySink(rows="struct(id, n)")
    world.put(*range(20))
    query = (
        counted(world.stream())
        .writeStream.foreachBatch(ExactlyOnce("app", ledger, [sink]))
        .option("checkpointLocation", str(world.checkpoint()))
        .start()
    )
    try:
        while query.isActive and not sink.visible:
            query.awaitTermination(0.1)
    finally:
        query.stop()

    offsets = [(world.checkpoint() / "offsets" / n).read_text().splitlines()[2] for n in "01"]
    assert offsets[0] == offsets[1]
    assert [row["n"] for row in sink.visible] == [10]


def test_an_empty_batch_leaves_its_cycle_in_the_ledger(world: World, ledger: MemoryLedger) -> None:
    sink = MemorySink(rows="if(id < 0, struct(id), null)")
    world.put(1, 2, 3)
    pipeline = ExactlyOnce("app", ledger, [sink])

    world.run(pipeline)

    newest = ledger.history(pipeline.scope)[0]
    assert newest.state is CycleState.FINISHED
    assert newest.rows == {"memory": 0}
    assert sink.visible == []


def test_a_lost_checkpoint_that_would_repeat_files_is_refused_until_it_is_adopted(
    world: World, ledger: MemoryLedger
) -> None:
    sink = MemorySink()
    world.put(*range(10))
    world.run(ExactlyOnce("app", ledger, [sink]))
    world.lose()

    refused = ExactlyOnce("app", ledger, [sink])
    with pytest.raises(StreamingQueryException):
        world.run(refused)
    assert isinstance(refused.failure, CheckpointRefused)
    assert "00001.json is committed already" in str(refused.failure)
    assert ids_in(sink.visible) == world.ids
    refused.stop()

    found = open_checkpoint(str(world.checkpoint())).adoptable()
    adopt(ledger, refused.scope, found, who="ann", why="test", repeat_files=True)
    world.run(ExactlyOnce("app", ledger, [sink]))

    assert ids_in(sink.visible) == sorted(world.ids * 2)
    assert ledger.acts(refused.scope)[0].who == "ann"


def test_a_stateful_query_that_lost_its_checkpoint_is_refused(
    world: World, ledger: MemoryLedger
) -> None:
    sink = MemorySink()
    world.put(*range(10))
    world.run(ExactlyOnce("app", ledger, [sink]), shape=deduplicated)
    world.lose()

    refused = ExactlyOnce("app", ledger, [sink])
    with pytest.raises(StreamingQueryException):
        world.run(refused, shape=deduplicated)
    refused.stop()

    assert "has lost its state" in str(refused.failure)
    found = open_checkpoint(str(world.checkpoint())).adoptable()
    with pytest.raises(NeedsOperator, match="--state-lost"):
        adopt(ledger, refused.scope, found, who="ann", why="test")


def test_the_checkpoint_of_a_plain_query_is_taken_over_by_adopting_it(
    world: World, ledger: MemoryLedger
) -> None:
    sink = MemorySink()
    world.put(1, 2)
    world.run(lambda df, batch: None)
    world.put(3, 4)

    refused = ExactlyOnce("app", ledger, [sink])
    with pytest.raises(StreamingQueryException):
        world.run(refused)
    assert "semel adopt" in str(refused.failure)
    refused.stop()

    found = open_checkpoint(str(world.checkpoint())).adoptable()
    adopt(ledger, refused.scope, found, who="ann", why="moving to semel")
    world.run(ExactlyOnce("app", ledger, [sink]))

    assert ids_in(sink.visible) == [3, 4]
    assert len(ledger.positions(refused.scope).paths["0"]) == 2


def test_a_batch_that_spark_noted_without_a_decision_stops_the_query(
    world: World, ledger: MemoryLedger
) -> None:
    sink = MemorySink()
    world.put(1)
    world.run(ExactlyOnce("app", ledger, [sink]))
    world.put(2)
    world.run(lambda df, batch: None)
    world.put(3)

    pipeline = ExactlyOnce("app", ledger, [sink])
    with pytest.raises(StreamingQueryException):
        world.run(pipeline)

    assert "no COMMIT" in str(pipeline.failure)
    assert ids_in(sink.visible) == [1]


def test_a_reused_batch_number_with_other_input_fails_loudly(
    world: World, ledger: MemoryLedger
) -> None:
    sink = MemorySink()
    world.put(1)
    world.run(ExactlyOnce("app", ledger, [sink]))
    world.forget_commit(0)
    entry = world.checkpoint() / "sources" / "0" / "0"
    entry.write_text(entry.read_text().replace("00001.json", "00002.json"))
    (entry.parent / ".0.crc").unlink()
    world.put(2)

    pipeline = ExactlyOnce("app", ledger, [sink])
    with pytest.raises(StreamingQueryException):
        world.run(pipeline)

    assert "another source range" in str(pipeline.failure)
    assert ids_in(sink.visible) == [1]


@pytest.mark.parametrize("stop", [SystemExit, KeyboardInterrupt])
def test_a_stop_inside_a_batch_ends_the_query_instead_of_hanging_it(
    world: World, ledger: MemoryLedger, stop: type[BaseException]
) -> None:
    class Stopping(MemorySink):
        def prepare(self, txn: SinkTxnId, receipts: object) -> SinkOutcome:
            raise stop

    world.put(1)
    pipeline = ExactlyOnce("app", ledger, [Stopping()])

    with pytest.raises(StreamingQueryException, match=stop.__name__):
        world.run(pipeline)

    assert isinstance(pipeline.failure, stop)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ("id", "must be a struct"),
        ("array(id)", "must be a struct"),
        ("struct(id, amount as id)", "two columns called 'id'"),
    ],
)
def test_rows_that_cannot_be_staged_are_refused_before_anything_is(
    world: World, ledger: MemoryLedger, rows: str, problem: str
) -> None:
    world.put(1)
    pipeline = ExactlyOnce("app", ledger, [MemorySink(rows=rows)])

    with pytest.raises(StreamingQueryException):
        world.run(pipeline)

    assert isinstance(pipeline.failure, Misuse)
    assert problem in str(pipeline.failure)
    assert ledger.scopes() == []


def test_two_queries_of_one_app_do_not_fence_each_other(world: World, ledger: MemoryLedger) -> None:
    left, right = MemorySink("left"), MemorySink("right")
    world.put(*range(5))

    queries = [
        world.start(ExactlyOnce("app", ledger, [left], query="left"), "left"),
        world.start(ExactlyOnce("app", ledger, [right], query="right"), "right"),
    ]
    for query in queries:
        assert query.awaitTermination(60)

    assert ids_in(left.visible) == ids_in(right.visible) == world.ids


def test_a_second_query_on_a_running_scope_is_refused_in_one_process(
    world: World, ledger: MemoryLedger
) -> None:
    sink = MemorySink()
    world.put(1)
    running = ExactlyOnce("app", ledger, [sink])
    query = (
        world.stream()
        .writeStream.foreachBatch(running)
        .option("checkpointLocation", str(world.checkpoint("one")))
        .trigger(processingTime="100 milliseconds")
        .start()
    )
    try:
        query.processAllAvailable()
        second = ExactlyOnce("app", ledger, [sink])
        with pytest.raises(StreamingQueryException):
            world.run(second, "two")
        assert "another query of this process" in str(second.failure)
        world.put(2)
        query.processAllAvailable()
    finally:
        query.stop()

    assert ids_in(sink.visible) == [1, 2]


def test_one_object_does_not_serve_two_queries_at_once(world: World, ledger: MemoryLedger) -> None:
    sink = MemorySink()
    world.put(1)
    pipeline = ExactlyOnce("app", ledger, [sink])
    query = (
        world.stream()
        .writeStream.foreachBatch(pipeline)
        .option("checkpointLocation", str(world.checkpoint("one")))
        .trigger(processingTime="100 milliseconds")
        .start()
    )
    try:
        query.processAllAvailable()
        with pytest.raises(StreamingQueryException, match="run by another query already"):
            world.run(pipeline, "two")
        world.put(2)
        query.processAllAvailable()
    finally:
        query.stop()

    assert ids_in(sink.visible) == [1, 2]
    assert len(ledger.generations(pipeline.scope)) == 1


def test_several_sources_are_told_apart_even_when_their_order_changes(
    world: World, ledger: MemoryLedger, tmp_path: Path
) -> None:
    (tmp_path / "second").mkdir()
    second = World(world.spark, tmp_path / "second")
    sink = MemorySink()
    for i in range(11):  # one more than Spark keeps before it compacts a source's log
        world.put(i)
    second.put(100, 101)

    world.run(ExactlyOnce("app", ledger, [sink]), shape=lambda df: df.union(second.stream()))
    everything = sorted(world.ids + second.ids)
    assert ids_in(sink.visible) == everything

    world.lose()
    swapped = ExactlyOnce("app", ledger, [sink])
    with pytest.raises(StreamingQueryException):
        world.run(swapped, shape=lambda df: second.stream().union(df))
    assert "the order of the sources has changed" in str(swapped.failure)
    assert ids_in(sink.visible) == everything


class Refusing(MemorySink):
    """A sink whose commits are refused a number of times."""

    def __init__(self, refusals: int, outcome: SinkOutcome) -> None:
        super().__init__("refusing")
        self.refusals = refusals
        self.answer = outcome

    def commit(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        self.refusals -= 1
        return self.answer if self.refusals >= 0 else super().commit(txn, token)


def test_run_finishes_a_stranded_sink_when_it_is_started_again(
    world: World, ledger: MemoryLedger
) -> None:
    sink = Refusing(2, SinkRetryable("not now"))
    world.put(1)
    first = ExactlyOnce("app", ledger, [sink], settings=IMPATIENT)

    assert first.run(lambda: world.start(first)) is Exit.STRANDED
    assert sink.visible == []

    second = ExactlyOnce("app", ledger, [sink], settings=IMPATIENT)
    assert second.run(lambda: world.start(second)) is Exit.DONE
    assert ids_in(sink.visible) == [1]


def test_run_calls_an_operator_when_a_promise_was_broken(
    world: World, ledger: MemoryLedger
) -> None:
    sink = Refusing(99, SinkFatal("the promised rows are gone"))
    world.put(1)
    pipeline = ExactlyOnce("app", ledger, [sink], settings=IMPATIENT)
    pipeline.run(lambda: world.start(pipeline))

    again = ExactlyOnce("app", ledger, [sink], settings=IMPATIENT)

    assert again.run(lambda: world.start(again)) is Exit.OPERATOR


def test_run_starts_the_query_again_after_a_failure_that_may_pass(
    world: World, ledger: MemoryLedger
) -> None:
    class FailsTwice(MemorySink):
        left = 3

        def prepare(self, txn: SinkTxnId, receipts: object) -> SinkOutcome:
            self.left -= 1
            if self.left >= 0:
                return SinkRetryable("not now")
            return super().prepare(txn, receipts)  # type: ignore[arg-type]

    events = Events()
    seen: list[Event] = []
    events.subscribe(seen.append)
    sink = FailsTwice()
    world.put(1)
    pipeline = ExactlyOnce("app", ledger, [sink], settings=IMPATIENT, events=events)

    code = pipeline.run(lambda: world.start(pipeline), backoff=Backoff(first_seconds=0.0))

    assert code is Exit.DONE
    assert ids_in(sink.visible) == [1]
    outcomes = [event.outcome for event in seen if isinstance(event, CycleEnded)]
    assert outcomes == ["aborted", "aborted", "aborted", "succeeded"]


def test_a_settings_that_hides_data_loss_is_refused(world: World, ledger: MemoryLedger) -> None:
    world.put(1)
    pipeline = ExactlyOnce("app", ledger, [MemorySink()], fails_on_data_loss=False)

    with pytest.raises(StreamingQueryException):
        world.run(pipeline)

    assert isinstance(pipeline.failure, Misuse)


def test_a_setting_that_forces_real_time_mode_is_refused(
    world: World, ledger: MemoryLedger
) -> None:
    world.put(1)
    world.spark.conf.set(REAL_TIME_BYPASS, "false")
    pipeline = ExactlyOnce("app", ledger, [MemorySink()])
    try:
        with pytest.raises(StreamingQueryException):
            world.run(pipeline)
    finally:
        world.spark.conf.unset(REAL_TIME_BYPASS)

    assert "Real-Time Mode" in str(pipeline.failure)


def test_a_batch_that_takes_longer_than_the_lease_keeps_it(
    world: World, ledger: MemoryLedger
) -> None:
    def slow(batches):  # type: ignore[no-untyped-def]
        for batch in batches:
            time.sleep(5)
            yield batch

    world.put(1)
    sink = MemorySink()
    pipeline = ExactlyOnce("app", ledger, [sink], settings=Settings(lease_seconds=2.0))
    query = world.start(pipeline, shape=lambda df: df.mapInArrow(slow, df.schema))
    while query.isActive and not ledger.scopes():
        time.sleep(0.05)
    for _ in range(4):
        time.sleep(1.0)
        with pytest.raises(LeaseHeld):
            ledger.acquire(pipeline.scope, Owner("elsewhere", "boot", 1, "1", "other"), 30.0)

    assert query.awaitTermination(60)
    assert ids_in(sink.visible) == [1]


def test_a_rate_source_is_carried_and_its_lost_checkpoint_refused(
    world: World, ledger: MemoryLedger
) -> None:
    sink = MemorySink(rows="struct(value as id)")

    def run(pipeline: ExactlyOnce) -> None:
        query = (
            world.spark.readStream.format("rate-micro-batch")
            .option("rowsPerBatch", 10)
            .load()
            .writeStream.foreachBatch(pipeline)
            .option("checkpointLocation", str(world.checkpoint()))
            .trigger(processingTime="0 seconds")
            .start()
        )
        try:
            while query.isActive and len(sink.visible) < 20:
                query.awaitTermination(0.1)
            if query.exception():
                raise query.exception()
        finally:
            query.stop()

    run(ExactlyOnce("app", ledger, [sink]))
    seen = ids_in(sink.visible)
    assert seen == list(range(len(seen)))
    world.lose()
    sink.store.visible.clear()

    refused = ExactlyOnce("app", ledger, [sink])
    with pytest.raises(StreamingQueryException):
        run(refused)
    assert "without durable positions" in str(refused.failure)
