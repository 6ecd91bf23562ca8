"""Sending a message with the caller's transaction: durable with it, or never there.

    outbox = Outbox()

    async def handle(message, session):
        session.add(Invoice(…))
        await outbox.add(session, "invoices", {"id": 7}, key="customer-3")

A `semel.messaging.send.relay.Relay` takes it to the broker later.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

from semel.errors import Misuse
from semel.message import Message, raw_of
from semel.messaging.database import OutboxStore
from semel.messaging.handle.attempt import Handling, handling_now
from semel.messaging.send.outbox import (
    CAUSATION_HEADER,
    CORRELATION_HEADER,
    MESSAGE_ID_HEADER,
    OutboxConflict,
    OutboxEntry,
    outgoing_id,
    parent_of,
)
from semel.messaging.send.relay import is_relayed_here, wake_relays


class Outbox:
    """An outbox by its name; whichever database a session belongs to has the entries."""

    def __init__(self, name: str = "outbox") -> None:
        self.name = name

    async def add(
        self,
        session: Any,
        topic: str,
        payload: Any,
        *,
        key: str | None = None,
        headers: Mapping[str, str | bytes] | None = None,
        message_id: str | None = None,
        cause: Message | None = None,
    ) -> str:
        """Write a message into the transaction of *session*, and return its id.

        *session* is what a handler got, or any `AsyncSession` whose database has semel's tables.
        Nothing is committed here.

        *payload* is bytes, text, or anything that JSON can say; None is a broker's tombstone.
        Messages of one topic and *key* leave in the order in which they were written.

        Inside a handler the id is derived from the message that is handled, the topic and a
        counter: handling it again writes the same ids, and the entry that is there already
        stays.  Correlation and causation are inherited as headers.  A handler that takes whole
        batches names the message that is the *cause*; without it, the first of the batch is.
        Elsewhere give a *message_id* that a repetition of your code gives again; without one
        it is random, and code that runs twice sends two messages.

        Raises:
            Misuse: the session, the payload, the key or the id cannot be used.
            OutboxConflict: *message_id* is there, with another topic, key or payload.
        """
        value = _value(payload)
        now = handling_now()
        cause = _cause(cause, now)
        is_given = message_id is not None
        if message_id is None:
            message_id = _next_id(now, cause, topic)
        _check(topic, key, message_id)
        # Only those who send need SQLAlchemy.
        from semel.sql.outbox import after_commit, store_of

        store: OutboxStore = store_of(session)
        entry = OutboxEntry(
            message_id,
            topic,
            value,
            key,
            _headers(headers or {}, cause),
            outbox=self.name,
            parent=parent_of(now.consumer, cause.id) if now and cause else "",
            parent_key=cause.key if now and cause else None,
        )
        try:
            await store.add([entry])
        except OutboxConflict:
            # A derived id is that of the same message, written by an earlier handling.
            if is_given:
                raise
        if is_relayed_here(self.name):
            after_commit(session, self.name, wake_relays)
        return message_id


def _cause(given: Message | None, now: Handling | None) -> Message | None:
    """Say which message the new one follows from; outside of handlers, only who is named.

    Raises:
        Misuse: the handler was not called for it: its other messages have the derived ids.
    """
    if given is None:
        return now.message if now else None
    if now is not None and not now.handles(given):
        raise Misuse(
            f"consumer {now.consumer} does not handle {given.id!r} now: the cause of an outgoing "
            f"message is one of those that the handler was called with"
        )
    return given


def _next_id(now: Handling | None, cause: Message | None, topic: str) -> str:
    if now is None or cause is None:
        return str(uuid.uuid4())
    return outgoing_id(now.consumer, cause.id, topic, now.next_ordinal(cause, topic))


def _value(payload: Any) -> bytes | None:
    if payload is None or isinstance(payload, bytes):
        return payload
    if isinstance(payload, bytearray | memoryview):
        return bytes(payload)
    if isinstance(payload, str):
        if not _is_unicode(payload):
            raise Misuse("an outgoing text has half a character in it; give its bytes instead")
        return payload.encode()
    try:
        text = json.dumps(payload, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        if not _is_unicode(text):
            # Half an emoji, which JSON can say and UTF-8 cannot.
            text = json.dumps(payload, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise Misuse(
            f"an outgoing payload is bytes, text, or what JSON can say; this is a "
            f"{type(payload).__name__}: {error}"
        ) from error
    return text.encode()


def _headers(given: Mapping[str, str | bytes], cause: Message | None) -> dict[str, bytes]:
    if MESSAGE_ID_HEADER in given:
        raise Misuse(f"the relay writes the header {MESSAGE_ID_HEADER!r}: give message_id instead")
    headers: dict[str, bytes] = {}
    if cause is not None:
        correlation_id = cause.correlation_id or cause.id
        headers[CORRELATION_HEADER] = raw_of(correlation_id)
        headers[CAUSATION_HEADER] = raw_of(cause.id)
    for name, value in given.items():
        headers[name] = raw_of(value) if isinstance(value, str) else bytes(value)
    return headers


def _check(topic: str, key: str | None, message_id: str) -> None:
    """Refuse what a database would refuse, or what could not be told from something else.

    Raises:
        Misuse: says which it is.
    """
    needed: dict[str, object] = {"topic": topic, "message id": message_id}
    for what, given in needed.items():
        if not isinstance(given, str) or not given:
            raise Misuse(f"an outgoing message needs a {what}, a text that is not empty")
    texts: dict[str, object] = {**needed, "key": "" if key is None else key}
    for what, text in texts.items():
        if not isinstance(text, str) or "\0" in text or not _is_unicode(text):
            raise Misuse(f"the {what} {text!r} is no plain text")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
