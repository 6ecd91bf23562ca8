"""The completeness audit: whether every offset of a consumer's partitions is accounted for.

handled + skipped + deleted + duplicate + parked + dead + waiting + refused + holes
= all offsets, or the offsets that are missing.  An offset that was delivered several
times is in several ranges, and counts once, with its strongest outcome.

Cycles on Spark leave counts: how many of their offsets were handled, duplicates, dead, and so
on.  What waits, is parked or dead now, and what a person ended, counts by its own offset, and
the rest of a cycle by its counts; offsets of a cycle without an outcome are holes, which a
reader can confirm.

A message that was noted as waiting, parked or dead, and did not end, is looked for in the
waiting table and among the dead letters.  Where it is now is what counts; a message that is
in neither is lost.  An offset that was never noted is looked up in the claims, which
have the offset of their message: a process may die between an effect and its note.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice, pairwise
from typing import Final

from semel.codec import coordinates_of
from semel.errors import Misuse
from semel.message import Coordinates, Partition
from semel.messaging.outcome import CYCLE, HOLE, Mark, Told, is_delivery, ranges_of
from semel.messaging.outcome import OutcomeRange as OutcomeRange
from semel.messaging.receive.broker import Reader
from semel.messaging.records import Waits
from semel.operate.stores import OperatorDatabase, OperatorUnit

PAGE: Final = 1000


@dataclass(frozen=True, slots=True, order=True)
class Stretch:
    """Neighbouring offsets, both ends included."""

    first: int
    last: int

    @property
    def length(self) -> int:
        """How many they are."""
        return self.last - self.first + 1


def offsets_in(stretches: Iterable[Stretch]) -> Iterator[int]:
    """Return the offsets of several stretches, one by one."""
    for stretch in stretches:
        yield from range(stretch.first, stretch.last + 1)


def add(stretches: list[Stretch], new: Stretch) -> None:
    """Append a stretch, or make the last one longer where *new* continues it."""
    if stretches and stretches[-1].last == new.first - 1:
        stretches[-1] = Stretch(stretches[-1].first, new.last)
    else:
        stretches.append(new)


async def pieces(
    reader: Reader, partition: Partition, stretch: Stretch, start: int
) -> list[tuple[Stretch, bool | None]]:
    """Split a stretch into offsets with records, without records, and unknown."""
    found: list[tuple[Stretch, bool | None]] = []
    if stretch.first < start:
        gone = Stretch(stretch.first, min(stretch.last, start - 1))
        found.append((gone, None))
    for first in range(max(stretch.first, start), stretch.last + 1, PAGE):
        last = min(first + PAGE - 1, stretch.last)
        have = {record.at.offset for record in await reader.read(partition, first, last)}
        for offset in range(first, last + 1):
            found.append((Stretch(offset, offset), offset in have))
    return found


# A message may be moved or ended while the audit searches; the next search sees it.
MOST_LOOKS: Final = 3


# Claims have no index on where a message came from.  A crash leaves a few offsets
# unnoted; more than this have another cause.
MOST_ASKED: Final = 100_000


class Standing(StrEnum):
    """What became of an offset, the strongest outcome first."""

    HANDLED = "handled"
    """Its effect is durable, from the delivery or from a later attempt."""

    SKIPPED = "skipped"
    """A person decided that its message has no effect."""

    DELETED = "deleted"
    """Two people decided to delete its message."""

    DEAD = "dead"
    """Its message is a dead letter."""

    PARKED = "parked"
    """Its message waits for a person, or behind one of its key."""

    WAITING = "waiting"
    """Its message is in the retry table."""

    DUPLICATE = "duplicate"
    """Its message was handled before, or has an old version."""

    REFUSED = "refused"
    """Its message was waiting, parked or dead already when it came, from another offset."""

    HOLE = "hole"
    """There is no record: a transaction's marker, or compaction."""


class OffsetFound(StrEnum):
    """Where the message of an offset is at the time of the audit."""

    HANDLED = "found_handled"
    DEAD = "found_dead"
    PARKED = "found_parked"
    WAITING = "found_waiting"


