"""The executable contract of an outbox.

    entries      what is written, read, and deleted
    leadership   who relays, and what the epoch refuses
    parking      what the broker will never take, and what an operator does with it

An implementation binds it in a few lines:

    class TestMyOutbox(OutboxContract):
        def world(self):
            return my_world()
"""

from __future__ import annotations

from tests.stores.outbox_entries import EntryRules
from tests.stores.outbox_leadership import LeadershipRules
from tests.stores.outbox_parking import ParkingRules

__all__ = ["OutboxContract"]


class OutboxContract(EntryRules, LeadershipRules, ParkingRules):
    """Everything a `semel.messaging.database.OutboxStore` must do; derive a test class from it."""
