"""The protocols of a broker: a group member that fetches, and a publisher.

Offsets are explicit: the committed offset is the *next* one to read, and it is
committed after the outcomes of all deliveries before it are durable.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from semel.errors import Retryable
from semel.message import Partition, Record

INBOX: Final = Partition("(inbox)", 0)
"""The partition of an inbox, by a name that no broker allows for a topic."""

Revoked = Callable[[Collection[Partition]], Awaitable[None]]
"""Called, and waited for, before partitions go to another member of the group."""


class MemberEnded(Retryable):
    """This member of the group can do nothing more; a new process can, now or a little later."""


class Subscription(Protocol):
    """One member of a consumer group.

    `committed` and `end` may be called while a fetch waits, to measure the lag.

    The contract is executable: `semel.testing.BrokerContract`.
    """

    @property
    def group(self) -> str:
        """The consumer group."""
        ...

    @property
    def assignment(self) -> frozenset[Partition]:
        """The partitions that this member owns now."""
        ...

    def on_revoked(self, listener: Revoked) -> None:
        """Call *listener* before partitions are revoked; its commits are still accepted."""
        ...

    async def fetch(self, max_records: int, wait_seconds: float) -> Sequence[Record]:
        """Return the next records of partitions that are not paused, in order of offset each.

        Waits at most *wait_seconds* for the first one.  Moves the position; commits nothing.

        Raises:
            Retryable: the broker does not answer.
            MemberEnded: this member never gets another record.
        """
        ...

    async def commit(self, offsets: Mapping[Partition, int]) -> None:
        """Commit the next offset to read of each partition.

        Raises:
            Fenced: a partition is no longer this member's; nothing was committed.
        """
        ...

    async def committed(self, partition: Partition) -> int:
        """Return the committed offset; without one, the first offset that exists."""
        ...

    async def end(self, partition: Partition) -> int:
        """Return the end: no record that can be read now has this offset, or a later one."""
        ...

    def seek(self, partition: Partition, offset: int) -> None:
        """Fetch from *offset* on, the next time."""
        ...

    def pause(self, partition: Partition) -> None:
        """Leave the partition out of fetches."""
        ...

    def resume(self, partition: Partition) -> None:
        """Fetch from a paused partition again; ignored if it is no longer assigned."""
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
        """Send a batch; return for each message None if it is durable at the broker, or the error.

        After a message of a key failed, no later message of that key and topic is sent.

        Raises:
            Retryable: the outcome of all of them is unknown; they may be sent again.
        """
        ...

    async def close(self) -> None:
        """Finish sending, then close."""
        ...


class Reader(Protocol):
    """Reads a range of a partition again, outside any group: for replays."""

    async def read(self, partition: Partition, first: int, last: int) -> Sequence[Record]:
        """Return the records with offsets from *first* to *last*, both included."""
        ...

    async def bounds(self, partition: Partition) -> tuple[int, int]:
        """Return the first offset that can be read, and the one that the next record will have."""
        ...
