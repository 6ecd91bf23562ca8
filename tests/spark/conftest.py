"""What the tests of real queries share."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from semel.memory.ledger import MemoryLedger
from tests.spark.world import World


@pytest.fixture
def world(spark: SparkSession, tmp_path: Path) -> World:
    return World(spark, tmp_path)


@pytest.fixture
def ledger() -> MemoryLedger:
    return MemoryLedger()
