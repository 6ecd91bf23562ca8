"""What the ledger says to checkpoints that are lost, foreign or out of step."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException

from semel import ExactlyOnce
from semel.errors import Misuse, NeedsOperator
from semel.files.sink import FilesSink
from semel.memory.ledger import MemoryLedger
from semel.memory.sink import MemorySink
from semel.operate.adoption import leave_out, plan_adoption
from semel.pipeline.generation import CheckpointRefused, adopt
from semel.spark.checkpoint import open_checkpoint
from semel.spark.supervise import Exit
from tests.spark.world import SCHEMA, World, deduplicated, ids_in

pytestmark = pytest.mark.spark


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
    assert [act.who for act in ledger.acts(refused.scope) if act.act == "adopt"] == ["ann"]


def test_a_query_that_lost_its_ledger_and_its_checkpoint_is_adopted_after_a_start_without_run(
    world: World, tmp_path: Path
) -> None:
    sink = FilesSink(tmp_path / "lake")
    world.put(1)
    world.run(ExactlyOnce("app", MemoryLedger(), [sink]))
    world.lose()
    new = MemoryLedger()
    pipeline = ExactlyOnce("app", new, [sink])
    started: list[object] = []

    def start() -> object:
        started.append(world.start(pipeline))
        return started[-1]

    assert pipeline.run(start) is Exit.OPERATOR
    assert not started
    with pytest.raises(NeedsOperator, match="start the query once without `run`"):
        open_checkpoint(str(world.checkpoint())).adoptable()

    with pytest.raises(StreamingQueryException):
        world.run(pipeline)
    pipeline.stop()
    found = open_checkpoint(str(world.checkpoint())).adoptable()
    adopt(new, pipeline.scope, found, who="ann", why="a clean start")

    assert pipeline.run(start) is Exit.DONE
    assert len(new.history(pipeline.scope, 9)) == 1


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


MOUNT = "fs.viewfs.mounttable.{name}.link./data"
"""The setting under which viewfs://name/data is a folder: a scheme that is not this host's."""


@pytest.fixture
def elsewhere(world: World) -> Iterator[str]:
    """A checkpoint's URL on a file system that only Spark can read."""
    # A name of its own for each test: Hadoop keeps a file system by its scheme and name.
    name = uuid.uuid4().hex
    world.spark.conf.set(MOUNT.format(name=name), f"file://{world.folder}")
    yield f"viewfs://{name}/data/elsewhere"
    world.spark.conf.unset(MOUNT.format(name=name))


def run_at(world: World, pipeline: ExactlyOnce, checkpoint: str) -> None:
    writer = world.stream().writeStream.foreachBatch(pipeline)
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    assert query.awaitTermination(60)


def test_a_checkpoint_on_another_file_system_is_read_through_spark(
    world: World, ledger: MemoryLedger, elsewhere: str
) -> None:
    sink = MemorySink()
    world.put(1, 2)
    run_at(world, ExactlyOnce("app", ledger, [sink]), elsewhere)
    world.put(3, 4)
    run_at(world, ExactlyOnce("app", ledger, [sink]), elsewhere)

    assert ids_in(sink.visible) == world.ids
    there = open_checkpoint(elsewhere, world.spark)
    here = open_checkpoint(str(world.folder / "elsewhere"), world.spark)
    assert there.view(1) == here.view(1)
    assert there.adoptable() == here.adoptable()
    assert (there.id, there.last_finished) == (here.id, 1)


def test_a_torn_checkpoint_on_another_file_system_shows_as_an_overlap_and_can_leave_files_out(
    world: World, ledger: MemoryLedger, elsewhere: str
) -> None:
    sink = MemorySink()
    world.put(1, 2)
    run_at(world, ExactlyOnce("app", ledger, [sink]), elsewhere)
    world.lose("elsewhere")

    refused = ExactlyOnce("app", ledger, [sink])
    world.put(3)
    with pytest.raises(StreamingQueryException):
        run_at(world, refused, elsewhere)
    refused.stop()

    assert isinstance(refused.failure, CheckpointRefused)
    assert ids_in(sink.visible) == [1, 2]

    there = open_checkpoint(elsewhere, world.spark)
    plan = plan_adoption(ledger, refused.scope, elsewhere, there, there.adoptable())
    adopt(ledger, refused.scope, leave_out(ledger, plan, there), who="ann", why="test")
    run_at(world, ExactlyOnce("app", ledger, [sink]), elsewhere)

    assert ids_in(sink.visible) == world.ids == [1, 2, 3]


def test_leaving_files_out_loses_no_old_file_beside_a_committed_one_that_is_gone(
    world: World, ledger: MemoryLedger
) -> None:
    def run(pipeline: ExactlyOnce) -> None:
        stream = world.spark.readStream.schema(SCHEMA).json(str(world.input))
        writer = stream.writeStream.foreachBatch(pipeline).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(world.checkpoint())).start()
        assert query.awaitTermination(60)

    sink = MemorySink()
    world.put(1)
    world.put(2)
    first, second = sorted(world.input.iterdir())
    committed, long_ago = (time.time() - 24 * 3600 * days for days in (9, 8))
    os.utime(second, (committed, committed))
    run(ExactlyOnce("app", ledger, [sink]))
    world.lose()
    first.unlink()
    world.put(3)
    os.utime(world.input / "00003.json", (long_ago, long_ago))
    world.put(4)
    refused = ExactlyOnce("app", ledger, [sink])
    with pytest.raises(StreamingQueryException):
        run(refused)
    refused.stop()

    there = open_checkpoint(str(world.checkpoint()))
    plan = plan_adoption(ledger, refused.scope, there.root, there, there.adoptable())
    adopt(ledger, refused.scope, leave_out(ledger, plan, there), who="ann", why="test")
    run(ExactlyOnce("app", ledger, [sink]))

    assert ids_in(sink.visible) == world.ids == [1, 2, 3, 4]


def test_a_file_system_that_spark_does_not_have_is_named(world: World) -> None:
    with pytest.raises(Misuse, match=r'No FileSystem for scheme "nowhere".*jars'):
        open_checkpoint("nowhere://x/y", world.spark)
