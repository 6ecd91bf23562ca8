"""A standalone Spark cluster: a master and workers, each in a JVM of its own."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException

from semel.testing.services.processes import (
    Child,
    Lifetime,
    free_port,
    java,
    package_folder,
)


class SparkCluster(Lifetime):
    """A master and *workers* workers of one core each, on several loopback addresses.

    Spark never runs a speculative copy of a task on the host that runs the task already, so a
    cluster on a single address would not show what speculation does.
    """

    def __init__(self, workers: int = 2) -> None:
        super().__init__()
        self.workers = workers
        self.port = free_port()
        self._page_port = free_port()
        self._workers: list[Child] = []

    @property
    def master_url(self) -> str:
        """The value of `spark.master`."""
        return f"spark://127.0.0.1:{self.port}"

    @property
    def session_settings(self) -> Mapping[str, str]:
        """What a session needs to get one small executor on every worker.

        Its Python tasks run on PATH's python3 unless the driver's PYSPARK_PYTHON says otherwise.
        """
        return {
            "spark.master": self.master_url,
            "spark.cores.max": str(self.workers),
            "spark.executor.cores": "1",
            "spark.executor.memory": "512m",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
        }

    @property
    def worker_pids(self) -> list[int]:
        """The workers that run, ready to be killed."""
        return [worker.pid for worker in self._workers if worker in self._children]

    def executor_pids(self) -> list[int]:
        """List the executors of all applications, ready to be killed."""
        # "ww", because the class stands behind a class path that is longer than any terminal.
        command = ["ps", "-axwwo", "pid=,ppid=,args="]
        table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        rows = [line.split(maxsplit=2) for line in table.splitlines()]
        parents = set(self.worker_pids)
        return [
            int(pid)
            for pid, parent, arguments in rows
            if int(parent) in parents and "ExecutorBackend" in arguments
        ]

    def _launch(self) -> None:
        self._workers.clear()
        pages = ["--webui-port", str(self._page_port)]
        self._run_class("master", "127.0.0.1", "--port", str(self.port), *pages)
        for number in range(1, self.workers + 1):
            folder = self.folder / f"worker-{number}"
            options = ["--cores", "1", "--memory", "1g", "--work-dir", str(folder)]
            options += ["--webui-port", str(free_port())]
            host = _loopback(number)
            worker = self._run_class(f"worker-{number}", host, *options, self.master_url)
            self._workers.append(worker)
        self._wait_until(self._has_all_workers, "the Spark cluster", seconds=120)

    def _run_class(self, name: str, host: str, *options: str) -> Child:
        home = package_folder("pyspark", extra="demo")
        java()
        role = name.partition("-")[0]
        main = f"org.apache.spark.deploy.{role}.{role.capitalize()}"
        command = [str(home / "bin" / "spark-class"), main, "--host", host, *options]
        environment = {
            "SPARK_HOME": str(home),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": host,
            "SPARK_LOCAL_DIRS": str(self.folder / "local"),
        }
        return self._spawn(name, command, environment)

    def _has_all_workers(self) -> bool:
        connection = HTTPConnection("127.0.0.1", self._page_port, timeout=5)
        try:
            with suppress(OSError, HTTPException, ValueError):
                connection.request("GET", "/json/")
                answer = json.load(connection.getresponse())
                return int(answer["aliveworkers"]) == self.workers
            return False
        finally:
            connection.close()


def _loopback(number: int) -> str:
    """Return 127.0.0.*number* where such addresses exist (Linux), else 127.0.0.1."""
    address = f"127.0.0.{number}"
    with socket.socket() as probe, suppress(OSError):
        probe.bind((address, 0))
        return address
    return "127.0.0.1"
