"""The replays that were begun, and how far each is.

    RUNNING ──▶ FINISHED            everything that was selected had its turn
       │ ▲
       ▼ │ run again
    STOPPED, FAILED                 a canary is over, a person said so; too much failed
       │
       ▼
    ABANDONED                       from any state but FINISHED: nobody will go on with it

A replay whose process died stays RUNNING: whoever runs it again goes on behind
its cursor.  Whatever can still go on needs the claims, so none of its consumer's
are pruned before it is FINISHED or ABANDONED.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol


class ReplayState(StrEnum):
    """How a replay stands."""

    RUNNING = "running"
    """Somebody is at it, or died at it."""

    STOPPED = "stopped"
    """It waits for somebody who runs it again."""

    FAILED = "failed"
    """It stopped by itself, because too much failed; it can be run again."""

    FINISHED = "finished"
    """Everything that was selected had its turn."""

    ABANDONED = "abandoned"
    """Somebody let it go: nobody can go on with it, and the claims are no longer kept for it."""


OVER: Final = frozenset({ReplayState.FINISHED, ReplayState.ABANDONED})
"""The states that nobody goes on from: these replays need no claims."""


@dataclass(frozen=True, slots=True)
class ReplayRun:
    """One replay, as it is kept."""

    name: str
    consumer: str
    selection: str
    """Which messages, as JSON."""

    actor: str
    """Who began it."""

    state: ReplayState = ReplayState.RUNNING
    cursor: str = ""
    """How far it is, as JSON; changes with everything that it does."""

    done: int = 0
    """Messages that had their turn."""

    failed: int = 0
    began_at: float = 0.0
    updated_at: float = 0.0


class Replays(Protocol):
    """The replays, in one open transaction.

    The contract is executable: `semel.testing.contracts.ReplaysContract`.
    """

    async def begin(self, run: ReplayRun) -> bool:
        """Write a new replay, at the database's time; False where the name is taken."""
        ...

    async def get(self, name: str) -> ReplayRun | None:
        """Return one replay."""
        ...

    async def advance(self, run: ReplayRun, cursor_before: str) -> bool:
        """Write state, cursor and counts of a replay that runs, if nobody else went on with it.

        False, and nothing changed, where its cursor is not *cursor_before* or it does not run.
        """
        ...

    async def set_state(self, name: str, before: ReplayState, after: ReplayState) -> bool:
        """Change the state, and nothing else; False where it is not *before*."""
        ...

    async def find(self, consumer: str | None, limit: int) -> Sequence[ReplayRun]:
        """Return replays, the newest first."""
        ...

    async def unfinished(self, consumer: str) -> Sequence[str]:
        """Return the names of a consumer's replays that can go on, whether they run or not.

        Until the transaction ends, no replay begins, and one that is being begun is waited
        for: what is deleted on the strength of the answer is deleted before or not at all.
        """
        ...

    async def delete_over(self, consumer: str, ttl_seconds: float, limit: int) -> int:
        """Delete replays that are over since so long; return how many."""
        ...
