"""The inbox in PostgreSQL and SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import (
    Row,
    Text,
    and_,
    bindparam,
    case,
    delete,
    func,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import insert

from semel.errors import Misuse
from semel.messaging.database import Sweep
from semel.messaging.handle.claims import ERASED
from semel.messaging.records import InboxMessage, MessageFilter, stored_id
from semel.operate.stores import plain
from semel.sql.store import ConnectionStore, is_over, matching, record_of, values_of
from semel.sql.tables import dead_letter, inbox_message
from semel.sql.types import now_us, to_us

_M: Final = inbox_message.c
_EARLIER: Final = inbox_message.alias("earlier")
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
WITHDRAW: Final = delete(inbox_message).where(*_ME)
GET: Final = select(inbox_message).where(*_ME)

_KEY_WAITS: Final = (
    select(_EARLIER.c.place)
    .where(
        _EARLIER.c.consumer == _M.consumer,
        _EARLIER.c.key == _M.key,
        _EARLIER.c.place < _M.place,
        _EARLIER.c.processed_at.is_(None),
        _EARLIER.c.due_at.is_not(None),
    )
    .exists()
)
TAKE_DUE: Final = (
    select(inbox_message)
    .where(
        _OF,
        _M.processed_at.is_(None),
        _M.due_at <= now_us(),
        or_(_M.key.is_(None), ~_KEY_WAITS),
    )
    .order_by(_M.place)
    .limit(bindparam("most"))
    .with_for_update(skip_locked=True, of=inbox_message)
)

DONE: Final = (
    update(inbox_message)
    .where(*_ME)
    .values(processed_at=now_us(), result=bindparam("kept"), error="", attempts=_M.attempts + 1)
)
FAILED: Final = (
    update(inbox_message)
    .where(*_ME, _M.processed_at.is_(None))
    .values(
        error=case((_M.erased_at.is_(None), bindparam("why", type_=Text)), else_=_M.error),
        due_at=case((_M.erased_at.is_(None), now_us() + bindparam("us"))),
        attempts=_M.attempts + 1,
    )
    .returning(_M.attempts)
)
TRY_AGAIN: Final = (
    update(inbox_message)
    .where(*_ME, _M.processed_at.is_(None), _M.due_at.is_(None), _M.erased_at.is_(None))
    .values(due_at=now_us(), attempts=0, error="")
)
CLOSE: Final = (
    update(inbox_message)
    .where(*_ME, _M.processed_at.is_(None))
    .values(processed_at=now_us(), error=bindparam("why"))
)
CONSUMERS: Final = (
    select(_M.consumer).where(_M.message_id == bindparam("of_id")).order_by(_M.consumer)
)
PENDING: Final = select(func.count()).where(_OF, _M.processed_at.is_(None), _M.due_at.is_not(None))
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
_HAS_NO_LETTER: Final = ~(
    select(dead_letter.c.message_id)
    .where(dead_letter.c.consumer == _M.consumer, dead_letter.c.message_id == _M.message_id)
    .exists()
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
        processed_at=case((and_(_IS_OPEN, _HAS_NO_LETTER), now_us()), else_=_M.processed_at),
        error=case((_IS_OPEN, ERASED), else_=_M.error),
    )
)


class SqlInboxStore(ConnectionStore):
    """The inbox, in one open transaction."""

    what = "the inbox"

    async def store(self, message: InboxMessage) -> bool:
        values = values_of(inbox_message, message, *_GIVEN_HERE)
        return (await self._run(STORE, values)).first() is not None

    async def withdraw(self, consumer: str, message_id: str) -> None:
        await self._run(WITHDRAW, _me(consumer, message_id))

    async def take_due(self, consumer: str, limit: int) -> Sequence[InboxMessage]:
        found = await self._run(TAKE_DUE, {"of_consumer": consumer, "most": limit})
        return [_message(row) for row in found]

    async def done(self, consumer: str, message_id: str, result: str | None = None) -> None:
        await self._run(DONE, {**_me(consumer, message_id), "kept": result})

    async def failed(
        self, consumer: str, message_id: str, error: str, delay_seconds: float | None
    ) -> int:
        me = _me(consumer, message_id)
        us = None if delay_seconds is None else to_us(delay_seconds)
        said = {**me, "why": plain(error), "us": us}
        attempts = (await self._run(FAILED, said)).scalar_one_or_none()
        if attempts is None:
            known = await self.get(consumer, message_id)
            return known.attempts if known is not None else 0
        return int(attempts)

    async def try_again(self, consumer: str, message_id: str) -> bool:
        return await self._count(TRY_AGAIN, _me(consumer, message_id)) > 0

    async def close(self, consumer: str, message_id: str, word: str) -> bool:
        return await self._count(CLOSE, {**_me(consumer, message_id), "why": word}) > 0

    async def get(self, consumer: str, message_id: str) -> InboxMessage | None:
        row = (await self._run(GET, _me(consumer, message_id))).one_or_none()
        return None if row is None else _message(row)

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

    async def erase(self, which: MessageFilter) -> int:
        if which.message_id is None and which.key is None:
            raise Misuse("erasing in the inbox needs an id or a key")
        return await self._count(ERASE.where(matching(inbox_message, which)))


def _me(consumer: str, message_id: str) -> dict[str, Any]:
    return {"of_consumer": consumer, "of_id": stored_id(message_id)}


def _message(row: Row[Any]) -> InboxMessage:
    return record_of(inbox_message, row, InboxMessage)
