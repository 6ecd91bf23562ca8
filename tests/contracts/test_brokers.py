"""Every broker keeps the same contract."""

from __future__ import annotations

import pytest
from broker_place import InThisProcess

from semel.memory.broker import FileBroker, MemoryBroker
from semel.testing.clock import SimulatedClock


class TestMemoryBroker(InThisProcess):
    async def open(self):
        self.clock = SimulatedClock()
        self.broker = MemoryBroker(clock=self.clock)


class TestFileBroker(InThisProcess):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.path = tmp_path / "broker"

    async def open(self):
        self.clock = SimulatedClock()
        self.broker = FileBroker(self.path, clock=self.clock)
