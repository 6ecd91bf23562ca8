"""The audit trail in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from semel.memory.tables import MemoryTables, Table
from semel.messaging.records import stored_id
from semel.operate.stores import FIRST_HASH, Act, AuditEntry, hash_of, recorded

MICROSECONDS: Final = 1_000_000
ONLY_ROW: Final = 1


class MemoryAuditTrail:
    """The trail of the transaction that is open."""

    def __init__(self, tables: MemoryTables) -> None:
        self._tables = tables
        self._entries: Table[int, AuditEntry] = tables.table("audit_entry")
        self._head: Table[int, tuple[int, str]] = tables.table("audit_head")

    async def append(self, act: Act) -> AuditEntry:
        """Write an act at the end of the chain."""
        act = recorded(act)
        last, previous = await self.head()
        # As fine as the databases keep it.
        at = round(self._tables.clock.now() * MICROSECONDS) / MICROSECONDS
        entry = AuditEntry(last + 1, at, act, previous, hash_of(last + 1, at, act, previous))
        self._entries.put(entry.number, entry)
        self._head.put(ONLY_ROW, (entry.number, entry.hash))
        return entry

    async def read(self, after: int, limit: int) -> Sequence[AuditEntry]:
        """Return the entries behind number *after*, in order."""
        return [entry for entry in self._in_order() if entry.number > after][:limit]

    async def about(self, consumer: str, message_id: str) -> Sequence[AuditEntry]:
        """Return the entries about one message, in order."""
        wanted = (consumer, stored_id(message_id))
        return [e for e in self._in_order() if (e.act.consumer, e.act.message_id) == wanted]

    async def head(self) -> tuple[int, str]:
        """Return number and hash of the last entry, as the head's own record has them."""
        return self._head.get(ONLY_ROW) or (0, FIRST_HASH)

    def _in_order(self) -> list[AuditEntry]:
        return sorted(self._entries.rows(), key=lambda entry: entry.number)