STANDINGS: Final[Mapping[str, Standing]] = {
    # what is noted, the strongest first      so the offset stands as
    Told.SUCCESS: Standing.HANDLED,
    Mark.HANDLED: Standing.HANDLED,
    OffsetFound.HANDLED: Standing.HANDLED,
    Mark.SKIPPED: Standing.SKIPPED,
    Mark.DELETED: Standing.DELETED,
    OffsetFound.DEAD: Standing.DEAD,
    OffsetFound.PARKED: Standing.PARKED,
    OffsetFound.WAITING: Standing.WAITING,
    Mark.DUPLICATE: Standing.DUPLICATE,
    Mark.REFUSED: Standing.REFUSED,
    Told.DLQ: Standing.DEAD,
    Told.DESERIALIZATION_FAILURE: Standing.DEAD,
    Told.SCHEMA_INCOMPATIBLE: Standing.DEAD,
    Told.CONFLICT: Standing.DEAD,
    Told.PARKED: Standing.PARKED,
    Told.RETRYABLE_FAILURE: Standing.WAITING,
    Mark.KEPT: Standing.WAITING,
    Told.DUPLICATE_SKIPPED: Standing.DUPLICATE,
    Told.TERMINAL_FAILURE: Standing.REFUSED,
    CYCLE: Standing.HANDLED,
    HOLE: Standing.HOLE,
}


KEPT: Final = frozenset(
    outcome
    for outcome, standing in STANDINGS.items()
    if standing in (Standing.DEAD, Standing.PARKED, Standing.WAITING)
) - frozenset[str](OffsetFound)
"""Outcomes whose message must be in a table, unless a stronger outcome is noted."""


FOUND: Final[Mapping[Waits, OffsetFound]] = {
    Waits.RETRY: OffsetFound.WAITING,
    Waits.PARKED: OffsetFound.PARKED,
    Waits.BEHIND: OffsetFound.PARKED,
}


@dataclass(frozen=True, slots=True)
class Extent:
    """Which offsets of a partition are asked about; what is None is taken from what is known."""

    first: int | None = None
    """Where to begin; None: with the broker's log, or without a reader with the first range."""

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
    unknown: tuple[Stretch, ...] = ()
    """Offsets of which nothing is known: they were lost, or another program passed them."""

    lost: tuple[Stretch, ...] = ()
    """Offsets whose messages waited, were parked or dead, and are nowhere any more."""

    holes: tuple[Stretch, ...] = ()
    not_reached: int = 0
    """Offsets after *until* that were not read yet."""

    repeated: int = 0
    """Offsets that are in more than one range."""

    ranges: int = 0
    """How many ranges deliveries left; 0: nothing was ever noted for this consumer here."""

    checked_holes: bool = field(default=False)
    """A reader confirmed that there is no record where a hole was noted."""

    @property
    def total(self) -> int:
        """The offsets that must be accounted for."""
        return self.until - self.first

    @property
    def missing(self) -> tuple[Stretch, ...]:
        """The offsets that are not accounted for."""
        merged: list[Stretch] = []
        for stretch in sorted((*self.unknown, *self.lost)):
            add(merged, stretch)
        return tuple(merged)

    @property
    def is_complete(self) -> bool:
        """Whether every offset is accounted for."""
        return not self.missing and sum(self.counts.values()) == self.total


@dataclass(frozen=True, slots=True)
class Completeness:
    """What became of a consumer's offsets."""

    consumer: str
    partitions: Sequence[PartitionAudit]

    @property
    def known(self) -> bool:
        """Whether anything was ever noted for a consumer of this name."""
        return any(audit.ranges for audit in self.partitions)

    @property
    def needs_attention(self) -> bool:
        """An offset is missing, or nothing is known at all: the name may be wrong."""
        return not self.known or not all(one.is_complete for one in self.partitions)


def audit_ranges(
    partition: Partition,
    ranges: Iterable[OutcomeRange],
    extent: Extent | None = None,
    found: Iterable[OutcomeRange] | None = None,
) -> PartitionAudit:
    """Add the ranges of one partition up; pure.

    *found* says which offsets' messages are in our tables, as `OffsetFound`; without it, every
    message that was stored counts as found.
    """
    known = list(ranges)
    extent = extent or Extent()
    delivered = [one for one in known if is_delivery(one.outcome)]
    first = extent.first
    if first is None:
        first = min((one.first for one in delivered), default=0)
    last = max((one.last for one in delivered), default=first - 1)
    until = extent.committed if extent.committed is not None else last + 1
    until = max(until, first)
    counts: Counter[Standing] = Counter()
    unknown: list[Stretch] = []
    lost: list[Stretch] = []
    holes: list[Stretch] = []
    repeated = 0
    for stretch, outcome, times in _swept([*known, *(found or ())], first, until):
        if outcome is None:
            add(unknown, stretch)
            continue
        if found is not None and outcome in KEPT:
            add(lost, stretch)
            continue
        standing = STANDINGS[outcome]
        counts[standing] += stretch.length
        repeated += stretch.length if times > 1 else 0
        if standing is Standing.HOLE:
            add(holes, stretch)
    return PartitionAudit(
        partition,
        first,
        until,
        {standing: counts[standing] for standing in Standing},
        tuple(unknown),
        tuple(lost),
        tuple(holes),
        max((extent.end or until) - until, 0),
        repeated,
        len(delivered),
    )


