"""The revisions in PostgreSQL and SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import ColumnElement, Row, and_, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql import Executable

from semel.messaging.audit import plain
from semel.messaging.ids import stored_id
from semel.messaging.revisions import Revision, RevisionFilter
from semel.sqlalchemy.faults import translated
from semel.sqlalchemy.operator_tables import message_revision
from semel.sqlalchemy.origins import (
    conflicts_with,
    original_names,
    seconds_or_none,
    stored_name,
    stored_names,
)
from semel.sqlalchemy.times import now_us, to_seconds

_C: Final = message_revision.c


class SqlRevisions:
    """The revisions of one open transaction."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, revision: Revision) -> Revision:
        """Write a message's next revision; return it with its number and time."""
        mine = _matching(RevisionFilter(revision.consumer, revision.message_id))
        last = select(func.coalesce(func.max(_C.number), -1)).where(mine)
        number = (await self._run(last)).scalar_one() + 1
        written = (
            insert(message_revision)
            .values(
                **stored_names(
                    message_id=revision.message_id, key=revision.key, new_id=revision.new_id
                ),
                consumer=revision.consumer,
                number=number,
                payload=revision.payload,
                payload_hash=revision.payload_hash,
                actor=plain(revision.actor),
                reason=plain(revision.reason),
                id_policy=revision.id_policy,
                at=now_us(),
            )
            .returning(_C.at)
        )
        at = (await self._run(written)).scalar_one()
        return replace(revision, number=number, at=to_seconds(at))

    async def of(self, consumer: str, message_id: str) -> Sequence[Revision]:
        """Return the revisions of one message, the original first."""
        mine = _matching(RevisionFilter(consumer, message_id))
        found = select(message_revision).where(mine).order_by(_C.number)
        return [_revision(row) for row in await self._run(found)]

    async def other_names(self, message_id: str) -> frozenset[str]:
        """Return the ids that people gave to a message of this id, or took from it."""
        name = stored_id(message_id)
        renamed = and_(_C.new_id.is_not(None), or_(_C.message_id == name, _C.new_id == name))
        meant = or_(renamed, conflicts_with(_C.message_id, message_id))
        rows = await self._run(select(message_revision).where(meant))
        found = map(_revision, rows)
        names = {name for one in found for name in (one.message_id, one.new_id) if name}
        return frozenset(names - {message_id})

    async def erase(self, which: RevisionFilter) -> int:
        """Remove the payloads of matching revisions; hashes, names and reasons stay."""
        erased = (
            update(message_revision)
            .where(_matching(which), _C.erased_at.is_(None))
            .values(payload=None, erased_at=now_us())
        )
        return int((await self._run(erased)).rowcount)

    async def _run(self, statement: Executable) -> Any:
        async with translated("the revisions"):
            return await self._session.execute(statement)


def _matching(which: RevisionFilter) -> ColumnElement[bool]:
    equal = {
        _C.consumer: which.consumer,
        _C.message_id: stored_name(which.message_id),
        _C.key: stored_name(which.key),
    }
    wanted = [column == value for column, value in equal.items() if value is not None]
    return and_(True, *wanted)


def _revision(row: Row[Any]) -> Revision:
    return Revision(
        **original_names(row, "message_id", "key", "new_id"),
        consumer=row.consumer,
        payload=row.payload,
        payload_hash=row.payload_hash,
        number=row.number,
        actor=row.actor,
        reason=row.reason,
        id_policy=row.id_policy,
        at=to_seconds(row.at),
        erased_at=seconds_or_none(row.erased_at),
    )
