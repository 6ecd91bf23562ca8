"""What all stores use: run a statement, convert rows and records, filter, find what is over.

An id or a key may be any text.  One that is too long for an index, or is not plain text, is stored
as a hash, with the original in JSON beside it, so that a message leaves the tables unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

from sqlalchemy import (
    Column,
    ColumnElement,
    Row,
    Table,
    Text,
    and_,
    delete,
    exists,
    func,
    literal_column,
    select,
)
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql import Executable
from sqlalchemy.sql.dml import ReturningDelete

from semel.message import Partition, headers_from_text, headers_to_text
from semel.messaging.records import CAME_AS_AT, CONFLICT, MessageFilter, came_as, stored_id
from semel.operate.stores import plain
from semel.sql.faults import translated
from semel.sql.tables import (
    dead_letter,
    inbox_message,
    outbox_message,
    processed_message,
    waiting_message,
)
from semel.sql.types import (
    IS_TIME,
    now_us,
    seconds_or_none,
    time_to_us,
    to_us,
)

Record = TypeVar("Record")


class Store:
    """One store in one open transaction: runs its statements."""

    what: ClassVar[str]
    """What the store holds, as errors name it."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def _run(self, statement: Executable, values: Any = None) -> Any:
        async with translated(self.what):
            return await self._session.execute(statement, values)

    async def _count(self, statement: Executable, values: Any = None) -> int:
        """Run a statement; return how many rows it changed."""
        return int((await self._run(statement, values)).rowcount)


class ConnectionStore(Store):
    """A store that uses the connection: the session would first flush other messages' rows."""

    async def _run(self, statement: Executable, values: Any = None) -> Any:
        async with translated(self.what):
            connection = await self._session.connection()
            return await connection.execute(statement, values)


def values_of(table: Table, record: Any, *without: str) -> dict[str, Any]:
    """Return the fields of a record as values of the columns with the same names.

    The fields named in *without* are left out: the statement or the database sets them.
    """
    plan = _plan(table, type(record), without)
    values = stored_names(**{name: getattr(record, name) for name in plan.names})
    if not plan.names:
        del values["originals"]
    for name, write, _ in plan.others:
        values[name] = write(getattr(record, name))
    return values


def record_of(table: Table, row: Row[Any], kind: type[Record], **more: Any) -> Record:
    """Read a row of *table* as a record whose fields have the names of columns.

    *more* are fields that the caller converts: members of an enum, booleans.
    """
    plan, columns = _plan(table, kind, ()), row._mapping
    values = {name: read(columns[name]) for name, _, read in plan.others}
    if plan.names:
        values.update(original_names(row, *plan.names))
    return kind(**{**values, **more})


class _Plan(NamedTuple):
    """Which fields of a record are columns of a table, and how values are converted."""

    names: tuple[str, ...]
    """Ids and keys, which are stored as a hash if they are long."""

    others: tuple[tuple[str, Callable[[Any], Any], Callable[[Any], Any]], ...]
    """The name, how it is written, and how it is read."""


_NAMES: Final = frozenset({"message_id", "key", "new_id"})
# Statements compare these columns with unchanged values, so they are written unchanged.
_ASKED_FOR: Final = frozenset({"consumer", "name"})
_PLANS: Final[dict[tuple[Table, type[Any], tuple[str, ...]], _Plan]] = {}


def _plan(table: Table, kind: type[Any], without: tuple[str, ...]) -> _Plan:
    known = _PLANS.get((table, kind, without))
    if known is not None:
        return known
    both = [one.name for one in fields(kind) if one.name in table.c and one.name not in without]
    hashed = _NAMES if "originals" in table.c else frozenset[str]()
    others = [(name, *_conversion(table.c[name])) for name in both if name not in hashed]
    plan = _Plan(tuple(name for name in both if name in hashed), tuple(others))
    return _PLANS.setdefault((table, kind, without), plan)


def _conversion(column: Column[Any]) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    if column.info.get(IS_TIME):
        return time_to_us, seconds_or_none
    if column.name == "headers":
        return headers_to_text, headers_from_text
    if isinstance(column.type, Text) and column.name not in _ASKED_FOR:
        return _plain_text, _as_it_is
    return _number_or_same, _as_it_is


def _plain_text(text: str | None) -> str | None:
    return None if text is None else plain(text)


