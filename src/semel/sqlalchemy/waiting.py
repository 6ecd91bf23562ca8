"""The waiting room in PostgreSQL and SQLite."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Row, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql import Executable

from semel.message import Partition
from semel.messaging.audit import plain
from semel.messaging.ids import stored_id
from semel.messaging.reasons import ERASED_REASON
from semel.messaging.waiting import HeldKey, WaitingFilter, WaitingMessage, Waits
from semel.sqlalchemy import waiting_statements as sql
from semel.sqlalchemy.faults import translated
from semel.sqlalchemy.origins import (
    came_from,
    origin_of,
    origin_values,
    seconds_or_none,
    stored_names,
)
from semel.sqlalchemy.tables import waiting_message
from semel.sqlalchemy.times import MICROSECONDS, now_us, to_seconds, to_us

_C = waiting_message.c


class SqlWaitingRoom:
    """The waiting messages of one open transaction."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session
        self._is_postgres = session.get_bind().dialect.name == "postgresql"

    async def hold(self, consumer: str, keys: Sequence[str]) -> frozenset[str]:
        """Lock the keys, in sorted order, until the transaction ends; say which are held."""
        if not keys:
            return frozenset()
        by_name = {stored_id(key): key for key in keys}
        await self._lock(consumer, by_name)
        statement = sql.HELD if self._is_postgres else sql.HELD_SQLITE
        held = await self._run(statement, {"by": consumer, "keys": sorted(by_name)})
        return frozenset(by_name[name] for name in held.scalars())

    async def _lock(self, consumer: str, names: Collection[str]) -> None:
        missing = set(names) if self._is_postgres else set()
        # A row may be deleted between the two statements by whoever tidies up: once more.
        while missing:
            for statement in (sql.MAKE_KEYS, sql.LOCK_KEYS):
                got = await self._run(statement, {"by": consumer, "keys": sorted(missing)})
                missing -= set(got.scalars())
                if not missing:
                    break

    async def put(self, waiting: WaitingMessage, delay_seconds: float = 0.0) -> None:
        """Let a message in, at the end of the queue; one that is there already is updated."""
        if waiting.held and waiting.key is not None:
            me = {"by": waiting.consumer, "id": stored_id(waiting.message_id)}
            # What is there already holds its key already; only a beginning needs the lock.
            if (await self._run(sql.HERE, me)).first() is None:
                await self._lock(waiting.consumer, [stored_id(waiting.key)])
        await self._run(sql.PUT, {**_values(waiting), "delay_us": to_us(delay_seconds)})

    async def take_due(
        self, consumer: str, limit: int, after_place: int = 0
    ) -> Sequence[WaitingMessage]:
        """Lock and return messages whose turn it is, in order of place, behind *after_place*."""
        which = {"by": consumer, "at_most": limit}
        if after_place:
            due = await self._run(sql.TAKE_DUE_BEHIND, {**which, "after": after_place})
        else:
            due = await self._run(sql.TAKE_DUE, which)
        return sorted(map(_message, due), key=lambda waiting: waiting.place)

    async def take(self, consumer: str, message_id: str) -> WaitingMessage | None:
        """Lock and return one message, if it is its turn."""
        me = {"by": consumer, "id": stored_id(message_id)}
        row = (await self._run(sql.TAKE, me)).first()
        return None if row is None else _message(row)

    async def take_many(
        self, consumer: str, message_ids: Collection[str]
    ) -> Sequence[WaitingMessage]:
        """Lock and return those of several messages whose turn it is, in order of place."""
        if not message_ids:
            return []
        these = {"by": consumer, "ids": sorted(map(stored_id, message_ids))}
        due = await self._run(sql.TAKE_MANY, these)
        return sorted(map(_message, due), key=lambda waiting: waiting.place)

    async def seconds_to_next(self, consumer: str) -> float | None:
        """Return the seconds until `take_due` has something; None where nothing waits for time."""
        us = (await self._run(sql.US_TO_NEXT, {"by": consumer})).scalar()
        return None if us is None else max(us / MICROSECONDS, 0.0)

    async def get(self, consumer: str, message_id: str) -> WaitingMessage | None:
        """Return one waiting message."""
        me = {"by": consumer, "id": stored_id(message_id)}
        row = (await self._run(sql.GET, me)).first()
        return None if row is None else _message(row)

    async def find(self, which: WaitingFilter, limit: int) -> Sequence[WaitingMessage]:
        """Return matching messages in order of place."""
        found = select(waiting_message).where(sql.matching(which)).order_by(_C.place).limit(limit)
        return [_message(row) for row in await self._run(found)]

    async def count(self, which: WaitingFilter) -> int:
        """Count matching messages."""
        counted = select(func.count()).select_from(waiting_message).where(sql.matching(which))
        return int((await self._run(counted)).scalar_one())

    async def held_keys(self, consumer: str, limit: int) -> Sequence[HeldKey]:
        """Return the keys that are held, the longest first."""
        rows = await self._run(sql.HELD_KEYS, {"by": consumer, "at_most": limit})
        return [_held_key(row) for row in rows]

    async def remove(self, consumer: str, message_id: str) -> bool:
        """Take a message out; the last one of its key lets the key go."""
        gone = await self._run(delete(waiting_message).where(sql.me(consumer, message_id)))
        return bool(gone.rowcount)

    async def remove_many(self, consumer: str, message_ids: Sequence[str]) -> None:
        """Take messages out, as `remove` does with one."""
        if message_ids:
            here = _C.message_id.in_(sorted(map(stored_id, message_ids)))
            await self._run(delete(waiting_message).where(_C.consumer == consumer, here))

    async def label(self, consumer: str, message_id: str, label: str) -> bool:
        """Write what a person classified it as."""
        here = sql.me(consumer, message_id)
        done = await self._run(update(waiting_message).where(here).values(label=plain(label)))
        return bool(done.rowcount)

    async def release(self, consumer: str, message_id: str) -> bool:
        """Make a parked message a retry that is due, in its place; an operator's act."""
        released = (
            update(waiting_message)
            .where(sql.me(consumer, message_id), _C.erased_at.is_(None))
            .where(_C.waits == Waits.PARKED.value)
            .values(waits=Waits.RETRY.value, due_at=now_us())
        )
        return bool((await self._run(released)).rowcount)

    async def let_go(self, consumer: str, message_id: str) -> bool:
        """Give a message its turn whatever of its key is before it."""
        here = sql.me(consumer, message_id)
        done = await self._run(update(waiting_message).where(here).values(held=0))
        return bool(done.rowcount)

    async def revise(
        self, consumer: str, message_id: str, payload: bytes, payload_hash: str, new_id: str
    ) -> bool:
        """Replace what will be handled, and under which id; the place in the queue stays."""
        before = await self.get(consumer, message_id)
        if before is None:
            return False
        names = stored_names(message_id=new_id, key=before.key)
        revised = (
            update(waiting_message)
            .where(sql.me(consumer, message_id), _C.erased_at.is_(None))
            .values(payload=payload, payload_hash=payload_hash, **names)
        )
        return bool((await self._run(revised)).rowcount)

    async def erase(self, which: WaitingFilter) -> int:
        """Remove payload, headers and reason of matching messages; hashes and error codes stay."""
        gone = {"payload": None, "headers": "", "reason": ERASED_REASON, "erased_at": now_us()}
        gone["waits"] = Waits.PARKED.value
        here = sql.matching(which)
        erased = update(waiting_message).where(here, _C.erased_at.is_(None)).values(gone)
        return int((await self._run(erased)).rowcount)

    async def places(
        self, consumer: str, partition: Partition, first: int, last: int, limit: int
    ) -> Sequence[tuple[int, Waits]]:
        """Return the first offsets between two, both included, whose messages wait, in order."""
        here = came_from(_C, partition, first, last)
        found = (
            select(_C.offset, _C.waits)
            .where(_C.consumer == consumer, here)
            .order_by(_C.offset, _C.waits)
            .limit(limit)
        )
        return [(row.offset, Waits(row.waits)) for row in await self._run(found)]

    async def forget_keys(self, consumer: str, older_than_seconds: float, limit: int) -> int:
        """Delete at most *limit* locks of keys that are that old and that nobody has locked."""
        old = {"by": consumer, "age_us": to_us(older_than_seconds), "at_most": limit}
        return len((await self._run(sql.FORGET_KEYS, old)).all())

    async def _run(self, statement: Executable, values: Any = None) -> Any:
        async with translated("the waiting room"):
            return await self._session.execute(statement, values)


