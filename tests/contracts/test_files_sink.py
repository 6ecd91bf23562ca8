"""The files sink keeps the contract, in both formats."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from semel.files.layout import Layout
from semel.files.sink import FilesSink
from semel.testing import SinkContract


class TestParquetFiles(SinkContract):
    format = "parquet"

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path):
        self.path = tmp_path / "lake"

    def make_sink(self):
        return FilesSink(self.path, format=self.format)

    def visible_rows(self, sink):
        for file in self.path.glob("cycle=*/[!_.]*"):
            # One file by itself: pyarrow would add the folder's name as a column.
            yield from pq.ParquetFile(file).read().to_pylist()

    def leavings(self, sink):
        return [str(path) for path in Path(self.path).glob("_semel/*/*ed/*")]

    def lose(self, sink, txn):
        shutil.rmtree(Layout(str(self.path), txn.scope).prepared(txn))


class TestJsonLinesFiles(TestParquetFiles):
    format = "jsonl"

    def visible_rows(self, sink):
        for file in self.path.glob("cycle=*/[!_.]*"):
            yield from map(json.loads, file.read_text().splitlines())


del SinkContract
