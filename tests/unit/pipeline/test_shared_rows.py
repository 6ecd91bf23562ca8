"""Sinks of the same rows are sent them once, and each gets all of them."""

from __future__ import annotations

import pytest

pa = pytest.importorskip("pyarrow")

from semel.memory.sink import MemorySink  # noqa: E402  needs pyarrow for batches
from semel.pipeline.sink import Receipt, StageAnew  # noqa: E402
from semel.pipeline.txn import CycleId, Scope  # noqa: E402
from semel.spark.staging import Tee, shared_rows  # noqa: E402

TXN = CycleId(Scope("l", "app", "main"), 1, 0).attempt()


class Unequal:
    """A column, whose == is neither true nor false."""

    def __eq__(self, other):
        raise AssertionError

    __hash__ = None


def places(*rows):
    sinks = [MemorySink(f"s{i}", each) for i, each in enumerate(rows)]
    different, found = shared_rows(sinks)
    return [sink.name for sink in different], found


def test_sinks_without_rows_of_their_own_share_all_columns():
    assert places(None, None) == (["s0"], [0, 0])


def test_equal_texts_are_shared_and_others_are_not():
    assert places("struct(id)", None, "struct(id)", "struct(n)", None) == (
        ["s0", "s1", "s3"],
        [0, 1, 0, 2, 1],
    )


def test_a_column_is_shared_only_with_itself():
    column = Unequal()

    assert places(column, Unequal(), column) == (["s0", "s1"], [0, 1, 0])


def test_every_sink_gets_the_rows_of_its_place():
    sinks = [MemorySink("all"), MemorySink("other", "struct(n)"), MemorySink("again")]
    ids = pa.array([{"id": 1}, {"id": 2}, None])
    numbers = pa.array([{"n": 7}, None, None])
    batch = pa.RecordBatch.from_arrays([ids, numbers], ["s0", "s1"])
    _, found = shared_rows(sinks)

    receipts = Tee([(sink.name, sink.stager(TXN)) for sink in sinks], found).write([batch], "t")

    assert [receipt.tally.rows for receipt in receipts] == [2, 1, 2]
    assert receipts[0].tally == receipts[2].tally
    assert all(isinstance(receipt, Receipt) for receipt in receipts)


class Refusing:
    """A stager that can only say that rows are refused, not which ones."""

    def open(self, task):
        raise StageAnew("a constraint")


def test_a_task_whose_rows_must_be_staged_in_another_way_is_not_tried_again():
    pytest.importorskip("pyspark")

    (told,) = Tee([("sink", Refusing())], attempts=4)([])

    assert told.to_pylist() == [{"sink": 0, "receipt": "a constraint", "failure": "StagingFailed"}]
