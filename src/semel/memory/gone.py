"""Which messages are gone: from the claims, and from everywhere they wait."""

from __future__ import annotations

from typing import Final

from semel.memory.tables import MemoryTables

SENT_BACK_FROM: Final = ("waiting_message", "dead_letter")
WHERE: Final = ("processed_message", "inbox_message", *SENT_BACK_FROM)


def is_gone(tables: MemoryTables, consumer: str, message_id: str) -> bool:
    """Tell whether a consumer has no message with this id."""
    return not any((consumer, message_id) in tables.table(name) for name in WHERE)


def can_be_sent_back(tables: MemoryTables, consumer: str, message_id: str) -> bool:
    """Tell whether a message waits, or is a dead letter."""
    return any((consumer, message_id) in tables.table(name) for name in SENT_BACK_FROM)
