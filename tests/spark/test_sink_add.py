"""`semel sink add`: a new sink of a Spark pipeline gets the past, by reading the source again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from semel import ExactlyOnce
from semel.memory.ledger import MemoryLedger
from semel.pipeline.source import BatchRange
from semel.sinks import FilesSink
from tests.snapshots import compare, normal
from tests.spark.world import SCHEMA, World, ids_in
from tests.unit.cli.cli_world import MODULE, Shell, publish
from tests.unit.cli.cli_world import World as CliWorld

pytestmark = pytest.mark.spark


def test_a_new_sink_gets_the_past_once_and_the_present_with_the_others(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, ledger = World(spark, tmp_path), MemoryLedger()
    world.put(*range(10))
    world.put(*range(10, 30))
    old = FilesSink(str(tmp_path / "old"), name="old")
    first = ExactlyOnce("shop", ledger, [old])
    world.run(first)
    first.stop()
    world.put(*range(30, 40))
    euro = F.struct("id", F.col("amount").alias("euro"))
    new = FilesSink(str(tmp_path / "new"), rows=euro, name="new")
    pipeline = ExactlyOnce("shop", ledger, [old, new])
    world.run(pipeline)
    pipeline.stop()
    read: list[str] = []

    def reader(batch: BatchRange, cycle: str) -> Any:
        read.append(cycle)
        return spark.read.schema(SCHEMA).json(list(batch.sources[0].paths))

    publish(monkeypatch, pipeline=pipeline, reader=reader, number=7)
    shell = Shell(CliWorld())

    def add(*more: str) -> Any:
        where = ("--pipeline", f"{MODULE}:pipeline", "--sink", "new")
        return shell.type("sink", "add", *where, *more, "--why", "analysts moved", "--yes")

    assert "--reread shop_pipeline:number: found int" in add("--reread", f"{MODULE}:number").output
    done = add("--reread", f"{MODULE}:reader", "--json")
    assert done.exit_code == 0, done.output
    assert read == ["g1.b0", "g1.b1"]
    document = json.loads(done.stdout)
    assert (document["cycles"], document["rows"], document["takes_part"]) == (2, 30, True)
    compare("sink", {"sink add": normal(document, tmp_path)})
    again = add("--reread", f"{MODULE}:reader")
    assert "filled 0 cycles, 0 rows, after 2 cycles before" in again.output
    shown = spark.read.parquet(str(tmp_path / "new")).collect()
    assert ids_in(shown) == list(range(40))
    assert {row["euro"] for row in shown} == {i * 10 for i in range(40)}
