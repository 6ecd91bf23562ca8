"""The applied versions in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from semel.memory.tables import Table
from semel.messaging.records import Gap

if TYPE_CHECKING:
    from semel.memory.tables import MemoryTables


class MemoryVersions:
    """The versions of the transaction that is open in *tables*."""

    def __init__(self, tables: MemoryTables) -> None:
        self._clock = tables.clock
        self._versions: Table[tuple[str, str], int] = tables.table("aggregate_version")
        self._gaps: Table[tuple[str, str, int], Gap] = tables.table("sequence_gap")

    async def current(self, consumer: str, key: str) -> int | None:
        """Return the version that was applied last; None where none was."""
        return self._versions.get((consumer, key))

    async def advance(self, consumer: str, key: str, version: int) -> None:
        """Write the version that is applied with this transaction."""
        self._versions.put((consumer, key), version)

    async def open_gap(self, gap: Gap) -> None:
        """List a gap; one that is listed already keeps its time."""
        where = (gap.consumer, gap.key, gap.expected)
        known = self._gaps.get(where)
        if known is None or known.closed_at is not None:
            self._gaps.put(where, replace(gap, since=self._clock.now()))
        else:
            self._gaps.put(where, replace(known, found=gap.found))

    async def close_gaps(
        self, consumer: str, key: str, up_to: int, how: str, after: int | None = None
    ) -> int:
        """Close the key's gaps that end at or below *up_to*, and behind *after*."""
        closing = [
            (where, gap)
            for where, gap in self._gaps.items()
            if where[:2] == (consumer, key)
            and gap.closed_at is None
            and gap.found - 1 <= up_to
            and (after is None or gap.found - 1 > after)
        ]
        for where, gap in closing:
            self._gaps.put(where, replace(gap, closed_at=self._clock.now(), how=how))
        return len(closing)

    async def gaps(self, consumer: str | None, limit: int) -> Sequence[Gap]:
        """Return the open gaps, the oldest first."""
        found = [
            gap
            for gap in self._gaps.rows()
            if gap.closed_at is None and consumer in (None, gap.consumer)
        ]
        return sorted(found, key=lambda gap: (gap.since, gap.consumer, gap.key))[:limit]

    async def delete_closed(self, consumer: str, ttl_seconds: float, limit: int) -> int:
        """Delete gaps that are closed since so long; return how many."""
        until = self._clock.now() - ttl_seconds
        old = sorted(
            (gap.closed_at, where)
            for where, gap in self._gaps.items()
            if where[0] == consumer and gap.closed_at is not None and gap.closed_at <= until
        )[:limit]
        for _, where in old:
            self._gaps.remove(where)
        return len(old)
