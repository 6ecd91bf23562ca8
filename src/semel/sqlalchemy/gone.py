"""Which messages are over, and which are gone from everywhere."""

from __future__ import annotations

from typing import Final

from sqlalchemy import ColumnElement, Table, Text, and_, exists, literal_column

from semel.sqlalchemy.tables import (
    dead_letter,
    inbox_message,
    outbox_message,
    processed_message,
    waiting_message,
)

_SLASH: Final = literal_column("'/'", Text)


def gone(consumer: str, message_id: ColumnElement[str]) -> ColumnElement[bool]:
    """Say that a consumer has no message with the id that a column has."""
    claim = processed_message.c
    claimed = exists().where(claim.consumer_name == consumer, claim.message_id == message_id)
    places = (waiting_message, dead_letter, inbox_message)
    return and_(~claimed, *(~_in(one, consumer, message_id) for one in places))


def is_over(consumer: ColumnElement[str], message_id: ColumnElement[str]) -> ColumnElement[bool]:
    """Say that a message neither waits nor is a dead letter, and that all it sent has left."""
    # As `semel.messaging.outbox.parent_of` names it.
    sent = exists().where(outbox_message.c.parent == consumer + _SLASH + message_id)
    kept = (_in(one, consumer, message_id) for one in (waiting_message, dead_letter))
    return and_(~sent, *(~one for one in kept))


def _in(
    table: Table, consumer: str | ColumnElement[str], message_id: ColumnElement[str]
) -> ColumnElement[bool]:
    return exists().where(table.c.consumer == consumer, table.c.message_id == message_id)
