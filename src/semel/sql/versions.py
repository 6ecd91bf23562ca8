"""The applied versions in PostgreSQL and SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import CursorResult, case, delete, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql import Executable

from semel.messaging.records import Gap, original_id, stored_id
from semel.sql.faults import translated
from semel.sql.tables import aggregate_version, sequence_gap
from semel.sql.types import now_us, to_seconds, to_us

_V: Final = aggregate_version.c
_G: Final = sequence_gap.c

BEGIN: Final = insert(aggregate_version).on_conflict_do_nothing(
    index_elements=list(aggregate_version.primary_key)
)
_APPLIED: Final = insert(aggregate_version)
ADVANCE: Final = _APPLIED.on_conflict_do_update(
    index_elements=list(aggregate_version.primary_key),
    set_={"version": _APPLIED.excluded.version},
)
_NEW: Final = insert(sequence_gap)
OPEN: Final = _NEW.on_conflict_do_update(
    index_elements=list(sequence_gap.primary_key),
    set_={
        "found": _NEW.excluded.found,
        # One that is open keeps its time; one that was closed is a new one.
        "since": case((_G.closed_at.is_(None), _G.since), else_=_NEW.excluded.since),
        "closed_at": None,
        "how": "",
    },
)


class SqlVersions:
    """The versions of one open transaction."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def current(self, consumer: str, key: str) -> int | None:
        """Lock a key and return the version that was applied last; None where none was."""
        name = stored_id(key)
        locked = select(_V.version).where(_V.consumer == consumer, _V.key == name).with_for_update()
        found = (await self._run(locked)).first()
        if found is None:
            # Two transactions that both see no row would both apply the first version.
            await self._run(BEGIN.values(consumer=consumer, key=name, version=None))
            found = (await self._run(locked)).one()
        return None if found.version is None else int(found.version)

    async def advance(self, consumer: str, key: str, version: int) -> None:
        """Write the version that is applied with this transaction."""
        applied = {"consumer": consumer, "key": stored_id(key), "version": version}
        await self._run(ADVANCE.values(**applied))

    async def open_gap(self, gap: Gap) -> None:
        """List a gap; one that is listed already keeps its time."""
        await self._run(
            OPEN.values(
                consumer=gap.consumer,
                key=stored_id(gap.key),
                original_key=original_id(gap.key),
                expected=gap.expected,
                found=gap.found,
                since=now_us(),
            )
        )

    async def close_gaps(
        self, consumer: str, key: str, up_to: int, how: str, after: int | None = None
    ) -> int:
        """Close the key's gaps that end at or below *up_to*, and behind *after*."""
        closing = update(sequence_gap).where(
            _G.consumer == consumer,
            _G.key == stored_id(key),
            _G.closed_at.is_(None),
            _G.found - 1 <= up_to,
        )
        if after is not None:
            closing = closing.where(_G.found - 1 > after)
        return (await self._run(closing.values(closed_at=now_us(), how=how))).rowcount

    async def gaps(self, consumer: str | None, limit: int) -> Sequence[Gap]:
        """Return the open gaps, the oldest first."""
        found = select(sequence_gap).where(_G.closed_at.is_(None))
        if consumer is not None:
            found = found.where(_G.consumer == consumer)
        rows = await self._run(found.order_by(_G.since, _G.consumer, _G.key).limit(limit))
        return [
            Gap(
                row.consumer,
                row.original_key or row.key,
                row.expected,
                row.found,
                to_seconds(row.since),
            )
            for row in rows
        ]

    async def delete_closed(self, consumer: str, ttl_seconds: float, limit: int) -> int:
        """Delete gaps that are closed since so long; return how many."""
        is_old = (_G.consumer == consumer, _G.closed_at <= now_us() - to_us(ttl_seconds))
        old = select(_G.key, _G.expected).where(*is_old).order_by(_G.closed_at).limit(limit)
        # Asked again of the row itself: the gap may have opened again while we waited for it.
        gone = delete(sequence_gap).where(tuple_(_G.key, _G.expected).in_(old), *is_old)
        return (await self._run(gone)).rowcount

    async def _run(self, statement: Executable) -> CursorResult[Any]:
        async with translated("the versions"):
            connection = await self._session.connection()
            return await connection.execute(statement)
