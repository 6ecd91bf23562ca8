"""The running members in PostgreSQL and SQLite."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import CursorResult, Row, Select, delete, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql import Executable

from semel.message import Partition
from semel.messaging.records import Member, Note, stored_id
from semel.sql.faults import translated
from semel.sql.tables import consumer_member, crash_suspect
from semel.sql.types import now_us, to_seconds, to_us

_M: Final = consumer_member.c
_S: Final = crash_suspect.c

_NEW: Final = insert(consumer_member)
_WRITTEN: Final = ("owner", "partitions", "in_flight", "expires_at")
ENTER: Final = _NEW.on_conflict_do_update(
    index_elements=list(consumer_member.primary_key),
    set_={name: _NEW.excluded[name] for name in _WRITTEN},
)

_TRY: Final = insert(crash_suspect)
SUSPECT: Final = _TRY.on_conflict_do_update(
    index_elements=list(crash_suspect.primary_key),
    set_={
        "tries": _S.tries + 1,
        "writer": _TRY.excluded.writer,
        "noted_at": _TRY.excluded.noted_at,
    },
).returning(_S.tries)
NOTE: Final = (
    insert(crash_suspect)
    .on_conflict_do_nothing(index_elements=list(crash_suspect.primary_key))
    .returning(_S.message_id)
)
_FOUND: Final = select(crash_suspect).order_by(_S.message_id)


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

    async def running(self, consumer: str) -> Sequence[Member]:
        """Return the rows that have not expired."""
        live = (_M.consumer == consumer, _M.expires_at > now_us())
        return [_member(row) for row in await self._run(select(consumer_member).where(*live))]

    async def suspect(self, consumer: str, message_id: str, writer: str) -> int:
        """Note one more try of a message; return how many there are."""
        one = _try(consumer, stored_id(message_id), writer)
        return int((await self._run(SUSPECT.values(**one))).scalar_one())

    async def note(
        self, consumer: str, message_ids: Collection[str], writer: str
    ) -> Mapping[str, Note]:
        """Note one try of each of several messages; return what was noted before."""
        by_name = {stored_id(message_id): message_id for message_id in message_ids}
        if not by_name:
            return {}
        # Sorted, so that two workers wait for each other in one direction only.
        rows = [_try(consumer, name, writer) for name in sorted(by_name)]
        new = set((await self._run(NOTE.values(rows))).scalars())
        known = {name: message_id for name, message_id in by_name.items() if name not in new}
        return await self._find(consumer, known, _FOUND.with_for_update())

    async def notes(self, consumer: str, message_ids: Collection[str]) -> Mapping[str, Note]:
        """Return what is noted of messages."""
        by_name = {stored_id(message_id): message_id for message_id in message_ids}
        return await self._find(consumer, by_name, _FOUND)

    async def _find(
        self, consumer: str, by_name: Mapping[str, str], found: Select[Any]
    ) -> dict[str, Note]:
        if not by_name:
            return {}
        mine = (_S.consumer == consumer, _S.message_id.in_(sorted(by_name)))
        rows = await self._run(found.where(*mine))
        return {
            by_name[row.message_id]: Note(row.tries, row.writer, to_seconds(row.noted_at))
            for row in rows
        }

    async def acquit(self, consumer: str, message_id: str) -> None:
        """Forget what was noted of a message, whoever did."""
        await self._run(
            delete(crash_suspect).where(
                _S.consumer == consumer, _S.message_id == stored_id(message_id)
            )
        )

    async def acquit_many(self, consumer: str, message_ids: Collection[str], writer: str) -> None:
        """Forget what *writer* noted of several messages."""
        if message_ids:
            here = _S.message_id.in_(sorted(map(stored_id, message_ids)))
            mine = (_S.consumer == consumer, _S.writer == writer)
            await self._run(delete(crash_suspect).where(*mine, here))

    async def forget_notes(self, consumer: str, older_than_seconds: float, limit: int) -> int:
        """Delete at most *limit* notes that are that old; return how many."""
        is_old = (_S.consumer == consumer, _S.noted_at <= now_us() - to_us(older_than_seconds))
        old = select(_S.message_id).where(*is_old).order_by(_S.message_id).limit(limit)
        gone = delete(crash_suspect).where(*is_old, _S.message_id.in_(old))
        return (await self._run(gone)).rowcount

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


def _try(consumer: str, name: str, writer: str) -> dict[str, Any]:
    values = {"consumer": consumer, "message_id": name, "tries": 1, "writer": writer}
    return {**values, "noted_at": now_us()}


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
