"""Lanes: which messages may run at once, and which offset may be committed.

    Lanes       messages that wait or run: those with an order one after the other
    Watermark   per partition: the offset up to which everything delivered is settled

Lanes finish in any order and the committed offset is one number: the watermark
connects the two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Generic, TypeAlias, TypeVar

from semel.codec import FromKey, Unreadable
from semel.errors import Misuse
from semel.message import Message, Partition, Record
from semel.messaging.settings import Order

Item = TypeVar("Item")


class Watermark:
    """The offset of one partition that may be committed.

    Offsets have holes (transaction markers, compaction), so only *delivered* records count:
    the watermark passes a record when it and all that were delivered before it are settled.
    """

    def __init__(self, start: int) -> None:
        self._next = start
        self._delivered: deque[int] = deque()
        """The delivered offsets beyond the watermark, in order."""

        self._unsettled: set[int] = set()

    @property
    def next_offset(self) -> int:
        """The offset to commit: behind the last record up to which everything is settled."""
        return self._next

    @property
    def in_flight(self) -> int:
        """How many records were delivered that the watermark has not passed."""
        return len(self._delivered)

    @property
    def due(self) -> int:
        """The offset that comes next, or a later one."""
        return self._delivered[-1] + 1 if self._delivered else self._next

    def expects(self, offset: int) -> bool:
        """Return whether a record was delivered and is not settled."""
        return offset in self._unsettled

    @property
    def unsettled(self) -> tuple[int, ...]:
        """The delivered offsets that are not settled, in order."""
        return tuple(sorted(self._unsettled))

    def deliver(self, offset: int) -> None:
        """Note that a record was delivered; records come in order, from the start on.

        Raises:
            Misuse: it comes before one that was delivered; a seek must `reset` first.
        """
        if offset < self.due:
            raise Misuse(
                f"offset {offset} was delivered, expected {self.due} or a later one; "
                f"reset the watermark after a seek"
            )
        self._delivered.append(offset)
        self._unsettled.add(offset)

    def settle(self, offset: int) -> None:
        """Note that a record is settled, in any order.

        An unknown offset changes nothing: it was settled before, or a `reset` made the
        broker deliver it again.
        """
        self._unsettled.discard(offset)
        while self._delivered and self._delivered[0] not in self._unsettled:
            self._next = self._delivered.popleft() + 1

    def after(self, settled: Collection[int]) -> int:
        """Return what `next_offset` will be once these are settled, too."""
        end = self._next
        for offset in self._delivered:
            if offset in self._unsettled and offset not in settled:
                break
            end = offset + 1
        return end

    def reset(self, offset: int) -> None:
        """Forget what was delivered from *offset* on: the subscription seeks there.

        What was delivered before it and is not settled still holds the watermark back.
        """
        while self._delivered and self._delivered[-1] >= offset:
            self._unsettled.discard(self._delivered.pop())
        self._next = min(self._next, offset)


Arrived: TypeAlias = Record | Message | Unreadable


Where: TypeAlias = tuple[Partition | None, Hashable]
"""A partition and a key; the key is None where there is none."""


def where_of(item: Arrived) -> Where:
    """Return the partition and the key of *item*."""
    match item:
        case Record():
            return item.at.place, item.key
        case Message():
            at = item.fetched_from or item.source
            return at.place if at else None, item.key
        case Unreadable():
            return item.record.at.place, FromKey().find(item.record, None)


class Lanes(Generic[Item]):
    """Messages that wait or run.

    Within a lane, one message runs after the other; between lanes there is no order.  A lane
    stops at a message that comes back: what waits behind it comes back, too.
    """

    def __init__(
        self,
        order: Order,
        where: Callable[[Item], Where] = where_of,  # type: ignore[assignment]  # the common case
    ) -> None:
        self._order = order
        self._where = where
        self._waiting: dict[Hashable, deque[Item]] = {}
        self._ready: deque[Hashable] = deque()
        """The lanes in which a message waits and none runs."""

        self._running: dict[Hashable, Partition | None] = {}
        self._stopped: dict[Hashable, Partition | None] = {}
        self._closed: set[Partition | None] = set()

    @property
    def is_busy(self) -> bool:
        """A message waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def is_ready(self) -> bool:
        """A message could run now."""
        return bool(self._ready)

    @property
    def partitions(self) -> set[Partition | None]:
        """The partitions of which a message waits."""
        return {self._where(waiting[0])[0] for waiting in self._waiting.values()}

    def add(self, items: Iterable[Item]) -> None:
        """Let messages wait for their turn; those of a stopped lane are left out."""
        for item in items:
            lane = self._lane(item)
            if lane in self._stopped or self._where(item)[0] in self._closed:
                continue
            if lane not in self._waiting:
                self._waiting[lane] = deque()
                if lane not in self._running:
                    self._ready.append(lane)
            self._waiting[lane].append(item)

    def take(self, at_most: int) -> list[Item]:
        """Take messages that may run together: of a lane, the first ones in their order."""
        taken: list[Item] = []
        while self._ready and len(taken) < at_most:
            lane = self._ready.popleft()
            waiting = self._waiting[lane]
            self._running[lane] = self._where(waiting[0])[0]
            while waiting and len(taken) < at_most:
                taken.append(waiting.popleft())
            if not waiting:
                del self._waiting[lane]
        return taken

    def done(self, taken: Iterable[Item], coming_back: Iterable[Item] = ()) -> None:
        """End what was taken, and stop the lanes of what comes back."""
        for item in coming_back:
            lane = self._lane(item)
            self._stopped[lane] = self._where(item)[0]
            self._waiting.pop(lane, None)
        for lane in {self._lane(item) for item in taken}:
            del self._running[lane]
            if lane in self._waiting:
                self._ready.append(lane)

    def runs(self, partitions: Collection[Partition]) -> bool:
        """Return whether a message of these partitions runs."""
        return any(place in partitions for place in self._running.values())

    def holds(self, partition: Partition) -> bool:
        """Return whether a message of a partition waits or runs."""
        return self.runs({partition}) or partition in self.partitions

    def close(self, partitions: Collection[Partition | None]) -> None:
        """Stop all lanes of these partitions, until they are dropped."""
        self.drop(partitions)
        self._closed.update(partitions)

    def drop(self, partitions: Collection[Partition | None]) -> None:
        """Forget what waits of these partitions, and that their lanes have stopped."""
        self._closed.difference_update(partitions)
        for lane, waiting in list(self._waiting.items()):
            if self._where(waiting[0])[0] in partitions:
                del self._waiting[lane]
        self._ready = deque(lane for lane in self._ready if lane in self._waiting)
        self._stopped = {
            lane: place for lane, place in self._stopped.items() if place not in partitions
        }

    def clear(self) -> None:
        """Forget everything."""
        for lanes in (self._waiting, self._ready, self._running, self._stopped, self._closed):
            lanes.clear()

    def _lane(self, item: Item) -> Hashable:
        place, key = self._where(item)
        match self._order:
            case Order.PARTITION:
                return place
            case Order.KEY if key is not None:
                return place, key
            case _:
                return place, _at(item)


def _at(item: object) -> Hashable:
    """Return a lane of its own for a message that has no order."""
    match item:
        case Record():
            return item.at
        case Unreadable():
            return item.record.at
        case Message() if at := item.fetched_from or item.source:
            return at
        case _:
            return id(item)
