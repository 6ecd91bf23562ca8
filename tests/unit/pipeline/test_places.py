"""A sink is its place: names and places that do not fit are refused, and an operator settles it."""

from __future__ import annotations

import shutil

import pyarrow as pa
import pytest

from semel import Driver
from semel.errors import LeaseHeld, Misuse, NeedsOperator
from semel.files.sink import FilesSink
from semel.ledger.sqlite import SqliteLedger
from semel.memory.ledger import MemoryLedger
from semel.operate import Pipeline, places
from semel.operate.resolution import Choice, Way, plan_resolution, resolve
from semel.pipeline.cycle import CommitSucceeded
from semel.pipeline.generation import Adoptable, adopt
from semel.pipeline.source import BatchRange
from semel.pipeline.txn import CycleId
from semel.testing import Crash, CrashPoint, crash_at

SCHEMA = pa.schema([("id", pa.int64())])
ANN = {"who": "ann", "why": "test"}


def run_one(driver: Driver, batch: int = 0) -> None:
    """Commit one row at every sink."""
    driver.start()
    generation = driver.ledger.open_generation(driver.lease, "checkpoint")

    def stage(txn):
        receipts = {}
        for sink in driver.sinks:
            writer = sink.stager(txn).open("task")
            writer.write(pa.RecordBatch.from_pylist([{"id": batch}], schema=SCHEMA))
            receipts[sink.name] = [writer.finish()]
        return receipts

    span = BatchRange.of_offsets({"p": (batch, batch + 1)})
    cycle = CycleId(driver.scope, generation.number, batch)
    assert isinstance(driver.run_cycle(cycle, lambda: span, stage), CommitSucceeded)
    driver.stop()


def refused(driver: Driver, *words: str) -> None:
    """Start, which must be refused with all of *words*, and leave nothing running."""
    with pytest.raises(NeedsOperator) as refusal:
        driver.start()
    driver.stop()
    for word in words:
        assert word in str(refusal.value)


@pytest.fixture(params=["sqlite", "memory"])
def ledger(request, tmp_path):
    return SqliteLedger(tmp_path / "a.ledger") if request.param == "sqlite" else MemoryLedger()


def test_a_known_sink_at_another_place_is_refused_until_it_is_moved(ledger, tmp_path):
    run_one(Driver("app", ledger, [FilesSink(tmp_path / "one")]))
    moved = Driver("app", ledger, [FilesSink(tmp_path / "two")])

    refused(moved, str(tmp_path / "one"), str(tmp_path / "two"), "semel sink move --sink files")
    assert not (tmp_path / "two").exists()

    done = places.move_sink(Pipeline.of(moved), "files", **ANN)
    assert str(tmp_path / "two") in done.after
    run_one(moved, 1)
    assert [act.who for act in ledger.acts(moved.scope) if act.act == "sink-move"] == ["ann"]


def test_a_sink_whose_place_is_new_after_a_kill_before_the_decision_can_be_moved(ledger, tmp_path):
    run_one(Driver("app", ledger, [FilesSink(tmp_path / "one")]))
    killed = Driver("app", ledger, [FilesSink(tmp_path / "one")])
    killed.start()
    ledger.plan(killed.lease, CycleId(killed.scope, 1, 1).attempt())
    killed.stop()
    moved = Driver("app", ledger, [FilesSink(tmp_path / "two")])

    places.move_sink(Pipeline.of(moved), "files", **ANN)

    run_one(moved, 1)
    assert ledger.open_attempts(moved.scope) == []


@pytest.mark.parametrize("way", [Way.RETRY, Way.WITHOUT])
def test_a_place_with_rows_of_a_committed_cycle_is_left_when_the_cycle_is_finished(
    ledger, tmp_path, way
):
    killed = Driver("app", ledger, [FilesSink(tmp_path / "one")])
    with crash_at(CrashPoint.COMMIT_2PC_BEFORE), pytest.raises(Crash):
        run_one(killed)
    killed.stop()
    if way is Way.RETRY:
        shutil.copytree(tmp_path / "one", tmp_path / "two")
    moved = Driver("app", ledger, [FilesSink(tmp_path / "two")])
    with pytest.raises(NeedsOperator, match=r"cycle g1.b0 is committed.*--without files"):
        places.move_sink(Pipeline.of(moved), "files", **ANN)
    choice = Choice(way, "files")
    record, plan = plan_resolution(Pipeline.of(moved), "g1.b0", choice)

    assert resolve(Pipeline.of(moved), record, plan, choice, **ANN).finished

    places.move_sink(Pipeline.of(moved), "files", **ANN)
    run_one(moved, 1)
    assert len([*(tmp_path / "two").rglob("*.parquet")]) == (2 if way is Way.RETRY else 1)


