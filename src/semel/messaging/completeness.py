"""What became of every offset, kept as ranges: the completeness audit (B-7).

    handled + duplicate + skipped + parked + dead-lettered + holes = all offsets

A hole is an offset that the broker never delivers: a transaction marker, or a
record that compaction removed.  An offset in no range is a loss, or was not
reached yet.

A delivery notes its outcome behind its transaction, many at once.  A message that
waits or is dead has not ended with its delivery: what becomes of it is marked in
the transaction that lets it in or takes it away.  Marks replace nothing: they
outrank what the delivery said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from semel.message import Coordinates, Partition
from semel.messaging.outcome import Told

HOLE: Final = "hole"
"""The outcome of offsets that have no record."""


class Mark(StrEnum):
    """What is noted of an offset when its message comes into our tables, or leaves them."""

    HANDLED = "ended_handled"
    """A retry or a replay handled it."""

    SKIPPED = "ended_skipped"
    """A person decided that it has no effect."""

    DELETED = "ended_deleted"
    """Two people decided to delete it."""

    DUPLICATE = "ended_duplicate"
    """Another delivery of its message was handled, or its version was an old one."""

    REFUSED = "ended_refused"
    """Its message is kept, or ended, under the offset of another delivery."""

    KEPT = "kept"
    """Its message came into the waiting room or among the dead letters."""


_DELIVERIES: Final = frozenset(map(str, (*Told, HOLE)))

ENDS: Final = frozenset[str](Mark) - {Mark.KEPT}
"""Behind these a message is in our tables no more."""


def is_delivery(outcome: str) -> bool:
    """Tell an outcome that a delivery noted, or a hole, from a mark."""
    return outcome in _DELIVERIES


@dataclass(frozen=True, slots=True, order=True)
class OutcomeRange:
    """Neighbouring offsets of one partition with the same outcome; both ends included."""

    partition: Partition
    first: int
    last: int
    outcome: str

    @property
    def length(self) -> int:
        """How many offsets it covers."""
        return self.last - self.first + 1


def ranges_of(
    partition: Partition, outcomes: Sequence[tuple[int, str]], position: int | None = None
) -> list[OutcomeRange]:
    """Fold (offset, outcome) pairs in order of offset into ranges.

    From *position* on, offsets between delivered records are holes: the broker went past them.
    """
    ranges: list[OutcomeRange] = []
    following = position
    for offset, outcome in outcomes:
        if following is not None and offset > following:
            ranges.append(OutcomeRange(partition, following, offset - 1, HOLE))
        last = ranges[-1] if ranges else None
        if last is not None and last.outcome == outcome and last.last == offset - 1:
            ranges[-1] = OutcomeRange(partition, last.first, offset, outcome)
        else:
            ranges.append(OutcomeRange(partition, offset, offset, outcome))
        following = offset + 1
    return ranges


class OutcomeStore(Protocol):
    """The outcome ranges, in one open transaction."""

    async def record(self, consumer: str, ranges: Sequence[OutcomeRange]) -> None:
        """Write ranges; one that continues a kept range of the same outcome extends it.

        An offset may be in several ranges: it was delivered several times.
        """
        ...

    async def ranges(self, consumer: str, partition: Partition) -> Sequence[OutcomeRange]:
        """Return the ranges of a partition in order."""
        ...

    async def covering(self, consumer: str, at: Coordinates) -> Sequence[OutcomeRange]:
        """Return the ranges that an offset is in, in the order in which they began."""
        ...

    async def partitions(self, consumer: str) -> Sequence[Partition]:
        """Return the partitions that have ranges."""
        ...

    async def prune(self, consumer: str, partition: Partition, below: int, limit: int) -> int:
        """Forget ranges that lie wholly below an offset, the lowest first; return how many.

        How a message ended is not forgotten before what says that it was kept.
        """
        ...
