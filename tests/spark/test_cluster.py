"""A standalone cluster with executors of its own: lost executors and speculative copies."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from semel.testing.services import SparkCluster
from tests.conftest import require
from tests.spark.killing import Scene, end

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.kill, pytest.mark.timeout(600)]

SPECULATION = (
    "spark.speculation=true",
    "spark.speculation.interval=50ms",
    "spark.speculation.quantile=0.1",
    "spark.speculation.multiplier=1.1",
    "spark.speculation.minTaskRuntime=50ms",
)
QUICK_EXECUTORS = "spark.executor.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def test_an_executor_killed_while_it_stages_with_speculation_on_changes_nothing(
    tmp_path: Path, postgres_url: str
) -> None:
    scene = Scene(tmp_path / "job", postgres_url, files=4)
    os.chmod(tmp_path, 0o755)
    with require(SparkCluster(workers=2).start) as cluster:
        options = ["--master", cluster.master_url]
        settings = [f"{name}={value}" for name, value in cluster.session_settings.items()]
        for setting in (*SPECULATION, QUICK_EXECUTORS, *settings):
            options += ["--set", setting]
        job = scene.start(*options)
        try:
            assert job.stdout is not None
            job.stdout.readline()
            victim = wait_for_executor(cluster)
            os.kill(victim, signal.SIGKILL)
            output, _ = job.communicate(timeout=180)
        finally:
            end(job)

    assert "EXIT DONE" in output
    scene.assert_clean()


def wait_for_executor(cluster: SparkCluster) -> int:
    """Return an executor once its Python worker runs a task."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        for executor in cluster.executor_pids():
            if any(
                "pyspark.daemon" in Path(f"/proc/{child}/cmdline").read_text()
                for task in Path(f"/proc/{executor}/task").glob("*/children")
                for child in (task.read_text().split() if task.exists() else [])
                if Path(f"/proc/{child}/cmdline").exists()
            ):
                return executor
        time.sleep(0.01)
    raise AssertionError("no executor began to stage")
