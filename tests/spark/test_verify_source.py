"""`semel verify --reread`: the source's range against what was staged."""

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
from tests.spark.world import SCHEMA, World
from tests.unit.cli.cli_world import MODULE, Shell, publish
from tests.unit.cli.cli_world import World as CliWorld

pytestmark = pytest.mark.spark


def test_the_source_is_read_again_and_compared_per_sink(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(spark, tmp_path)
    world.put(*range(10))
    world.put(*range(10, 30))
    pipeline = ExactlyOnce(
        "shop",
        MemoryLedger(),
        [
            FilesSink(str(tmp_path / "all"), name="all"),
            FilesSink(
                str(tmp_path / "some"),
                rows=F.when(F.col("amount") > 100, F.struct("id", F.col("amount").alias("euro"))),
                name="some",
            ),
        ],
    )
    world.run(pipeline)
    pipeline.stop()

    def reader(batch: BatchRange) -> Any:
        (source,) = batch.sources
        return spark.read.schema(SCHEMA).json(list(source.paths))

    publish(monkeypatch, pipeline=pipeline, reader=reader)
    shell = Shell(CliWorld())
    command = ("verify", "--pipeline", f"{MODULE}:pipeline", "--reread", f"{MODULE}:reader")

    same = shell.type(*command, "--json")

    assert same.exit_code == 0, same.output
    checks = json.loads(same.stdout)["checks"]
    assert {(check["verdict"], check["source_verdict"]) for check in checks} == {("equal", "equal")}
    counts = {(check["cycle"], check["sink"]): check["source"]["rows"] for check in checks}
    assert counts[("g1.b1", "some")] == 19

    changed = next(world.input.glob("00001.json"))
    changed.write_text(changed.read_text().replace('"amount": 30', '"amount": 31'))
    spark.catalog.clearCache()

    other = shell.type(*command, "--json")

    assert other.exit_code == 1
    wrong = [
        (check["cycle"], check["sink"])
        for check in json.loads(other.stdout)["checks"]
        if check["source_verdict"] != "equal"
    ]
    assert wrong == [("g1.b0", "all")]
    assert "against staged" in shell.type(*command).output
