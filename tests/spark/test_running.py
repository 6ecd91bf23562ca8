"""Whom `ExactlyOnce` refuses, and how `run` ends."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F

from semel import ExactlyOnce, Settings
from semel.errors import LeaseHeld, Misuse, Permanent
from semel.events import CycleEnded, Event, Events
from semel.lease import Owner
from semel.memory.ledger import MemoryLedger
from semel.memory.sink import MemorySink
from semel.pipeline.cycle import CycleRefused
from semel.pipeline.sink import (
    SinkFatal,
    SinkOutcome,
    SinkRetryable,
    Stager,
    StagingWriter,
    Token,
)
from semel.pipeline.twophase import Backoff
from semel.pipeline.txn import SinkTxnId
from semel.spark.query import FILE_SETTINGS, REAL_TIME_BYPASS
from semel.spark.supervise import Exit
from tests.spark.world import SCHEMA, World, ids_in

pytestmark = pytest.mark.spark

AT_ONCE = Backoff(tries=2, first_seconds=0.0)
IMPATIENT = Settings(cycle_backoff=AT_ONCE, commit_backoff=AT_ONCE)


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


class Faulty(MemorySink):
    """A sink whose tasks raise."""

    def __init__(self, error: Exception, notes: Path | None = None) -> None:
        super().__init__("faulty")
        self.error = error
        self.notes = notes

    def stager(self, txn: SinkTxnId) -> Stager:
        error, notes = self.error, self.notes

        # Of a local class, because executors cannot import this module.
        class FaultyStager:
            def open(self, task: str) -> StagingWriter:
                if notes is not None:
                    notes.joinpath(task).touch()
                raise error

        return FaultyStager()


class NotOnExecutors:
    """Is pickled by its module, which executors cannot import."""


class Absent(MemorySink):
    def stager(self, txn: SinkTxnId) -> Any:
        return NotOnExecutors()


def attempts_of(world: World, sink: MemorySink, **options: Any) -> tuple[ExactlyOnce, Exit, int]:
    """Run one batch; return how it ended and how many attempts were made."""
    events = Events()
    seen: list[Event] = []
    events.subscribe(seen.append)
    world.put(1)
    pipeline = ExactlyOnce("app", MemoryLedger(), [sink], settings=IMPATIENT, events=events)
    backoff = Backoff(tries=1)
    code = pipeline.run(lambda: world.start(pipeline, **options), backoff=backoff)
    return pipeline, code, sum(isinstance(event, CycleEnded) for event in seen)


def test_a_permanent_error_in_a_task_is_tried_once(world: World, tmp_path: Path) -> None:
    notes = tmp_path / "tasks"
    notes.mkdir()
    sink = Faulty(Permanent("column note: a NUL"), notes)

    pipeline, code, attempts = attempts_of(world, sink)

    assert (code, attempts, len([*notes.iterdir()])) == (Exit.REFUSED, 1, 1)
    assert isinstance(pipeline.failure, CycleRefused)
    assert "column note: a NUL" in str(pipeline.failure)


@pytest.mark.parametrize(("error", "code"), [(ValueError, Exit.REFUSED), (OSError, Exit.GAVE_UP)])
def test_a_task_that_may_pass_later_is_tried_again(
    world: World, error: type[Exception], code: Exit
) -> None:
    pipeline, ended, attempts = attempts_of(world, Faulty(error("canary-1")))

    assert ("canary-1" in str(pipeline.failure)) == (error is OSError)
    assert (ended, attempts) == (code, 1 if code is Exit.REFUSED else IMPATIENT.cycle_backoff.tries)


def test_a_module_that_executors_lack_is_named_and_not_waited_for(world: World) -> None:
    pipeline, code, attempts = attempts_of(world, Absent())

    assert (code, attempts) == (Exit.REFUSED, 1)
    assert "test_running': the executors' Python" in str(pipeline.failure)
    assert "set PYSPARK_PYTHON" in str(pipeline.failure)


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        ("udf", "ValueError at "),
        ("absent", "ModuleNotFoundError: No module named 'absent': the executors' Python lacks it"),
        ("cast('canary-' || id as long)", "CAST_INVALID_INPUT"),
        ("raise_error('canary-' || id)", "USER_RAISED_EXCEPTION"),
        ("map_from_arrays(array(id, id), array('canary-1', ''))[id]", "DUPLICATED_MAP_KEY"),
        ("from_json('{canary-' || id, 'a int', map('mode', 'FAILFAST')).a", "MALFORMED_RECORD"),
    ],
)
def test_an_error_of_the_plan_itself_is_not_repeated_and_shows_no_value(
    world: World, column: str, reason: str
) -> None:
    functions = {
        "udf": lambda number: int(f"canary-{number}"),
        "absent": lambda number: __import__("absent"),
    }
    known = functions.get(column)
    made = F.udf(known, "long")("id") if known else F.expr(column)

    pipeline, code, attempts = attempts_of(
        world, MemorySink(), shape=lambda df: df.withColumn("id", made)
    )

    assert (code, attempts) == (Exit.REFUSED, 1)
    assert reason in str(pipeline.failure)
    assert "canary-1" not in str(pipeline.failure)


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_a_record_that_a_source_refuses_names_the_file_and_no_value(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = world.folder / "refused"
    folder.mkdir()
    folder.joinpath("0").write_text({"json": '{"id": "canary-1"}', "csv": "canary-1,2,3"}[kind])
    reader = world.spark.readStream.schema(SCHEMA).option("mode", "FAILFAST")
    monkeypatch.setattr(world, "stream", lambda: reader.format(kind).load(str(folder)))

    pipeline, code, attempts = attempts_of(world, MemorySink())

    assert (code, attempts) == (Exit.REFUSED, 1)
    assert "refused/0 (SQLSTATE 22" in str(pipeline.failure)
    assert "canary-1" not in str(pipeline.failure)


def test_a_file_whose_columns_have_another_type_is_not_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.spark.range(3).write.parquet(str(world.input / "of-numbers"))
    reader = world.spark.readStream.schema("id string")
    stream = reader.parquet(str(world.input / "of-numbers"))
    monkeypatch.setattr(world, "stream", lambda: stream)

    pipeline, code, attempts = attempts_of(world, MemorySink())

    assert (code, attempts) == (Exit.REFUSED, 1)
    assert "PARQUET_COLUMN_DATA_TYPE_MISMATCH in " in str(pipeline.failure)


def test_a_file_that_cannot_be_read_is_tried_again_without_the_stack_of_the_jvm(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = world.folder / "damaged"
    folder.mkdir()
    folder.joinpath("0.parquet").write_text("not Parquet")
    stream = world.spark.readStream.schema(SCHEMA).parquet(str(folder))
    monkeypatch.setattr(world, "stream", lambda: stream)

    pipeline, code, attempts = attempts_of(world, MemorySink())

    assert (code, attempts) == (Exit.GAVE_UP, IMPATIENT.cycle_backoff.tries)
    assert "FAILED_READ_FILE" in str(pipeline.failure)
    assert "0.parquet (SQLSTATE KD001" in str(pipeline.failure)
    assert " at org.apache" not in str(pipeline.failure)


def test_a_worker_that_dies_is_waited_for(world: World) -> None:
    dies = F.udf(lambda number: os._exit(number), "long")

    pipeline, code, _ = attempts_of(
        world, MemorySink(), shape=lambda df: df.withColumn("id", dies("id"))
    )

    assert code is Exit.GAVE_UP
    assert "EOFException (Spark's log has the text)" in str(pipeline.failure)


def test_a_settings_that_hides_data_loss_is_refused(world: World, ledger: MemoryLedger) -> None:
    world.put(1)
    pipeline = ExactlyOnce("app", ledger, [MemorySink()], fails_on_data_loss=False)

    with pytest.raises(StreamingQueryException):
        world.run(pipeline)

    assert isinstance(pipeline.failure, Misuse)


@pytest.mark.parametrize("root", ["", "all"])
def test_a_query_without_a_checkpoint_of_its_own_is_refused_at_its_first_start(
    world: World, ledger: MemoryLedger, root: str
) -> None:
    setting = "spark.sql.streaming.checkpointLocation"
    world.put(1)
    pipeline = ExactlyOnce("app", ledger, [MemorySink()])
    writer = world.stream().writeStream.foreachBatch(pipeline).trigger(availableNow=True)
    if root:
        world.spark.conf.set(setting, f"{world.folder / root}/")
    try:
        query = writer.start()
        with pytest.raises(StreamingQueryException):
            query.awaitTermination(60)

        assert isinstance(pipeline.failure, Misuse)
        assert 'option("checkpointLocation"' in str(pipeline.failure)
        assert ledger.scopes() == []

        if root:
            assert writer.queryName("payments").start().awaitTermination(60)
            assert len(ledger.generations(pipeline.scope)) == 1
    finally:
        world.spark.conf.unset(setting)


@pytest.mark.parametrize("option", ["ignoreMissingFiles", "IGNORECORRUPTFILES"])
def test_a_source_that_passes_over_files_is_refused(
    world: World, ledger: MemoryLedger, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    world.put(1)
    reader = world.spark.readStream.schema(SCHEMA).option(option, "True")
    monkeypatch.setattr(world, "stream", lambda: reader.json(str(world.input)))
    pipeline = ExactlyOnce("app", ledger, [MemorySink()])

    with pytest.raises(StreamingQueryException):
        world.run(pipeline)

    assert isinstance(pipeline.failure, Misuse)
    assert f"{option.lower()}=true" in str(pipeline.failure).lower()


@pytest.mark.parametrize("setting", FILE_SETTINGS)
def test_a_setting_that_passes_over_files_is_refused(
    world: World, ledger: MemoryLedger, setting: str
) -> None:
    world.put(1)
    world.spark.conf.set(setting, "true")
    pipeline = ExactlyOnce("app", ledger, [MemorySink()])
    try:
        with pytest.raises(StreamingQueryException):
            world.run(pipeline)
    finally:
        world.spark.conf.unset(setting)

    assert isinstance(pipeline.failure, Misuse)
    assert setting in str(pipeline.failure)


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
