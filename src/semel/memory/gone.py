"""Which messages are over, and which are gone from everywhere."""

from __future__ import annotations

from typing import Final

from semel.memory.tables import MemoryTables
from semel.messaging.send.outbox import parent_of

SENT_BACK_FROM: Final = ("waiting_message", "dead_letter")
WHERE: Final = ("processed_message", "inbox_message", *SENT_BACK_FROM)


def is_gone(tables: MemoryTables, consumer: str, message_id: str) -> bool:
    """Tell whether a consumer has no message with this id."""
    return not any((consumer, message_id) in tables.table(name) for name in WHERE)


def is_over(tables: MemoryTables, consumer: str, message_id: str) -> bool:
    """Tell whether a message neither waits nor is a dead letter, and all it sent has left."""
    if any((consumer, message_id) in tables.table(name) for name in SENT_BACK_FROM):
        return False
    sent = parent_of(consumer, message_id)
    return all(entry.parent != sent for entry in tables.table("outbox_message").rows())
