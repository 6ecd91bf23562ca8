"""Whether every offset of a consumer's partitions is accounted for (B-7).

handled + duplicate + parked + dead + waiting + refused + holes = all offsets, or
the offsets that are missing.  An offset that was delivered several times is in
several ranges, and counts once, as the most that became of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Final

from semel.message import Partition
from semel.messaging.broker import Reader
from semel.messaging.completeness import HOLE, OutcomeRange
from semel.messaging.database import Database
from semel.messaging.outcome import Told

PAGE: Final = 1000


class Standing(StrEnum):
    """What became of an offset, the most first."""

    HANDLED = "handled"
    DEAD = "dead"
    """Its message is a dead letter."""

    PARKED = "parked"
    WAITING = "waiting"
    """Its message is in the retry table."""

    DUPLICATE = "duplicate"
    """Its message was handled before, or has an old version: skipped."""

    REFUSED = "refused"
    """Its message was parked or dead already when it came."""

    HOLE = "hole"
    """There is no record: a transaction's marker, or compaction."""


STANDINGS: Final[Mapping[str, Standing]] = {
    Told.SUCCESS: Standing.HANDLED,
    Told.DUPLICATE_SKIPPED: Standing.DUPLICATE,
    Told.RETRYABLE_FAILURE: Standing.WAITING,
    Told.TERMINAL_FAILURE: Standing.REFUSED,
    Told.DLQ: Standing.DEAD,
    Told.PARKED: Standing.PARKED,
    Told.DESERIALIZATION_FAILURE: Standing.DEAD,
    Told.SCHEMA_INCOMPATIBLE: Standing.DEAD,
    Told.CONFLICT: Standing.DEAD,
    HOLE: Standing.HOLE,
}


@dataclass(frozen=True, slots=True, order=True)
class Stretch:
    """Neighbouring offsets, both ends included."""

    first: int
    last: int

    @property
    def length(self) -> int:
        """How many they are."""
        return self.last - self.first + 1


@dataclass(frozen=True, slots=True)
class Extent:
    """Which offsets of a partition are asked about; what is None is taken from what is known."""

    first: int | None = None
    """Where to begin; None: with the broker's log, or where nobody can ask it, with the ranges."""

    committed: int | None = None
    """The next offset to read: everything before it must be accounted for."""

    end: int | None = None
    """The offset that the next record will have."""


@dataclass(frozen=True, slots=True)
class PartitionAudit:
    """What is known of a partition's offsets."""

    partition: Partition
    first: int
    until: int
    """The first offset behind those that must be accounted for."""

    counts: Mapping[Standing, int]
    missing: tuple[Stretch, ...] = ()
    """Offsets of which nothing is known: they were lost, or passed by somebody else."""

    holes: tuple[Stretch, ...] = ()
    not_reached: int = 0
    """Offsets behind *until* that nobody has read yet."""

    repeated: int = 0
    """Offsets that are in more than one range."""

    ranges: int = 0
    """How many ranges are kept; 0: nothing was ever noted for this consumer here."""

    checked_holes: bool = field(default=False)
    """A reader confirmed that there is no record where a hole was noted."""

    @property
    def total(self) -> int:
        """The offsets that must be accounted for."""
        return self.until - self.first

    @property
    def is_complete(self) -> bool:
        """Tell whether every one of them is."""
        return not self.missing and sum(self.counts.values()) == self.total


def is_known(audits: Iterable[PartitionAudit]) -> bool:
    """Tell whether anything was ever noted for the consumer: its name may be a wrong one."""
    return any(audit.ranges for audit in audits)


def audit_ranges(
    partition: Partition, ranges: Iterable[OutcomeRange], extent: Extent | None = None
) -> PartitionAudit:
    """Add the ranges of one partition up; pure."""
    known = sorted(ranges)
    extent = extent or Extent()
    first = extent.first if extent.first is not None else min((r.first for r in known), default=0)
    last = max((r.last for r in known), default=first - 1)
    until = extent.committed if extent.committed is not None else last + 1
    until = max(until, first)
    counts: Counter[Standing] = Counter()
    missing: list[Stretch] = []
    holes: list[Stretch] = []
    repeated = 0
    for stretch, standing, times in _swept(known, first, until):
        if standing is None:
            _add(missing, stretch)
            continue
        counts[standing] += stretch.length
        repeated += stretch.length if times > 1 else 0
        if standing is Standing.HOLE:
            _add(holes, stretch)
    return PartitionAudit(
        partition,
        first,
        until,
        {standing: counts[standing] for standing in Standing},
        tuple(missing),
        tuple(holes),
        max((extent.end or until) - until, 0),
        repeated,
        len(known),
    )


