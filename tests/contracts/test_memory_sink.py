"""The memory sink keeps the contract it is the reference of."""

from __future__ import annotations

import pytest

from semel.memory.sink import MemorySink, MemoryStore
from semel.testing import SinkContract


class TestMemorySink(SinkContract):
    @pytest.fixture(autouse=True)
    def store(self):
        self.memory = MemoryStore()

    def make_sink(self):
        return MemorySink(store=self.memory)

    def visible_rows(self, sink):
        return sink.visible

    def leavings(self, sink):
        return [*self.memory.staged, *self.memory.prepared]

    def lose(self, sink, txn):
        del self.memory.prepared[txn]


class TestMemorySinkWithItsTasksElsewhere(TestMemorySink):
    """The stager finds no store, as in a Spark worker, and the rows travel in the receipts."""

    @pytest.fixture(autouse=True)
    def far_away(self, monkeypatch):
        monkeypatch.setattr("semel.memory.sink.find_store", lambda uid: None)
