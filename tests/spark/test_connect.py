"""Spark Connect: the object travels to the server's side, and says what it must be told."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from semel.testing.services import ServiceUnavailable
from tests.conftest import require
from tests.spark.killing import REPOSITORY

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def connect_package() -> None:
    if importlib.util.find_spec("grpc") is None:
        raise ServiceUnavailable("Spark Connect needs: pip install 'pyspark[connect]'")


def run(folder: Path, *missing: str) -> list[str]:
    """Run a query without each of these declarations; return how each ended."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.connect_job", str(folder), *missing],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_a_connect_query_is_carried_and_a_missing_declaration_is_named(tmp_path: Path) -> None:
    require(connect_package)
    (tmp_path / "in").mkdir()
    for number in range(3):
        lines = [json.dumps({"id": number * 10 + i}) for i in range(10)]
        (tmp_path / "in" / f"{number}.json").write_text("\n".join(lines) + "\n")

    without_checkpoint, without_promise, declared = run(
        tmp_path, "checkpoint", "fails_on_data_loss", "nothing"
    )

    assert without_checkpoint.startswith("REFUSED")
    assert "give its path" in without_checkpoint
    assert without_promise.startswith("REFUSED")
    assert "fails_on_data_loss=True" in without_promise
    assert declared == "DONE"
    rows = [
        json.loads(line)["id"]
        for path in (tmp_path / "out").glob("cycle=*/*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert sorted(rows) == list(range(30))
