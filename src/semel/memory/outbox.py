"""The outbox in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from semel.errors import Misuse
from semel.memory.session import MemorySession
from semel.memory.tables import MemoryTables, Table
from semel.messaging.redact import ERASED_REASON
from semel.messaging.send.outbox import (
    Leader,
    Leadership,
    LeadershipLost,
    OutboxEntry,
    OutboxNumbers,
    refuse_another,
)


@dataclass(frozen=True, slots=True)
class _Lease:
    owner: str = ""
    epoch: int = 0
    until: float = 0.0


class MemoryOutboxStore:
    """The outbox of one open transaction."""

    def __init__(self, tables: MemoryTables) -> None:
        self._tables = tables
        self._entries: Table[int, OutboxEntry] = tables.table("outbox_message")
        self._places: Table[tuple[str, str], int] = tables.table("outbox_message by id")
        self._leases: Table[str, _Lease] = tables.table("outbox_leader")

    async def add(self, entries: Sequence[OutboxEntry]) -> None:
        """Write entries; one that is there already is left as it is."""
        for entry in entries:
            known = self._places.get((entry.outbox, entry.message_id))
            if known is not None:
                self._meet(self._entries.get(known), entry)
                continue
            place = self._tables.next_number("outbox_message")
            now = self._tables.clock.now()
            self._entries.put(place, entry._replace(place=place, created_at=now))
            self._places.put((entry.outbox, entry.message_id), place)

    async def lead(
        self, outbox: str, owner: str, seconds: float, *, instead_of: str = ""
    ) -> Leadership | None:
        """Take or keep the leadership; None while another owner's lease lives."""
        lease = self._leases.get(outbox) or _Lease()
        now = self._tables.clock.now()
        if lease.owner not in (owner, instead_of) and lease.until > now:
            return None
        epoch = lease.epoch if lease.owner == owner else lease.epoch + 1
        self._leases.put(outbox, _Lease(owner, epoch, now + seconds))
        return Leadership(outbox, owner, epoch)

    async def leader(self, outbox: str) -> Leader | None:
        """Say who relays; None where nobody ever did."""
        lease = self._leases.get(outbox)
        if lease is None:
            return None
        return Leader(lease.owner, lease.epoch, max(0.0, lease.until - self._tables.clock.now()))

    async def resign(self, leadership: Leadership) -> None:
        """Give the leadership up; nothing happens where it was lost."""
        if self._stands(leadership):
            self._leases.put(leadership.outbox, _Lease(epoch=leadership.epoch))

    async def read(self, outbox: str, after_place: int, limit: int) -> Sequence[OutboxEntry]:
        """Return entries behind *after_place* that are not parked, in order."""
        waiting = (e for e in self._of(outbox) if e.place > after_place and not e.parked_reason)
        return [entry for _, entry in zip(range(limit), waiting, strict=False)]

    async def delete(self, leadership: Leadership, places: Sequence[int]) -> int:
        """Delete exactly these entries, if the leadership still stands."""
        self._check(leadership)
        return sum(self._remove(leadership.outbox, place) for place in places)

    async def failed(self, leadership: Leadership, places: Sequence[int]) -> None:
        """Count a failed publication of each of these entries."""
        self._check(leadership)
        for place in places:
            self._change(leadership.outbox, place)

    async def park(self, leadership: Leadership, place: int, reason: str) -> None:
        """Set an entry aside that the broker will never take, and count the failure."""
        self._check(leadership)
        entry = self._entries.get(place)
        # What the broker says of an entry that was erased since it was read may quote its value.
        is_erased = entry is not None and entry.erased_at is not None
        said = ERASED_REASON if is_erased else reason
        self._change(leadership.outbox, place, parked_reason=said)

    async def unpark(self, outbox: str, message_id: str) -> bool:
        """Send a parked entry again, as if for the first time; an operator's act."""
        entry = self._parked(outbox, message_id)
        if entry is None or entry.erased_at is not None:
            return False
        self._entries.put(entry.place, entry._replace(parked_reason="", attempts=0))
        return True

    async def drop(self, outbox: str, message_id: str) -> bool:
        """Take a parked entry out for good; an operator's act."""
        entry = self._parked(outbox, message_id)
        return entry is not None and self._remove(outbox, entry.place)

    async def parked(self, outbox: str, limit: int) -> Sequence[OutboxEntry]:
        """Return the entries that were set aside, in order."""
        return [entry for entry in self._of(outbox) if entry.parked_reason][:limit]

    async def parked_keys(self, outbox: str) -> frozenset[tuple[str, str]]:
        """Return (topic, key) of parked entries that later ones wait for; of erased ones, none."""
        parked = (entry for entry in self._of(outbox) if entry.parked_reason)
        aside = (entry for entry in parked if entry.erased_at is None)
        return frozenset((entry.topic, entry.key) for entry in aside if entry.key is not None)

    async def children(self, parent: str) -> Sequence[OutboxEntry]:
        """Return entries that handling one message wrote and that are still here."""
        return [entry for entry in self._all() if entry.parent == parent]

    async def numbers(self, outbox: str) -> OutboxNumbers:
        """Count what is pending and say how old the oldest is."""
        every = self._of(outbox)
        pending = [entry.created_at for entry in every if not entry.parked_reason]
        now = self._tables.clock.now()
        oldest = now - min(pending) if pending else 0.0
        return OutboxNumbers(len(pending), len(every) - len(pending), oldest)

    async def erase(
        self, *, message_id: str | None = None, key: str | None = None, parent: str | None = None
    ) -> int:
        """Remove value, headers and the broker's words of matching entries, and park them all."""
        if message_id is None and key is None and parent is None:
            raise Misuse("say whose entries of the outbox are erased: an id, a key or a parent")
        meant = [
            entry
            for entry in self._all()
            if message_id in (None, entry.message_id)
            and key in (None, entry.key, entry.parent_key)
            and parent in (None, entry.parent)
            and entry.erased_at is None
        ]
        for entry in meant:
            erased = entry._replace(value=None, headers={}, erased_at=self._tables.clock.now())
            self._entries.put(entry.place, erased._replace(parked_reason=ERASED_REASON))
        return len(meant)

    def _meet(self, there: OutboxEntry | None, new: OutboxEntry) -> None:
        if there is not None:
            refuse_another(there, new)

    def _all(self) -> list[OutboxEntry]:
        return [entry for _, entry in sorted(self._entries.items())]

    def _of(self, outbox: str) -> list[OutboxEntry]:
        return [entry for entry in self._all() if entry.outbox == outbox]

    def _parked(self, outbox: str, message_id: str) -> OutboxEntry | None:
        place = self._places.get((outbox, message_id))
        entry = None if place is None else self._entries.get(place)
        return entry if entry is not None and entry.parked_reason else None

    def _stands(self, leadership: Leadership) -> bool:
        lease = self._leases.get(leadership.outbox) or _Lease()
        return (lease.owner, lease.epoch) == (leadership.owner, leadership.epoch)

    def _check(self, leadership: Leadership) -> None:
        if not self._stands(leadership):
            raise LeadershipLost(leadership.outbox, leadership.epoch)

    def _change(self, outbox: str, place: int, **changed: Any) -> None:
        entry = self._entries.get(place)
        if entry is not None and entry.outbox == outbox:
            self._entries.put(place, entry._replace(attempts=entry.attempts + 1, **changed))

    def _remove(self, outbox: str, place: int) -> bool:
        entry = self._entries.get(place)
        if entry is None or entry.outbox != outbox:
            return False
        self._places.remove((outbox, entry.message_id))
        return self._entries.remove(place)


def store_of(session: MemorySession) -> MemoryOutboxStore:
    """Return the outbox in the transaction of a handler's session."""
    return MemoryOutboxStore(session._tables)
