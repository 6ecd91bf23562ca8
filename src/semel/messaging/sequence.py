"""Versions of aggregates: skip the old, apply the next, notice the gap (S3-34, S3-35)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol


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
    """The message is applied across the gap: it is told of, and listed until somebody closes it."""


FIRST_VERSION: Final = 1
"""Where producers begin to count, unless a consumer's settings say otherwise."""


def due_version(current: int | None, first: int = FIRST_VERSION) -> int:
    """Return the version that comes after the one that was applied last (None: none yet)."""
    return first if current is None else current + 1


def in_sequence(version: int, current: int | None, first: int = FIRST_VERSION) -> InSequence:
    """Compare a message's version with the one that was applied last (None: none yet).

    Before anything was applied nothing is old: a version before the *first* one begins the
    aggregate, too.
    """
    due = due_version(current, first)
    if version == due or (current is None and version < due):
        return InSequence.NEXT
    return InSequence.OLD if version < due else InSequence.GAP


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

    async def current(self, consumer: str, key: str) -> int | None:
        """Lock a key and return the version that was applied last; None where none was."""
        ...

    async def advance(self, consumer: str, key: str, version: int) -> None:
        """Write the version that is applied with this transaction."""
        ...

    async def open_gap(self, gap: Gap) -> None:
        """List a gap; one that is listed already keeps its time."""
        ...

    async def close_gaps(
        self, consumer: str, key: str, up_to: int, how: str, after: int | None = None
    ) -> int:
        """Close the key's gaps whose missing versions are all at or below *up_to*.

        Of those, with *after*, only the ones of which the last is behind it: a gap that ends at
        or before the version that was applied last was crossed, and nothing has filled it.
        """
        ...

    async def gaps(self, consumer: str | None, limit: int) -> Sequence[Gap]:
        """Return the open gaps, the oldest first."""
        ...

    async def delete_closed(self, consumer: str, ttl_seconds: float, limit: int) -> int:
        """Delete gaps that are closed since so long; return how many."""
        ...
