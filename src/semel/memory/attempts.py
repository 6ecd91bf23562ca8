"""The failed attempts in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from semel.memory.gone import is_gone
from semel.memory.tables import MemoryTables, Table
from semel.messaging.database import Sweep
from semel.messaging.records import FIRST_KEPT, LATEST_KEPT, AttemptFilter, FailedAttempt


class MemoryFailedAttempts:
    """The failed attempts of one open transaction."""

    def __init__(self, tables: MemoryTables) -> None:
        self._tables = tables
        self._attempts: Table[int, FailedAttempt] = tables.table("failed_attempt")

    async def add(self, attempt: FailedAttempt) -> None:
        """Write a message's next failed attempt; those between first and latest go."""
        at = attempt.at or self._tables.clock.now()
        self._attempts.put(self._tables.next_number("failed_attempt"), replace(attempt, at=at))
        mine = self._matching(AttemptFilter(attempt.consumer, attempt.message_id))
        for place, _ in mine[FIRST_KEPT:-LATEST_KEPT]:
            self._attempts.remove(place)

    async def of(self, consumer: str, message_id: str) -> Sequence[FailedAttempt]:
        """Return the attempts of one message that are kept, in the order of their writing."""
        return [attempt for _, attempt in self._matching(AttemptFilter(consumer, message_id))]

    async def erase(self, which: AttemptFilter) -> int:
        """Remove the reasons of matching attempts; times, numbers and codes stay."""
        found = [(place, attempt) for place, attempt in self._matching(which) if attempt.reason]
        for place, attempt in found:
            self._attempts.put(place, replace(attempt, reason=""))
        return len(found)

    async def delete_gone(
        self, consumer: str, ttl_seconds: float, limit: int, sweep: Sweep | None = None
    ) -> int:
        """Delete attempts so old whose message is gone from everywhere; return how many."""
        until, sweep = self._tables.clock.now() - ttl_seconds, sweep or Sweep()
        old = [
            (attempt.at, place)
            for place, attempt in self._matching(AttemptFilter(consumer))
            if sweep.since() <= attempt.at <= until
            if is_gone(self._tables, consumer, attempt.message_id)
        ]
        chosen = sorted(old)[:limit]
        for _, place in chosen:
            self._attempts.remove(place)
        return sweep.note([at for at, _ in chosen])

    def _matching(self, which: AttemptFilter) -> list[tuple[int, FailedAttempt]]:
        return sorted(
            (place, attempt)
            for place, attempt in self._attempts.items()
            if which.consumer in (None, attempt.consumer)
            and which.message_id in (None, attempt.message_id)
            and which.key in (None, attempt.key)
        )
