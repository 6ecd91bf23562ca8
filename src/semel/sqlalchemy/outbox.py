"""The outbox in PostgreSQL and SQLite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Executable, event
from sqlalchemy.engine import CursorResult
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

from semel.errors import Misuse
from semel.messaging.ids import original_id, stored_id
from semel.messaging.outbox import (
    NO_HEADERS,
    Leader,
    Leadership,
    LeadershipLost,
    OutboxEntry,
    OutboxNumbers,
    refuse_another,
)
from semel.sqlalchemy import outbox_statements as sql
from semel.sqlalchemy.encoding import headers_from_text, headers_to_text
from semel.sqlalchemy.faults import translated
from semel.sqlalchemy.session import HandlerSession
from semel.sqlalchemy.tables import outbox_message
from semel.sqlalchemy.times import MICROSECONDS, to_seconds, to_us

# SQLite takes 32,766 parameters, older ones 999.
ASKED_AT_ONCE: Final = 500


class SqlOutboxStore:
    """The outbox of one open transaction."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def add(self, entries: Sequence[OutboxEntry]) -> None:
        """Write entries; one that is there already is left as it is."""
        new: dict[tuple[str, str], OutboxEntry] = {}
        for entry in entries:
            refuse_another(new.setdefault(_place_of(entry), entry), entry)
        while new:
            rows = [_row(entry) for entry in new.values()]
            written = await self._run(sql.ADD, rows if len(rows) > 1 else rows[0])
            for place in written:
                del new[tuple(place)]
            # What a relay has sent in between is neither written nor there.
            for there in await self._known(list(new)):
                refuse_another(there, new.pop(_place_of(there)))

    async def lead(
        self, outbox: str, owner: str, seconds: float, *, instead_of: str = ""
    ) -> Leadership | None:
        """Take or keep the leadership; None while another owner's lease lives."""
        # Whoever resigned is called "", and has no lease.
        asked = {"of_outbox": outbox, "me": owner, "us": to_us(seconds), "instead_of": instead_of}
        epoch = (await self._run(sql.LEAD, asked)).scalar_one_or_none()
        if epoch is None and await self.leader(outbox) is None:
            await self._run(sql.NEW_LEASE, {"outbox": outbox})
            epoch = (await self._run(sql.LEAD, asked)).scalar_one_or_none()
        return None if epoch is None else Leadership(outbox, owner, epoch)

    async def leader(self, outbox: str) -> Leader | None:
        """Say who relays; None where nobody ever did."""
        found: Any = (await self._run(sql.LEADER, {"of_outbox": outbox})).one_or_none()
        if found is None:
            return None
        owner, epoch, us_left = found
        return Leader(owner, epoch, max(0.0, to_seconds(us_left)))

    async def resign(self, leadership: Leadership) -> None:
        """Give the leadership up; nothing happens where it was lost."""
        await self._run(sql.RESIGN, _shown(leadership))

    async def read(self, outbox: str, after_place: int, limit: int) -> Sequence[OutboxEntry]:
        """Return entries behind *after_place* that are not parked, in order."""
        asked = {"of_outbox": outbox, "after_place": after_place, "most": limit}
        return _read_pending(await self._run(sql.READ, asked), outbox)

    async def delete(self, leadership: Leadership, places: Sequence[int]) -> int:
        """Delete exactly these entries, if the leadership still stands."""
        return await self._fenced(sql.DELETE, leadership, places)

    async def failed(self, leadership: Leadership, places: Sequence[int]) -> None:
        """Count a failed publication of each of these entries."""
        await self._fenced(sql.FAILED, leadership, places)

    async def park(self, leadership: Leadership, place: int, reason: str) -> None:
        """Set an entry aside that the broker will never take, and count the failure."""
        await self._fenced(sql.PARK, leadership, [place], reason=reason.replace("\0", "\\0"))

    async def unpark(self, outbox: str, message_id: str) -> bool:
        """Send a parked entry again, as if for the first time; an operator's act."""
        return await self._change_one(sql.UNPARK, outbox, message_id)

    async def drop(self, outbox: str, message_id: str) -> bool:
        """Take a parked entry out for good; an operator's act."""
        return await self._change_one(sql.DROP, outbox, message_id)

    async def parked(self, outbox: str, limit: int) -> Sequence[OutboxEntry]:
        """Return the entries that were set aside, in order."""
        return _read(await self._run(sql.PARKED, {"of_outbox": outbox, "most": limit}))

    async def parked_keys(self, outbox: str) -> frozenset[tuple[str, str]]:
        """Return (topic, key) of parked entries that later ones wait for; of erased ones, none."""
        found = await self._run(sql.PARKED_KEYS, {"of_outbox": outbox})
        return frozenset(tuple(row) for row in found)

    async def children(self, parent: str) -> Sequence[OutboxEntry]:
        """Return entries that handling one message wrote and that are still here."""
        return _read(await self._run(sql.CHILDREN, {"of_parent": parent}))

    async def numbers(self, outbox: str) -> OutboxNumbers:
        """Count what is pending and say how old the oldest is."""
        found: Any = (await self._run(sql.NUMBERS, {"of_outbox": outbox})).one()
        pending, parked, us = found
        return OutboxNumbers(pending, parked, to_seconds(us))

    async def erase(
        self, *, message_id: str | None = None, key: str | None = None, parent: str | None = None
    ) -> int:
        """Remove value, headers and the broker's words of matching entries, and park them all."""
        if message_id is None and key is None and parent is None:
            raise Misuse("say whose entries of the outbox are erased: an id, a key or a parent")
        meant = sql.erasing(message_id=message_id, key=key, parent=parent)
        return (await self._run(meant)).rowcount

    async def _known(self, places: Sequence[tuple[str, str]]) -> list[OutboxEntry]:
        """Return the entries at these outboxes and ids."""
        found: list[OutboxEntry] = []
        for outbox in dict(places):
            ids = [message_id for of_outbox, message_id in places if of_outbox == outbox]
            for start in range(0, len(ids), ASKED_AT_ONCE):
                asked = {"of_outbox": outbox, "ids": ids[start : start + ASKED_AT_ONCE]}
                found += _read(await self._run(sql.KNOWN, asked))
        return found

    async def _fenced(
        self, statement: Executable, leadership: Leadership, places: Sequence[int], **more: str
    ) -> int:
        asked = {**_shown(leadership), "places": places, **more}
        count = (await self._run(statement, asked)).rowcount
        # Nothing changed where the entries are gone already, too: by this leader's own delete,
        # whose answer was lost.
        if count == 0 and (await self._run(sql.STANDS, _shown(leadership))).first() is None:
            raise LeadershipLost(leadership.outbox, leadership.epoch)
        return count

    async def _change_one(self, statement: Executable, outbox: str, message_id: str) -> bool:
        meant = {"of_outbox": outbox, "of_id": stored_id(message_id)}
        return (await self._run(statement, meant)).rowcount == 1

    async def _run(
        self,
        statement: Executable,
        parameters: Mapping[str, Any] | list[dict[str, Any]] | None = None,
    ) -> CursorResult[Any]:
        async with translated("the outbox"):
            # Where a session has several binds, ours is that of these tables.
            binds = {"clause": outbox_message}
            # Past a handler's session, which sends the rows of other messages before.
            connection = await AsyncSession.connection(self._session, bind_arguments=binds)
            return await connection.execute(statement, parameters)


