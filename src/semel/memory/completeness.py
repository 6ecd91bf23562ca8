"""The outcome ranges in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from semel.memory.tables import Table
from semel.message import Coordinates, Partition
from semel.messaging.outcome import ENDS, OutcomeRange

if TYPE_CHECKING:
    from semel.memory.tables import MemoryTables


class MemoryOutcomeStore:
    """The ranges of the transaction that is open in *tables*."""

    def __init__(self, tables: MemoryTables) -> None:
        self._tables = tables
        self._ranges: Table[int, tuple[str, OutcomeRange]] = tables.table("consumer_outcome")

    async def record(self, consumer: str, ranges: Sequence[OutcomeRange]) -> None:
        """Write ranges; one that continues a kept range of the same outcome extends it."""
        for new in ranges:
            for number, (whose, kept) in self._ranges.items():
                if (
                    whose == consumer
                    and kept.partition == new.partition
                    and kept.outcome == new.outcome
                    and kept.last == new.first - 1
                ):
                    longer = OutcomeRange(new.partition, kept.first, new.last, new.outcome)
                    self._ranges.put(number, (consumer, longer))
                    break
            else:
                number = self._tables.next_number("consumer_outcome")
                self._ranges.put(number, (consumer, new))

    async def ranges(self, consumer: str, partition: Partition) -> Sequence[OutcomeRange]:
        """Return the ranges of a partition in order."""
        return sorted(
            kept
            for whose, kept in self._ranges.rows()
            if whose == consumer and kept.partition == partition
        )

    async def covering(self, consumer: str, at: Coordinates) -> Sequence[OutcomeRange]:
        """Return the ranges that an offset is in, in the order in which they began."""
        found = [
            (number, kept)
            for number, (whose, kept) in self._ranges.items()
            if whose == consumer
            and kept.partition == at.place
            and kept.first <= at.offset <= kept.last
        ]
        return [kept for _, kept in sorted(found)]

    async def partitions(self, consumer: str) -> Sequence[Partition]:
        """Return the partitions that have ranges."""
        return sorted({kept.partition for whose, kept in self._ranges.rows() if whose == consumer})

    async def prune(self, consumer: str, partition: Partition, below: int, limit: int) -> int:
        """Forget ranges that lie wholly below an offset, the lowest first; return how many."""
        here = [
            (number, kept)
            for number, (whose, kept) in self._ranges.items()
            if whose == consumer and kept.partition == partition
        ]
        staying = [kept for _, kept in here if kept.last >= below and kept.outcome not in ENDS]
        old = sorted(
            (kept.first, number)
            for number, kept in here
            if kept.last < below
            and not (
                kept.outcome in ENDS
                and any(one.first <= kept.last and one.last >= kept.first for one in staying)
            )
        )[:limit]
        for _, number in old:
            self._ranges.remove(number)
        return len(old)
