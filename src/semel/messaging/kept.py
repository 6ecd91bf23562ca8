"""A message as it stands in the inbox or the waiting room: to read it may fail, or kill."""

from __future__ import annotations

from dataclasses import replace

from semel.codec import Unreadable
from semel.message import Coordinates, Message, Record, raw_of, value_of
from semel.messaging.consumer import Consumer
from semel.messaging.inbox import InboxMessage
from semel.messaging.waiting import WaitingMessage


def unread(kept: InboxMessage | WaitingMessage) -> Message:
    """Return a message without its payload, only with the bytes of it."""
    return Message(
        kept.message_id,
        None,
        kept.payload or b"",
        kept.key,
        kept.message_type,
        kept.headers,
        kept.source,
        kept.timestamp,
        schema_version=kept.schema_version,
        correlation_id=kept.correlation_id,
        digest=kept.payload_hash,
    )


def message_of(consumer: Consumer, waiting: WaitingMessage) -> Message | Unreadable:
    """Read a waiting message again, as the broker's record was read."""
    at = waiting.source or Coordinates(waiting.topic or "?", 0, 0)
    record = Record(
        at,
        value_of(waiting.payload, waiting.payload_hash),
        None if waiting.key is None else raw_of(waiting.key),
        waiting.headers,
        waiting.timestamp,
    )
    found = consumer.reading.read(record)
    if isinstance(found, Unreadable):
        return found
    # A person may have given it another id, and the key may come from elsewhere.
    return replace(found, id=waiting.message_id, key=waiting.key, source=waiting.source)
