"""The dead letters in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from semel.memory.tables import MemoryTables, Table
from semel.message import Partition
from semel.messaging.records import DeadLetter, DeadLetterFilter, is_conflict_with
from semel.messaging.redact import ERASED_REASON


class MemoryDeadLetters:
    """The dead letters of one open transaction."""

    def __init__(self, tables: MemoryTables) -> None:
        self._tables = tables
        self._letters: Table[tuple[str, str], DeadLetter] = tables.table("dead_letter")

    async def put(self, letter: DeadLetter) -> bool:
        """Write a dead letter; False where a later failure of the same message updates it."""
        first = self._letters.get((letter.consumer, letter.message_id))
        if first is None:
            self._put(letter)
            return True
        self._put(
            replace(
                first,
                # Why it failed again may quote what was erased.
                reason=letter.reason if first.erased_at is None else ERASED_REASON,
                exception=letter.exception,
                error_code=letter.error_code,
                attempts=letter.attempts,
                last_failed_at=letter.last_failed_at,
                owner=letter.owner,
                outcome=letter.outcome,
                needs_review=letter.needs_review,
                expected_hash=letter.expected_hash,
            )
        )
        return False

    async def get(self, consumer: str, message_id: str) -> DeadLetter | None:
        """Return one dead letter."""
        return self._letters.get((consumer, message_id))

    async def find(self, which: DeadLetterFilter, limit: int) -> Sequence[DeadLetter]:
        """Return matching dead letters, the oldest first."""
        found = sorted(self._matching(which), key=lambda letter: (*_place(letter), letter.consumer))
        after = which.after
        return [letter for letter in found if after is None or _place(letter) > after][:limit]

    async def count(self, which: DeadLetterFilter) -> int:
        """Count matching dead letters."""
        return len(self._matching(which))

    async def remove(self, consumer: str, message_id: str) -> bool:
        """Take a dead letter away; False where there is none."""
        return self._letters.remove((consumer, message_id))

    async def places(
        self, consumer: str, partition: Partition, first: int, last: int, limit: int
    ) -> Sequence[int]:
        """Return the first offsets between two, both included, that have letters, in order."""
        found = sorted(
            letter.source.offset
            for letter in self._letters.rows()
            if letter.consumer == consumer
            and letter.source is not None
            and letter.source.place == partition
            and first <= letter.source.offset <= last
        )
        return found[:limit]

    async def erase(self, which: DeadLetterFilter) -> int:
        """Remove payload, headers and reason of matching letters; hashes and error codes stay."""
        found = [letter for letter in self._matching(which) if letter.erased_at is None]
        now = self._tables.clock.now()
        for letter in found:
            gone = replace(letter, payload=None, headers={}, reason=ERASED_REASON)
            self._put(replace(gone, erased_at=now))
        return len(found)

    def _put(self, letter: DeadLetter) -> None:
        self._letters.put((letter.consumer, letter.message_id), letter)

    def _matching(self, which: DeadLetterFilter) -> list[DeadLetter]:
        return [letter for letter in self._letters.rows() if _matches(letter, which)]


def _place(letter: DeadLetter) -> tuple[float, str]:
    return letter.first_failed_at, letter.message_id


def _matches(letter: DeadLetter, which: DeadLetterFilter) -> bool:
    equal = (
        (which.consumer, letter.consumer),
        (which.message_id, letter.message_id),
        (which.key, letter.key),
        (which.topic, letter.topic),
        (which.error_code, letter.error_code),
        (which.outcome, letter.outcome),
    )
    return (
        all(wanted is None or wanted == found for wanted, found in equal)
        and (
            which.conflicts_with is None
            or is_conflict_with(letter.message_id, which.conflicts_with)
        )
        and (which.since is None or letter.first_failed_at >= which.since)
        and (which.until is None or letter.first_failed_at < which.until)
    )