def test_a_move_does_not_accept_what_another_ledger_has_committed(ledger, tmp_path):
    run_one(Driver("app", MemoryLedger(), [FilesSink(tmp_path / "lake")]))
    lost = Driver("app", ledger, [FilesSink(tmp_path / "lake")])
    refused(lost, "semel adopt")

    with pytest.raises(NeedsOperator, match="semel adopt"):
        places.move_sink(Pipeline.of(lost), "files", **ANN)


def test_a_known_place_under_another_name_is_refused_until_it_is_renamed(ledger, tmp_path):
    run_one(Driver("app", ledger, [FilesSink(tmp_path / "lake")]))
    renamed = Driver("app", ledger, [FilesSink(tmp_path / "lake", name="lake")])

    refused(renamed, "'lake'", "'files'", "semel sink rename --from files --to lake")

    for _ in range(2):
        places.rename_sink(Pipeline.of(renamed), "files", "lake", **ANN)
    run_one(renamed, 1)
    assert [tenant.sink for tenant in renamed.sinks[0].tenants()] == ["lake"]
    assert renamed.sinks[0].mark(renamed.scope).cycle.batch == 1


def test_a_new_ledger_on_a_filled_place_is_refused_whatever_sink_and_app_are_called(tmp_path):
    run_one(Driver("app", MemoryLedger(), [FilesSink(tmp_path / "lake")]))
    new = MemoryLedger()

    refused(Driver("app", new, [FilesSink(tmp_path / "lake", name="x")]), "another ledger", "adopt")
    other = Driver("other", new, [FilesSink(tmp_path / "lake", name="x")])
    refused(other, "sink 'files' of app/main", "another ledger", "semel sink move --sink x")

    places.move_sink(Pipeline.of(other), "x", **ANN)
    run_one(other)


def test_an_adoption_accepts_a_filled_place_once(tmp_path):
    run_one(Driver("app", MemoryLedger(), [FilesSink(tmp_path / "lake")]))
    new = Driver("app", MemoryLedger(), [FilesSink(tmp_path / "lake", name="x")])
    found = Adoptable("checkpoint", 1, {}, is_stateful=False)
    adopt(new.ledger, new.scope, found, who="ann", why="the ledger is lost")

    run_one(new, 1)
    run_one(new, 2)


def test_two_people_with_places_of_their_own_do_not_meet(tmp_path):
    run_one(Driver("app", MemoryLedger(), [FilesSink(tmp_path / "ann")]))
    run_one(Driver("app", MemoryLedger(), [FilesSink(tmp_path / "bob")]))


def test_queries_of_one_app_share_a_place(ledger, tmp_path):
    run_one(Driver("app", ledger, [FilesSink(tmp_path / "lake")], "one"))
    run_one(Driver("app", ledger, [FilesSink(tmp_path / "lake")], "two"))
    run_one(Driver("app", ledger, [FilesSink(tmp_path / "lake")], "one"), 1)


def test_a_renamed_app_is_recognised_and_goes_on_after_the_rename(ledger, tmp_path):
    run_one(Driver("pay", ledger, [FilesSink(tmp_path / "lake")]))
    renamed = Driver("payments", ledger, [FilesSink(tmp_path / "lake")])

    refused(renamed, "payments/main", "pay/main", "semel app rename --from pay")

    places.rename_app(Pipeline.of(renamed), "pay", **ANN)
    run_one(renamed, 1)
    assert [scope.app for scope in ledger.scopes()] == ["payments"]
    assert [tenant.scope.app for tenant in renamed.sinks[0].tenants()] == ["payments"]
    with pytest.raises(Misuse, match="no other scope pay/main"):
        places.rename_app(Pipeline.of(renamed), "pay", **ANN)


def test_a_rename_that_stopped_half_way_can_be_repeated(ledger, tmp_path, monkeypatch):
    run_one(Driver("pay", ledger, [FilesSink(tmp_path / "lake")]))
    renamed = Driver("payments", ledger, [FilesSink(tmp_path / "lake")])
    with monkeypatch.context() as broken:
        broken.setattr(type(ledger), "rename_app", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            places.rename_app(Pipeline.of(renamed), "pay", **ANN)

    places.rename_app(Pipeline.of(renamed), "pay", **ANN)

    run_one(renamed, 1)


def test_nothing_is_renamed_or_moved_while_a_pipeline_runs_or_a_cycle_is_open(ledger, tmp_path):
    running = Driver("app", ledger, [FilesSink(tmp_path / "lake")])
    running.start()
    moved = Pipeline.of(Driver("app", ledger, [FilesSink(tmp_path / "two")]))
    ledger.plan(running.lease, CycleId(running.scope, 1, 0).attempt())

    with pytest.raises(LeaseHeld):
        places.move_sink(moved, "files", **ANN)
    running.stop()
    with pytest.raises(NeedsOperator, match="semel recover"):
        places.rename_sink(moved, "old", "files", **ANN)
