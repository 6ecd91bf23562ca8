"""The failed attempts in PostgreSQL and SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, FromClause, Row, and_, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql import Executable

from semel.messaging.attempts import (
    FIRST_KEPT,
    LATEST_KEPT,
    MOST_KEPT,
    AttemptFilter,
    FailedAttempt,
)
from semel.messaging.audit import plain
from semel.messaging.sweep import Sweep
from semel.sqlalchemy.faults import translated
from semel.sqlalchemy.gone import delete_of_gone
from semel.sqlalchemy.origins import original_names, stored_name, stored_names
from semel.sqlalchemy.tables import failed_attempt
from semel.sqlalchemy.times import now_us, to_seconds, to_us

_C: Final = failed_attempt.c
_KEPT: Final = failed_attempt.alias("kept")


class SqlFailedAttempts:
    """The failed attempts of one open transaction."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, attempt: FailedAttempt) -> None:
        """Write a message's next failed attempt; those between first and latest go."""
        me = AttemptFilter(attempt.consumer, attempt.message_id)
        written = (
            insert(failed_attempt)
            .values(
                **stored_names(message_id=attempt.message_id, key=attempt.key),
                consumer=attempt.consumer,
                number=attempt.number,
                error_code=plain(attempt.error_code),
                failure_class=attempt.failure_class,
                reason=plain(attempt.reason),
                exception=plain(attempt.exception),
                worker=plain(attempt.worker),
                at=to_us(attempt.at) if attempt.at else now_us(),
            )
            # PostgreSQL counts the rows before this one: as many as may be kept are enough.
            .returning(select(func.count(_KEPT.c.place)).where(_are(me, _KEPT)).scalar_subquery())
        )
        if (await self._run(written)).scalar_one() >= MOST_KEPT:
            places = select(_KEPT.c.place).where(_are(me, _KEPT))
            first = places.order_by(_KEPT.c.place).limit(FIRST_KEPT)
            others = places.order_by(_KEPT.c.place.desc()).offset(LATEST_KEPT)
            between = and_(_C.place.in_(others), _C.place.not_in(first))
            await self._run(delete(failed_attempt).where(between))

    async def of(self, consumer: str, message_id: str) -> Sequence[FailedAttempt]:
        """Return the attempts of one message that are kept, in the order of their writing."""
        mine = _are(AttemptFilter(consumer, message_id))
        found = select(failed_attempt).where(mine).order_by(_C.place)
        return [_attempt(row) for row in await self._run(found)]

    async def erase(self, which: AttemptFilter) -> int:
        """Remove the reasons of matching attempts; times, numbers and codes stay."""
        erased = update(failed_attempt).where(_are(which), _C.reason != "").values(reason="")
        return int((await self._run(erased)).rowcount)

    async def delete_gone(
        self, consumer: str, ttl_seconds: float, limit: int, sweep: Sweep | None = None
    ) -> int:
        """Delete attempts so old whose message is gone from everywhere; return how many."""
        sweep = sweep or Sweep()
        old = delete_of_gone(_C.at, _C.at, consumer, ttl_seconds, sweep.since(), limit)
        return sweep.note(list((await self._run(old)).scalars()))

    async def _run(self, statement: Executable) -> Any:
        async with translated("the failed attempts"):
            return await self._session.execute(statement)


def _are(which: AttemptFilter, rows: FromClause = failed_attempt) -> ColumnElement[bool]:
    equal = {
        rows.c.consumer: which.consumer,
        rows.c.message_id: stored_name(which.message_id),
        rows.c.key: stored_name(which.key),
    }
    wanted = [column == value for column, value in equal.items() if value is not None]
    return and_(True, *wanted)


def _attempt(row: Row[Any]) -> FailedAttempt:
    return FailedAttempt(
        **original_names(row, "message_id", "key"),
        consumer=row.consumer,
        number=row.number,
        error_code=row.error_code,
        failure_class=row.failure_class,
        reason=row.reason,
        exception=row.exception,
        worker=row.worker,
        at=to_seconds(row.at),
    )
