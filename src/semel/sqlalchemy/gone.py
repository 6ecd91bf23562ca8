"""Which messages are gone: from the claims, and from everywhere they wait."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Table, and_, exists

from semel.sqlalchemy.tables import dead_letter, inbox_message, processed_message, waiting_message


def gone(consumer: str, message_id: ColumnElement[str]) -> ColumnElement[bool]:
    """Say that a consumer has no message with the id that a column has."""
    claim = processed_message.c
    claimed = exists().where(claim.consumer_name == consumer, claim.message_id == message_id)
    stored = _in(inbox_message, consumer, message_id)
    return and_(~claimed, ~stored, cannot_be_sent_back(consumer, message_id))


def cannot_be_sent_back(
    consumer: str | ColumnElement[str], message_id: ColumnElement[str]
) -> ColumnElement[bool]:
    """Say that a message neither waits nor is a dead letter."""
    return and_(*(~_in(one, consumer, message_id) for one in (waiting_message, dead_letter)))


def _in(
    table: Table, consumer: str | ColumnElement[str], message_id: ColumnElement[str]
) -> ColumnElement[bool]:
    return exists().where(table.c.consumer == consumer, table.c.message_id == message_id)
