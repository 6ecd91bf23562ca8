"""The approvals in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from semel.memory.gone import is_gone
from semel.memory.tables import MemoryTables, Table
from semel.messaging.database import Sweep
from semel.operate.stores import Approval, Asked, Decision


class MemoryApprovals:
    """The requests of one open transaction."""

    def __init__(self, tables: MemoryTables) -> None:
        self._tables = tables
        self._requests: Table[int, Approval] = tables.table("approval")

    async def ask(
        self,
        act: Asked,
        consumer: str,
        message_id: str,
        asked_by: str,
        reason: str,
        payload_hash: str = "",
    ) -> Approval:
        """Write a request, with a number and the database's time."""
        number, now = self._tables.next_number("approval"), self._tables.clock.now()
        request = Approval(
            number, act, consumer, message_id, asked_by, reason, now, payload_hash=payload_hash
        )
        self._requests.put(number, request)
        return request

    async def get(self, number: int) -> Approval | None:
        """Return one request."""
        return self._requests.get(number)

    async def open_ones(self, consumer: str | None, limit: int) -> Sequence[Approval]:
        """Return requests that nobody has decided, the oldest first."""
        return [
            request
            for request in self._in_order()
            if request.decision is Decision.OPEN and consumer in (None, request.consumer)
        ][:limit]

    async def about(self, consumer: str, message_id: str) -> Sequence[Approval]:
        """Return the requests about one message, in order."""
        wanted = (consumer, message_id)
        return [r for r in self._in_order() if (r.consumer, r.message_id) == wanted]

    async def decide(self, number: int, decided_by: str, decision: Decision) -> bool:
        """Write the decision; False, and nothing changed, where there is one already."""
        request = self._requests.get(number)
        if request is None or request.decision is not Decision.OPEN:
            return False
        now = self._tables.clock.now()
        decided = replace(request, decided_by=decided_by, decided_at=now, decision=decision)
        self._requests.put(number, decided)
        return True

    async def delete_decided(
        self, consumer: str, ttl_seconds: float, limit: int, sweep: Sweep | None = None
    ) -> int:
        """Delete requests decided so long ago whose message is gone; return how many."""
        until, sweep = self._tables.clock.now() - ttl_seconds, sweep or Sweep()
        old = [
            request.number
            for request in self._in_order()
            if request.consumer == consumer
            and request.decided_at is not None
            and request.decided_at <= until
            and request.number >= sweep.since()
            and is_gone(self._tables, consumer, request.message_id)
        ][:limit]
        for number in old:
            self._requests.remove(number)
        return sweep.note(old)

    def _in_order(self) -> list[Approval]:
        return sorted(self._requests.rows(), key=lambda request: request.number)
