"""The outcome ranges in PostgreSQL and SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    CursorResult,
    Integer,
    Text,
    and_,
    bindparam,
    delete,
    exists,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql import Executable
from sqlalchemy.sql.base import ReadOnlyColumnCollection

from semel.message import Coordinates, Partition
from semel.messaging.outcome import ENDS, OutcomeRange
from semel.sql.faults import translated
from semel.sql.tables import consumer_outcome

Columns: TypeAlias = ReadOnlyColumnCollection[str, Column[Any]]

_C: Final = consumer_outcome.c

_FROM: Final = bindparam("from_offset", type_=BigInteger)
_UNTIL: Final = bindparam("until", type_=BigInteger)
_NEW: Final[dict[str, Any]] = {
    "consumer": bindparam("of", type_=Text),
    "topic": bindparam("in_topic", type_=Text),
    "partition": bindparam("at", type_=Integer),
    "outcome": bindparam("what", type_=Text),
}
_ENDS_BEFORE: Final = and_(*(_C[name] == new for name, new in _NEW.items()), _C.last == _FROM - 1)
# Two ranges may end at the same offset, after redeliveries: one of them goes on.  The
# condition is asked again of the row itself: if another process has extended it while
# we waited for its lock, what that process wrote must not be cut off.
_NEIGHBOUR: Final = select(_C.number).where(_ENDS_BEFORE).limit(1).scalar_subquery()
EXTEND: Final = (
    update(consumer_outcome).where(_C.number == _NEIGHBOUR, _ENDS_BEFORE).values(last=_UNTIL)
)
ADD: Final = insert(consumer_outcome).values(first=_FROM, last=_UNTIL, **_NEW)


class SqlOutcomeStore:
    """The ranges of one open transaction."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def record(self, consumer: str, ranges: Sequence[OutcomeRange]) -> None:
        """Write ranges; one that continues a kept range of the same outcome extends it."""
        for new in ranges:
            values = {
                "of": consumer,
                "in_topic": new.partition.topic,
                "at": new.partition.number,
                "from_offset": new.first,
                "until": new.last,
                "what": new.outcome,
            }
            if not (await self._run(EXTEND, values)).rowcount:
                await self._run(ADD, values)

    async def ranges(self, consumer: str, partition: Partition) -> Sequence[OutcomeRange]:
        """Return the ranges of a partition in order."""
        found = await self._run(
            select(_C.first, _C.last, _C.outcome)
            .where(_in(consumer, partition))
            .order_by(_C.first, _C.last, _C.outcome)
        )
        return [OutcomeRange(partition, row.first, row.last, row.outcome) for row in found]

    async def covering(self, consumer: str, at: Coordinates) -> Sequence[OutcomeRange]:
        """Return the ranges that an offset is in, in the order in which they began."""
        found = await self._run(
            select(_C.first, _C.last, _C.outcome)
            .where(_in(consumer, at.place), _C.first <= at.offset, _C.last >= at.offset)
            .order_by(_C.number)
        )
        return [OutcomeRange(at.place, row.first, row.last, row.outcome) for row in found]

    async def partitions(self, consumer: str) -> Sequence[Partition]:
        """Return the partitions that have ranges."""
        found = await self._run(
            select(_C.topic, _C.partition)
            .where(_C.consumer == consumer)
            .distinct()
            .order_by(_C.topic, _C.partition)
        )
        return [Partition(row.topic, row.partition) for row in found]

    async def prune(self, consumer: str, partition: Partition, below: int, limit: int) -> int:
        """Forget ranges that lie wholly below an offset, the lowest first; return how many."""
        says_kept = consumer_outcome.alias().c
        is_needed = exists().where(
            _in(consumer, partition, says_kept),
            says_kept.outcome.not_in(ENDS),
            says_kept.first <= _C.last,
            says_kept.last >= _C.first,
            says_kept.last >= below,
        )
        old = (
            select(_C.number)
            .where(_in(consumer, partition), _C.last < below)
            .where(or_(_C.outcome.not_in(ENDS), ~is_needed))
            .order_by(_C.first, _C.number)
            .limit(limit)
        )
        # Asked again of the row itself: it may have been extended while we waited for it.
        low = delete(consumer_outcome).where(_C.number.in_(old), _C.last < below)
        return (await self._run(low)).rowcount

    async def _run(self, statement: Executable, values: Any = None) -> CursorResult[Any]:
        async with translated("the outcomes"):
            connection = await self._session.connection()
            return await connection.execute(statement, values)


def _in(consumer: str, partition: Partition, columns: Columns = _C) -> ColumnElement[bool]:
    return and_(
        columns.consumer == consumer,
        columns.topic == partition.topic,
        columns.partition == partition.number,
    )
