"""The replays in PostgreSQL and SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Row, delete, select, text, update
from sqlalchemy.dialects.postgresql import insert as insert_once
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql import Executable

from semel.messaging.audit import plain
from semel.messaging.replays import OVER, ReplayRun, ReplayState
from semel.sqlalchemy.faults import translated
from semel.sqlalchemy.operator_tables import replay_run
from semel.sqlalchemy.times import now_us, to_seconds, to_us

_C: Final = replay_run.c
_OVER: Final = sorted(OVER)


class SqlReplays:
    """The replays of one open transaction."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def begin(self, run: ReplayRun) -> bool:
        """Write a new replay, at the database's time; False where the name is taken."""
        written = (
            insert_once(replay_run)
            .values(
                name=run.name,
                consumer=run.consumer,
                selection=run.selection,
                state=run.state.value,
                cursor=run.cursor,
                done=run.done,
                failed=run.failed,
                actor=plain(run.actor),
                began_at=now_us(),
                updated_at=now_us(),
            )
            .on_conflict_do_nothing(index_elements=[_C.name])
            .returning(_C.name)
        )
        return (await self._run(written)).first() is not None

    async def get(self, name: str) -> ReplayRun | None:
        """Return one replay."""
        row = (await self._run(select(replay_run).where(_C.name == name))).first()
        return None if row is None else _read(row)

    async def advance(self, run: ReplayRun, cursor_before: str) -> bool:
        """Write state, cursor and counts of a replay that runs, if nobody else went on with it."""
        ours = (
            _C.name == run.name,
            _C.state == ReplayState.RUNNING.value,
            _C.cursor == cursor_before,
        )
        written = (
            update(replay_run)
            .where(*ours)
            .values(
                state=run.state.value,
                cursor=run.cursor,
                done=run.done,
                failed=run.failed,
                updated_at=now_us(),
            )
        )
        return bool((await self._run(written)).rowcount)

    async def set_state(self, name: str, before: ReplayState, after: ReplayState) -> bool:
        """Change the state, and nothing else; False where it is not *before*."""
        written = (
            update(replay_run)
            .where(_C.name == name, _C.state == before.value)
            .values(state=after.value, updated_at=now_us())
        )
        return bool((await self._run(written)).rowcount)

    async def find(self, consumer: str | None, limit: int) -> Sequence[ReplayRun]:
        """Return replays, the newest first."""
        found = select(replay_run).order_by(_C.began_at.desc(), _C.name).limit(limit)
        if consumer is not None:
            found = found.where(_C.consumer == consumer)
        return [_read(row) for row in await self._run(found)]

    async def unfinished(self, consumer: str) -> Sequence[str]:
        """Return the names of a consumer's replays that can go on, whether they run or not."""
        connection = await self._session.connection()
        if connection.dialect.name == "postgresql":
            # Nothing to lock is there yet of a replay that begins.  SQLite has one writer.  In
            # SHARE mode two who go on to delete replays would wait for one another for ever.
            await self._run(text(f"LOCK TABLE {replay_run.name} IN SHARE ROW EXCLUSIVE MODE"))
        names = select(_C.name).where(_C.consumer == consumer, _C.state.not_in(_OVER))
        return list((await self._run(names.order_by(_C.name))).scalars())

    async def delete_over(self, consumer: str, ttl_seconds: float, limit: int) -> int:
        """Delete replays that are over since so long; return how many."""
        old = (
            select(_C.name)
            .where(
                _C.consumer == consumer,
                _C.state.in_(_OVER),
                _C.updated_at <= now_us() - to_us(ttl_seconds),
            )
            .order_by(_C.updated_at)
            .limit(limit)
        )
        return int((await self._run(delete(replay_run).where(_C.name.in_(old)))).rowcount)

    async def _run(self, statement: Executable) -> Any:
        async with translated("the replays"):
            return await self._session.execute(statement)


def _read(row: Row[Any]) -> ReplayRun:
    return ReplayRun(
        row.name,
        row.consumer,
        row.selection,
        row.actor,
        ReplayState(row.state),
        row.cursor,
        row.done,
        row.failed,
        to_seconds(row.began_at),
        to_seconds(row.updated_at),
    )
