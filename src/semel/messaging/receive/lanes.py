"""Lanes: which messages may run at once, and which offset may be committed.

    lanes       a batch, split so that messages with an order stay together
    run_lanes   lanes side by side, each in order, each ending at its first failure
    Watermark   per partition: the offset up to which everything delivered is settled

Lanes finish in any order and the committed offset is one number: the watermark
connects the two.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from semel.codec import FromKey, Unreadable
from semel.errors import Misuse
from semel.message import Message, Partition, Record
from semel.messaging.handle.cancel import end, owned
from semel.messaging.outcome import Ack, Nack, Settlement
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
    def unsettled(self) -> tuple[int, ...]:
        """The delivered offsets that are not settled, in order."""
        return tuple(sorted(self._unsettled))

    def deliver(self, offset: int) -> None:
        """Note that a record was delivered; records come in order, from the start on.

        Raises:
            Misuse: it comes before one that was delivered; a seek must `reset` first.
        """
        due = self._delivered[-1] + 1 if self._delivered else self._next
        if offset < due:
            raise Misuse(
                f"offset {offset} was delivered, expected {due} or a later one; "
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


def lanes(
    batch: Iterable[Item],
    order: Order,
    where: Callable[[Item], Where] = where_of,  # type: ignore[assignment]  # the common case
) -> list[list[Item]]:
    """Split *batch* into lanes: within one the order is kept, between them there is none.

    The lanes have the order of their first messages.
    """
    found: dict[Hashable, list[Item]] = {}
    for number, item in enumerate(batch):
        partition, key = where(item)
        match order:
            case Order.PARTITION:
                lane: Hashable = partition
            case Order.KEY if key is not None:
                lane = (partition, key)
            case _:
                lane = number
        found.setdefault(lane, []).append(item)
    return list(found.values())


@dataclass(slots=True)
class Ran(Generic[Item]):
    """The results of some lanes."""

    settled: list[Item] = field(default_factory=list)
    """In the order in which they were settled."""

    stopped: list[tuple[Item, Nack]] = field(default_factory=list)
    """Those at which a lane ended, with their worker's answer."""

    not_attempted: list[Item] = field(default_factory=list)
    """Those behind a failed one."""


async def run_lanes(
    lanes: Sequence[Sequence[Item]],
    worker: Callable[[Item], Awaitable[Settlement]],
    concurrency: int,
) -> Ran[Item]:
    """Run at most *concurrency* lanes at once, each in order.

    A lane ends at the first message that is not settled; the others continue.  If a worker
    raises, or the caller is cancelled, every worker is cancelled and awaited before the
    error is raised, so that no worker still runs then.
    """
    if concurrency < 1:
        raise Misuse(f"concurrency must be at least 1, got {concurrency}")
    ran: Ran[Item] = Ran()
    waiting = iter(lanes)
    runners = [owned(_run(waiting, worker, ran)) for _ in range(min(concurrency, len(lanes)))]
    if not runners:
        return ran
    try:
        done, _ = await asyncio.wait(runners, return_when=asyncio.FIRST_EXCEPTION)
        for runner in done:
            runner.result()
    finally:
        await end(runners)
    return ran


async def _run(
    waiting: Iterator[Sequence[Item]],
    worker: Callable[[Item], Awaitable[Settlement]],
    ran: Ran[Item],
) -> None:
    for lane in waiting:
        for number, item in enumerate(lane):
            match await worker(item):
                case Ack():
                    ran.settled.append(item)
                case Nack() as nack:
                    ran.stopped.append((item, nack))
                    ran.not_attempted.extend(lane[number + 1 :])
                    break
