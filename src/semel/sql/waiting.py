"""The waiting table in PostgreSQL and SQLite: its statements, and the store that sends them.

SQLite has no row locks, and needs none: it has one writer at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Insert,
    Integer,
    Row,
    Text,
    and_,
    any_,
    bindparam,
    case,
    delete,
    func,
    literal_column,
    not_,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql import Executable

from semel.message import Partition
from semel.messaging.records import HeldKey, MessageFilter, WaitingMessage, Waits, stored_id
from semel.messaging.redact import ERASED_REASON
from semel.operate.stores import plain
from semel.sql.store import (
    MessageStore,
    insert_new,
    insert_or_update,
    is_me,
    matching,
    me,
    new_values,
    record_of,
    stored_names,
    values_of,
    without_payload,
)
from semel.sql.tables import waiting_key, waiting_message
from semel.sql.types import MICROSECONDS, now_us, to_seconds, to_us

_C: Final = waiting_message.c
_K: Final = waiting_key.c
_BY: Final = bindparam("by", type_=Text)
_ID: Final = bindparam("id", type_=Text)
_KEYS: Final = bindparam("keys", type_=ARRAY(Text))
_AT_MOST: Final = bindparam("at_most", type_=Integer)
_RETRY: Final = Waits.RETRY.value
_PARKED: Final = Waits.PARKED.value
_BEHIND: Final = Waits.BEHIND.value


def _make_keys() -> Insert:
    given = func.unnest(_KEYS).table_valued("key").render_derived(name="given")
    rows = select(_BY, given.c.key, now_us()).order_by(given.c.key.collate("C"))
    names = ["consumer", "key", "used_at"]
    made = insert_new(waiting_key).from_select(names, rows, include_defaults=False)
    return made.returning(_K.key)


# Both statements sort by bytes, as Python sorts text: two workers that lock several keys lock
# them in the same order, and cannot deadlock.
MAKE_KEYS: Final = _make_keys()
"""For PostgreSQL; the rows that it inserts are locked by it."""

LOCK_KEYS: Final = (
    select(_K.key)
    .where(_K.consumer == _BY, _K.key == any_(_KEYS))
    .order_by(_K.key.collate("C"))
    .with_for_update()
)

_HELD: Final = select(_C.key).where(_C.consumer == _BY, _C.held == 1).distinct()
HELD: Final = _HELD.where(_C.key == any_(_KEYS))
HELD_SQLITE: Final = _HELD.where(_C.key.in_(bindparam("keys", expanding=True)))

# In a subquery the clock is read once, not once for each row.
_LONG_AGO: Final = select(now_us() - bindparam("age_us", type_=BigInteger)).scalar_subquery()

_OLD_KEYS: Final = (
    select(_K.key)
    .where(_K.consumer == _BY, _K.used_at <= _LONG_AGO)
    .limit(_AT_MOST)
    .with_for_update(skip_locked=True)
)

# With RETURNING, because sqlite3 has no row count for a DELETE that begins with WITH.
FORGET_KEYS: Final = (
    delete(waiting_key)
    .where(_K.consumer == _BY, _K.key.in_(select(_OLD_KEYS.cte("old").c.key)))
    .returning(_K.key)
)

_SAID: Final = new_values(waiting_message)

PUT: Final = (
    insert_or_update(
        waiting_message,
        ["due_at", "attempts", "error_code", "exception"],
        _C.consumer,
        _C.message_id,
        # A message without its payload cannot be handled: it stays parked.
        waits=case((_C.erased_at.is_not(None), _PARKED), else_=_SAID.waits),
        # The new reason may quote the payload that was erased.
        reason=case((_C.erased_at.is_not(None), ERASED_REASON), else_=_SAID.reason),
        first_failed_at=case(
            (_C.first_failed_at == 0, _SAID.first_failed_at), else_=_C.first_failed_at
        ),
    )
    .values(
        # A missing time becomes the database's current time.
        due_at=now_us() + bindparam("delay_us", type_=BigInteger),
        since=func.coalesce(bindparam("came_at", type_=BigInteger), now_us()),
        first_failed_at=func.coalesce(bindparam("failed_at", type_=BigInteger), now_us()),
    )
    .returning(waiting_message)
)

HERE: Final = select(_C.place).where(is_me(waiting_message)).with_for_update()
_EARLIER: Final = waiting_message.alias("earlier")

_IS_FIRST: Final = or_(
    _C.held == 0,
    not_(
        select(literal_column("1"))
        .where(
            _EARLIER.c.consumer == _C.consumer,
            _EARLIER.c.key == _C.key,
            _EARLIER.c.held == 1,
            _EARLIER.c.place < _C.place,
        )
        .exists()
    ),
)

WHOSE_TURN: Final = select(waiting_message).where(
    _C.consumer == _BY,
    or_(_C.waits == _BEHIND, and_(_C.waits == _RETRY, _C.due_at <= now_us())),
    _IS_FIRST,
)

TAKE_DUE: Final = WHOSE_TURN.order_by(_C.place).limit(_AT_MOST).with_for_update(skip_locked=True)

# A separate statement: with a bound of unknown value in it, `TAKE_DUE` would get a worse plan.
TAKE_DUE_BEHIND: Final = TAKE_DUE.where(_C.place > bindparam("after", type_=BigInteger))
TAKE: Final = WHOSE_TURN.where(_C.message_id == _ID).with_for_update(skip_locked=True)
TAKE_RETRY: Final = (
    select(waiting_message)
    .where(
        is_me(waiting_message),
        _C.waits == _RETRY,
        _C.attempts == bindparam("attempts", type_=Integer),
    )
    .with_for_update(skip_locked=True)
)
_THESE: Final = _C.message_id.in_(bindparam("ids", type_=Text, expanding=True))
TAKE_MANY: Final = WHOSE_TURN.where(_THESE).with_for_update(skip_locked=True)
_MINE_BY_TURN: Final = select(_C.due_at).where(_C.consumer == _BY, _IS_FIRST).limit(1)

# Each reads an index up to the first row whose turn it is; a minimum would read all rows.
_IS_BEHIND_NOBODY: Final = (
    _MINE_BY_TURN.with_only_columns(literal_column("0")).where(_C.waits == _BEHIND)
).scalar_subquery()

_NEXT_RETRY: Final = (_MINE_BY_TURN.where(_C.waits == _RETRY).order_by(_C.due_at)).scalar_subquery()
US_TO_NEXT: Final = select(func.coalesce(_IS_BEHIND_NOBODY, _NEXT_RETRY - now_us()))

_OF_KEY: Final = (
    select(
        _C.key,
        func.min(_C.place).label("first"),
        func.count().label("messages"),
        func.min(_C.since).label("held_since"),
    )
    .where(_C.consumer == _BY, _C.held == 1)
    .group_by(_C.key)
    .subquery("of_key")
)

HELD_KEYS: Final = (
    select(*without_payload(waiting_message), _OF_KEY.c.messages, _OF_KEY.c.held_since)
    .join(_OF_KEY, _OF_KEY.c.first == _C.place)
    .order_by(_OF_KEY.c.held_since, _C.place)
    .limit(_AT_MOST)
)


class SqlWaitingStore(MessageStore[WaitingMessage]):
    """The waiting table, in one open transaction."""

    what = "the waiting messages"
    table = waiting_message
    record = WaitingMessage
    time = _C.since
    order = (_C.place,)
    erased: ClassVar = {
        "payload": None,
        "headers": "",
        "reason": ERASED_REASON,
        "waits": _PARKED,
    }

    def __init__(self, session: AsyncSession) -> None:
        super().__init__(session)
        self._is_postgres = session.get_bind().dialect.name == "postgresql"

    async def hold(self, consumer: str, keys: Sequence[str]) -> frozenset[str]:
        if not keys:
            return frozenset()
        by_name = {stored_id(key): key for key in keys}
        await self._lock(consumer, by_name)
        statement = HELD if self._is_postgres else HELD_SQLITE
        held = await self._run(statement, {"by": consumer, "keys": sorted(by_name)})
        return frozenset(by_name[name] for name in held.scalars())

    async def _lock(self, consumer: str, names: Collection[str]) -> None:
        missing = set(names) if self._is_postgres else set()
        # Retention may delete a row between the two statements: then try again.
        while missing:
            for statement in (MAKE_KEYS, LOCK_KEYS):
                got = await self._run(statement, {"by": consumer, "keys": sorted(missing)})
                missing -= set(got.scalars())
                if not missing:
                    break

    async def put(self, waiting: WaitingMessage, delay_seconds: float = 0.0) -> WaitingMessage:
        if waiting.held and waiting.key is not None:
            # A message in the table holds its key already; only a new one needs the lock.
            here = await self._run(HERE, me(waiting.consumer, waiting.message_id))
            if here.first() is None:
                await self._lock(waiting.consumer, [stored_id(waiting.key)])
        # If the first failure is unknown, it is this one; a BEHIND message has not failed.
        not_failed = 0 if waiting.waits is Waits.BEHIND else None
        values = {
            **values_of(waiting_message, waiting, "place", "due_at", "since", "first_failed_at"),
            "held": int(waiting.held and waiting.key is not None),
            "delay_us": to_us(delay_seconds),
            "came_at": to_us(waiting.since) or None,
            "failed_at": to_us(waiting.first_failed_at) or not_failed,
        }
        [row] = await self._read(PUT, values)
        return row

    async def take_due(
        self, consumer: str, limit: int, after_place: int = 0
    ) -> Sequence[WaitingMessage]:
        which = {"by": consumer, "at_most": limit}
        if after_place:
            return await self._taken(TAKE_DUE_BEHIND, {**which, "after": after_place})
        return await self._taken(TAKE_DUE, which)

    async def take(self, consumer: str, message_id: str) -> WaitingMessage | None:
        found = await self._taken(TAKE, me(consumer, message_id))
        return found[0] if found else None

    async def take_retry(
        self, consumer: str, message_id: str, attempts: int
    ) -> WaitingMessage | None:
        which = {**me(consumer, message_id), "attempts": attempts}
        found = await self._taken(TAKE_RETRY, which)
        return found[0] if found else None

    async def take_many(
        self, consumer: str, message_ids: Collection[str]
    ) -> Sequence[WaitingMessage]:
        if not message_ids:
            return []
        these = sorted(map(stored_id, message_ids))
        return await self._taken(TAKE_MANY, {"by": consumer, "ids": these})

    async def _taken(self, statement: Executable, which: dict[str, Any]) -> list[WaitingMessage]:
        found = await self._read(statement, which)
        return sorted(found, key=lambda waiting: waiting.place)

    async def seconds_to_next(self, consumer: str) -> float | None:
        us = (await self._run(US_TO_NEXT, {"by": consumer})).scalar()
        return None if us is None else max(us / MICROSECONDS, 0.0)

    async def held_keys(self, consumer: str, limit: int) -> Sequence[HeldKey]:
        rows = await self._run(HELD_KEYS, {"by": consumer, "at_most": limit})
        return [_held_key(row) for row in rows]

    async def remove_many(self, consumer: str, message_ids: Sequence[str]) -> int:
        if not message_ids:
            return 0
        here = _C.message_id.in_(sorted(map(stored_id, message_ids)))
        return await self._count(delete(waiting_message).where(_C.consumer == consumer, here))

    async def label(self, consumer: str, message_id: str, label: str) -> bool:
        return await self._change(consumer, message_id, label=plain(label))

    async def release(self, consumer: str, message_id: str) -> bool:
        can_be_handled = (_C.erased_at.is_(None), _C.waits == _PARKED)
        return await self._change(
            consumer, message_id, *can_be_handled, waits=_RETRY, attempts=0, due_at=now_us()
        )

    async def let_overtake(self, consumer: str, message_id: str) -> bool:
        return await self._change(consumer, message_id, held=0)

    async def revise(
        self, consumer: str, message_id: str, payload: bytes, payload_hash: str, new_id: str
    ) -> bool:
        before = await self.get(consumer, message_id)
        if before is None:
            return False
        new = {"payload": payload, "payload_hash": payload_hash}
        names = stored_names(message_id=new_id, key=before.key)
        return await self._change(consumer, message_id, _C.erased_at.is_(None), **new, **names)

    async def _change(
        self, consumer: str, message_id: str, /, *where: ColumnElement[bool], **values: Any
    ) -> bool:
        mine = matching(waiting_message, MessageFilter(consumer, message_id))
        return await self._count(update(waiting_message).where(mine, *where).values(values)) > 0

    async def places(
        self, consumer: str, partition: Partition, first: int, last: int, limit: int
    ) -> Sequence[tuple[int, Waits]]:
        columns = [_C.offset, _C.waits]
        found = await self._places(columns, consumer, partition, (first, last), limit)
        return [(offset, Waits(waits)) for offset, waits in found]

    async def forget_keys(self, consumer: str, older_than_seconds: float, limit: int) -> int:
        old = {"by": consumer, "age_us": to_us(older_than_seconds), "at_most": limit}
        return len((await self._run(FORGET_KEYS, old)).all())


def _held_key(row: Row[Any]) -> HeldKey:
    head = record_of(waiting_message, row, WaitingMessage)
    since = to_seconds(row.held_since)
    return HeldKey(head.consumer, head.key or "", head, row.messages - 1, since)
