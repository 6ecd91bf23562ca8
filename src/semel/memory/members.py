"""The running members in memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from semel.memory.tables import Table
from semel.message import Partition
from semel.messaging.members import Member

if TYPE_CHECKING:
    from semel.memory.tables import MemoryTables


class MemoryMembers:
    """The members of the transaction that is open in *tables*."""

    def __init__(self, tables: MemoryTables) -> None:
        self._clock = tables.clock
        self._members: Table[tuple[str, str], Member] = tables.table("consumer_member")
        self._suspects: Table[tuple[str, str], int] = tables.table("crash_suspect")

    async def enter(self, member: Member, seconds: float) -> None:
        """Write or renew a member's row, with its partitions, for *seconds* from now."""
        until = self._clock.now() + seconds
        self._members.put((member.consumer, member.name), replace(member, expires_at=until))

    async def leave(self, consumer: str, name: str) -> None:
        """Remove a row."""
        self._members.remove((consumer, name))

    async def others(
        self, consumer: str, name: str, partitions: Collection[Partition]
    ) -> Sequence[Member]:
        """Return other members' rows that name one of *partitions*."""
        return [
            member
            for member in self._members.rows()
            if member.consumer == consumer
            and member.name != name
            and member.partitions & frozenset(partitions)
        ]

    async def suspect(self, consumer: str, message_id: str) -> int:
        """Note that a message is about to be tried alone; return how often that was noted."""
        tries = (self._suspects.get((consumer, message_id)) or 0) + 1
        self._suspects.put((consumer, message_id), tries)
        return tries

    async def note(self, consumer: str, message_ids: Collection[str]) -> frozenset[str]:
        """Note one try of each of several messages, together; return those noted before."""
        known = frozenset(one for one in message_ids if (consumer, one) in self._suspects)
        for message_id in frozenset(message_ids) - known:
            self._suspects.put((consumer, message_id), 1)
        return known

    async def acquit_many(self, consumer: str, message_ids: Collection[str]) -> None:
        """Forget what was noted of several messages."""
        for message_id in message_ids:
            self._suspects.remove((consumer, message_id))

    async def acquit(self, consumer: str, message_id: str) -> None:
        """Forget the suspicion."""
        self._suspects.remove((consumer, message_id))

    async def release(self, consumer: str, name: str, partition: Partition) -> None:
        """Take a partition off a row; the last one removes the row if it has expired."""
        member = self._members.get((consumer, name))
        if member is None:
            return
        left = member.partitions - {partition}
        if not left and member.expires_at <= self._clock.now():
            self._members.remove((consumer, name))
        else:
            self._members.put((consumer, name), replace(member, partitions=left))

    async def forget_expired(self, consumer: str) -> int:
        """Remove the rows that name no partition and have expired; return how many."""
        now = self._clock.now()
        ended = [
            (member.consumer, member.name)
            for member in self._members.rows()
            if member.consumer == consumer and not member.partitions and member.expires_at <= now
        ]
        for key in ended:
            self._members.remove(key)
        return len(ended)
