"""An Iceberg table for every test."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tests.unit.iceberg.iceberg_place import Lake


@pytest.fixture
def lake(tmp_path):
    lake = Lake(tmp_path)
    yield lake
    lake.close()


@pytest.fixture
def plain(lake):
    """The lake with a table of an id and a text."""
    lake.create(("id", pa.int64()), ("text", pa.string()))
    return lake
