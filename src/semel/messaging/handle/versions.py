"""The versions of an aggregate: whether one is old, the next, or after a gap."""

from __future__ import annotations

from enum import StrEnum

from semel.messaging.settings import FIRST_VERSION


class InSequence(StrEnum):
    """How a version relates to the one that was applied last."""

    OLD = "old"
    NEXT = "next"
    GAP = "gap"


def due_version(current: int | None, first: int = FIRST_VERSION) -> int:
    """Return the version that comes after the one that was applied last (None: none yet)."""
    return first if current is None else current + 1


def in_sequence(version: int, current: int | None, first: int = FIRST_VERSION) -> InSequence:
    """Compare a message's version with the one that was applied last (None: none yet).

    Before a version was applied, none is old: a version lower than *first* begins the
    aggregate, too.
    """
    due = due_version(current, first)
    if version == due or (current is None and version < due):
        return InSequence.NEXT
    return InSequence.OLD if version < due else InSequence.GAP
