"""The executable contract of a store of claims.

    table      what a claim finds, and what it answers
    leases     owners, fences, expiry
    failures   what is written after an attempt, and by operators
    retention  what may be forgotten
    batches    many claims in one statement
    races      several transactions at once

An implementation says how an empty database is opened:

    class TestMemoryClaims(ClaimsContract):
        @asynccontextmanager
        async def world(self):
            clock = SimulatedClock()

            async def age(seconds):
                clock.advance(seconds)

            yield DatabaseWorld(MemoryDatabase(clock), age, waits_for_locks=False)
"""

from __future__ import annotations

from semel.testing.contracts.claims_batches import BatchRules
from semel.testing.contracts.claims_failures import FailureRules, RetentionRules
from semel.testing.contracts.claims_leases import LeaseRules
from semel.testing.contracts.claims_races import RaceRules
from semel.testing.contracts.claims_table import TableRules

__all__ = ["ClaimsContract"]


class ClaimsContract(TableRules, LeaseRules, FailureRules, RetentionRules, BatchRules, RaceRules):
    """Everything a `ProcessedMessageStore` must do; derive a test class from it."""
