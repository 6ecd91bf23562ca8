"""The dead letters and the failed attempts, in PostgreSQL and SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from sqlalchemy import BigInteger, and_, bindparam, case, delete, func, insert, select, update

from semel.message import Partition
from semel.messaging.database import Sweep
from semel.messaging.records import (
    FIRST_KEPT,
    LATEST_KEPT,
    MOST_KEPT,
    DeadLetter,
    FailedAttempt,
    MessageFilter,
)
from semel.messaging.redact import ERASED_REASON
from semel.sql.store import (
    MessageStore,
    RecordStore,
    insert_new,
    insert_or_update,
    is_older,
    matching,
    new_values,
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

ADD: Final = insert_new(dead_letter).returning(_C.message_id)
PUT: Final = insert_or_update(
    dead_letter,
    LATER,
    # The new reason may quote the payload that was erased.
    reason=case((_C.erased_at.is_not(None), ERASED_REASON), else_=new_values(dead_letter).reason),
)


class SqlDeadLetters(MessageStore[DeadLetter]):
    """The dead letters, in one open transaction."""

    what = "the dead letters"
    table = dead_letter
    record = DeadLetter
    time = _C.first_failed_at
    order = (_C.first_failed_at, _C.message_id, _C.consumer)
    erased: ClassVar = {"payload": None, "headers": "", "reason": ERASED_REASON}

    async def put(self, letter: DeadLetter) -> bool:
        values = values_of(dead_letter, letter)
        if (await self._run(ADD, values)).first() is not None:
            return True
        await self._run(PUT, values)
        return False

    async def places(
        self, consumer: str, partition: Partition, first: int, last: int, limit: int
    ) -> Sequence[int]:
        found = await self._places([_C.offset], consumer, partition, (first, last), limit)
        return list(found.scalars())


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


class SqlFailedAttempts(RecordStore[FailedAttempt]):
    """The failed attempts, in one open transaction."""

    what = "the failed attempts"
    table = failed_attempt
    record = FailedAttempt
    order = (_A.place,)

    async def add(self, attempt: FailedAttempt) -> None:
        values = values_of(failed_attempt, attempt, "at")
        mine = {"by": attempt.consumer, "id": values["message_id"]}
        at = {"at_us": to_us(attempt.at) or None}
        if (await self._run(ADD_ATTEMPT, {**values, **mine, **at})).scalar_one() >= MOST_KEPT:
            await self._run(THIN_OUT, mine)

    async def of(self, consumer: str, message_id: str) -> Sequence[FailedAttempt]:
        return await self._about(consumer, message_id)

    async def erase(self, which: MessageFilter) -> int:
        known = (matching(failed_attempt, which), _A.reason != "")
        return await self._count(update(failed_attempt).where(*known).values(reason=""))

    async def delete_gone(
        self, consumer: str, ttl_seconds: float, limit: int, sweep: Sweep | None = None
    ) -> int:
        is_old = is_older(_A.at, ttl_seconds)
        return await self._delete_gone(consumer, is_old, _A.at, sweep or Sweep(), limit)
