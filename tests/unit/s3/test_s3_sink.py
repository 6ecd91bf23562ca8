"""The S3 sink keeps the contract, for readers of its manifests and of a listing."""

from __future__ import annotations

from itertools import count

import pyarrow as pa
import pytest

from semel.arrow.formats import read_rows
from semel.s3.reading import read_committed
from semel.s3.sink import S3Sink, _sealed
from semel.testing import SinkContract
from semel.testing.services import SeaweedServer

pytestmark = pytest.mark.seaweedfs
numbers = count(1)


@pytest.fixture(autouse=True)
def credentials(monkeypatch, seaweedfs):
    for name, value in seaweedfs.environment.items():
        monkeypatch.setenv(name, value)


class TestObjectsOfCommittedCycles(SinkContract):
    """A reader of the manifests."""

    format = "parquet"
    secrets = (SeaweedServer.access_key, SeaweedServer.secret_key)

    @pytest.fixture(autouse=True)
    def prefix(self, seaweedfs):
        self.endpoint = seaweedfs.endpoint
        self.url = f"s3://{seaweedfs.bucket}/contract-{next(numbers)}"
        self.sinks = []
        yield
        for sink in self.sinks:
            sink.close()

    def make_sink(self):
        sink = S3Sink(self.url, format=self.format, endpoint=self.endpoint)
        self.sinks.append(sink)
        return sink

    def visible_rows(self, sink):
        return read_committed(self.url, endpoint=self.endpoint).read_all().to_pylist()

    def leavings(self, sink):
        seals = [name for name, _ in sink.store.names("_semel/") if "/prepared/" in name]
        return [*seals, *((one.key, one.upload_id) for one in sink.open_uploads())]

    def lose(self, sink, txn):
        for one in sink.store.get(_sealed(txn))["objects"]:
            sink.store.give_up(one["name"], one["upload_id"])


@pytest.mark.soak
class TestObjectsInAListing(TestObjectsOfCommittedCycles):
    """A reader that lists the prefix sees the same, once a commit has ended."""

    format = "jsonl"

    def visible_rows(self, sink):
        for name, _ in sink.store.names(""):
            if name.lstrip("/").startswith("part-"):
                got = sink.store.client.get_object(
                    Bucket=sink.store.bucket, Key=sink.store.key(name.lstrip("/"))
                )
                content = pa.BufferReader(got["Body"].read())
                for batch in read_rows(content, sink.format, self.schema(), "none"):
                    yield from batch.to_pylist()


del SinkContract
