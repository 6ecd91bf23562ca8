"""A ledger that is not the one its sinks were filled under."""

from __future__ import annotations

import shutil

import pytest

from semel import Driver
from semel.errors import NeedsOperator
from semel.ledger.sqlite import SqliteLedger
from semel.memory.ledger import MemoryLedger
from semel.memory.sink import MemorySink
from semel.pipeline.cycle import CommitSucceeded
from semel.pipeline.generation import Adoptable, adopt
from semel.pipeline.source import (
    BatchRange,
    Position,
    Positions,
    SourceKind,
    SourceRange,
    Span,
    discontinuities,
)
from semel.pipeline.txn import CycleId, SinkTxnId


def run_one(driver: Driver, batch: int = 0) -> None:
    driver.start()
    generation = driver.ledger.open_generation(driver.lease, "checkpoint")

    def stage(txn: SinkTxnId) -> dict[str, list[object]]:
        writer = driver.sinks[0].stager(txn).open("task")
        writer.write([batch])
        return {"memory": [writer.finish()]}

    span = BatchRange.of_offsets({"p": (batch, batch + 1)})
    cycle = CycleId(driver.scope, generation.number, batch)
    assert isinstance(driver.run_cycle(cycle, lambda: span, stage), CommitSucceeded)
    driver.stop()


def test_a_new_ledger_on_sinks_that_another_filled_is_refused_until_it_is_adopted() -> None:
    sink = MemorySink()
    run_one(Driver("app", MemoryLedger(), [sink]))
    new = MemoryLedger()

    second = Driver("app", new, [MemorySink(store=sink.store)])
    with pytest.raises(NeedsOperator, match="decided in another ledger"):
        second.start()
    second.stop()

    found = Adoptable("checkpoint", 1, {}, is_stateful=False)
    adopt(new, second.scope, found, who="ann", why="the old ledger is lost")
    run_one(second, batch=1)
    assert sink.visible == [0, 1]


def test_a_ledger_that_is_older_than_its_sinks_is_refused_until_it_is_adopted(tmp_path) -> None:
    sink = MemorySink()
    ledger = SqliteLedger(tmp_path / "app.ledger")
    run_one(Driver("app", ledger, [sink]))
    ledger.close()
    shutil.copy(tmp_path / "app.ledger", tmp_path / "backup.ledger")
    run_one(Driver("app", ledger, [sink]), batch=1)

    older = SqliteLedger(tmp_path / "backup.ledger")
    restored = Driver("app", older, [sink])
    with pytest.raises(NeedsOperator, match="as generation 2 or later"):
        restored.start()
    restored.stop()

    found = Adoptable("checkpoint", 2, {}, is_stateful=False)
    assert adopt(older, restored.scope, found, who="ann", why="no newer backup").number == 2
    run_one(restored, batch=2)
    assert sink.visible == [0, 1, 2]


def test_an_adopted_ledger_is_refused_again_once_another_one_has_been_used() -> None:
    sink = MemorySink()
    old = Driver("app", MemoryLedger(), [sink])
    new = Driver("app", MemoryLedger(), [MemorySink(store=sink.store)])
    plain = Adoptable("checkpoint", 0, {}, is_stateful=False)
    adopt(old.ledger, old.scope, plain, who="ann", why="takes a plain query over")
    run_one(old)
    moved = Adoptable("checkpoint", 1, {}, is_stateful=False)
    adopt(new.ledger, new.scope, moved, who="ann", why="the old ledger's volume is gone")
    run_one(new, batch=1)
    run_one(new, batch=2)

    with pytest.raises(NeedsOperator, match="decided in another ledger"):
        old.start()
    old.stop()

    back = Adoptable("checkpoint", 3, {}, is_stateful=False)
    adopt(old.ledger, old.scope, back, who="ann", why="the volume is back, sinks compared")
    run_one(old, batch=3)
    assert sink.visible == [0, 1, 2, 3]


def test_a_ledger_with_a_history_of_its_own_is_refused_by_sinks_that_another_filled() -> None:
    sink = MemorySink()
    run_one(Driver("app", MemoryLedger(), [sink]))
    experienced = MemoryLedger()
    run_one(Driver("app", experienced, [MemorySink()]))

    with pytest.raises(NeedsOperator, match="decided in another ledger"):
        Driver("app", experienced, [MemorySink(store=sink.store)]).start()


def test_a_committed_batch_that_spark_has_not_noted_cannot_be_adopted() -> None:
    ledger, sink = MemoryLedger(), MemorySink()
    driver = Driver("app", ledger, [sink])
    run_one(driver)
    found = Adoptable("checkpoint", 0, {}, is_stateful=False)

    with pytest.raises(NeedsOperator, match="adopting would repeat it"):
        adopt(ledger, driver.scope, found, who="ann", why="test")


def test_files_that_an_adopted_checkpoint_has_read_count_as_committed() -> None:
    ledger = MemoryLedger()
    scope = Driver("app", ledger, [MemorySink()]).scope

    adopt(
        ledger,
        scope,
        Adoptable("one", 1, {}, is_stateful=False, paths={"0": ["/a"]}),
        who="ann",
        why="moving to semel",
    )
    second = Adoptable("two", 1, {}, is_stateful=False, paths={"0": ["/b"]})
    adopt(ledger, scope, second, who="ann", why="the checkpoint is lost")
    assert set(ledger.positions(scope).paths["0"]) == {"/a", "/b"}

    third = Adoptable("three", 1, {}, is_stateful=False, paths={"0": ["/c"]})
    adopt(ledger, scope, third, who="ann", why="read all again", repeat_files=True)
    assert set(ledger.positions(scope).paths["0"]) == {"/c"}


def test_a_topic_whose_id_cannot_be_asked_for_is_not_trusted() -> None:
    positions = Positions({("0", "t/0"): Position(10, "id")})
    span = {"t/0": Span(10, 20)}
    same = SourceRange("0", SourceKind.OFFSETS, span, topic_ids={"t": "id"})
    unknown = SourceRange("0", SourceKind.OFFSETS, span)

    assert discontinuities(positions, BatchRange((same,))) == []
    assert (
        "the topic's id cannot be read here"
        in discontinuities(positions, BatchRange((unknown,)))[0]
    )


def test_another_app_may_share_a_sink() -> None:
    sink = MemorySink()
    run_one(Driver("app", MemoryLedger(), [sink]))

    run_one(Driver("other", MemoryLedger(), [MemorySink(store=sink.store)]))

    assert sink.visible == [0, 0]


def test_a_ledger_that_is_older_than_its_sinks_is_refused() -> None:
    ledger, sink = MemoryLedger(ledger_id="one"), MemorySink()
    run_one(Driver("app", ledger, [sink]))
    restored = MemoryLedger(ledger_id="one")

    with pytest.raises(NeedsOperator, match="the ledger is older than its sinks"):
        Driver("app", restored, [MemorySink(store=sink.store)]).start()