def _values(waiting: WaitingMessage) -> dict[str, Any]:
    """Return the columns of a new message; a first failure that is not known is this one."""
    failed = 0 if waiting.waits is Waits.BEHIND else None
    return {
        **origin_values(waiting),
        "consumer": waiting.consumer,
        "waits": waiting.waits.value,
        "held": int(waiting.held and waiting.key is not None),
        "attempts": waiting.attempts,
        "reason": plain(waiting.reason),
        "error_code": plain(waiting.error_code),
        "exception": plain(waiting.exception),
        "came_at": to_us(waiting.since) or None,
        "failed_at": to_us(waiting.first_failed_at) or failed,
        "label": plain(waiting.label),
        "erased_at": None if waiting.erased_at is None else to_us(waiting.erased_at),
    }


def _message(row: Row[Any]) -> WaitingMessage:
    return WaitingMessage(
        **origin_of(row),
        consumer=row.consumer,
        waits=Waits(row.waits),
        place=row.place,
        held=bool(row.held),
        due_at=to_seconds(row.due_at),
        attempts=row.attempts,
        reason=row.reason,
        error_code=row.error_code,
        exception=row.exception,
        since=to_seconds(row.since),
        first_failed_at=to_seconds(row.first_failed_at),
        label=row.label,
        erased_at=seconds_or_none(row.erased_at),
    )


def _held_key(row: Row[Any]) -> HeldKey:
    head = _message(row)
    since = to_seconds(row.held_since)
    return HeldKey(head.consumer, head.key or "", head, row.messages - 1, since)
