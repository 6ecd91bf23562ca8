"""The executable contract of the waiting room.

    records   what is kept of a message, found, revised and erased
    turns     whose turn it is: by time, by place, behind whom
    workers   several at once, and the lock of a key

An implementation binds it in a few lines, by saying how its database is opened:

    class TestMyWaitingRoom(WaitingContract):
        def world(self):
            return my_world()
"""

from __future__ import annotations

from tests.stores.waiting_records import RecordRules
from tests.stores.waiting_turns import TurnRules
from tests.stores.waiting_workers import WorkerRules


class WaitingContract(RecordRules, TurnRules, WorkerRules):
    """Everything a `semel.messaging.database.WaitingStore` must do."""
