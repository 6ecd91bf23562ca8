"""The outbox in PostgreSQL and SQLite: its statements, and the store that sends them.

LEAD     take or keep the leadership; a new leader raises the epoch
READ     read what the relay sends next
DELETE   delete what was sent, if the leadership still holds
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from sqlalchemy import (
    ColumnElement,
    Executable,
    Select,
    Text,
    and_,
    bindparam,
    case,
    delete,
    event,
    exists,
    func,
    literal,
    null,
    or_,
    select,
    update,
)
from sqlalchemy.engine import CursorResult
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.util import await_only

from semel.errors import Misuse
from semel.message import headers_from_text, headers_to_text
from semel.messaging.records import original_id, stored_id
from semel.messaging.redact import ERASED_REASON
from semel.messaging.send.outbox import (
    NO_HEADERS,
    Leader,
    Leadership,
    LeadershipLost,
    OutboxEntry,
    OutboxNumbers,
    key_from_text,
    key_to_text,
    refuse_another,
)
from semel.sql.faults import translated
from semel.sql.session import HandlerSession
from semel.sql.store import Store, insert_new, naming_in
from semel.sql.tables import outbox_leader, outbox_message
from semel.sql.types import MICROSECONDS, among, now_us, seconds_or_none, to_seconds, to_us

Result = TypeVar("Result")

_M: Final = outbox_message.c
_L: Final = outbox_leader.c
_OF: Final = _M.outbox == bindparam("of_outbox")
_IS_PARKED: Final = _M.parked_reason.is_not(None)
_MEANT: Final = (_OF, _M.message_id == bindparam("of_id"), _IS_PARKED)

_NEW: Final = insert_new(outbox_message, _M.outbox, _M.message_id)
ADD: Final = _NEW.values(created_at=now_us()).returning(_M.outbox, _M.message_id)

_IS_MINE: Final = _L.owner == bindparam("me")

LEAD: Final = (
    update(outbox_leader)
    .where(
        _L.outbox == bindparam("of_outbox"),
        or_(_IS_MINE, _L.lease_until <= now_us(), _L.owner == bindparam("instead_of")),
    )
    .values(
        epoch=case((_IS_MINE, _L.epoch), else_=_L.epoch + 1),
        owner=bindparam("me"),
        lease_until=now_us() + bindparam("us"),
    )
    .returning(_L.epoch)
)

NEW_LEASE: Final = insert_new(outbox_leader)

LEADER: Final = select(_L.owner, _L.epoch, _L.lease_until - now_us()).where(
    _L.outbox == bindparam("of_outbox")
)

_STANDS: Final = (
    _L.outbox == bindparam("of_outbox"),
    _L.owner == bindparam("me"),
    _L.epoch == bindparam("of_epoch"),
)

RESIGN: Final = update(outbox_leader).where(*_STANDS).values(owner="", lease_until=0)
STANDS: Final = select(literal(1)).where(*_STANDS)

# The lock orders this statement and a change of leadership: a new leader waits for this
# transaction, or this statement finds the new epoch.  So an old leader cannot change anything
# after the first act of a new one.
_FENCE: Final = exists(select(literal(1)).where(*_STANDS).with_for_update(read=True))
_FENCED: Final = (_OF, among(_M.place, "places"), _FENCE)
DELETE: Final = delete(outbox_message).where(*_FENCED)
FAILED: Final = update(outbox_message).where(*_FENCED).values(attempts=_M.attempts + 1)

# The broker's reason may quote the value of an entry that was erased after it was read.
_SAID: Final = bindparam("reason", type_=Text)

PARK: Final = FAILED.values(
    parked_reason=case((_M.erased_at.is_(None), _SAID), else_=_M.parked_reason)
)

UNPARK: Final = (
    update(outbox_message)
    .where(*_MEANT, _M.erased_at.is_(None))
    .values(parked_reason=None, attempts=0)
)

DROP: Final = delete(outbox_message).where(*_MEANT)
CANCEL: Final = delete(outbox_message).where(*_MEANT[:2])

# What the relay reads: entries that are neither parked nor erased.
_PENDING_ENTRY: Final = (
    func.coalesce(_M.original_id, _M.message_id),
    _M.topic,
    _M.payload,
    _M.key,
    _M.headers,
    _M.place,
    _M.created_at,
    _M.attempts,
    _M.parent,
)

_ENTRY: Final = (*_PENDING_ENTRY, _M.outbox, _M.parked_reason, _M.erased_at)


def _entries(*where: ColumnElement[bool]) -> Select[Any]:
    return select(*_ENTRY).where(*where).order_by(_M.place)


_IS_DUE: Final = or_(_M.not_before.is_(None), _M.not_before <= now_us())

READ: Final = (
    select(*_PENDING_ENTRY)
    .where(_OF, _M.place > bindparam("after_place"), _M.parked_reason.is_(None), _IS_DUE)
    .order_by(_M.place)
    .limit(bindparam("most"))
)

# Without payloads, because the list is for people: large messages must not fill the memory.
PARKED: Final = (
    select(*(null() if column is _M.payload else column for column in _ENTRY))
    .where(_OF, _IS_PARKED)
    .order_by(_M.place)
    .limit(bindparam("most"))
)
KNOWN: Final = _entries(_OF, _M.message_id.in_(bindparam("ids", expanding=True)))
CHILDREN: Final = _entries(_M.parent == bindparam("of_parent"))

PARKED_KEYS: Final = (
    select(_M.topic, _M.key)
    .where(_OF, _IS_PARKED, _M.erased_at.is_(None), _M.key.is_not(None))
    .distinct()
)

# One that waits for its time is not late.
_PENDING: Final = and_(_M.parked_reason.is_(None), _IS_DUE)

NUMBERS: Final = select(
    func.count().filter(_PENDING),
    func.count(_M.parked_reason),
    now_us() - func.min(_M.created_at).filter(_PENDING),
).where(_OF)

_ERASE: Final = (
    update(outbox_message)
    .where(_M.erased_at.is_(None))
    .values(
        payload=None,
        headers="",
        erased_at=now_us(),
        parked_reason=ERASED_REASON,
    )
)


# SQLite accepts 32,766 parameters in a statement, before 3.32 only 999.
ASKED_AT_ONCE: Final = 500


class SqlOutboxStore(Store):
    """The outbox, in one open transaction."""

    what = "the outbox"

    def __init__(self, session: AsyncSession, schema: str | None = None) -> None:
        super().__init__(session)
        self._schema = schema

    async def add(self, entries: Sequence[OutboxEntry]) -> None:
        new: dict[tuple[str, str], OutboxEntry] = {}
        for entry in entries:
            refuse_another(new.setdefault(_place_of(entry), entry), entry)
        while new:
            rows = [_row(entry) for entry in new.values()]
            written = await self._run(ADD, rows if len(rows) > 1 else rows[0])
            for place in written:
                del new[tuple(place)]
            # An entry that a relay sent and deleted between the statements is not found here.
            for there in await self._known(list(new)):
                refuse_another(there, new.pop(_place_of(there)))

    async def cancel(self, outbox: str, message_id: str) -> bool:
        return await self._change_one(CANCEL, outbox, message_id)

    async def lead(
        self, outbox: str, owner: str, seconds: float, *, instead_of: str = ""
    ) -> Leadership | None:
        # After a leader resigned, its row has the owner "" and no lease.
        asked = {"of_outbox": outbox, "me": owner, "us": to_us(seconds), "instead_of": instead_of}
        epoch = (await self._run(LEAD, asked)).scalar_one_or_none()
        if epoch is None and await self.leader(outbox) is None:
            await self._run(NEW_LEASE, {"outbox": outbox})
            epoch = (await self._run(LEAD, asked)).scalar_one_or_none()
        return None if epoch is None else Leadership(outbox, owner, epoch)

    async def leader(self, outbox: str) -> Leader | None:
        found: Any = (await self._run(LEADER, {"of_outbox": outbox})).one_or_none()
        if found is None:
            return None
        owner, epoch, us_left = found
        return Leader(owner, epoch, max(0.0, to_seconds(us_left)))

    async def resign(self, leadership: Leadership) -> None:
        await self._run(RESIGN, _shown(leadership))

    async def read(self, outbox: str, after_place: int, limit: int) -> Sequence[OutboxEntry]:
        asked = {"of_outbox": outbox, "after_place": after_place, "most": limit}
        rows: Any = (await self._run(READ, asked)).all()
        return [_entry(row, outbox) for row in rows]

    async def delete(self, leadership: Leadership, places: Sequence[int]) -> int:
        return await self._fenced(DELETE, leadership, places)

    async def failed(self, leadership: Leadership, places: Sequence[int]) -> None:
        await self._fenced(FAILED, leadership, places)

    async def park(self, leadership: Leadership, place: int, reason: str) -> None:
        await self._fenced(PARK, leadership, [place], reason=reason.replace("\0", "\\0"))

    async def unpark(self, outbox: str, message_id: str) -> bool:
        return await self._change_one(UNPARK, outbox, message_id)

    async def drop(self, outbox: str, message_id: str) -> bool:
        return await self._change_one(DROP, outbox, message_id)

    async def parked(self, outbox: str, limit: int) -> Sequence[OutboxEntry]:
        return _read(await self._run(PARKED, {"of_outbox": outbox, "most": limit}))

    async def parked_keys(self, outbox: str) -> frozenset[tuple[str, str]]:
        found = await self._run(PARKED_KEYS, {"of_outbox": outbox})
        return frozenset((topic, key_from_text(key) or "") for topic, key in found)

    async def children(self, parent: str) -> Sequence[OutboxEntry]:
        return _read(await self._run(CHILDREN, {"of_parent": parent}))

    async def numbers(self, outbox: str) -> OutboxNumbers:
        found: Any = (await self._run(NUMBERS, {"of_outbox": outbox})).one()
        pending, parked, us = found
        return OutboxNumbers(pending, parked, to_seconds(us))

    async def erase(
        self, *, message_id: str | None = None, key: str | None = None, parent: str | None = None
    ) -> int:
        if message_id is None and key is None and parent is None:
            raise Misuse("erasing in the outbox needs an id, a key or a parent")
        meant = _ERASE
        if message_id is not None:
            meant = meant.where(_M.message_id == stored_id(message_id))
        if key is not None:
            caused = _M.parent_key == stored_id(key)
            meant = meant.where(or_(_M.key == key_to_text(key), caused))
        if parent is not None:
            meant = meant.where(_M.parent == parent)
        return await self._count(meant)

    async def _known(self, places: Sequence[tuple[str, str]]) -> list[OutboxEntry]:
        """Return the entries with these outboxes and ids."""
        found: list[OutboxEntry] = []
        for outbox in dict(places):
            ids = [message_id for of_outbox, message_id in places if of_outbox == outbox]
            for start in range(0, len(ids), ASKED_AT_ONCE):
                asked = {"of_outbox": outbox, "ids": ids[start : start + ASKED_AT_ONCE]}
                found += _read(await self._run(KNOWN, asked))
        return found

    async def _fenced(
        self, statement: Executable, leadership: Leadership, places: Sequence[int], **more: str
    ) -> int:
        asked = {**_shown(leadership), "places": places, **more}
        count = await self._count(statement, asked)
        # No rows may also mean that the entries are deleted already: by this leader, if the
        # answer to an earlier delete was lost.  So ask who leads.
        if count == 0 and (await self._run(STANDS, _shown(leadership))).first() is None:
            raise LeadershipLost(leadership.outbox, leadership.epoch)
        return count

    async def _change_one(self, statement: Executable, outbox: str, message_id: str) -> bool:
        meant = {"of_outbox": outbox, "of_id": stored_id(message_id)}
        return await self._count(statement, meant) > 0

    async def _run(self, statement: Executable, values: Any = None) -> Any:
        async with translated(self.what):
            # A session may have several binds: use that of these tables.
            binds = {"clause": outbox_message}
            # Not through the handler's session, which would first flush the rows of other messages.
            connection = await AsyncSession.connection(self._session, bind_arguments=binds)
            options = await naming_in(self._session, self._schema)
            return await connection.execute(statement, values, execution_options=options)


def store_of(session: object, schema: str | None = None) -> SqlOutboxStore:
    """Return the outbox in the transaction of a session, in the *schema* of a caller's own.

    Raises:
        Misuse: it is not an `AsyncSession` of SQLAlchemy.
    """
    session = _unscoped(session)
    if not isinstance(session, AsyncSession):
        kind = type(session)
        raise Misuse(
            f"the outbox writes into an AsyncSession's transaction, or into that of the session "
            f"that a handler got; this is a {kind.__module__}.{kind.__qualname__}"
        )
    return SqlOutboxStore(session, schema)


def in_session(session: Any, write: Callable[[Any], Coroutine[Any, Any, Result]]) -> Any:
    """Return the coroutine of *write*; in a handler that is a plain function, its result.

    Raises:
        Misuse: nothing can be written with the session; raised before anything is awaited.
    """
    outside = getattr(session, "of_handler", None)
    if outside is not None:
        return await_only(write(outside))
    store_of(session)
    return write(session)


def after_commit(session: Any, outbox: str, call: Callable[[str], None]) -> None:
    """Call *call* with *outbox* when the session has committed.

    A handler's session never commits, so there *call* is called at once, shortly before the commit.
    """
    session = _unscoped(session)
    if isinstance(session, HandlerSession):
        call(outbox)
        return
    inside = session.sync_session
    told: set[str] = inside.info.setdefault("semel_outboxes", set())
    if outbox not in told:
        told.add(outbox)

        def once(_: object) -> None:
            told.discard(outbox)
            call(outbox)

        event.listen(inside, "after_commit", once, once=True)


def _unscoped(session: Any) -> Any:
    return session() if isinstance(session, async_scoped_session) else session


def _shown(leadership: Leadership) -> dict[str, Any]:
    """Return the parameters of the fence."""
    return {"of_outbox": leadership.outbox, "me": leadership.owner, "of_epoch": leadership.epoch}


def _place_of(entry: OutboxEntry) -> tuple[str, str]:
    return entry.outbox, stored_id(entry.message_id)


def _row(entry: OutboxEntry) -> dict[str, Any]:
    return {
        "outbox": entry.outbox,
        "message_id": stored_id(entry.message_id),
        "original_id": original_id(entry.message_id),
        "topic": entry.topic,
        "key": key_to_text(entry.key),
        "payload": entry.value,
        "headers": headers_to_text(entry.headers),
        "not_before": None if entry.not_before is None else to_us(entry.not_before),
        "parent": entry.parent,
        "parent_key": None if entry.parent_key is None else stored_id(entry.parent_key),
    }


def _read(found: CursorResult[Any]) -> list[OutboxEntry]:
    rows: Any = found.all()
    return [
        _entry(pending, outbox, parked_reason or "", seconds_or_none(erased_at))
        for *pending, outbox, parked_reason, erased_at in rows
    ]


def _entry(
    row: Sequence[Any], outbox: str, parked_reason: str = "", erased_at: float | None = None
) -> OutboxEntry:
    message_id, topic, value, key, headers, place, created, attempts, parent = row
    return OutboxEntry(
        message_id,
        topic,
        value,
        key_from_text(key),
        headers_from_text(headers) if headers else NO_HEADERS,
        place,
        outbox,
        created / MICROSECONDS,
        attempts,
        parked_reason,
        parent,
        erased_at,
    )
