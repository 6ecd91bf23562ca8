"""Who is running: the row by which a message that kills its process is found out.

A process writes its row when it starts, names the partitions it works on, and
removes the row at a clean stop.  A row that stands without its process means
that something in flight may have killed it; whoever gets the partition next
handles what was in flight one message at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from semel.message import Partition


@dataclass(frozen=True, slots=True)
class Member:
    """One running process of one consumer."""

    consumer: str
    name: str
    """Unique per start."""

    owner: str
    """`semel.lease.Owner` as JSON: whether the process still runs."""

    partitions: frozenset[Partition]
    in_flight: int
    """How many records it may have had at once, per partition."""

    expires_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Note:
    """What was noted of a message that was about to be tried."""

    tries: int
    writer: str
    """Who tried it last: `semel.lease.Owner` as JSON, its instance that of the worker, if known."""

    noted_at: float = 0.0


class Members(Protocol):
    """The running members, in one open transaction."""

    async def enter(self, member: Member, seconds: float) -> None:
        """Write or renew a member's row, with its partitions, for *seconds* from now."""
        ...

    async def leave(self, consumer: str, name: str) -> None:
        """Remove a row: its process ended cleanly, or what it left was worked off."""
        ...

    async def others(
        self, consumer: str, name: str, partitions: Collection[Partition]
    ) -> Sequence[Member]:
        """Return other members' rows that name one of *partitions*."""
        ...

    async def running(self, consumer: str) -> Sequence[Member]:
        """Return the rows that have not expired."""
        ...

    async def suspect(self, consumer: str, message_id: str, writer: str) -> int:
        """Note one more try of a message, by *writer* from now on; return how many there are.

        Counts on until `acquit`: a message that killed its process was never acquitted.
        """
        ...

    async def note(
        self, consumer: str, message_ids: Collection[str], writer: str
    ) -> Mapping[str, Note]:
        """Note one try of each of several messages, together; return what was noted before.

        What was noted before, here or by `suspect`, stays as it is, and nobody else changes it
        before this transaction ends.
        """
        ...

    async def notes(self, consumer: str, message_ids: Collection[str]) -> Mapping[str, Note]:
        """Return what is noted of messages."""
        ...

    async def acquit(self, consumer: str, message_id: str) -> None:
        """Forget what was noted of a message, whoever did."""
        ...

    async def acquit_many(self, consumer: str, message_ids: Collection[str], writer: str) -> None:
        """Forget what *writer* noted of several messages; what others did stays."""
        ...

    async def forget_notes(self, consumer: str, older_than_seconds: float, limit: int) -> int:
        """Delete at most *limit* notes that are that old; return how many."""
        ...

    async def release(self, consumer: str, name: str, partition: Partition) -> None:
        """Take a partition off a row; the last one removes the row if it has expired."""
        ...

    async def forget_expired(self, consumer: str) -> int:
        """Remove the rows that name no partition and have expired; return how many.

        What such a process left was worked off before anybody could know that it had ended.
        """
        ...
