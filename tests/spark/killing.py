"""Runs `tests.spark.job` in processes of its own, kills them, and audits what they leave."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.dataset as ds

from semel.testing.sink_audit import Audit, audit_sinks

REPOSITORY = Path(__file__).parents[2]
ROWS_A_FILE = 20
DEADLINE_SECONDS = 120


class Scene:
    """One job's folder and database, and the processes that ran on it."""

    def __init__(self, folder: Path, postgres: str, mode: str = "staging", files: int = 6) -> None:
        self.folder = folder
        self.postgres = postgres
        self.mode = mode
        (folder / "in").mkdir(parents=True)
        self.ids = list(range(files * ROWS_A_FILE))
        for number in range(files):
            ids = self.ids[number * ROWS_A_FILE : (number + 1) * ROWS_A_FILE]
            lines = [json.dumps({"id": i, "amount": i * 10, "at": i}) for i in ids]
            (folder / "in" / f"{number:05}.json").write_text("\n".join(lines) + "\n")
        with psycopg.connect(postgres, autocommit=True) as connection:
            connection.execute("create table entries (id bigint, amount bigint, cycle text)")

    def start(self, *options: str, **environment: str) -> subprocess.Popen[str]:
        """Start the job, in a process group of its own."""
        command = [sys.executable, "-m", "tests.spark.job", str(self.folder), self.postgres]
        with (self.folder / "stderr.txt").open("a") as errors:
            return subprocess.Popen(
                [*command, "--mode", self.mode, *options],
                cwd=REPOSITORY,
                env=os.environ | environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def run(
        self, *options: str, deadline_seconds: float = DEADLINE_SECONDS, **environment: str
    ) -> tuple[int, str]:
        """Run the job to its end, whatever that is; its JVM ends with it."""
        job = self.start(*options, **environment)
        try:
            output, _ = job.communicate(timeout=deadline_seconds)
        finally:
            end(job)
        return job.returncode, output

    def kill_after(self, seconds: float, behind: str = "", *options: str) -> bool:
        """Run the job and kill it *seconds* after an event; False if it was done before.

        Without *behind*, the name of an event, its first one counts.

        A job that fails by itself fails the test at once: what it left is still there.
        """
        job = self.start(*options)
        try:
            assert job.stdout is not None
            for line in job.stdout:
                if line.startswith(behind):
                    break
            try:
                job.wait(seconds)
            except subprocess.TimeoutExpired:
                return True
            assert job.returncode == 0, f"{job.stdout.read()}\n{self.last_words()}"
            return False
        finally:
            end(job)

    def last_words(self) -> str:
        """Return the end of what the job's processes logged."""
        return (self.folder / "stderr.txt").read_text()[-4000:]

    def audit(self) -> Audit:
        """Compare every sink with the source, row by row, and look for what was left behind."""
        everything = audit_sinks(
            [(i, i * 10) for i in self.ids],
            {"postgres": self._entries(), "all": self._parquet()},
            left_behind={"postgres": self._staged_tables(), "all": self._staged_files("all")},
        )
        large = audit_sinks(
            [i for i in self.ids if i * 10 >= 500],
            {"large": self._lines()},
            left_behind={"large": self._staged_files("large")},
        )
        return Audit(everything.sinks + large.sinks)

    def assert_clean(self) -> None:
        """Fail with the audit's table unless every row is everywhere once and nothing else is."""
        found = self.audit()
        assert found.is_clean, found.table()

    def _entries(self) -> list[Any]:
        with psycopg.connect(self.postgres) as connection:
            return connection.execute("select id, amount from entries").fetchall()

    def _parquet(self) -> list[Any]:
        table = ds.dataset(self.folder / "all", format="parquet").to_table(["id", "amount"])
        return [(row["id"], row["amount"]) for row in table.to_pylist()]

    def _lines(self) -> list[Any]:
        paths = (self.folder / "large").glob("cycle=*/*.jsonl")
        return [json.loads(line)["id"] for path in paths for line in path.read_text().splitlines()]

    def _staged_tables(self) -> list[Any]:
        with psycopg.connect(self.postgres) as connection:
            tables = connection.execute(
                "select relname from pg_class c join pg_namespace n on n.oid = relnamespace "
                "where nspname = 'semel' and relkind = 'r' and relname not like 'sink%'"
            ).fetchall()
            return tables + connection.execute("select gid from pg_prepared_xacts").fetchall()

    def _staged_files(self, sink: str) -> list[Path]:
        hidden = self.folder / sink / "_semel"
        return [*hidden.glob("*/staged/*"), *hidden.glob("*/prepared/*")]


def end(job: subprocess.Popen[str]) -> None:
    """Kill the job's whole group, and wait until its JVM is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait(10)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.killpg(job.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.02)
    if job.stdout is not None:
        job.stdout.close()
