"""The Iceberg sink keeps the contract: catalog in SQLite and on disk, and by REST and on S3."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

import pyarrow as pa
import pyarrow.fs as fs
import pytest
from pyiceberg.catalog import load_catalog

from semel.iceberg.staging import file_system
from semel.sinks import IcebergSink
from semel.testing import SinkContract

SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
NUMBERS = count()


class TestIceberg(SinkContract):
    table = "db.rows"
    write: Mapping[str, Any] = {}

    @pytest.fixture(autouse=True)
    def lake(self, tmp_path):
        self.properties = {
            "type": "sql",
            "uri": f"sqlite:///{tmp_path}/catalog.db",
            "warehouse": f"file://{tmp_path}/lake",
        }
        yield from self.opened()

    def opened(self):
        self.catalog = load_catalog("lake", **self.properties)
        self.catalog.create_namespace_if_not_exists("db")
        self.catalog.create_table(self.table, schema=SCHEMA)
        self.sinks = []
        yield
        for sink in self.sinks:
            sink.close()
        self.catalog.close()

    def make_sink(self):
        where = {"catalog": "lake", "properties": self.properties}
        self.sinks.append(IcebergSink(self.table, **where, **self.write))
        return self.sinks[-1]

    def visible_rows(self, sink):
        return self.catalog.load_table(self.table).scan().to_arrow().to_pylist()

    def leavings(self, sink):
        table = self.catalog.load_table(self.table)
        used = [
            path.partition("/semel-")[2] for path in table.inspect.files()["file_path"].to_pylist()
        ]
        return [
            path
            for path in self.files(table)
            if (path.endswith(".parquet") and path.partition("/semel-")[2] not in used)
            or "/prepared/" in path
        ]

    def files(self, table):
        self.system, path = file_system(table.io, f"{table.location()}/data")
        what = fs.FileSelector(path, allow_not_found=True, recursive=True)
        return [info.path for info in self.system.get_file_info(what) if info.size is not None]

    def lose(self, sink, txn):
        for path in self.files(self.catalog.load_table(self.table)):
            if path.endswith(f"/prepared/{txn.label}.avro"):
                self.system.delete_file(path)


@pytest.mark.soak
class TestIcebergUpserts(TestIceberg):
    write = {"key": ["id"]}  # noqa: RUF012

    test_equal_rows_are_all_kept = None  # of rows with one key there can be only one


@pytest.mark.seaweedfs
class TestIcebergByRestOnS3(TestIceberg):
    @pytest.fixture(autouse=True)
    def lake(self, seaweedfs):
        self.table = f"db.rows_{next(NUMBERS)}"
        self.properties = seaweedfs.catalog_properties()
        self.secrets = (seaweedfs.secret_key,)
        yield from self.opened()


del SinkContract
