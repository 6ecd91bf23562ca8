"""`ExactlyOnce` in a real query, with sinks and a ledger in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import functions as F

from semel import ExactlyOnce
from semel.arrow.tally import schema_from_text
from semel.memory.ledger import MemoryLedger
from semel.memory.sink import MemorySink
from semel.pipeline.driver import CycleReplayed
from semel.pipeline.ledger import CycleState
from semel.pipeline.sink import tally_of
from semel.pipeline.txn import CycleId, Scope
from semel.sinks import FilesSink
from semel.spark.staging import (
    Tee,
    WholeTee,
    arrow_schemas,
    run_tasks,
    select_rows,
    staging_job,
)
from tests.spark.world import World, counted, deduplicated, ids_in

pytestmark = pytest.mark.spark


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


@pytest.mark.parametrize(
    ("names", "tee"),
    [(["id", "n"], WholeTee), (["a.b", "n"], Tee), (["id", "ID"], Tee), (["1 %", "ü"], Tee)],
)
def test_columns_of_any_name_are_staged_as_they_are(
    world: World, tmp_path: Path, names: list[str], tee: type[Tee]
) -> None:
    frame = world.spark.createDataFrame([(1, "x"), (2, None)], names)
    sink = FilesSink(tmp_path / "rows", format="jsonl")
    txn = CycleId(Scope("ledger", "app", "main"), 1, 0).attempt()
    sink.fence(txn.scope, 1)

    job, found = staging_job(frame, [sink], [("files", sink.stager(txn))])
    receipts = run_tasks(job, found)["files"]

    assert type(found) is tee
    assert tally_of(receipts).rows == 2
    staged = {schema_from_text(text) for one in receipts if (text := one.detail["schema"])}
    wanted = arrow_schemas(select_rows(frame, [sink]), [sink])["files"]
    assert staged == {wanted}


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
