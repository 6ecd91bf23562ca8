"""What readers of a files sink's folder see."""

from __future__ import annotations

import pyarrow.dataset as ds
import pytest

from semel.files.sink import FilesSink
from semel.pipeline.txn import CycleId
from tests.unit.files.files_place import SCOPE, committed, new_sink, prepared, stage


def fill(sink):
    """Leave a cycle that is committed, one without rows, one prepared and one only staged."""
    first, empty, held, late = (CycleId(SCOPE, 1, batch).attempt() for batch in range(4))
    committed(sink, first, [1, 2])
    sink.commit(empty, sink.prepare(empty, []).token)
    prepared(sink, held, [3])
    stage(sink, late, [4])


def test_arrows_reader_sees_only_committed_rows_and_their_cycle(tmp_path):
    sink = new_sink(tmp_path)
    fill(sink)

    table = ds.dataset(sink.path, format="parquet", partitioning="hive").to_table()

    assert sorted(table["id"].to_pylist()) == [1, 2]
    assert set(table["cycle"].to_pylist()) == {f"g1.b0-{SCOPE.slug}"}


@pytest.mark.spark
@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_sparks_reader_sees_only_committed_rows_and_their_cycle(format, tmp_path, spark):
    sink = FilesSink(tmp_path, format=format)
    fill(sink)

    reader = spark.read.parquet if format == "parquet" else spark.read.json
    rows = [(row["id"], row["cycle"]) for row in reader(str(tmp_path)).collect()]

    assert sorted(rows) == [(1, f"g1.b0-{SCOPE.slug}"), (2, f"g1.b0-{SCOPE.slug}")]
