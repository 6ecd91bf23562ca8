"""The Delta sink keeps the contract, on disk and on S3 with conditional puts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pyarrow as pa
import pyarrow.fs as fs
import pytest
from deltalake import DeltaTable

from semel.delta.staging import file_system
from semel.pipeline.sink import SinkOK
from semel.sinks import DeltaSink
from semel.testing import SinkContract

SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])
NUMBERS = count()


class TestDelta(SinkContract):
    options = None

    @pytest.fixture(autouse=True)
    def lake(self, tmp_path):
        self.uri = str(tmp_path / "rows")
        DeltaTable.create(self.uri, SCHEMA)

    def make_sink(self):
        return DeltaSink(self.uri, options=self.options)

    def read(self):
        return DeltaTable(self.uri, storage_options=self.options)

    def visible_rows(self, sink):
        return self.read().to_pyarrow_table().to_pylist()

    def files(self):
        self.system = file_system(self.uri, self.options or {})
        found = self.system.get_file_info(fs.FileSelector("", recursive=True))
        return [info.path for info in found if info.size]

    def leavings(self, sink):
        used = pa.table(self.read().get_add_actions())["path"].to_pylist()
        return [
            path
            for path in self.files()
            if (path.endswith(".parquet") and path not in used) or "/prepared/" in path
        ]

    def lose(self, sink, txn):
        for path in self.files():
            if path.endswith(f"/prepared/{txn.label}.avro"):
                self.system.delete_file(path)


@pytest.mark.seaweedfs
class TestDeltaOnS3(TestDelta):
    @pytest.fixture(autouse=True)
    def lake(self, seaweedfs):
        self.uri = f"s3://{seaweedfs.bucket}/delta-{next(NUMBERS)}"
        self.options = {
            "aws_endpoint": seaweedfs.endpoint,
            "aws_access_key_id": seaweedfs.access_key,
            "aws_secret_access_key": seaweedfs.secret_key,
            "aws_region": seaweedfs.region,
            "aws_allow_http": "true",
            "aws_conditional_put": "etag",
        }
        self.secrets = (seaweedfs.secret_key,)
        DeltaTable.create(self.uri, SCHEMA, storage_options=self.options)

    def test_owners_of_many_scopes_that_commit_at_once_lose_nothing(self):
        scopes = (self.scope, *self.other_scopes)
        txns = [self.txn(scope=scope) for scope in scopes]
        sinks = [self.process(scope) for scope in scopes]
        held = [
            (sink, txn, self.prepared(sink, txn, [number]))
            for number, (sink, txn) in enumerate(zip(sinks, txns, strict=True))
        ]

        with ThreadPoolExecutor(len(held)) as pool:
            done = list(pool.map(lambda one: one[0].commit(*one[1:]), held))

        assert done == [SinkOK()] * len(held)
        self.shows(sinks[0], *range(len(held)))
        assert self.read().version() == len(held)


del SinkContract
