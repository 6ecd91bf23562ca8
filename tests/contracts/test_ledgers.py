"""Every ledger keeps the same contract."""

from __future__ import annotations

from semel.memory.ledger import MemoryLedger
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
