"""The inbox in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from semel.errors import Misuse
from semel.memory.gone import is_over
from semel.memory.tables import MemoryTables, Table
from semel.messaging.database import Sweep
from semel.messaging.handle.claims import ERASED
from semel.messaging.records import DeadLetter, InboxMessage


class MemoryInboxStore:
    """The inbox of one open transaction."""

    def __init__(self, tables: MemoryTables) -> None:
        self._tables = tables
        self._messages: Table[tuple[str, str], InboxMessage] = tables.table("inbox_message")
        self._letters: Table[tuple[str, str], DeadLetter] = tables.table("dead_letter")

    async def store(self, message: InboxMessage) -> bool:
        """Write a message that is due at once; False where its id is there already."""
        if (message.consumer, message.message_id) in self._messages:
            return False
        now = self._tables.clock.now()
        place = self._tables.next_number("inbox_message")
        self._put(replace(message, place=place, received_at=now, due_at=now))
        return True

    async def withdraw(self, consumer: str, message_id: str) -> None:
        """Remove a message that *this* transaction stored, as if it had never come."""
        self._messages.remove((consumer, message_id))

    async def take_due(self, consumer: str, limit: int) -> Sequence[InboxMessage]:
        """Lock and return unprocessed messages that are due, in order of arrival."""
        now = self._tables.clock.now()
        keys: set[str] = set()
        due: list[InboxMessage] = []
        for message in sorted(self._of(consumer), key=lambda message: message.place):
            if message.processed_at is not None or message.due_at is None:
                continue
            if message.due_at <= now and message.key not in keys and len(due) < limit:
                due.append(message)
            if message.key is not None:
                keys.add(message.key)
        return due

    async def done(self, consumer: str, message_id: str, result: str | None = None) -> None:
        """Mark a message as processed in this transaction, and count the attempt."""
        message = self._messages.get((consumer, message_id))
        if message is not None:
            now, attempts = self._tables.clock.now(), message.attempts + 1
            self._put(
                replace(message, processed_at=now, result=result, error="", attempts=attempts)
            )

    async def failed(
        self, consumer: str, message_id: str, error: str, delay_seconds: float | None
    ) -> int:
        """Write a failed attempt and when it is due again (None: never); return the attempts."""
        message = self._messages.get((consumer, message_id))
        if message is None:
            return 0
        if message.processed_at is not None:
            return message.attempts
        ends = delay_seconds is None or message.erased_at is not None
        due = None if ends else self._tables.clock.now() + (delay_seconds or 0.0)
        attempts = message.attempts + 1
        said = error if message.erased_at is None else message.error
        self._put(replace(message, error=said, due_at=due, attempts=attempts))
        return attempts

    async def try_again(self, consumer: str, message_id: str) -> bool:
        """Make a message that is not tried any more due now, its attempts forgotten."""
        message = self._messages.get((consumer, message_id))
        if message is None or message.due_at is not None:
            return False
        if message.processed_at is not None or message.erased_at is not None:
            return False
        self._put(replace(message, due_at=self._tables.clock.now(), attempts=0, error=""))
        return True

    async def close(self, consumer: str, message_id: str, word: str) -> bool:
        """Mark a message as processed without an effect, by a person's *word*."""
        message = self._messages.get((consumer, message_id))
        if message is None or message.processed_at is not None:
            return False
        self._put(replace(message, processed_at=self._tables.clock.now(), error=word))
        return True

    async def get(self, consumer: str, message_id: str) -> InboxMessage | None:
        """Return one message."""
        return self._messages.get((consumer, message_id))

    async def consumers_of(self, message_id: str) -> Sequence[str]:
        """Name the consumers for which a message is stored, in order."""
        return sorted(m.consumer for m in self._messages.rows() if m.message_id == message_id)

    async def pending(self, consumer: str) -> int:
        """Count what is not processed yet and will be tried."""
        waits = (m for m in self._of(consumer) if m.processed_at is None and m.due_at is not None)
        return sum(1 for _ in waits)

    async def delete_processed(
        self, consumer: str, older_than_seconds: float, limit: int, sweep: Sweep | None = None
    ) -> int:
        """Delete at most *limit* messages that were processed so long ago."""
        before, sweep = self._tables.clock.now() - older_than_seconds, sweep or Sweep()
        old = [
            message
            for message in self._of(consumer)
            if message.processed_at is not None and message.processed_at <= before
            if message.place >= sweep.since()
            if is_over(self._tables, consumer, message.message_id)
        ]
        for message in old[:limit]:
            self._messages.remove((consumer, message.message_id))
        return sweep.note([message.place for message in old[:limit]])

    async def erase(
        self,
        *,
        message_id: str | None = None,
        key: str | None = None,
        consumer: str | None = None,
    ) -> int:
        """Remove payload, headers and result of matching messages; what waited is not tried."""
        if message_id is None and key is None:
            raise Misuse("say whose messages of the inbox are erased: an id or a key")
        meant = [
            message
            for message in self._messages.rows()
            if message_id in (None, message.message_id)
            and key in (None, message.key)
            and consumer in (None, message.consumer)
            and message.erased_at is None
        ]
        now = self._tables.clock.now()
        for message in meant:
            gone = replace(message, payload=None, headers={}, result=None, erased_at=now)
            if message.processed_at is None:
                gone = replace(gone, due_at=None, error=ERASED)
                if (message.consumer, message.message_id) not in self._letters:
                    gone = replace(gone, processed_at=now)
            self._put(gone)
        return len(meant)

    def _of(self, consumer: str) -> list[InboxMessage]:
        return [message for message in self._messages.rows() if message.consumer == consumer]

    def _put(self, message: InboxMessage) -> None:
        self._messages.put((message.consumer, message.message_id), message)
