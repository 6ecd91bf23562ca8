"""The life of one attempt at a cycle.

    PLANNED ──▶ PREPARED ──▶ COMMITTED ──▶ FINISHED
       │            │
       └────────────┴──────▶ ABORTED

COMMITTED is the commit point, and the only one.  Left of it an attempt can
always be given up; right of it it can only be carried through.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class CycleState(StrEnum):
    """The state of an attempt, as the ledger stores it."""

    PLANNED = "planned"
    """The attempt is in the ledger.  Tasks may be staging for it."""

    PREPARED = "prepared"
    """Every sink holds the batch, invisible, and has promised that it can commit."""

    COMMITTED = "committed"
    """The decision is COMMIT, together with the new source positions."""

    FINISHED = "finished"
    """Every sink has made the batch visible."""

    ABORTED = "aborted"
    """The decision is ABORT; the attempt's staged data may be removed."""

    @property
    def is_decided(self) -> bool:
        """Whether the write-once decision has been taken."""
        return self in (CycleState.COMMITTED, CycleState.FINISHED, CycleState.ABORTED)

    @property
    def is_committed(self) -> bool:
        """Whether the decision is COMMIT."""
        return self in (CycleState.COMMITTED, CycleState.FINISHED)


class Decision(StrEnum):
    """The write-once answer for one attempt; a cycle has at most one COMMIT, ever."""

    COMMIT = "commit"
    ABORT = "abort"


ARROWS: Final[Mapping[CycleState, frozenset[CycleState]]] = {
    CycleState.PLANNED: frozenset({CycleState.PREPARED, CycleState.ABORTED}),
    CycleState.PREPARED: frozenset({CycleState.COMMITTED, CycleState.ABORTED}),
    CycleState.COMMITTED: frozenset({CycleState.FINISHED}),
    CycleState.FINISHED: frozenset(),
    CycleState.ABORTED: frozenset(),
}
