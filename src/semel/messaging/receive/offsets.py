"""The offsets of a subscription: the outcome of each, and what is committed to the broker.

    outcomes of a fetch ─▶ their marks, durable ─▶ commit the next offset of each partition
                        └▶ a message that comes back: seek to it, pause until it is due

If one transaction handles a whole fetch, it also writes the marks (`FetchMarks`); otherwise a
transaction of their own does.  An offset is never marked before its message is durable, and
never committed before it is marked.  An inbox needs no marks: its rows show what became of each.

Further marks follow a message that stays in our own tables after its delivery:

    enters the waiting table, or is dead-lettered              KEPT
    is handled, skipped, deleted there                         HANDLED, SKIPPED, DELETED
    leaves because another delivery of it ended                DUPLICATE, REFUSED

They are written in the transaction that makes the change: the audit reports a message as lost
that was kept, has not ended, and is in no table.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from semel.clock import Clock
from semel.crashpoints import CrashPoint, reach
from semel.errors import Fenced, SemelError
from semel.events import EVENTS, Metric
from semel.message import Coordinates, Partition
from semel.messaging.database import Database, Unit
from semel.messaging.outcome import (
    Mark,
    Nack,
    Outcome,
    OutcomeRange,
    RetryStored,
    Told,
    end_of,
    ranges_of,
    settlement,
    told,
)
from semel.messaging.receive.broker import INBOX, Subscription
from semel.messaging.receive.lanes import Watermark
from semel.messaging.records import DeadLetter, WaitingMessage

log = logging.getLogger("semel.messaging")


Kept: TypeAlias = WaitingMessage | DeadLetter


async def mark(unit: Unit, consumer: str, what: Mark, *places: Coordinates | None) -> None:
    """Mark offsets; a message that did not come from a broker has none."""
    by_partition: dict[Partition, set[int]] = {}
    for at in places:
        if at is not None:
            by_partition.setdefault(at.place, set()).add(at.offset)
    ranges = [
        one
        for place, offsets in sorted(by_partition.items())
        for one in ranges_of(place, [(offset, what.value) for offset in sorted(offsets)])
    ]
    if ranges:
        await unit.outcomes.record(consumer, ranges)


async def mark_kept(
    unit: Unit, consumer: str, came_from: Coordinates | None, kept: Kept | None
) -> None:
    """Mark that a message is kept: for this offset, or for an earlier delivery.

    *kept* is its row, which keeps the coordinates of the first delivery.
    """
    is_its_own = kept is not None and kept.source == came_from
    await mark(unit, consumer, Mark.KEPT if is_its_own else Mark.REFUSED, came_from)


@dataclass(frozen=True, slots=True)
class Ended:
    """A message that leaves the waiting table or the dead letters, and why."""

    message_id: str
    came_from: Coordinates | None
    outcome: Outcome | Mark
    """The outcome of its last attempt, or the mark of what a person decided."""

    @property
    def end(self) -> Mark | None:
        """How it ended; None if it stays in our tables."""
        return self.outcome if isinstance(self.outcome, Mark) else end_of(self.outcome)


async def mark_ends(unit: Unit, consumer: str, ended: Sequence[Ended]) -> None:
    """Mark how messages ended; not those that stay in our tables."""
    for end in (Mark.HANDLED, Mark.DUPLICATE, Mark.SKIPPED, Mark.DELETED):
        await mark(unit, consumer, end, *(one.came_from for one in ended if one.end is end))
    for one in ended:
        if one.end is Mark.REFUSED and one.came_from is not None:
            letter = await unit.dead_letters.get(consumer, one.message_id)
            await mark_kept(unit, consumer, one.came_from, letter)


def noted(outcome: Outcome) -> str:
    """Return the outcome that the range of a delivery records.

    A message that waits already is kept for an earlier delivery, whose offset is marked.  That
    may be the same delivery, before a crash.
    """
    if isinstance(outcome, RetryStored) and outcome.failure is None:
        return Told.TERMINAL_FAILURE.value
    return told(outcome).value


@dataclass(slots=True, eq=False)
class _Place:
    """One assigned partition."""

    watermark: Watermark
    position: int
    """The offset after the last one whose outcome is written."""

    committed: int
    outcomes: dict[int, str] = field(default_factory=dict)
    """The outcomes of records from *position* on, until the watermark passes them."""

    times: dict[int, float] = field(default_factory=dict)
    """When the delivered records that are not committed were sent, by offset."""

    def note(self, offset: int, outcome: Outcome) -> None:
        """Remember the outcome of a record, unless its mark is written."""
        if offset >= self.position:
            # Keep the first outcome: a redelivery only finds a duplicate.
            self.outcomes.setdefault(offset, noted(outcome))

    def marked(self, end: int) -> None:
        """Forget the outcomes before *end*: they are written."""
        self.position = max(self.position, end)
        self.outcomes = {o: t for o, t in self.outcomes.items() if o >= end}


class FetchMarks:
    """The marks of one fetch, written inside the transaction of the batch that ends it."""

    def __init__(
        self,
        consumer: str,
        places: Mapping[Partition, _Place],
        settled: Mapping[Coordinates, Outcome],
        batch: Sequence[Coordinates],
    ) -> None:
        self._consumer = consumer
        self._places = places
        self._settled = settled
        self._batch = batch
        self._ends: list[tuple[_Place, int]] = []

    async def write(self, unit: Unit, outcomes: Sequence[Outcome]) -> None:
        """Write the marks up to the watermarks that this transaction will reach."""
        self._ends = []
        fetched = {**self._settled, **dict(zip(self._batch, outcomes, strict=True))}
        acked: dict[Partition, dict[int, str]] = {}
        for at, outcome in fetched.items():
            if not isinstance(settlement(outcome), Nack):
                acked.setdefault(at.place, {})[at.offset] = noted(outcome)
        ranges: list[OutcomeRange] = []
        for partition, place in self._places.items():
            if partition == INBOX:
                continue
            told = acked.get(partition, {})
            end = place.watermark.after(told)
            told |= place.outcomes
            passed = sorted((o, t) for o, t in told.items() if place.position <= o < end)
            ranges.extend(ranges_of(partition, passed, place.position))
            self._ends.append((place, end))
        if ranges:
            await unit.outcomes.record(self._consumer, ranges)

    def are_durable(self) -> None:
        """Count the marks as written; call it only after the commit."""
        reach(CrashPoint.OUTCOMES_AFTER, self._consumer)
        for place, end in self._ends:
            place.marked(end)


class Settling:
    """The assigned partitions of one subscription, and what may be committed of each."""

    def __init__(
        self, consumer: str, subscription: Subscription, database: Database, clock: Clock
    ) -> None:
        self._consumer = consumer
        self._subscription = subscription
        self._database = database
        self._clock = clock
        self._places: dict[Partition, _Place] = {}
        self._resume_at: dict[Partition, float] = {}
        self._back: dict[Partition, tuple[int, float]] = {}
        """Partitions with a message that comes back: its offset, and the seconds until then."""

        self._full: dict[Partition, int] = {}
        """Partitions that are paused, with the number of their records in flight then."""

    def room(self, most: int) -> int:
        """Return how many more records may be fetched; fewer than *most* are in flight then.

        In flight are the delivered records beyond the offset that may be committed.  A slow
        message holds that of its own partition: the fullest ones are paused, and do not count,
        until half of their records are settled.
        """
        for partition, in_flight in list(self._full.items()):
            if self._places[partition].watermark.in_flight <= in_flight // 2:
                del self._full[partition]
                if partition not in self._back and partition not in self._resume_at:
                    self._subscription.resume(partition)
        flying = {p: place.watermark.in_flight for p, place in self._places.items()}
        for partition in self._full:
            del flying[partition]
        while (room := most - sum(flying.values())) <= 0:
            fullest = max(flying, key=lambda partition: flying[partition])
            self._full[fullest] = flying.pop(fullest)
            self._subscription.pause(fullest)
        return room

    @property
    def is_full(self) -> bool:
        """A partition is paused because of its records in flight."""
        return bool(self._full)

    @property
    def is_behind(self) -> bool:
        """An offset may be committed that is not: its commit failed."""
        return any(p.watermark.next_offset > p.committed for p in self._places.values())

    def expects(self, at: Coordinates) -> bool:
        """Return whether a record was delivered and is not settled."""
        place = self._places.get(at.place)
        return place is not None and place.watermark.expects(at.offset)

    async def deliver(self, at: Coordinates, sent_at: float = 0.0) -> bool:
        """Note that a record came; return whether it is the first of its partition.

        Raises:
            Fenced: it was delivered before: the partition was lost and came back; begin again.
        """
        place = self._places.get(at.place)
        # Each fetch of an inbox begins with the first row that is not settled, which is before the
        # rows of earlier fetches if its transaction committed late.
        begins_with_it = at.place == INBOX
        if place is None or (begins_with_it and at.offset < place.watermark.next_offset):
            start = at.offset if begins_with_it else await self._subscription.committed(at.place)
            new = _Place(Watermark(min(start, at.offset)), start, start)
            self._places[at.place] = new
            new.watermark.deliver(at.offset)
            new.times[at.offset] = sent_at
            return True
        if at.offset < place.watermark.due:
            raise Fenced(f"{at.place} was lost and came back: {at.offset} was delivered again")
        place.watermark.deliver(at.offset)
        place.times[at.offset] = sent_at
        return False

    def forget(self, partitions: Collection[Partition]) -> None:
        """Release partitions that are no longer assigned."""
        for partition in partitions:
            self._places.pop(partition, None)
            self._resume_at.pop(partition, None)
            self._back.pop(partition, None)
            self._full.pop(partition, None)

    def keep_only(self, partitions: Collection[Partition]) -> None:
        """Forget all partitions but these: the others were revoked without a notice."""
        self.forget([*(self._places.keys() | self._resume_at.keys()) - set(partitions)])

    async def settle(self, outcomes: Mapping[Coordinates, Outcome]) -> None:
        """Commit what is settled; `bring_back` what is not.

        If a commit fails, the next one includes its offsets.  A redelivery meanwhile is a
        duplicate, because the outcomes are durable in the database.

        Raises:
            Fenced: a partition was lost; fetch the others from their committed offsets again.
        """
        for at, outcome in sorted(outcomes.items()):
            place = self._places.get(at.place)
            if place is None:
                continue
            match settlement(outcome):
                case Nack() if not place.watermark.expects(at.offset):
                    pass  # it comes again anyway: its partition went back before it
                case Nack(seconds):
                    known = self._back.setdefault(at.place, (at.offset, seconds))
                    self._back[at.place] = min(known, (at.offset, seconds))
                    self._subscription.pause(at.place)
                case _:
                    if at.place != INBOX:
                        place.note(at.offset, outcome)
                    place.watermark.settle(at.offset)
        await self._keep_outcomes()
        await self._commit()

    async def _keep_outcomes(self) -> None:
        """Write the marks that are not written yet, before their offsets are committed."""
        ends = {place: place.watermark.next_offset for place in self._places.values()}
        ranges: list[OutcomeRange] = []
        for partition, place in self._places.items():
            passed = sorted((o, t) for o, t in place.outcomes.items() if o < ends[place])
            ranges.extend(ranges_of(partition, passed, place.position))
        if not ranges:
            return
        async with self._database.begin() as unit:
            await unit.outcomes.record(self._consumer, ranges)
        reach(CrashPoint.OUTCOMES_AFTER, self._consumer)
        for place, end in ends.items():
            place.marked(end)

    def marks(
        self, settled: Mapping[Coordinates, Outcome], batch: Sequence[Coordinates]
    ) -> FetchMarks:
        """Return the marks of a fetch, to be written by the transaction that handles *batch*.

        *settled*: the outcomes of the other records of the fetch, durable by then.
        """
        return FetchMarks(self._consumer, self._places, settled, batch)

    async def _commit(self) -> None:
        offsets = {
            partition: place.watermark.next_offset
            for partition, place in self._places.items()
            if place.watermark.next_offset > place.committed
        }
        if not offsets:
            return
        reach(CrashPoint.SETTLE_BEFORE, self._consumer)
        try:
            await self._subscription.commit(offsets)
        except Fenced:
            self._count(offsets, "fenced")
            raise
        except SemelError as error:
            self._count(offsets, "failed")
            log.warning(
                "offsets were not committed; the next commit includes them",
                extra={"consumer": self._consumer, "why": str(error)},
            )
            return
        reach(CrashPoint.SETTLE_AFTER, self._consumer)
        for partition, offset in offsets.items():
            # The partition may have been revoked during the call to the broker.
            if partition in self._places:
                place = self._places[partition]
                place.committed = offset
                place.times = {o: sent for o, sent in place.times.items() if o >= offset}
        self._count(offsets, "ok")

    def _count(self, offsets: Mapping[Partition, int], status: str) -> None:
        for topic in {partition.topic for partition in offsets}:
            EVENTS.measure(Metric.OFFSET_COMMITS, topic, self._subscription.group, status)

    @property
    def coming_back(self) -> frozenset[Partition]:
        """The partitions with a message that comes back; they are not fetched meanwhile."""
        return frozenset(self._back)

    @property
    def is_waiting(self) -> bool:
        """A message comes back, now or later."""
        return bool(self._back or self._resume_at)

    def bring_back(self, partition: Partition) -> None:
        """Fetch a partition again from the message that comes back, when that is due.

        Call it when nothing of the partition runs, and between two fetches: what was fetched
        before would otherwise count as delivered after this, and the rest be passed over.
        """
        offset, seconds = self._back.pop(partition)
        self._full.pop(partition, None)
        place = self._places.get(partition)
        if place is None or partition not in self._subscription.assignment:
            return
        place.watermark.reset(offset)
        # Not simply *offset*: nothing before it may be passed over that is due, too.
        self._subscription.seek(partition, place.watermark.due)
        if seconds > 0:
            self._resume_at[partition] = self._clock.monotonic() + seconds
        else:
            self._subscription.resume(partition)

    def resume_due(self) -> float | None:
        """Resume partitions whose pause has ended; return the seconds until the next one."""
        now = self._clock.monotonic()
        for partition in [p for p, at in self._resume_at.items() if at <= now]:
            del self._resume_at[partition]
            self._subscription.resume(partition)
        return min(self._resume_at.values()) - now if self._resume_at else None

    async def lag(self) -> int:
        """Return how many records its partitions are behind their ends, together."""
        behind = 0
        for partition in self._subscription.assignment:
            place = self._places.get(partition)
            done = place.committed if place else await self._subscription.committed(partition)
            behind += max(await self._subscription.end(partition) - done, 0)
        return behind

    async def measure_lag(self) -> None:
        """Measure how far each assigned partition is behind its end, in records and in seconds.

        The seconds are the age of the oldest record that is not committed; they are not measured
        while that record was not fetched yet.  It may be called at any time, because it changes
        nothing.
        """
        group = self._subscription.group
        for partition in sorted(self._subscription.assignment):
            end = await self._subscription.end(partition)
            place = self._places.get(partition)
            done = place.committed if place else await self._subscription.committed(partition)
            labels = (partition.topic, group, str(partition.number))
            EVENTS.measure(Metric.LAG, *labels, value=float(max(end - done, 0)))
            times = place.times if place else {}
            if end <= done:
                EVENTS.measure(Metric.LAG_SECONDS, *labels, value=0.0)
            elif times:
                age = max(self._clock.now() - times[min(times)], 0.0)
                EVENTS.measure(Metric.LAG_SECONDS, *labels, value=age)
