"""Sinks over tables through crashes, failing calls, woken owners and late tasks, in process."""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog

from semel.sinks import DeltaSink, IcebergSink
from semel.testing import prove
from tests.crash.local_driver import sql_catalog

COLUMNS = pa.schema([("id", pa.int64()), ("name", pa.string())])
EVERY = [17, pytest.param(1, marks=[pytest.mark.soak])]


@pytest.fixture(autouse=True)
def _quiet():
    log = logging.getLogger("semel")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    yield
    log.setLevel(level)


@pytest.mark.parametrize("key", [(), pytest.param(["id"], marks=pytest.mark.soak)])
@pytest.mark.parametrize("every", EVERY)
def test_the_iceberg_sink_is_proved(tmp_path, every, key):
    where = sql_catalog(str(tmp_path))
    with ExitStack() as opened:
        lake = opened.enter_context(closing(load_catalog("lake", **where)))
        lake.create_namespace("db")

        def make_sink(place):
            table = f"db.{place.replace('-', '_')}"
            lake.create_table_if_not_exists(table, schema=COLUMNS)
            sink = IcebergSink(table, catalog="lake", properties=where, name=place, key=key)
            opened.enter_context(closing(sink))
            return sink

        def visible_rows(sink):
            return lake.load_table(sink.table).scan().to_arrow().to_pylist()

        assert prove(make_sink, visible_rows, every=every).histories > 20


@pytest.mark.parametrize("every", EVERY)
def test_the_delta_sink_is_proved(tmp_path, every):
    def make_sink(place):
        DeltaTable.create(tmp_path / place, COLUMNS, mode="ignore")
        return DeltaSink(tmp_path / place, name=place)

    def visible_rows(sink):
        return DeltaTable(sink.table).to_pyarrow_table().to_pylist()

    assert prove(make_sink, visible_rows, every=every).histories > 20
