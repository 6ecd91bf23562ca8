"""The waiting room in memory; one transaction at a time is lock enough."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from semel.memory.tables import MemoryTables, Table
from semel.message import Partition
from semel.messaging.records import HeldKey, WaitingFilter, WaitingMessage, Waits, is_conflict_with
from semel.messaging.redact import ERASED_REASON


class MemoryWaitingRoom:
    """The waiting messages of one open transaction."""

    def __init__(self, tables: MemoryTables) -> None:
        self._tables = tables
        self._messages: Table[tuple[str, str], WaitingMessage] = tables.table("waiting_message")

    async def hold(self, consumer: str, keys: Sequence[str]) -> frozenset[str]:
        """Say which of the keys are held."""
        return frozenset(keys) & {waiting.key for waiting in self._held(consumer)}

    async def put(self, waiting: WaitingMessage, delay_seconds: float = 0.0) -> None:
        """Let a message in, at the end of the queue; one that is there already is updated."""
        now = self._tables.clock.now()
        due_at = now + delay_seconds
        failed_at = waiting.first_failed_at or (0.0 if waiting.waits is Waits.BEHIND else now)
        before = self._messages.get((waiting.consumer, waiting.message_id))
        if before is None:
            held = waiting.held and waiting.key is not None
            place = self._tables.next_number("waiting_message")
            since = waiting.since or now
            new = replace(waiting, place=place, held=held, due_at=due_at, since=since)
            self._put(replace(new, first_failed_at=failed_at))
            return
        self._put(
            replace(
                before,
                # Nothing can be handled whose payload is gone.
                waits=waiting.waits if before.erased_at is None else Waits.PARKED,
                due_at=due_at,
                attempts=waiting.attempts,
                # Why it failed again may quote what was erased.
                reason=waiting.reason if before.erased_at is None else ERASED_REASON,
                error_code=waiting.error_code,
                exception=waiting.exception,
                first_failed_at=before.first_failed_at or failed_at,
            )
        )

    async def take_due(
        self, consumer: str, limit: int, after_place: int = 0
    ) -> Sequence[WaitingMessage]:
        """Return messages whose turn it is, in order of place, behind *after_place*."""
        now = self._tables.clock.now()
        due = (waiting for waiting in self._whose_turn(consumer) if _due_at(waiting) <= now)
        return [waiting for waiting in due if waiting.place > after_place][:limit]

    async def take(self, consumer: str, message_id: str) -> WaitingMessage | None:
        """Return one message, if it is its turn."""
        due = await self.take_due(consumer, len(self._messages))
        return next((waiting for waiting in due if waiting.message_id == message_id), None)

    async def take_many(
        self, consumer: str, message_ids: Collection[str]
    ) -> Sequence[WaitingMessage]:
        """Return those of several messages whose turn it is, in order of place."""
        due = await self.take_due(consumer, len(self._messages))
        return [waiting for waiting in due if waiting.message_id in message_ids]

    async def seconds_to_next(self, consumer: str) -> float | None:
        """Return the seconds until `take_due` has something; None where nothing waits for time."""
        times = [_due_at(waiting) for waiting in self._whose_turn(consumer)]
        return max(min(times) - self._tables.clock.now(), 0.0) if times else None

    async def get(self, consumer: str, message_id: str) -> WaitingMessage | None:
        """Return one waiting message."""
        return self._messages.get((consumer, message_id))

    async def find(self, which: WaitingFilter, limit: int) -> Sequence[WaitingMessage]:
        """Return matching messages in order of place."""
        return [waiting for waiting in self._in_order() if _matches(waiting, which)][:limit]

    async def count(self, which: WaitingFilter) -> int:
        """Count matching messages."""
        return len(await self.find(which, len(self._messages)))

    async def held_keys(self, consumer: str, limit: int) -> Sequence[HeldKey]:
        """Return the keys that are held, the longest first."""
        queues: dict[str, list[WaitingMessage]] = {}
        for waiting in self._held(consumer):
            queues.setdefault(waiting.key or "", []).append(waiting)
        found = [
            HeldKey(consumer, key, queue[0], len(queue) - 1, min(one.since for one in queue))
            for key, queue in queues.items()
        ]
        return sorted(found, key=lambda held: (held.since, held.head.place))[:limit]

    async def remove(self, consumer: str, message_id: str) -> bool:
        """Take a message out; the last one of its key lets the key go."""
        return self._messages.remove((consumer, message_id))

    async def remove_many(self, consumer: str, message_ids: Sequence[str]) -> None:
        """Take messages out, as `remove` does with one."""
        for message_id in message_ids:
            self._messages.remove((consumer, message_id))

    async def label(self, consumer: str, message_id: str, label: str) -> bool:
        """Write what a person classified it as."""
        waiting = self._messages.get((consumer, message_id))
        if waiting is not None:
            self._put(replace(waiting, label=label))
        return waiting is not None

    async def release(self, consumer: str, message_id: str) -> bool:
        """Make a parked message a retry that is due, in its place; an operator's act."""
        before = self._messages.get((consumer, message_id))
        if before is None or before.waits is not Waits.PARKED or before.erased_at is not None:
            return False
        self._put(replace(before, waits=Waits.RETRY, due_at=self._tables.clock.now()))
        return True

    async def let_go(self, consumer: str, message_id: str) -> bool:
        """Give a message its turn whatever of its key is before it."""
        waiting = self._messages.get((consumer, message_id))
        if waiting is not None:
            self._put(replace(waiting, held=False))
        return waiting is not None

    async def revise(
        self, consumer: str, message_id: str, payload: bytes, payload_hash: str, new_id: str
    ) -> bool:
        """Replace what will be handled, and under which id; the place in the queue stays."""
        before = self._messages.get((consumer, message_id))
        if before is None or before.erased_at is not None:
            return False
        self._messages.remove((consumer, message_id))
        self._put(replace(before, message_id=new_id, payload=payload, payload_hash=payload_hash))
        return True

    async def erase(self, which: WaitingFilter) -> int:
        """Remove payload, headers and reason of matching messages; hashes and error codes stay."""
        now = self._tables.clock.now()
        found = [w for w in self._in_order() if _matches(w, which) and w.erased_at is None]
        for waiting in found:
            gone = replace(waiting, payload=None, headers={}, reason=ERASED_REASON)
            self._put(replace(gone, waits=Waits.PARKED, erased_at=now))
        return len(found)

    async def places(
        self, consumer: str, partition: Partition, first: int, last: int, limit: int
    ) -> Sequence[tuple[int, Waits]]:
        """Return the first offsets between two, both included, whose messages wait, in order."""
        found = sorted(
            (waiting.source.offset, waiting.waits)
            for waiting in self._messages.rows()
            if waiting.consumer == consumer
            and waiting.source is not None
            and waiting.source.place == partition
            and first <= waiting.source.offset <= last
        )
        return found[:limit]

    async def forget_keys(self, consumer: str, older_than_seconds: float, limit: int) -> int:
        """Do nothing: there are no locks of keys."""
        return 0

    def _put(self, waiting: WaitingMessage) -> None:
        self._messages.put((waiting.consumer, waiting.message_id), waiting)

    def _in_order(self) -> list[WaitingMessage]:
        return sorted(self._messages.rows(), key=lambda waiting: waiting.place)

    def _held(self, consumer: str) -> list[WaitingMessage]:
        return [w for w in self._in_order() if w.consumer == consumer and w.held]

    def _whose_turn(self, consumer: str) -> Iterator[WaitingMessage]:
        """Find what time alone, or nothing at all, keeps here: of each held key its first."""
        keys: set[str | None] = set()
        for waiting in self._in_order():
            if waiting.consumer != consumer or (waiting.held and waiting.key in keys):
                continue
            if waiting.held:
                keys.add(waiting.key)
            if waiting.waits is not Waits.PARKED:
                yield waiting


def _due_at(waiting: WaitingMessage) -> float:
    return 0.0 if waiting.waits is Waits.BEHIND else waiting.due_at


def _matches(waiting: WaitingMessage, which: WaitingFilter) -> bool:
    equal = (
        (which.consumer, waiting.consumer),
        (which.message_id, waiting.message_id),
        (which.key, waiting.key),
        (which.waits, waiting.waits),
        (which.label, waiting.label),
        (which.error_code, waiting.error_code),
        (which.held, waiting.held),
    )
    return (
        all(wanted is None or wanted == found for wanted, found in equal)
        and (
            which.conflicts_with is None
            or is_conflict_with(waiting.message_id, which.conflicts_with)
        )
        and (which.since is None or waiting.since >= which.since)
        and (which.until is None or waiting.since < which.until)
        and (which.after_place is None or waiting.place > which.after_place)
    )
