"""The replays in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from semel.memory.tables import MemoryTables, Table
from semel.operate.stores import OVER, ReplayRun, ReplayState


class MemoryReplays:
    """The replays of one open transaction."""

    def __init__(self, tables: MemoryTables) -> None:
        self._clock = tables.clock
        self._runs: Table[str, ReplayRun] = tables.table("replay_run")

    async def begin(self, run: ReplayRun) -> bool:
        """Write a new replay, at the database's time; False where the name is taken."""
        if run.name in self._runs:
            return False
        now = self._clock.now()
        self._runs.put(run.name, replace(run, began_at=now, updated_at=now))
        return True

    async def get(self, name: str) -> ReplayRun | None:
        """Return one replay."""
        return self._runs.get(name)

    async def advance(self, run: ReplayRun, cursor_before: str) -> bool:
        """Write state, cursor and counts of a replay that runs, if nobody else went on with it."""
        kept = self._runs.get(run.name)
        if kept is None or (kept.state, kept.cursor) != (ReplayState.RUNNING, cursor_before):
            return False
        changed = replace(
            kept, state=run.state, cursor=run.cursor, done=run.done, failed=run.failed
        )
        self._runs.put(run.name, replace(changed, updated_at=self._clock.now()))
        return True

    async def set_state(self, name: str, before: ReplayState, after: ReplayState) -> bool:
        """Change the state, and nothing else; False where it is not *before*."""
        kept = self._runs.get(name)
        if kept is None or kept.state is not before:
            return False
        self._runs.put(name, replace(kept, state=after, updated_at=self._clock.now()))
        return True

    async def find(self, consumer: str | None, limit: int) -> Sequence[ReplayRun]:
        """Return replays, the newest first."""
        meant = [run for run in self._runs.rows() if consumer in (None, run.consumer)]
        return sorted(meant, key=lambda run: (-run.began_at, run.name))[:limit]

    async def unfinished(self, consumer: str) -> Sequence[str]:
        """Return the names of a consumer's replays that can go on, whether they run or not."""
        return sorted(
            run.name
            for run in self._runs.rows()
            if run.consumer == consumer and run.state not in OVER
        )

    async def delete_over(self, consumer: str, ttl_seconds: float, limit: int) -> int:
        """Delete replays that are over since so long; return how many."""
        until = self._clock.now() - ttl_seconds
        old = sorted(
            (run.updated_at, run.name)
            for run in self._runs.rows()
            if run.consumer == consumer and run.state in OVER and run.updated_at <= until
        )[:limit]
        for _, name in old:
            self._runs.remove(name)
        return len(old)
