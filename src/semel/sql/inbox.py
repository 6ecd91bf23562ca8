"""The inbox in PostgreSQL and SQLite."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

from sqlalchemy import (
    Row,
    ScalarSelect,
    Table,
    Text,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    literal_column,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import insert

from semel.errors import Misuse
from semel.messaging.database import Sweep
from semel.messaging.handle.claims import ERASED, WITHOUT_EFFECT, ClaimState
from semel.messaging.records import InboxMessage, MessageFilter, stored_id
from semel.sql.store import (
    ConnectionStore,
    is_over,
    matching,
    record_of,
    values_of,
    without_payload,
)
from semel.sql.tables import dead_letter, inbox_message, processed_message, waiting_message
from semel.sql.types import now_us, to_us

_M: Final = inbox_message.c
_C: Final = processed_message.c
_OF: Final = _M.consumer == bindparam("of_consumer")
_ME: Final = (_OF, _M.message_id == bindparam("of_id"))

STORE: Final = (
    insert(inbox_message)
    .values(received_at=now_us(), due_at=now_us())
    .on_conflict_do_nothing(index_elements=[_M.consumer, _M.message_id])
    .returning(_M.place)
)

# A message is always stored as new: the store or the database sets these columns.
_GIVEN_HERE: Final = ("place", "received_at", "due_at", "processed_at", "error", "result")
GET: Final = select(inbox_message).where(*_ME)

_IS_DUE: Final = and_(_OF, _M.processed_at.is_(None), _M.due_at.is_not(None))
DUE: Final = select(inbox_message).where(_IS_DUE).order_by(_M.place).limit(bindparam("most"))
OPEN: Final = (
    select(*without_payload(inbox_message))
    .where(_OF, _M.processed_at.is_(None))
    .order_by(_M.place)
    .limit(bindparam("most"))
)
BOUNDS: Final = select(
    func.coalesce(func.min(_M.place), 0), func.coalesce(func.max(_M.place) + 1, 0)
).where(_IS_DUE)
PENDING: Final = select(func.count()).where(_IS_DUE)


def _failure_in(table: Table) -> ScalarSelect[Any]:
    """Return the code and the reason of a message's row in another table; NULL without one."""
    here = table.c
    words = here.error_code + literal_column("': '", Text) + here.reason
    mine = (here.consumer == _C.consumer_name, here.message_id == _C.message_id)
    return select(words).where(*mine).scalar_subquery()


def _claimed(what: Any) -> ScalarSelect[Any]:
    mine = (_C.consumer_name == _M.consumer, _C.message_id == _M.message_id)
    return select(what).where(*mine).scalar_subquery()


_IS_HANDLED: Final = _C.state == ClaimState.COMPLETED.value
_ENDED_WITHOUT_EFFECT: Final = case((_C.marker.in_(sorted(WITHOUT_EFFECT)), _C.marker), else_="")
_SAID: Final = case((_C.marker != "", _C.marker), else_=_C.error_code)
_WHY: Final = case(
    (_IS_HANDLED, _ENDED_WITHOUT_EFFECT),
    else_=func.coalesce(_failure_in(dead_letter), _failure_in(waiting_message), _SAID),
)
_SETTLE: Final = (
    update(inbox_message)
    .where(_OF, _M.processed_at.is_(None), _claimed(_C.state).is_not(None))
    .values(
        due_at=None,
        processed_at=_claimed(case((_IS_HANDLED, now_us()))),
        attempts=_claimed(_C.attempts),
        error=case((_M.erased_at.is_(None), _claimed(_WHY)), else_=_M.error),
        result=_claimed(_C.result),
    )
)
SETTLE: Final = _SETTLE.where(_M.message_id.in_(bindparam("ids", type_=Text, expanding=True)))
SETTLE_AGAIN: Final = _SETTLE.where(
    _M.due_at.is_(None), or_(_claimed(_IS_HANDLED), _claimed(_C.attempts) != _M.attempts)
)

