"""The revisions in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from semel.memory.tables import MemoryTables, Table
from semel.messaging.records import is_conflict_with
from semel.operate.stores import Revision, RevisionFilter


class MemoryRevisions:
    """The revisions of one open transaction."""

    def __init__(self, tables: MemoryTables) -> None:
        self._tables = tables
        self._revisions: Table[tuple[str, str, int], Revision] = tables.table("message_revision")

    async def add(self, revision: Revision) -> Revision:
        """Write a message's next revision; return it with its number and time."""
        number = len(await self.of(revision.consumer, revision.message_id))
        written = replace(revision, number=number, at=self._tables.clock.now())
        self._put(written)
        return written

    async def of(self, consumer: str, message_id: str) -> Sequence[Revision]:
        """Return the revisions of one message, the original first."""
        return self._matching(RevisionFilter(consumer, message_id))

    async def other_names(self, message_id: str) -> frozenset[str]:
        """Return the ids that people gave to a message of this id, or took from it."""
        renamed = [r for r in self._revisions.rows() if r.new_id is not None]
        given = {r.new_id for r in renamed if r.message_id == message_id and r.new_id is not None}
        taken = {r.message_id for r in renamed if r.new_id == message_id}
        every = {r.message_id for r in self._revisions.rows()}
        return frozenset(given | taken | {id for id in every if is_conflict_with(id, message_id)})

    async def erase(self, which: RevisionFilter) -> int:
        """Remove the payloads of matching revisions; hashes, names and reasons stay."""
        found = [revision for revision in self._matching(which) if revision.erased_at is None]
        for revision in found:
            self._put(replace(revision, payload=None, erased_at=self._tables.clock.now()))
        return len(found)

    def _put(self, revision: Revision) -> None:
        key = (revision.consumer, revision.message_id, revision.number)
        self._revisions.put(key, revision)

    def _matching(self, which: RevisionFilter) -> list[Revision]:
        found = [
            revision
            for revision in self._revisions.rows()
            if which.consumer in (None, revision.consumer)
            and which.message_id in (None, revision.message_id)
            and which.key in (None, revision.key)
        ]
        return sorted(found, key=lambda revision: revision.number)