def _swept(
    ranges: Sequence[OutcomeRange], first: int, until: int
) -> Iterator[tuple[Stretch, str | None, int]]:
    """Cut the offsets where a range begins or ends; say what counts, and how often it came."""
    changes: dict[int, Counter[str]] = {first: Counter(), until: Counter()}
    for one in ranges:
        begin, end = max(one.first, first), min(one.last + 1, until)
        if begin < end:
            changes.setdefault(begin, Counter())[one.outcome] += 1
            changes.setdefault(end, Counter())[one.outcome] -= 1
    open_now: Counter[str] = Counter()
    places = sorted(changes)
    for begin, end in pairwise(places):
        for outcome, more in changes[begin].items():
            open_now[outcome] += more
        here = [outcome for outcome in STANDINGS if open_now[outcome]]
        times = sum(open_now[outcome] for outcome in here if is_delivery(outcome))
        yield Stretch(begin, end - 1), here[0] if here else None, times


async def audit_completeness(
    database: OperatorDatabase,
    consumer: str,
    extents: Mapping[Partition, Extent] | None = None,
    reader: Reader | None = None,
) -> list[PartitionAudit]:
    """Add up what became of a consumer's offsets, partition by partition.

    With a *reader*, the broker says where its log begins, and is asked where a hole was noted
    and where nothing was: an offset with a record is a loss, one without is a hole.  Without
    one, what lies before the first range is not asked about.  What waits, is parked or dead is
    looked for where it should be, and is lost where it is not.  Of a consumer of which nothing
    was ever noted, no partition has ranges: see `Completeness.known`.
    """
    extents = extents or {}
    async with database.begin() as unit:
        known = await unit.outcomes.partitions(consumer)
        on_spark = await unit.outcomes.cycle_partitions(consumer)
    partitions = sorted({*known, *on_spark, *extents})
    audits = [
        await _audited(database, consumer, place, extents.get(place, Extent()), reader)
        for place in partitions
    ]
    # A program without a runner writes marks, but no deliveries to compare them with.
    return [audit for audit in audits if audit.ranges or audit.partition in extents]


async def _audited(
    database: OperatorDatabase,
    consumer: str,
    place: Partition,
    extent: Extent,
    reader: Reader | None,
) -> PartitionAudit:
    found: list[OutcomeRange] = []
    before: tuple[Stretch, ...] = ()
    for _ in range(MOST_LOOKS):
        async with database.begin() as unit:
            cycles = await unit.outcomes.cycle_ranges(consumer, place)
            ranges = [*await unit.outcomes.ranges(consumer, place), *cycles]
            ranges += await _left(unit, consumer, cycles)
        found += await _found(database, consumer, place, ranges)
        begun = await _begun(place, ranges, extent, reader)
        audit = audit_ranges(place, ranges, begun, found)
        if audit.unknown:
            found += await _handled(database, consumer, place, audit.unknown)
            audit = audit_ranges(place, ranges, begun, found)
        # What is lost stays lost.
        if audit.lost in ((), before):
            break
        before = audit.lost
    if reader is not None:
        audit = await _checked(audit, reader)
    return await _by_counts(database, consumer, audit, cycles, reader) if cycles else audit


async def _left(
    unit: OperatorUnit, consumer: str, cycles: Sequence[OutcomeRange]
) -> list[OutcomeRange]:
    """Return the offsets of cycles whose messages have an open claim, and are in no table."""
    if not cycles:
        return []
    place, left = cycles[0].partition, []
    for source in await unit.claims.without_message(consumer, MOST_ASKED):
        with suppress(Misuse):  # a program that claims without this engine may write any text
            at = coordinates_of(source)
            if at.place == place and any(one.first <= at.offset <= one.last for one in cycles):
                left.append(OutcomeRange(place, at.offset, at.offset, Mark.KEPT))
    return left


