"""What semel needs of a broker: a member of a group that fetches, and a publisher.

Offsets are explicit: what is committed is the *next* offset to read, and it is
committed after whatever the deliveries before it caused is durable.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from semel.message import Partition, Record

Revoked = Callable[[Collection[Partition]], Awaitable[None]]
"""Called, and waited for, before partitions go to another member of the group."""


class Subscription(Protocol):
    """One member of a consumer group.

    `committed` and `end` may be asked while a fetch waits: the lag is measured beside the work.

    The contract is executable: `semel.testing.contracts.BrokerContract`.
    """

    @property
    def group(self) -> str:
        """The consumer group."""
        ...

    @property
    def assignment(self) -> frozenset[Partition]:
        """The partitions that are this member's now."""
        ...

    def on_revoked(self, listener: Revoked) -> None:
        """Call *listener* before partitions are given up; what it commits still counts."""
        ...

    async def fetch(self, max_records: int, wait_seconds: float) -> Sequence[Record]:
        """Return the next records of partitions that are not paused, in order of offset each.

        Waits at most *wait_seconds* for the first one.  Moves the position; commits nothing.

        Raises:
            Retryable: the broker does not answer.
        """
        ...

    async def commit(self, offsets: Mapping[Partition, int]) -> None:
        """Commit the next offset to read of each partition.

        Raises:
            Fenced: a partition is no longer this member's; nothing was committed.
        """
        ...

    async def committed(self, partition: Partition) -> int:
        """Return the committed offset; the first one that exists where none was committed."""
        ...

    async def end(self, partition: Partition) -> int:
        """Return the offset that the next record of the partition will have."""
        ...

    def seek(self, partition: Partition, offset: int) -> None:
        """Fetch from *offset* on, the next time."""
        ...

    def pause(self, partition: Partition) -> None:
        """Leave the partition out of fetches."""
        ...

    def resume(self, partition: Partition) -> None:
        """Take a paused partition in again; nothing happens where it is no longer assigned."""
        ...

    async def close(self) -> None:
        """Leave the group."""
        ...


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One message on its way to a broker."""

    topic: str
    value: bytes | None
    key: bytes | None = None
    headers: Mapping[str, bytes] = field(default_factory=dict)


class Publisher(Protocol):
    """Sends messages, those of one key in order."""

    async def publish(self, batch: Sequence[Outgoing]) -> Sequence[Exception | None]:
        """Send a batch; say of each message whether it is durable at the broker (None) or why not.

        After a message of a key failed, no later message of that key and topic is sent.

        Raises:
            Retryable: nothing is known of any of them; they may be sent again.
        """
        ...

    async def close(self) -> None:
        """Finish what was handed over."""
        ...


class Reader(Protocol):
    """Reads a range of a partition again, outside any group: for replays."""

    async def read(self, partition: Partition, first: int, last: int) -> Sequence[Record]:
        """Return the records with offsets from *first* to *last*, both included."""
        ...

    async def bounds(self, partition: Partition) -> tuple[int, int]:
        """Return the first offset that can be read, and the one that the next record will have."""
        ...
