"""A function gets the rows of each cycle after its decision, by a key that tells repetitions."""

from __future__ import annotations

import shutil
import traceback

import pyarrow as pa
import pytest

from semel.errors import NEVER_PASSES, Misuse
from semel.pipeline.sink import Found, SinkFatal, SinkOK, SinkRetryable
from semel.pipeline.txn import CycleId, Scope
from semel.sinks import CallbackSink
from semel.testing import SinkContract

SCOPE = Scope("ledger", "payments", "main")
TAKEN: dict[str, list] = {}
FAILURES: list[Exception] = []


def take(cycle, rows):
    if FAILURES:
        raise FAILURES.pop()
    TAKEN.setdefault(cycle, rows.to_pylist())


@pytest.fixture(autouse=True)
def nothing_taken():
    TAKEN.clear()
    FAILURES.clear()


class TestCallbackSink(SinkContract):
    @pytest.fixture(autouse=True)
    def place(self, tmp_path):
        self.path = tmp_path

    def make_sink(self):
        return CallbackSink(take, staging=str(self.path))

    def visible_rows(self, sink):
        return [row for rows in TAKEN.values() for row in rows]

    def leavings(self, sink):
        return [*self.path.glob("*/semel-*/prepared/*"), *self.path.glob("*/semel-*/from=*/*/*")]

    def lose(self, sink, txn):
        shutil.rmtree(sink._area.folder(txn))


@pytest.fixture
def held(tmp_path):
    """A sink that holds two rows of a cycle."""
    sink = CallbackSink(take, staging=str(tmp_path))
    sink.fence(SCOPE, 1)
    txn = CycleId(SCOPE, 1, 7).attempt()
    writer = sink.stager(txn).open("task")
    writer.write(pa.RecordBatch.from_pydict({"id": [1, 2]}))
    return sink, txn, sink.prepare(txn, [writer.finish()]).token


def test_a_function_that_raises_is_called_again_with_the_same_cycle(held):
    sink, txn, token = held
    FAILURES.append(RuntimeError("no"))

    outcome = sink.commit(txn, token)

    assert isinstance(outcome, SinkRetryable)
    assert "take raised" in outcome.reason
    assert sink.look_up(txn, token).found is Found.HELD
    assert sink.commit(txn, token) == SinkOK()
    assert sink.commit(txn, token) == SinkOK()
    assert {f"{SCOPE.slug}.g1.b7": [{"id": 1}, {"id": 2}]} == TAKEN


@pytest.mark.parametrize("group", NEVER_PASSES)
def test_an_error_that_never_passes_stops_the_cycle_at_once(held, group):
    sink, txn, token = held
    FAILURES.append(group("somebody must look"))

    outcome = sink.commit(txn, token)

    assert outcome == SinkFatal("callback sink callback: somebody must look")
    assert sink.look_up(txn, token).found is Found.HELD


@pytest.mark.parametrize("secret", ["s3cr3t", "s3/cr3t", "s3/c@r3t", "s3?cr3t"])
@pytest.mark.parametrize("uri", ["s3://AKIA:{}@bucket/p?region=x&x=[", "S3://AKIA:{}@bucket/p"])
def test_a_place_that_cannot_be_opened_is_told_without_its_secret(uri, secret):
    with pytest.raises(Misuse, match="bucket/p'") as refused:
        CallbackSink(take, staging=uri.format(secret))

    told = "".join(traceback.format_exception(refused.value))
    assert "AKIA" not in told.partition("got")[2]
    assert "cr3t" not in told


del SinkContract