async def _by_counts(
    database: OperatorDatabase,
    consumer: str,
    audit: PartitionAudit,
    cycles: Sequence[OutcomeRange],
    reader: Reader | None,
) -> PartitionAudit:
    """Divide the offsets of cycles, which count as handled so far, by what the cycles counted."""
    place = audit.partition
    async with database.begin() as unit:
        totals = await unit.outcomes.cycle_totals(consumer, place)
        short = await unit.outcomes.short_cycles(consumer, place, MOST_ASKED)
    counted = Counter[Standing]()
    for outcome, total in totals.items():
        counted[STANDINGS[outcome]] += total
    # After a checkpoint was lost, cycles may have read offsets a second time: as duplicates.
    length, total = sum(one.length for one in cycles), sum(totals.values())
    repeated = max(total - length, 0)
    counts = Counter(audit.counts)
    for standing, number in (
        (Standing.DUPLICATE, max(counted[Standing.DUPLICATE] - repeated, 0)),
        (Standing.REFUSED, counted[Standing.REFUSED]),
        (Standing.HOLE, max(length - total, 0)),
    ):
        counts[standing] += number
        counts[Standing.HANDLED] -= number
    unknown = list(audit.unknown)
    if reader is not None and short:
        start, _ = await reader.bounds(place)
        for cycle in short:
            stretch = Stretch(cycle.first, cycle.last)
            seen = await pieces(reader, place, stretch, start)
            if sum(one.length for one, has_record in seen if has_record) > cycle.counted:
                unknown.append(stretch)
    repeated += audit.repeated
    return replace(audit, counts=counts, unknown=tuple(sorted(unknown)), repeated=repeated)


async def _begun(
    place: Partition, ranges: Sequence[OutcomeRange], extent: Extent, reader: Reader | None
) -> Extent:
    """Return where an audit begins, if the broker knows it."""
    if reader is None or extent.first is not None:
        return extent
    start, _ = await reader.bounds(place)
    delivered = [one.first for one in ranges if is_delivery(one.outcome)]
    return replace(extent, first=min([start, *delivered]))


async def _found(
    database: OperatorDatabase, consumer: str, place: Partition, ranges: Sequence[OutcomeRange]
) -> list[OutcomeRange]:
    """Look for the messages of kept offsets in our tables, a page per transaction."""
    kept = [one for one in ranges if one.outcome in KEPT or one.outcome == CYCLE]
    if not kept:
        return []
    first, last = min(one.first for one in kept), max(one.last for one in kept)

    async def waiting(unit: OperatorUnit, begin: int) -> list[tuple[int, str]]:
        page = await unit.waiting.places(consumer, place, begin, last, PAGE)
        return [(offset, FOUND[waits].value) for offset, waits in page]

    async def dead(unit: OperatorUnit, begin: int) -> list[tuple[int, str]]:
        page = await unit.dead_letters.places(consumer, place, begin, last, PAGE)
        return [(offset, OffsetFound.DEAD.value) for offset in page]

    found: list[OutcomeRange] = []
    for look in (waiting, dead):
        begin = first
        while begin <= last:
            async with database.begin() as unit:
                page = await look(unit, begin)
            found += ranges_of(place, page)
            begin = page[-1][0] + 1 if len(page) == PAGE else last + 1
    return found


async def _handled(
    database: OperatorDatabase, consumer: str, place: Partition, unknown: Sequence[Stretch]
) -> list[OutcomeRange]:
    """Look up unnoted offsets in the claims: a crash may have come before the note."""
    found: list[OutcomeRange] = []
    asked = islice(offsets_in(unknown), MOST_ASKED)
    while page := list(islice(asked, PAGE)):
        places = [Coordinates(place.topic, place.number, offset) for offset in page]
        async with database.begin() as unit:
            handled = sorted(at.offset for at in await unit.claims.handled_from(consumer, places))
        found += ranges_of(place, [(offset, OffsetFound.HANDLED.value) for offset in handled])
    return found


async def _checked(audit: PartitionAudit, reader: Reader) -> PartitionAudit:
    """Distinguish holes from losses by what the broker still has."""
    start, end = await reader.bounds(audit.partition)
    unknown: list[Stretch] = []
    holes: list[Stretch] = []
    for stretch in sorted((*audit.unknown, *audit.holes)):
        noted = stretch in audit.holes
        for piece, has_record in await pieces(reader, audit.partition, stretch, start):
            # What the broker has deleted was a hole if it was noted as one.
            is_lost = has_record if has_record is not None else not noted
            add(unknown if is_lost else holes, piece)
    counts = {**audit.counts, Standing.HOLE: sum(hole.length for hole in holes)}
    return replace(
        audit,
        counts=counts,
        unknown=tuple(unknown),
        holes=tuple(holes),
        not_reached=max(end - audit.until, 0),
        checked_holes=True,
    )
