"""The dead letters in PostgreSQL and SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
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
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql import Executable

from semel.message import Partition
from semel.messaging.records import DeadLetter, DeadLetterFilter, stored_id
from semel.messaging.redact import ERASED_REASON
from semel.operate.stores import plain
from semel.sql.faults import translated
from semel.sql.tables import dead_letter
from semel.sql.types import (
    came_from,
    conflicts_with,
    now_us,
    stored_fields,
    stored_name,
    stored_values,
    to_seconds,
    to_us,
)

_C: Final = dead_letter.c

# What a later failure of the same message says anew; the payload and all about the record
# stay as they came first.
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
        # Why it failed again may quote what was erased.
        "reason": case((_C.erased_at.is_not(None), ERASED_REASON), else_=_NEW.excluded.reason),
    },
)


class SqlDeadLetters:
    """The dead letters of one open transaction."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def put(self, letter: DeadLetter) -> bool:
        """Write a dead letter; False where a later failure of the same message updates it."""
        values = _values(letter)
        if (await self._run(ADD, values)).first() is not None:
            return True
        await self._run(PUT, values)
        return False

    async def get(self, consumer: str, message_id: str) -> DeadLetter | None:
        """Return one dead letter."""
        row = (await self._run(GET, _me(consumer, message_id))).first()
        return None if row is None else _letter(row)

    async def find(self, which: DeadLetterFilter, limit: int) -> Sequence[DeadLetter]:
        """Return matching dead letters, the oldest first."""
        order = (_C.first_failed_at, _C.message_id, _C.consumer)
        found = select(dead_letter).where(_matching(which)).order_by(*order).limit(limit)
        if which.after is not None:
            at, message_id = which.after
            behind = (to_us(at), stored_id(message_id))
            found = found.where(tuple_(_C.first_failed_at, _C.message_id) > tuple_(*behind))
        return [_letter(row) for row in await self._run(found)]

    async def count(self, which: DeadLetterFilter) -> int:
        """Count matching dead letters."""
        counted = select(func.count()).select_from(dead_letter).where(_matching(which))
        return int((await self._run(counted)).scalar_one())

    async def remove(self, consumer: str, message_id: str) -> bool:
        """Take a dead letter away; False where there is none."""
        gone = await self._run(REMOVE, _me(consumer, message_id))
        return bool(gone.rowcount)

    async def places(
        self, consumer: str, partition: Partition, first: int, last: int, limit: int
    ) -> Sequence[int]:
        """Return the first offsets between two, both included, that have letters, in order."""
        found = (
            select(_C.offset)
            .where(_C.consumer == consumer, came_from(_C, partition, first, last))
            .order_by(_C.offset)
            .limit(limit)
        )
        return list((await self._run(found)).scalars())

    async def erase(self, which: DeadLetterFilter) -> int:
        """Remove payload, headers and reason of matching letters; hashes and error codes stay."""
        erased = (
            update(dead_letter)
            .where(_matching(which), _C.erased_at.is_(None))
            .values(payload=None, headers="", reason=ERASED_REASON, erased_at=now_us())
        )
        return int((await self._run(erased)).rowcount)

    async def _run(self, statement: Executable, values: Any = None) -> Any:
        async with translated("the dead letters"):
            return await self._session.execute(statement, values)


def _me(consumer: str, message_id: str) -> dict[str, str]:
    return {"by": consumer, "id": stored_id(message_id)}


def _matching(which: DeadLetterFilter) -> ColumnElement[bool]:
    """Say *which* in SQL, but for the page."""
    equal = {
        _C.consumer: which.consumer,
        _C.message_id: stored_name(which.message_id),
        _C.key: stored_name(which.key),
        _C.topic: which.topic,
        _C.error_code: which.error_code,
        _C.outcome: which.outcome,
    }
    wanted = [column == value for column, value in equal.items() if value is not None]
    if which.conflicts_with is not None:
        wanted.append(conflicts_with(_C.message_id, which.conflicts_with))
    if which.since is not None:
        wanted.append(_C.first_failed_at >= to_us(which.since))
    if which.until is not None:
        wanted.append(_C.first_failed_at < to_us(which.until))
    return and_(True, *wanted)


def _values(letter: DeadLetter) -> dict[str, Any]:
    return {
        **stored_values(letter),
        "reason": plain(letter.reason),
        "exception": plain(letter.exception),
        "error_code": plain(letter.error_code),
        "first_failed_at": to_us(letter.first_failed_at),
        "last_failed_at": to_us(letter.last_failed_at),
        "owner": letter.owner,
        "outcome": letter.outcome,
        "needs_review": int(letter.needs_review),
        "expected_hash": letter.expected_hash,
    }


def _letter(row: Row[Any]) -> DeadLetter:
    return DeadLetter(
        **stored_fields(row),
        reason=row.reason,
        exception=row.exception,
        error_code=row.error_code,
        first_failed_at=to_seconds(row.first_failed_at),
        last_failed_at=to_seconds(row.last_failed_at),
        owner=row.owner,
        outcome=row.outcome,
        needs_review=bool(row.needs_review),
        expected_hash=row.expected_hash,
    )
