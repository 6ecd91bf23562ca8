"""The dead letters and the failed attempts, in PostgreSQL and SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Row,
    and_,
    bindparam,
    case,
    delete,
    func,
    select,
    tuple_,
    update,
)
from sqlalchemy.dialects.postgresql import insert

from semel.message import Partition
from semel.messaging.database import Sweep
from semel.messaging.records import (
    FIRST_KEPT,
    LATEST_KEPT,
    MOST_KEPT,
    DeadLetter,
    DeadLetterFilter,
    FailedAttempt,
    MessageFilter,
    stored_id,
)
from semel.messaging.redact import ERASED_REASON
from semel.sql.store import (
    Store,
    came_from,
    delete_of_gone,
    matching,
    record_of,
    values_of,
)
from semel.sql.tables import dead_letter, failed_attempt
from semel.sql.types import now_us, to_us

_C: Final = dead_letter.c

# The columns that a later failure of the same message replaces; the payload and the record's
# coordinates stay those of the first failure.
LATER: Final = (
    "exception",
    "error_code",
    "attempts",
    "last_failed_at",
    "owner",
    "outcome",
    "needs_review",
    "expected_hash",
)

_ME: Final = and_(_C.consumer == bindparam("by"), _C.message_id == bindparam("id"))
GET: Final = select(dead_letter).where(_ME)
REMOVE: Final = delete(dead_letter).where(_ME)
_NEW: Final = insert(dead_letter)
ADD: Final = _NEW.on_conflict_do_nothing(index_elements=list(dead_letter.primary_key)).returning(
    _C.message_id
)
PUT: Final = _NEW.on_conflict_do_update(
    index_elements=list(dead_letter.primary_key),
    set_={
        **{name: _NEW.excluded[name] for name in LATER},
        # The new reason may quote the payload that was erased.
        "reason": case((_C.erased_at.is_not(None), ERASED_REASON), else_=_NEW.excluded.reason),
    },
)


class SqlDeadLetters(Store):
    """The dead letters, in one open transaction."""

    what = "the dead letters"

    async def put(self, letter: DeadLetter) -> bool:
        values = values_of(dead_letter, letter)
        if (await self._run(ADD, values)).first() is not None:
            return True
        await self._run(PUT, values)
        return False

    async def get(self, consumer: str, message_id: str) -> DeadLetter | None:
        row = (await self._run(GET, _me(consumer, message_id))).first()
        return None if row is None else _letter(row)

    async def find(self, which: DeadLetterFilter, limit: int) -> Sequence[DeadLetter]:
        order = (_C.first_failed_at, _C.message_id, _C.consumer)
        meant = matching(dead_letter, which, _C.first_failed_at)
        found = select(dead_letter).where(meant).order_by(*order).limit(limit)
        if which.after is not None:
            at, message_id = which.after
            behind = (to_us(at), stored_id(message_id))
            found = found.where(tuple_(_C.first_failed_at, _C.message_id) > tuple_(*behind))
        return [_letter(row) for row in await self._run(found)]

    async def count(self, which: DeadLetterFilter) -> int:
        meant = matching(dead_letter, which, _C.first_failed_at)
        counted = select(func.count()).select_from(dead_letter).where(meant)
        return int((await self._run(counted)).scalar_one())

    async def remove(self, consumer: str, message_id: str) -> bool:
        return await self._count(REMOVE, _me(consumer, message_id)) > 0

    async def places(
        self, consumer: str, partition: Partition, first: int, last: int, limit: int
    ) -> Sequence[int]:
        found = (
            select(_C.offset)
            .where(_C.consumer == consumer, came_from(dead_letter, partition, first, last))
            .order_by(_C.offset)
            .limit(limit)
        )
        return list((await self._run(found)).scalars())

    async def erase(self, which: MessageFilter) -> int:
        meant = matching(dead_letter, which, _C.first_failed_at)
        erased = (
            update(dead_letter)
            .where(meant, _C.erased_at.is_(None))
            .values(payload=None, headers="", reason=ERASED_REASON, erased_at=now_us())
        )
        return await self._count(erased)


def _me(consumer: str, message_id: str) -> dict[str, str]:
    return {"by": consumer, "id": stored_id(message_id)}


def _letter(row: Row[Any]) -> DeadLetter:
    return record_of(dead_letter, row, DeadLetter, needs_review=bool(row.needs_review))


_A: Final = failed_attempt.c
_KEPT: Final = failed_attempt.alias("kept")
_MINE: Final = and_(_KEPT.c.consumer == bindparam("by"), _KEPT.c.message_id == bindparam("id"))

# PostgreSQL does not count the row that it inserts: if it counts MOST_KEPT, there is one too many.
ADD_ATTEMPT: Final = (
    insert(failed_attempt)
    .values(at=func.coalesce(bindparam("at_us", type_=BigInteger), now_us()))
    .returning(select(func.count(_KEPT.c.place)).where(_MINE).scalar_subquery())
)

_PLACES: Final = select(_KEPT.c.place).where(_MINE)
_FIRST: Final = _PLACES.order_by(_KEPT.c.place).limit(FIRST_KEPT)
_OTHERS: Final = _PLACES.order_by(_KEPT.c.place.desc()).offset(LATEST_KEPT)
THIN_OUT: Final = delete(failed_attempt).where(_A.place.in_(_OTHERS), _A.place.not_in(_FIRST))


class SqlFailedAttempts(Store):
    """The failed attempts, in one open transaction."""

    what = "the failed attempts"

    async def add(self, attempt: FailedAttempt) -> None:
        values = values_of(failed_attempt, attempt, "at")
        mine = {"by": attempt.consumer, "id": values["message_id"]}
        at = {"at_us": to_us(attempt.at) or None}
        if (await self._run(ADD_ATTEMPT, {**values, **mine, **at})).scalar_one() >= MOST_KEPT:
            await self._run(THIN_OUT, mine)

    async def of(self, consumer: str, message_id: str) -> Sequence[FailedAttempt]:
        mine = matching(failed_attempt, MessageFilter(consumer, message_id))
        found = await self._run(select(failed_attempt).where(mine).order_by(_A.place))
        return [record_of(failed_attempt, row, FailedAttempt) for row in found]

    async def erase(self, which: MessageFilter) -> int:
        meant = matching(failed_attempt, which)
        erased = update(failed_attempt).where(meant, _A.reason != "").values(reason="")
        return await self._count(erased)

    async def delete_gone(
        self, consumer: str, ttl_seconds: float, limit: int, sweep: Sweep | None = None
    ) -> int:
        sweep = sweep or Sweep()
        old = delete_of_gone(_A.at, _A.at, consumer, ttl_seconds, sweep.since(), limit)
        return sweep.note(list((await self._run(old)).scalars()))
