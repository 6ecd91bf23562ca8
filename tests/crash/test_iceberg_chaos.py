"""The Iceberg sink through crashes, failing calls, woken owners and late tasks, in process."""

from __future__ import annotations

import logging

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog

from semel.sinks import IcebergSink
from semel.testing import prove
from tests.crash.local_driver import sql_catalog


@pytest.mark.parametrize("every", [17, pytest.param(1, marks=[pytest.mark.soak])])
def test_the_iceberg_sink_is_proved(tmp_path, every):
    logging.getLogger("semel").setLevel(logging.CRITICAL + 1)
    lake = load_catalog("lake", **sql_catalog(str(tmp_path)))
    lake.create_namespace("db")
    sinks = []

    def make_sink(place):
        columns = pa.schema([("id", pa.int64()), ("name", pa.string())])
        table = f"db.{place.replace('-', '_')}"
        lake.create_table_if_not_exists(table, schema=columns)
        where = sql_catalog(str(tmp_path))
        sinks.append(IcebergSink(table, catalog="lake", properties=where, name=place))
        return sinks[-1]

    def visible_rows(sink):
        return lake.load_table(sink.table).scan().to_arrow().to_pylist()

    try:
        proof = prove(make_sink, visible_rows, every=every)
    finally:
        logging.getLogger("semel").setLevel(logging.NOTSET)
        for sink in sinks:
            sink.close()
        lake.close()

    assert proof.histories > 20