CLOSE: Final = (
    update(inbox_message)
    .where(*_ME, _M.processed_at.is_(None))
    .values(processed_at=now_us(), error=bindparam("why"))
)
CONSUMERS: Final = (
    select(_M.consumer).where(_M.message_id == bindparam("of_id")).order_by(_M.consumer)
)
DELETE_PROCESSED: Final = (
    delete(inbox_message)
    .where(
        _M.place.in_(
            select(_M.place)
            .where(
                _OF,
                _M.processed_at <= now_us() - bindparam("us"),
                _M.place >= bindparam("since"),
                is_over(_M.consumer, _M.message_id),
            )
            .order_by(_M.place)
            .limit(bindparam("most"))
        )
    )
    .returning(_M.place)
)
_IS_OPEN: Final = _M.processed_at.is_(None)
_IS_NOWHERE_ELSE: Final = and_(
    *(
        ~exists().where(one.c.consumer == _M.consumer, one.c.message_id == _M.message_id)
        for one in (dead_letter, waiting_message)
    )
)
ERASE: Final = (
    update(inbox_message)
    .where(_M.erased_at.is_(None))
    .values(
        payload=None,
        headers="",
        result=None,
        erased_at=now_us(),
        due_at=case((_IS_OPEN, None), else_=_M.due_at),
        processed_at=case((and_(_IS_OPEN, _IS_NOWHERE_ELSE), now_us()), else_=_M.processed_at),
        error=case((_IS_OPEN, ERASED), else_=_M.error),
    )
)


class SqlInboxStore(ConnectionStore):
    """The inbox, in one open transaction."""

    what = "the inbox"

    async def store(self, message: InboxMessage) -> bool:
        values = values_of(inbox_message, message, *_GIVEN_HERE)
        return (await self._run(STORE, values)).first() is not None

    async def due(self, consumer: str, limit: int) -> Sequence[InboxMessage]:
        found = await self._run(DUE, {"of_consumer": consumer, "most": limit})
        return [_message(row) for row in found]

    async def bounds(self, consumer: str) -> tuple[int, int]:
        first, end = (await self._run(BOUNDS, {"of_consumer": consumer})).one()
        return int(first), int(end)

    async def settle(self, consumer: str, message_ids: Collection[str]) -> None:
        ids = [stored_id(message_id) for message_id in message_ids]
        await self._run(SETTLE, {"of_consumer": consumer, "ids": ids})

    async def settle_again(self, consumer: str) -> None:
        await self._run(SETTLE_AGAIN, {"of_consumer": consumer})

    async def close(self, consumer: str, message_id: str, word: str) -> bool:
        return await self._count(CLOSE, {**_me(consumer, message_id), "why": word}) > 0

    async def get(self, consumer: str, message_id: str) -> InboxMessage | None:
        row = (await self._run(GET, _me(consumer, message_id))).one_or_none()
        return None if row is None else _message(row)

    async def outlines(self, consumer: str, limit: int) -> Sequence[InboxMessage]:
        found = await self._run(OPEN, {"of_consumer": consumer, "most": limit})
        return [_message(row) for row in found]

    async def consumers_of(self, message_id: str) -> Sequence[str]:
        asked = {"of_id": stored_id(message_id)}
        return list((await self._run(CONSUMERS, asked)).scalars())

    async def pending(self, consumer: str) -> int:
        return int((await self._run(PENDING, {"of_consumer": consumer})).scalar_one())

    async def delete_processed(
        self, consumer: str, older_than_seconds: float, limit: int, sweep: Sweep | None = None
    ) -> int:
        sweep = sweep or Sweep()
        asked = {"of_consumer": consumer, "us": to_us(older_than_seconds), "most": limit}
        deleted = await self._run(DELETE_PROCESSED, {**asked, "since": sweep.since()})
        return sweep.note(list(deleted.scalars()))

    async def unhandled(self, which: MessageFilter) -> Sequence[tuple[str, str]]:
        open_now = (_M.processed_at.is_(None), _M.due_at.is_not(None))
        meant = select(*without_payload(inbox_message)).where(matching(inbox_message, which))
        found = await self._run(meant.where(*open_now))
        return [(one.consumer, one.message_id) for one in map(_message, found)]

    async def erase(self, which: MessageFilter) -> int:
        if which.message_id is None and which.key is None:
            raise Misuse("erasing in the inbox needs an id or a key")
        return await self._count(ERASE.where(matching(inbox_message, which)))


def _me(consumer: str, message_id: str) -> dict[str, Any]:
    return {"of_consumer": consumer, "of_id": stored_id(message_id)}


def _message(row: Row[Any]) -> InboxMessage:
    return record_of(inbox_message, row, InboxMessage)
