"""The outcome ranges in PostgreSQL and SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from sqlalchemy import (
    Column,
    ColumnElement,
    CursorResult,
    and_,
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
from semel.messaging.completeness import ENDS, OutcomeRange
from semel.sqlalchemy.faults import translated
from semel.sqlalchemy.tables import consumer_outcome

Columns: TypeAlias = ReadOnlyColumnCollection[str, Column[Any]]

_C: Final = consumer_outcome.c


class SqlOutcomeStore:
    """The ranges of one open transaction."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def record(self, consumer: str, ranges: Sequence[OutcomeRange]) -> None:
        """Write ranges; one that continues a kept range of the same outcome extends it."""
        for new in ranges:
            if not await self._extended(consumer, new):
                await self._run(
                    insert(consumer_outcome).values(
                        consumer=consumer,
                        topic=new.partition.topic,
                        partition=new.partition.number,
                        first=new.first,
                        last=new.last,
                        outcome=new.outcome,
                    )
                )

    async def _extended(self, consumer: str, new: OutcomeRange) -> bool:
        ends_before = and_(
            _in(consumer, new.partition), _C.outcome == new.outcome, _C.last == new.first - 1
        )
        # Two ranges may end at the same offset, after redeliveries: one of them goes on.  The
        # condition is asked again of the row itself: if another process has extended it while
        # we waited for its lock, what that process wrote must not be cut off.
        neighbour = select(_C.number).where(ends_before).limit(1).scalar_subquery()
        longer = (
            update(consumer_outcome)
            .where(_C.number == neighbour, ends_before)
            .values(last=new.last)
        )
        return bool((await self._run(longer)).rowcount)

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

    async def _run(self, statement: Executable) -> CursorResult[Any]:
        async with translated("the outcomes"):
            connection = await self._session.connection()
            return await connection.execute(statement)


def _in(consumer: str, partition: Partition, columns: Columns = _C) -> ColumnElement[bool]:
    return and_(
        columns.consumer == consumer,
        columns.topic == partition.topic,
        columns.partition == partition.number,
    )
