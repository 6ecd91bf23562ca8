"""The running members in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from semel.memory.tables import Table
from semel.message import Partition
from semel.messaging.records import Member, Note

if TYPE_CHECKING:
    from semel.memory.tables import MemoryTables


class MemoryMembers:
    """The members of the transaction that is open in *tables*."""

    def __init__(self, tables: MemoryTables) -> None:
        self._clock = tables.clock
        self._members: Table[tuple[str, str], Member] = tables.table("consumer_member")
        self._notes: Table[tuple[str, str], Note] = tables.table("crash_suspect")

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

    async def running(self, consumer: str) -> Sequence[Member]:
        """Return the rows that have not expired."""
        now = self._clock.now()
        rows = self._members.rows()
        return [
            member for member in rows if member.consumer == consumer and member.expires_at > now
        ]

    async def suspect(self, consumer: str, message_id: str, writer: str) -> int:
        """Note one more try of a message; return how many there are."""
        before = self._notes.get((consumer, message_id))
        tries = 1 if before is None else before.tries + 1
        self._notes.put((consumer, message_id), Note(tries, writer, self._clock.now()))
        return tries

    async def note(
        self, consumer: str, message_ids: Collection[str], writer: str
    ) -> Mapping[str, Note]:
        """Note one try of each of several messages; return what was noted before."""
        known = await self.notes(consumer, message_ids)
        for message_id in frozenset(message_ids) - known.keys():
            self._notes.put((consumer, message_id), Note(1, writer, self._clock.now()))
        return known

    async def notes(self, consumer: str, message_ids: Collection[str]) -> Mapping[str, Note]:
        """Return what is noted of messages."""
        found = {message_id: self._notes.get((consumer, message_id)) for message_id in message_ids}
        return {message_id: note for message_id, note in found.items() if note is not None}

    async def acquit(self, consumer: str, message_id: str) -> None:
        """Forget what was noted of a message, whoever did."""
        self._notes.remove((consumer, message_id))

    async def acquit_many(self, consumer: str, message_ids: Collection[str], writer: str) -> None:
        """Forget what *writer* noted of several messages."""
        for message_id, note in (await self.notes(consumer, message_ids)).items():
            if note.writer == writer:
                self._notes.remove((consumer, message_id))

    async def forget_notes(self, consumer: str, older_than_seconds: float, limit: int) -> int:
        """Delete at most *limit* notes that are that old; return how many."""
        until = self._clock.now() - older_than_seconds
        old = [
            key
            for key, note in self._notes.items()
            if key[0] == consumer and note.noted_at <= until
        ][:limit]
        for key in old:
            self._notes.remove(key)
        return len(old)

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
