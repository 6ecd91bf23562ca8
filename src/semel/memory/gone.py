"""Which rows are about messages that are gone: from the claims, and from everywhere they wait."""

from __future__ import annotations

from typing import Final

from semel.memory.tables import MemoryTables

WHERE: Final = ("processed_message", "waiting_message", "dead_letter", "inbox_message")


def is_gone(tables: MemoryTables, consumer: str, message_id: str) -> bool:
    """Tell whether a consumer has no message with this id."""
    return not any((consumer, message_id) in tables.table(name) for name in WHERE)