def _swept(
    ranges: Sequence[OutcomeRange], first: int, until: int
) -> Iterator[tuple[Stretch, Standing | None, int]]:
    """Cut the offsets where a range begins or ends; say of each piece what it is."""
    changes: dict[int, Counter[Standing]] = {first: Counter(), until: Counter()}
    for one in ranges:
        begin, end = max(one.first, first), min(one.last + 1, until)
        if begin < end:
            standing = STANDINGS[one.outcome]
            changes.setdefault(begin, Counter())[standing] += 1
            changes.setdefault(end, Counter())[standing] -= 1
    open_now: Counter[Standing] = Counter()
    places = sorted(changes)
    for begin, end in pairwise(places):
        for standing, more in changes[begin].items():
            open_now[standing] += more
        here = [standing for standing in Standing if open_now[standing]]
        yield Stretch(begin, end - 1), here[0] if here else None, sum(open_now.values())


def _add(stretches: list[Stretch], new: Stretch) -> None:
    if stretches and stretches[-1].last == new.first - 1:
        stretches[-1] = Stretch(stretches[-1].first, new.last)
    else:
        stretches.append(new)


async def audit_completeness(
    database: Database,
    consumer: str,
    extents: Mapping[Partition, Extent] | None = None,
    reader: Reader | None = None,
) -> list[PartitionAudit]:
    """Add up what became of a consumer's offsets, partition by partition.

    With a *reader*, the broker says where its log begins, and is asked where a hole was noted
    and where nothing was: an offset with a record is a loss, one without is a hole.  Without
    one, what lies before the first range is not asked about.  Of a consumer of which nothing
    was ever noted, no partition has ranges: see `is_known`.
    """
    extents = extents or {}
    async with database.begin() as unit:
        partitions = sorted({*await unit.outcomes.partitions(consumer), *extents})
        ranges = {place: await unit.outcomes.ranges(consumer, place) for place in partitions}
    return [
        await _audited(place, ranges[place], extents.get(place, Extent()), reader)
        for place in partitions
    ]


async def _audited(
    place: Partition, ranges: Sequence[OutcomeRange], extent: Extent, reader: Reader | None
) -> PartitionAudit:
    if reader is None:
        return audit_ranges(place, ranges, extent)
    if extent.first is None:
        start, _ = await reader.bounds(place)
        extent = replace(extent, first=min([start, *(one.first for one in ranges)]))
    return await _checked(audit_ranges(place, ranges, extent), reader)


async def _checked(audit: PartitionAudit, reader: Reader) -> PartitionAudit:
    """Tell holes from losses by what the broker still has."""
    start, end = await reader.bounds(audit.partition)
    missing: list[Stretch] = []
    holes: list[Stretch] = []
    for stretch in sorted((*audit.missing, *audit.holes)):
        noted = stretch in audit.holes
        for piece, has_record in await _pieces(reader, audit.partition, stretch, start):
            # What the broker has deleted was a hole if it was noted as one.
            is_lost = has_record if has_record is not None else not noted
            _add(missing if is_lost else holes, piece)
    counts = {**audit.counts, Standing.HOLE: sum(hole.length for hole in holes)}
    return replace(
        audit,
        counts=counts,
        missing=tuple(missing),
        holes=tuple(holes),
        not_reached=max(end - audit.until, 0),
        checked_holes=True,
    )


async def _pieces(
    reader: Reader, partition: Partition, stretch: Stretch, start: int
) -> list[tuple[Stretch, bool | None]]:
    """Cut a stretch into what has records, what has none, and what nobody can say."""
    pieces: list[tuple[Stretch, bool | None]] = []
    if stretch.first < start:
        gone = Stretch(stretch.first, min(stretch.last, start - 1))
        pieces.append((gone, None))
    for first in range(max(stretch.first, start), stretch.last + 1, PAGE):
        last = min(first + PAGE - 1, stretch.last)
        have = {record.at.offset for record in await reader.read(partition, first, last)}
        for offset in range(first, last + 1):
            pieces.append((Stretch(offset, offset), offset in have))
    return pieces
