"""Versions of aggregates: skip the old, apply the next, notice the gap (S3-34, S3-35)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class InSequence(StrEnum):
    """How a version stands to the one that was applied last."""

    OLD = "old"
    NEXT = "next"
    GAP = "gap"


class GapPolicy(StrEnum):
    """What happens when versions are missing."""

    RETRY = "retry"
    """The message is tried again later, as often as the retry policy says."""

    FETCH = "fetch"
    """The consumer's own function brings the state up to the version before."""

    REBUILD = "rebuild"
    """The consumer's own function rebuilds the aggregate, this message included."""

    PARK_KEY = "park-key"
    """The key waits for a person, with its later messages behind it."""

    ALERT = "alert"
    """The message is applied across the gap, which stays listed until somebody closes it."""


def in_sequence(version: int, current: int) -> InSequence:
    """Compare a message's version with the one that was applied last (0: none)."""
    if version <= current:
        return InSequence.OLD
    return InSequence.NEXT if version == current + 1 else InSequence.GAP


@dataclass(frozen=True, slots=True)
class Gap:
    """Versions of a key that did not come."""

    consumer: str
    key: str
    expected: int
    """The first version that is missing."""

    found: int
    """The version that came instead."""

    since: float = 0.0
    closed_at: float | None = None
    how: str = ""
    """How it was closed: ``arrived``, ``fetched``, ``rebuilt``, or a person's reason."""


class Versions(Protocol):
    """The applied versions, in one open transaction."""

    async def current(self, consumer: str, key: str) -> int:
        """Lock a key and return the version that was applied last; 0 where none was."""
        ...

    async def advance(self, consumer: str, key: str, version: int) -> None:
        """Write the version that is applied with this transaction."""
        ...

    async def open_gap(self, gap: Gap) -> None:
        """List a gap; one that is listed already keeps its time."""
        ...

    async def close_gaps(self, consumer: str, key: str, up_to: int, how: str) -> int:
        """Close the key's gaps whose missing versions are all at or below *up_to*."""
        ...

    async def gaps(self, consumer: str | None, limit: int) -> Sequence[Gap]:
        """Return the open gaps, the oldest first."""
        ...

    async def delete_closed(self, consumer: str, ttl_seconds: float, limit: int) -> int:
        """Delete gaps that are closed since so long; return how many."""
        ...
