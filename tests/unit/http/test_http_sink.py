"""The HTTP sink and its receiver keep the contract together, on SQLite."""

from __future__ import annotations

import json
import sqlite3
import threading
import time

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from semel.http.receiver import receiver
from semel.http.sink import HttpSink
from semel.http.store import keep_rows
from semel.testing import SinkContract
from semel.testing.services import free_port

SECRET = "not-to-be-told"


def secret_headers():
    return {"Authorization": f"Bearer {SECRET}"}


class Served:
    """An application at `url`, in a thread of this process."""

    def __init__(self, app, **tls):
        self.port = free_port()
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        config = uvicorn.Config(
            app, host="127.0.0.1", port=self.port, log_level="critical", lifespan="off", **tls
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    def __enter__(self):
        self.thread.start()
        deadline = time.monotonic() + 30
        while not self.server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return self

    def __exit__(self, *failure):
        self.server.should_exit = True
        self.thread.join(30)


class Service(Served):
    """A service with a receiver on SQLite."""

    def __init__(self, folder, apply=keep_rows, mounted=False):
        self.path = folder / "received.db"
        self.app = receiver(f"sqlite:///{self.path}", apply)
        super().__init__(Starlette(routes=[Mount("/semel", self.app)]) if mounted else self.app)

    def query(self, text):
        database = sqlite3.connect(self.path, isolation_level=None)
        try:
            return database.execute(text).fetchall()
        finally:
            database.close()

    def __exit__(self, *failure):
        super().__exit__(*failure)
        self.app.state.store.close()


class TestHttpSink(SinkContract):
    secrets = (SECRET,)

    @pytest.fixture(autouse=True)
    def service(self, tmp_path):
        self.sinks = []
        with Service(tmp_path) as self.there:
            yield
            for sink in self.sinks:
                sink.close()

    def make_sink(self):
        sink = HttpSink(self.there.url, headers=secret_headers, chunk_bytes=1000)
        self.sinks.append(sink)
        return sink

    def visible_rows(self, sink):
        return [json.loads(row) for (row,) in self.there.query("SELECT row FROM semel_received")]

    def leavings(self, sink):
        query = "SELECT txn FROM semel_receiver_{} ORDER BY txn"
        return [
            *self.there.query(query.format("chunk")),
            *self.there.query(query.format("prepared")),
        ]

    def lose(self, sink, txn):
        self.there.query(f"DELETE FROM semel_receiver_chunk WHERE txn LIKE '%{txn.label}'")


del SinkContract
