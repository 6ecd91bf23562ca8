"""Every ledger keeps the same contract."""

from __future__ import annotations

import pytest

from semel.memory.ledger import MemoryLedger
from semel.sql.sqlite import SqliteLedger
from semel.testing.clock import SimulatedClock
from semel.testing.contracts.ledger import LEASE_SECONDS, LedgerContract


class TestMemoryLedger(LedgerContract):
    def make_ledger(self):
        self.clock = SimulatedClock()
        return MemoryLedger(self.clock)

    def another(self, ledger):
        return ledger

    def expire(self, ledger, scope):
        self.clock.sleep(LEASE_SECONDS)


class TestSqliteLedger(LedgerContract):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.path = tmp_path / "test.ledger"
        self.clock = SimulatedClock()

    def make_ledger(self):
        return SqliteLedger(self.path, clock=self.clock)

    def another(self, ledger):
        return SqliteLedger(f"sqlite:///{self.path}", clock=self.clock)

    def expire(self, ledger, scope):
        self.clock.advance(LEASE_SECONDS)
