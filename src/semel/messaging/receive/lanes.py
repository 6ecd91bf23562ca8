"""What may run at once, and what may be committed.

    lanes       a batch, split so that whatever must keep its order stays together
    run_lanes   lanes side by side, each in order, each ending at its first failure
    Watermark   per partition: the offset up to which everything delivered is settled

Lanes finish in any order and the committed offset is one number: the watermark
is what stands between the two.
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
    """What of one partition may be committed.

    Offsets have holes (transaction markers, compaction), so what counts is what was
    *delivered*: the watermark passes a record when it and all that were delivered before it
    are settled.
    """

    def __init__(self, start: int) -> None:
        self._next = start
        self._delivered: deque[int] = deque()
        """What is beyond the watermark, in order."""

        self._unsettled: set[int] = set()

    @property
    def next_offset(self) -> int:
        """The offset to commit: behind the last record up to which everything is settled."""
        return self._next

    @property
    def unsettled(self) -> tuple[int, ...]:
        """What was delivered and is not settled, in order."""
        return tuple(sorted(self._unsettled))

    def deliver(self, offset: int) -> None:
        """Note that a record was delivered; records come in order, from the start on.

        Raises:
            Misuse: it comes before one that was delivered; a seek must `reset` first.
        """
        due = self._delivered[-1] + 1 if self._delivered else self._next
        if offset < due:
            raise Misuse(
                f"offset {offset} was delivered where {due} or a later one was due; "
                f"reset the watermark where the subscription seeks"
            )
        self._delivered.append(offset)
        self._unsettled.add(offset)

    def settle(self, offset: int) -> None:
        """Note that a record is settled, in whatever order.

        One that is not known (any more) changes nothing: it was settled before, or a `reset`
        brings it again.
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
    """Say from which partition *item* came, and with which key."""
    match item:
        case Record():
            return item.at.place, item.key
        case Message():
            return item.source.place if item.source else None, item.key
        case Unreadable():
            return item.record.at.place, FromKey().find(item.record, None)


def lanes(
    batch: Iterable[Item],
    order: Order,
    where: Callable[[Item], Where] = where_of,  # type: ignore[assignment]  # the common case
) -> list[list[Item]]:
    """Split *batch* into lanes: within one the order is kept, between them there is none.

    The lanes stand in the order of their first messages.
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
    """What became of the messages of some lanes."""

    settled: list[Item] = field(default_factory=list)
    """In the order in which they were settled."""

    stopped: list[tuple[Item, Nack]] = field(default_factory=list)
    """Those at which a lane ended, with what their worker said."""

    not_attempted: list[Item] = field(default_factory=list)
    """Those that stand behind one of them."""


async def run_lanes(
    lanes: Sequence[Sequence[Item]],
    worker: Callable[[Item], Awaitable[Settlement]],
    concurrency: int,
) -> Ran[Item]:
    """Run at most *concurrency* lanes at once, each in order.

    A lane ends at the first message that is not settled; the others go on.  When a worker
    raises, or the caller is cancelled, every worker is cancelled and waited for, and the
    error is the caller's: nothing runs on behind its back.
    """
    if concurrency < 1:
        raise Misuse(f"a concurrency of {concurrency} runs nothing")
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
