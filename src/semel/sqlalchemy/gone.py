"""Which rows are about messages that are gone: from the claims, and from everywhere they wait."""

from __future__ import annotations

from sqlalchemy import ColumnElement, and_, exists

from semel.sqlalchemy.tables import dead_letter, inbox_message, processed_message, waiting_message


def gone(consumer: str, message_id: ColumnElement[str]) -> ColumnElement[bool]:
    """Say that a consumer has no message with the id that a column has."""
    claim = processed_message.c
    kept = [exists().where(claim.consumer_name == consumer, claim.message_id == message_id)]
    for table in (waiting_message, dead_letter, inbox_message):
        kept.append(exists().where(table.c.consumer == consumer, table.c.message_id == message_id))
    return and_(*(~there for there in kept))
