"""The failed attempts in PostgreSQL and SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Row,
    and_,
    bindparam,
    delete,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql import Executable

from semel.messaging.database import Sweep
from semel.messaging.records import FIRST_KEPT, LATEST_KEPT, MOST_KEPT, AttemptFilter, FailedAttempt
from semel.operate.stores import plain
from semel.sql.faults import translated
from semel.sql.retention import delete_of_gone
from semel.sql.tables import failed_attempt
from semel.sql.types import now_us, original_names, stored_name, stored_names, to_seconds, to_us

_C: Final = failed_attempt.c
_KEPT: Final = failed_attempt.alias("kept")
_MINE: Final = and_(_KEPT.c.consumer == bindparam("by"), _KEPT.c.message_id == bindparam("id"))

# PostgreSQL counts the rows before this one: as many as may be kept are enough.
ADD: Final = (
    insert(failed_attempt)
    .values(at=func.coalesce(bindparam("at_us", type_=BigInteger), now_us()))
    .returning(select(func.count(_KEPT.c.place)).where(_MINE).scalar_subquery())
)

_PLACES: Final = select(_KEPT.c.place).where(_MINE)
_FIRST: Final = _PLACES.order_by(_KEPT.c.place).limit(FIRST_KEPT)
_OTHERS: Final = _PLACES.order_by(_KEPT.c.place.desc()).offset(LATEST_KEPT)
THIN_OUT: Final = delete(failed_attempt).where(_C.place.in_(_OTHERS), _C.place.not_in(_FIRST))


class SqlFailedAttempts:
    """The failed attempts of one open transaction."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, attempt: FailedAttempt) -> None:
        """Write a message's next failed attempt; those between first and latest go."""
        values = {
            **stored_names(message_id=attempt.message_id, key=attempt.key),
            "consumer": attempt.consumer,
            "number": attempt.number,
            "error_code": plain(attempt.error_code),
            "failure_class": attempt.failure_class,
            "reason": plain(attempt.reason),
            "exception": plain(attempt.exception),
            "worker": plain(attempt.worker),
            "at_us": to_us(attempt.at) if attempt.at else None,
        }
        mine = {"by": attempt.consumer, "id": values["message_id"]}
        if (await self._run(ADD, {**values, **mine})).scalar_one() >= MOST_KEPT:
            await self._run(THIN_OUT, mine)

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

    async def _run(self, statement: Executable, values: Any = None) -> Any:
        async with translated("the failed attempts"):
            return await self._session.execute(statement, values)


def _are(which: AttemptFilter) -> ColumnElement[bool]:
    equal = {
        _C.consumer: which.consumer,
        _C.message_id: stored_name(which.message_id),
        _C.key: stored_name(which.key),
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
