"""A message as it stands in the inbox or the waiting room: to read it may fail, or kill."""

from __future__ import annotations

from semel.message import Message
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