def _number_or_same(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value


def _as_it_is(value: Any) -> Any:
    return value


def stored_names(**names: str | None) -> dict[str, str | None]:
    """Return the columns of ids and keys, and ``originals`` where one of them is a hash."""
    stored = {name: stored_name(value) for name, value in names.items()}
    hashed = {name: value for name, value in names.items() if value != stored[name]}
    return {**stored, "originals": json.dumps(hashed) if hashed else None}


def stored_name(name: str | None) -> str | None:
    """Return an id or a key as a column stores it."""
    return None if name is None else stored_id(name)


def original_names(row: Row[Any], *names: str) -> dict[str, Any]:
    """Return the original ids and keys of a row."""
    columns = row._mapping
    originals = json.loads(columns["originals"]) if columns["originals"] else {}
    return {name: originals.get(name, columns[name]) for name in names}


# Fields of filters that are not columns; the store that has pages uses `after` itself.
_BOUNDS: Final = frozenset({"conflicts_with", "since", "until", "after", "after_place"})


def matching(
    table: Table, which: MessageFilter, time: Column[int] | None = None
) -> ColumnElement[bool]:
    """Return the condition for a filter; *time* is the column of its since and until."""
    given = {one.name: getattr(which, one.name) for one in fields(which)}
    wanted = [
        table.c[name] == (stored_id(value) if name in _NAMES else _number_or_same(value))
        for name, value in given.items()
        if value is not None and name not in _BOUNDS
    ]
    if given.get("conflicts_with") is not None:
        wanted.append(conflicts_with(table.c.message_id, given["conflicts_with"]))
    if time is not None and given.get("since") is not None:
        wanted.append(time >= to_us(given["since"]))
    if time is not None and given.get("until") is not None:
        wanted.append(time < to_us(given["until"]))
    if given.get("after_place") is not None:
        wanted.append(table.c.place > given["after_place"])
    return and_(True, *wanted)


def conflicts_with(column: ColumnElement[str], message_id: str) -> ColumnElement[bool]:
    """Return the condition that a column has the id of a conflict with *message_id*."""
    begins = func.substr(column, 1, len(CONFLICT)) == CONFLICT
    return and_(begins, func.substr(column, CAME_AS_AT + 1) == came_as(message_id))


def came_from(table: Table, partition: Partition, first: int, last: int) -> ColumnElement[bool]:
    """Return the condition that a record's offset is from *first* to *last*, inclusive."""
    return and_(
        table.c.partition == partition.number,
        table.c.offset.between(first, last),
        table.c.topic == plain(partition.topic),
    )


def delete_of_gone(
    when: Column[Any],
    place: Column[Any],
    consumer: str,
    ttl_seconds: float,
    since: float,
    limit: int,
) -> ReturningDelete[Any]:
    """Delete old rows about messages that the consumer has in no table any more.

    In the order of *place*, beginning at *since*; returns the places of the deleted rows.
    """
    table = when.table
    (number,) = table.primary_key
    old = (
        select(number)
        .where(
            table.c.consumer == consumer,
            place >= since,
            # In a subquery the clock is read once.  Read for every row, it could not bound a scan.
            when <= select(now_us() - to_us(ttl_seconds)).scalar_subquery(),
            _gone(consumer, table.c.message_id),
        )
        .order_by(place)
        .limit(limit)
    )
    return delete(table).where(number.in_(old)).returning(place)


def _gone(consumer: str, message_id: ColumnElement[str]) -> ColumnElement[bool]:
    """Return the condition that a consumer has no message with the id in a column."""
    claim = processed_message.c
    claimed = exists().where(claim.consumer_name == consumer, claim.message_id == message_id)
    places = (waiting_message, dead_letter, inbox_message)
    return and_(~claimed, *(~_in(one, consumer, message_id) for one in places))


_SLASH: Final = literal_column("'/'", Text)


def is_over(consumer: ColumnElement[str], message_id: ColumnElement[str]) -> ColumnElement[bool]:
    """Return the condition that a message does not wait, is not a dead letter, and that
    everything that it sent was published.
    """
    # The format of `semel.messaging.send.outbox.parent_of`.
    sent = exists().where(outbox_message.c.parent == consumer + _SLASH + message_id)
    stored = (_in(one, consumer, message_id) for one in (waiting_message, dead_letter))
    return and_(~sent, *(~one for one in stored))


def _in(
    table: Table, consumer: str | ColumnElement[str], message_id: ColumnElement[str]
) -> ColumnElement[bool]:
    return exists().where(table.c.consumer == consumer, table.c.message_id == message_id)
