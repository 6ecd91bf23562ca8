"""A receiver of the HTTP sink in this process, whose work can be held up or made to fail."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import uvicorn

from semel.http.receiver import receiver
from semel.testing.services import free_port

DEADLINE_SECONDS = 60.0


class Receiver:
    """It keeps the rows of each cycle in a table of its own, at `url`."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.failing = False
        """Whether to raise instead of keeping rows."""

        self.open = threading.Event()
        """Rows are kept while it is set."""

        self.open.set()
        self.asked = threading.Event()
        self._path = folder / "received.db"
        with sqlite3.connect(self._path) as database:
            database.execute("create table kept (cycle text, id int, name text, amount int)")
        self._app = receiver(f"sqlite:///{self._path}", self._keep)
        config = uvicorn.Config(
            self._app, host="127.0.0.1", port=self.port, log_level="critical", lifespan="off"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def _keep(self, connection: Any, cycle: str, rows: Iterator[dict[str, Any]]) -> None:
        self.asked.set()
        if not self.open.wait(DEADLINE_SECONDS) or self.failing:
            raise RuntimeError("told to fail")
        for row in rows:
            values = (cycle, row["id"], row["name"], row["amount"])
            connection.exec_driver_sql("insert into kept values (?, ?, ?, ?)", values)

    def rows(self) -> Mapping[str, list[dict[str, Any]]]:
        """Return what was kept, by the cycle's label."""
        cycles: dict[str, list[dict[str, Any]]] = {}
        with self._read() as database:
            for cycle, n, name, amount in database.execute("select * from kept"):
                label = cycle.partition(".")[2]
                cycles.setdefault(label, []).append({"id": n, "name": name, "amount": amount})
        return cycles

    def pending(self, slug: str) -> list[dict[str, Any]]:
        """Return the transactions of a scope that are neither applied nor gone."""
        found: list[dict[str, Any]] = httpx.get(f"{self.url}/pending/{slug}").json()
        return found

    def _read(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=DEADLINE_SECONDS)

    def __enter__(self) -> Self:
        self._thread.start()
        deadline = threading.Event()
        for _ in range(int(DEADLINE_SECONDS / 0.01)):
            if self._server.started:
                return self
            deadline.wait(0.01)
        raise AssertionError("the receiver did not start")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.open.set()
        self._server.should_exit = True
        self._thread.join(DEADLINE_SECONDS)
        self._app.state.store.close()
