"""The outbox: write outgoing messages in the transaction of the caller.

    outbox = Outbox()

    async def handle(message, session):
        session.add(Invoice(…))
        await outbox.add(session, "invoices", {"id": 7}, key="customer-3")

A message is durable if and only if that transaction commits.
A `semel.messaging.send.relay.Relay` publishes it later.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, overload

from semel.errors import Misuse
from semel.message import Message, text_of
from semel.messaging.database import OutboxStore
from semel.messaging.handle.attempt import Handling, handling_now
from semel.messaging.send.outbox import (
    OutboxConflict,
    OutboxEntry,
    check_outgoing,
    outgoing_headers,
    outgoing_id,
    parent_of,
    value_of_payload,
)
from semel.messaging.send.relay import is_relayed_here, wake_relays

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


class Outbox:
    """One outbox, by its name; its entries are in the database of the session.

    In a session of your own, *schema* says where semel's tables are on PostgreSQL, if that is
    neither the schema ``semel`` nor one of the search path.
    """

    def __init__(self, name: str = "outbox", *, schema: str | None = None) -> None:
        self.name = name
        self.schema = schema

    @overload
    def add(
        self,
        session: Session,
        topic: str,
        payload: Any,
        *,
        key: str | bytes | None = None,
        headers: Mapping[str, str | bytes] | None = None,
        message_id: str | None = None,
        cause: Message | None = None,
        not_before: dt.datetime | None = None,
    ) -> str: ...

    @overload
    def add(
        self,
        session: Any,
        topic: str,
        payload: Any,
        *,
        key: str | bytes | None = None,
        headers: Mapping[str, str | bytes] | None = None,
        message_id: str | None = None,
        cause: Message | None = None,
        not_before: dt.datetime | None = None,
    ) -> Coroutine[Any, Any, str]: ...

    def add(
        self,
        session: Any,
        topic: str,
        payload: Any,
        *,
        key: str | bytes | None = None,
        headers: Mapping[str, str | bytes] | None = None,
        message_id: str | None = None,
        cause: Message | None = None,
        not_before: dt.datetime | None = None,
    ) -> Any:
        """Write a message into the transaction of *session*, and return its id.

        *session* is what a handler got, or any `AsyncSession` whose database has semel's tables.
        Nothing is committed here.  A handler that is a plain function gets the id without
        ``await``.

        *payload* is bytes, text, or a value that JSON can represent; None is a tombstone.  *key*
        is text, or any bytes.
        Messages of one topic and *key* are published in the order in which they were written.

        Inside a handler the id is derived from the handled message, the topic and a counter:
        handling the message again produces the same ids, and existing entries stay.
        Correlation and causation are inherited as headers.  A handler of batches passes the
        message that is the *cause*; the default is the first of the batch.  Outside a handler
        pass a *message_id* that is the same when your code runs again; the default is random,
        and code that runs twice sends two messages.

        With *not_before*, a time with its zone, the relay sends it then or a little later, and
        later messages of its key overtake it.  Until it is sent, `cancel` takes it back.

        Raises:
            Misuse: the session, the payload, the key, the id or the time cannot be used.
            OutboxConflict: *message_id* exists with another topic, key or payload.
        """
        # Imported here, because only programs that send need SQLAlchemy.
        from semel.sql.outbox import in_session

        options = (key, headers, message_id, cause, not_before)
        return in_session(session, lambda one: self._add(one, topic, payload, *options))

    async def _add(
        self,
        session: Any,
        topic: str,
        payload: Any,
        key: str | bytes | None,
        headers: Mapping[str, str | bytes] | None,
        message_id: str | None,
        cause: Message | None,
        not_before: dt.datetime | None,
    ) -> str:
        value = value_of_payload(payload)
        is_time = not_before is None or isinstance(not_before, dt.datetime)
        if not is_time or (not_before is not None and not_before.tzinfo is None):
            raise Misuse(
                f"not_before must be a datetime with a time zone, such as "
                f"datetime.now(timezone.utc) + timedelta(hours=1), got {not_before!r}"
            )
        now = handling_now()
        cause = _cause(cause, now)
        is_given = message_id is not None
        if message_id is None:
            message_id = _next_id(now, cause, topic)
        check_outgoing(topic, None if isinstance(key, bytes) else key, message_id)
        key = text_of(key) if isinstance(key, bytes) else key
        from semel.sql.outbox import after_commit, store_of

        store: OutboxStore = store_of(session, self.schema)
        entry = OutboxEntry(
            message_id,
            topic,
            value,
            key,
            outgoing_headers(headers or {}, cause),
            outbox=self.name,
            parent=parent_of(now.consumer, cause.id) if now and cause else "",
            parent_key=cause.key if now and cause else None,
            not_before=None if not_before is None else not_before.timestamp(),
        )
        try:
            await store.add([entry])
        except OutboxConflict:
            # A derived id belongs to the same message, written by an earlier attempt.
            if is_given:
                raise
        if is_relayed_here(self.name):
            after_commit(session, self.name, wake_relays)
        return message_id

    @overload
    def cancel(self, session: Session, message_id: str) -> bool: ...

    @overload
    def cancel(self, session: Any, message_id: str) -> Coroutine[Any, Any, bool]: ...

    def cancel(self, session: Any, message_id: str) -> Any:
        """Take a message back, in the transaction of *session*; False if it is not there.

        It was sent then, or never written.  One that is due may be on its way to the broker while
        it is taken back: only one whose time has not come is certain not to be sent.
        """
        from semel.sql.outbox import in_session, store_of

        def take_back(one: Any) -> Coroutine[Any, Any, bool]:
            return store_of(one, self.schema).cancel(self.name, message_id)

        return in_session(session, take_back)


def _cause(given: Message | None, now: Handling | None) -> Message | None:
    """Return the message that caused the new one; None outside of handlers.

    Raises:
        Misuse: the handler was not called with *given*, so ids derived from it could clash.
    """
    if given is None:
        return now.message if now else None
    if now is not None and not now.handles(given):
        raise Misuse(
            f"consumer {now.consumer} does not handle {given.id!r} now; cause= must be one of "
            f"the messages that the handler was called with"
        )
    return given


def _next_id(now: Handling | None, cause: Message | None, topic: str) -> str:
    if now is None or cause is None:
        return str(uuid.uuid4())
    return outgoing_id(now.consumer, cause.id, topic, now.next_ordinal(cause, topic))
