"""The running members in PostgreSQL and SQLite."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, Final

from sqlalchemy import CursorResult, Row, delete, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql import Executable

from semel.message import Partition
from semel.messaging.ids import stored_id
from semel.messaging.members import Member
from semel.sqlalchemy.faults import translated
from semel.sqlalchemy.tables import consumer_member, crash_suspect
from semel.sqlalchemy.times import now_us, to_seconds, to_us

_M: Final = consumer_member.c
_S: Final = crash_suspect.c

_NEW: Final = insert(consumer_member)
_WRITTEN: Final = ("owner", "partitions", "in_flight", "expires_at")
ENTER: Final = _NEW.on_conflict_do_update(
    index_elements=list(consumer_member.primary_key),
    set_={name: _NEW.excluded[name] for name in _WRITTEN},
)

SUSPECT: Final = (
    insert(crash_suspect)
    .on_conflict_do_update(
        index_elements=list(crash_suspect.primary_key), set_={"tries": _S.tries + 1}
    )
    .returning(_S.tries)
)
NOTE: Final = (
    insert(crash_suspect)
    .on_conflict_do_nothing(index_elements=list(crash_suspect.primary_key))
    .returning(_S.message_id)
)


class SqlMembers:
    """The members of one open transaction."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def enter(self, member: Member, seconds: float) -> None:
        """Write or renew a member's row, with its partitions, for *seconds* from now."""
        values = {
            "consumer": member.consumer,
            "name": member.name,
            "owner": member.owner,
            "partitions": _to_text(member.partitions),
            "in_flight": member.in_flight,
        }
        await self._run(ENTER.values(**values, expires_at=now_us() + to_us(seconds)))

    async def leave(self, consumer: str, name: str) -> None:
        """Remove a row."""
        await self._run(delete(consumer_member).where(_M.consumer == consumer, _M.name == name))

    async def others(
        self, consumer: str, name: str, partitions: Collection[Partition]
    ) -> Sequence[Member]:
        """Return other members' rows that name one of *partitions*."""
        found = await self._run(
            select(consumer_member)
            .where(_M.consumer == consumer, _M.name != name)
            .order_by(_M.name)
        )
        members = [_member(row) for row in found]
        return [member for member in members if member.partitions & frozenset(partitions)]

    async def suspect(self, consumer: str, message_id: str) -> int:
        """Note that a message is about to be tried alone; return how often that was noted."""
        values = {"consumer": consumer, "message_id": stored_id(message_id), "tries": 1}
        return int((await self._run(SUSPECT.values(**values))).scalar_one())

    async def note(self, consumer: str, message_ids: Collection[str]) -> frozenset[str]:
        """Note one try of each of several messages, together; return those noted before."""
        by_name = {stored_id(message_id): message_id for message_id in message_ids}
        if not by_name:
            return frozenset()
        # Sorted, so that two workers wait for each other in one direction only.
        rows = [{"consumer": consumer, "message_id": name, "tries": 1} for name in sorted(by_name)]
        new = (await self._run(NOTE.values(rows))).scalars().all()
        return frozenset(by_name[name] for name in by_name.keys() - set(new))

    async def acquit_many(self, consumer: str, message_ids: Collection[str]) -> None:
        """Forget what was noted of several messages."""
        if message_ids:
            here = _S.message_id.in_(sorted(map(stored_id, message_ids)))
            await self._run(delete(crash_suspect).where(_S.consumer == consumer, here))

    async def acquit(self, consumer: str, message_id: str) -> None:
        """Forget the suspicion."""
        await self._run(
            delete(crash_suspect).where(
                _S.consumer == consumer, _S.message_id == stored_id(message_id)
            )
        )

    async def release(self, consumer: str, name: str, partition: Partition) -> None:
        """Take a partition off a row; the last one removes the row if it has expired."""
        me = (_M.consumer == consumer, _M.name == name)
        found = (await self._run(select(consumer_member).where(*me).with_for_update())).first()
        if found is None:
            return
        left = _member(found).partitions - {partition}
        if not left:
            gone = delete(consumer_member).where(*me, _M.expires_at <= now_us())
            if (await self._run(gone)).rowcount:
                return
        await self._run(update(consumer_member).where(*me).values(partitions=_to_text(left)))

    async def forget_expired(self, consumer: str) -> int:
        """Remove the rows that name no partition and have expired; return how many."""
        ended = (_M.partitions == _to_text(()), _M.expires_at <= now_us())
        gone = delete(consumer_member).where(_M.consumer == consumer, *ended)
        return (await self._run(gone)).rowcount

    async def _run(self, statement: Executable) -> CursorResult[Any]:
        async with translated("the members"):
            connection = await self._session.connection()
            return await connection.execute(statement)


def _to_text(partitions: Collection[Partition]) -> str:
    return json.dumps(sorted([p.topic, p.number] for p in partitions))


def _member(row: Row[Any]) -> Member:
    return Member(
        row.consumer,
        row.name,
        row.owner,
        frozenset(Partition(topic, number) for topic, number in json.loads(row.partitions)),
        row.in_flight,
        to_seconds(row.expires_at),
    )
