"""The inbox in PostgreSQL and SQLite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import (
    Executable,
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
from sqlalchemy.engine import CursorResult
from sqlalchemy.ext.asyncio import AsyncSession

from semel.errors import Misuse
from semel.messaging.database import Sweep
from semel.messaging.handle.claims import ERASED
from semel.messaging.records import InboxMessage, stored_id
from semel.operate.stores import plain
from semel.sql.faults import translated
from semel.sql.retention import is_over
from semel.sql.tables import dead_letter, inbox_message
from semel.sql.types import (
    now_us,
    seconds_or_none,
    stored_fields,
    stored_values,
    to_seconds,
    to_us,
)

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


class SqlInboxStore:
    """The inbox of one open transaction."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def store(self, message: InboxMessage) -> bool:
        """Write a message that is due at once; False where its id is there already."""
        return (await self._run(STORE, stored_values(message))).first() is not None

    async def withdraw(self, consumer: str, message_id: str) -> None:
        """Remove a message that *this* transaction stored, as if it had never come."""
        await self._run(WITHDRAW, _me(consumer, message_id))

    async def take_due(self, consumer: str, limit: int) -> Sequence[InboxMessage]:
        """Lock and return unprocessed messages that are due, in order of arrival."""
        found = await self._run(TAKE_DUE, {"of_consumer": consumer, "most": limit})
        return [_message(row) for row in found]

    async def done(self, consumer: str, message_id: str, result: str | None = None) -> None:
        """Mark a message as processed in this transaction, and count the attempt."""
        await self._run(DONE, {**_me(consumer, message_id), "kept": result})

    async def failed(
        self, consumer: str, message_id: str, error: str, delay_seconds: float | None
    ) -> int:
        """Write a failed attempt and when it is due again (None: never); return the attempts."""
        me = _me(consumer, message_id)
        us = None if delay_seconds is None else to_us(delay_seconds)
        said = {**me, "why": plain(error), "us": us}
        attempts = (await self._run(FAILED, said)).scalar_one_or_none()
        if attempts is None:
            known = await self.get(consumer, message_id)
            return known.attempts if known is not None else 0
        return int(attempts)

    async def try_again(self, consumer: str, message_id: str) -> bool:
        """Make a message that is not tried any more due now, its attempts forgotten."""
        return (await self._run(TRY_AGAIN, _me(consumer, message_id))).rowcount == 1

    async def close(self, consumer: str, message_id: str, word: str) -> bool:
        """Mark a message as processed without an effect, by a person's *word*."""
        me = _me(consumer, message_id)
        return (await self._run(CLOSE, {**me, "why": word})).rowcount == 1

    async def get(self, consumer: str, message_id: str) -> InboxMessage | None:
        """Return one message."""
        row = (await self._run(GET, _me(consumer, message_id))).one_or_none()
        return None if row is None else _message(row)

    async def consumers_of(self, message_id: str) -> Sequence[str]:
        """Name the consumers for which a message is stored, in order."""
        asked = {"of_id": stored_id(message_id)}
        return list((await self._run(CONSUMERS, asked)).scalars())

    async def pending(self, consumer: str) -> int:
        """Count what is not processed yet and will be tried."""
        return int((await self._run(PENDING, {"of_consumer": consumer})).scalar_one())

    async def delete_processed(
        self, consumer: str, older_than_seconds: float, limit: int, sweep: Sweep | None = None
    ) -> int:
        """Delete at most *limit* messages that were processed so long ago."""
        sweep = sweep or Sweep()
        asked = {"of_consumer": consumer, "us": to_us(older_than_seconds), "most": limit}
        deleted = await self._run(DELETE_PROCESSED, {**asked, "since": sweep.since()})
        return sweep.note(list(deleted.scalars()))

    async def erase(
        self,
        *,
        message_id: str | None = None,
        key: str | None = None,
        consumer: str | None = None,
    ) -> int:
        """Remove payload, headers and result of matching messages; what waited is not tried."""
        if message_id is None and key is None:
            raise Misuse("say whose messages of the inbox are erased: an id or a key")
        meant = ERASE
        if message_id is not None:
            meant = meant.where(_M.message_id == stored_id(message_id))
        if key is not None:
            meant = meant.where(_M.key == stored_id(key))
        if consumer is not None:
            meant = meant.where(_M.consumer == consumer)
        return (await self._run(meant)).rowcount

    async def _run(
        self, statement: Executable, parameters: Mapping[str, Any] | None = None
    ) -> CursorResult[Any]:
        async with translated("the inbox"):
            connection = await self._session.connection(bind_arguments={"clause": inbox_message})
            return await connection.execute(statement, parameters)


def _me(consumer: str, message_id: str) -> dict[str, Any]:
    return {"of_consumer": consumer, "of_id": stored_id(message_id)}


def _message(row: Row[Any]) -> InboxMessage:
    return InboxMessage(
        **stored_fields(row),
        place=row.place,
        received_at=to_seconds(row.received_at),
        processed_at=seconds_or_none(row.processed_at),
        due_at=seconds_or_none(row.due_at),
        error=row.error,
        result=row.result,
    )