def store_of(session: object) -> SqlOutboxStore:
    """Return the outbox in the transaction of a session.

    Raises:
        Misuse: it is no asynchronous session of SQLAlchemy.
    """
    if isinstance(session, async_scoped_session):
        session = session()
    if not isinstance(session, AsyncSession):
        kind = type(session)
        raise Misuse(
            f"the outbox writes into an AsyncSession's transaction; this is a "
            f"{kind.__module__}.{kind.__qualname__}"
        )
    return SqlOutboxStore(session)


def after_commit(session: Any, outbox: str, call: Callable[[str], None]) -> None:
    """Call *call* with *outbox* when the session has committed.

    A handler's session never commits itself: there it is called at once, a moment too early.
    """
    if isinstance(session, async_scoped_session):
        session = session()
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


def _shown(leadership: Leadership) -> dict[str, Any]:
    """Return what the fence asks for."""
    return {"of_outbox": leadership.outbox, "me": leadership.owner, "of_epoch": leadership.epoch}


def _place_of(entry: OutboxEntry) -> tuple[str, str]:
    return entry.outbox, stored_id(entry.message_id)


def _row(entry: OutboxEntry) -> dict[str, Any]:
    return {
        "outbox": entry.outbox,
        "message_id": stored_id(entry.message_id),
        "original_id": original_id(entry.message_id),
        "topic": entry.topic,
        "key": entry.key,
        "payload": entry.value,
        "headers": headers_to_text(entry.headers),
        "parent": entry.parent,
        "parent_key": None if entry.parent_key is None else stored_id(entry.parent_key),
    }


def _read_pending(found: CursorResult[Any], outbox: str) -> list[OutboxEntry]:
    rows: Any = found.all()
    return [
        OutboxEntry(
            message_id,
            topic,
            value,
            key,
            headers_from_text(headers) if headers else NO_HEADERS,
            place,
            outbox,
            created / MICROSECONDS,
            attempts,
            "",
            parent,
        )
        for message_id, topic, value, key, headers, place, created, attempts, parent in rows
    ]


def _read(found: CursorResult[Any]) -> list[OutboxEntry]:
    return [_entry(row) for row in found]


def _entry(row: Any) -> OutboxEntry:
    message_id, topic, value, key, headers, place, created, attempts, parent, *rest = row
    outbox, parked_reason, erased_at = rest
    return OutboxEntry(
        message_id,
        topic,
        value,
        key,
        headers_from_text(headers),
        place,
        outbox,
        to_seconds(created),
        attempts,
        parked_reason or "",
        parent,
        None if erased_at is None else to_seconds(erased_at),
    )
