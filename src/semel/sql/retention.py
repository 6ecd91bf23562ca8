"""Which messages are over, and which are gone from everywhere."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    Column,
    ColumnElement,
    Table,
    Text,
    and_,
    delete,
    exists,
    literal_column,
    select,
)
from sqlalchemy.sql.dml import ReturningDelete

from semel.sql.tables import (
    dead_letter,
    inbox_message,
    outbox_message,
    processed_message,
    waiting_message,
)
from semel.sql.types import now_us, to_us

_SLASH: Final = literal_column("'/'", Text)


def delete_of_gone(
    when: Column[Any],
    place: Column[Any],
    consumer: str,
    ttl_seconds: float,
    since: float,
    limit: int,
) -> ReturningDelete[Any]:
    """Delete old rows about messages that a consumer has nowhere any more.

    In the order of *place*, from *since* on; gives back the places of those that were deleted.
    """
    table = when.table
    (number,) = table.primary_key
    old = (
        select(number)
        .where(
            table.c.consumer == consumer,
            place >= since,
            # Read for every row, the clock could not bound a scan; read once, it can.
            when <= select(now_us() - to_us(ttl_seconds)).scalar_subquery(),
            _gone(consumer, table.c.message_id),
        )
        .order_by(place)
        .limit(limit)
    )
    return delete(table).where(number.in_(old)).returning(place)


def _gone(consumer: str, message_id: ColumnElement[str]) -> ColumnElement[bool]:
    """Say that a consumer has no message with the id that a column has."""
    claim = processed_message.c
    claimed = exists().where(claim.consumer_name == consumer, claim.message_id == message_id)
    places = (waiting_message, dead_letter, inbox_message)
    return and_(~claimed, *(~_in(one, consumer, message_id) for one in places))


def is_over(consumer: ColumnElement[str], message_id: ColumnElement[str]) -> ColumnElement[bool]:
    """Say that a message neither waits nor is a dead letter, and that all it sent has left."""
    # As `semel.messaging.send.outbox.parent_of` names it.
    sent = exists().where(outbox_message.c.parent == consumer + _SLASH + message_id)
    kept = (_in(one, consumer, message_id) for one in (waiting_message, dead_letter))
    return and_(~sent, *(~one for one in kept))


def _in(
    table: Table, consumer: str | ColumnElement[str], message_id: ColumnElement[str]
) -> ColumnElement[bool]:
    return exists().where(table.c.consumer == consumer, table.c.message_id == message_id)
