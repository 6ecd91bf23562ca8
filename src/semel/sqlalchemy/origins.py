"""Messages as the tables hold them, and back: ids, keys, words, and what a record carried.

An id or a key may be any text.  What is too long for an index, or is not plain
text, is kept as a hash, with the original in JSON beside it: a message that
leaves the tables again is the one that came.
"""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Column, ColumnElement, Row, and_, func
from sqlalchemy.sql.base import ReadOnlyColumnCollection

from semel.message import Partition
from semel.messaging.audit import plain
from semel.messaging.deadletters import DeadLetter
from semel.messaging.filing import CAME_AS_AT, CONFLICT, came_as
from semel.messaging.ids import stored_id
from semel.messaging.inbox import InboxMessage
from semel.messaging.waiting import WaitingMessage
from semel.sqlalchemy.encoding import headers_from_text, headers_to_text
from semel.sqlalchemy.times import to_seconds, told_us


def origin_values(carried: DeadLetter | WaitingMessage | InboxMessage) -> dict[str, Any]:
    """Return the columns that say what came, and from where."""
    return {
        **stored_names(message_id=carried.message_id, key=carried.key),
        "payload": carried.payload,
        "headers": headers_to_text(carried.headers),
        "topic": plain(carried.topic),
        "partition": carried.partition,
        "offset": carried.offset,
        "timestamp": told_us(carried.timestamp),
        "payload_hash": carried.payload_hash,
        "message_type": plain(carried.message_type),
        "schema_version": plain(carried.schema_version),
        "correlation_id": plain(carried.correlation_id),
    }


def origin_of(row: Row[Any]) -> dict[str, Any]:
    """Read what `origin_values` wrote, as a dataclass's arguments."""
    kept = row._mapping
    return {
        **original_names(row, "message_id", "key"),
        "payload": kept["payload"],
        "headers": headers_from_text(kept["headers"]),
        "topic": kept["topic"],
        "partition": kept["partition"],
        "offset": kept["offset"],
        "timestamp": to_seconds(kept["timestamp"]),
        "payload_hash": kept["payload_hash"],
        "message_type": kept["message_type"],
        "schema_version": kept["schema_version"],
        "correlation_id": kept["correlation_id"],
    }


def stored_names(**names: str | None) -> dict[str, str | None]:
    """Return the columns of ids and keys, and ``originals`` where one of them is a hash."""
    kept = {name: stored_name(value) for name, value in names.items()}
    hashed = {name: value for name, value in names.items() if value != kept[name]}
    return {**kept, "originals": json.dumps(hashed) if hashed else None}


def stored_name(name: str | None) -> str | None:
    """Return an id or a key as a column has it."""
    return None if name is None else stored_id(name)


def original_names(row: Row[Any], *names: str) -> dict[str, Any]:
    """Return ids and keys as they came."""
    kept = row._mapping
    originals = json.loads(kept["originals"]) if kept["originals"] else {}
    return {name: originals.get(name, kept[name]) for name in names}


def conflicts_with(column: ColumnElement[str], message_id: str) -> ColumnElement[bool]:
    """Say that a column has the id of a conflict that came with *message_id*."""
    begins = func.substr(column, 1, len(CONFLICT)) == CONFLICT
    return and_(begins, func.substr(column, CAME_AS_AT + 1) == came_as(message_id))


def came_from(
    columns: ReadOnlyColumnCollection[str, Column[Any]], partition: Partition, first: int, last: int
) -> ColumnElement[bool]:
    """Say that a row's record stood between two offsets of a partition, both included."""
    return and_(
        columns.partition == partition.number,
        columns.offset.between(first, last),
        columns.topic == plain(partition.topic),
    )


def seconds_or_none(us: int | None) -> float | None:
    """Turn a time that may be missing into seconds."""
    return None if us is None else to_seconds(us)
