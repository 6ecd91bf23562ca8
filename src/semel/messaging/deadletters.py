"""Dead letters: durable, owned, replayable records of what could not be handled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from semel.codec import unreadable_id
from semel.message import Coordinates, Partition


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One dead letter, with the thirteen fields of S3-27; one per consumer and message id."""

    consumer: str
    message_id: str
    topic: str
    partition: int | None
    offset: int | None
    key: str | None
    payload: bytes | None
    """The bytes as they came; None once they were erased."""

    reason: str
    exception: str
    error_code: str
    attempts: int
    first_failed_at: float
    last_failed_at: float
    headers: Mapping[str, bytes] = field(default_factory=dict)
    schema_version: str = ""
    correlation_id: str = ""
    message_type: str = ""
    timestamp: float = 0.0
    payload_hash: str = ""
    owner: str = ""
    """The team that looks after it."""

    outcome: str = "dlq"
    """``dlq``, ``deserialization_failure``, ``schema_incompatible`` or ``conflict``."""

    needs_review: bool = False
    """A person must have looked at it before it is handled again."""

    expected_hash: str = ""
    """For a conflict: the hash of the payload that came first."""

    erased_at: float | None = None

    @property
    def source(self) -> Coordinates | None:
        """Where the record stood, if that is known."""
        if self.partition is None or self.offset is None:
            return None
        return Coordinates(self.topic, self.partition, self.offset)

    @property
    def was_no_message(self) -> bool:
        """Tell whether its record could not be read, and is filed under its coordinates."""
        return self.source is not None and self.message_id == unreadable_id(self.source)


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """Which dead letters are meant; what is None does not matter."""

    consumer: str | None = None
    message_id: str | None = None
    conflicts_with: str | None = None
    """Conflicts that came with this id, filed under one that was made up."""

    key: str | None = None
    topic: str | None = None
    error_code: str | None = None
    outcome: str | None = None
    since: float | None = None
    until: float | None = None
    after: tuple[float, str] | None = field(default=None)
    """Go on behind this (first_failed_at, message_id), for pages."""


class DeadLetters(Protocol):
    """The dead letters, in one open transaction.

    The contract is executable: `semel.testing.contracts.DeadLettersContract`.
    """

    async def put(self, letter: DeadLetter) -> bool:
        """Write a dead letter; False where a later failure of the same message updates it.

        The first failure's time and the original payload stay.
        """
        ...

    async def get(self, consumer: str, message_id: str) -> DeadLetter | None:
        """Return one dead letter."""
        ...

    async def find(self, which: DeadLetterFilter, limit: int) -> Sequence[DeadLetter]:
        """Return matching dead letters, the oldest first."""
        ...

    async def count(self, which: DeadLetterFilter) -> int:
        """Count matching dead letters."""
        ...

    async def remove(self, consumer: str, message_id: str) -> bool:
        """Take a dead letter away: it was replayed, skipped, parked or deleted."""
        ...

    async def places(
        self, consumer: str, partition: Partition, first: int, last: int, limit: int
    ) -> Sequence[int]:
        """Return the first offsets between two, both included, that have letters, in order.

        For the audit of completeness.
        """
        ...

    async def erase(self, which: DeadLetterFilter) -> int:
        """Remove payload, headers and reason of matching letters; hashes and error codes stay."""
        ...
