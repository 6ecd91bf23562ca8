"""What all stores use: run a statement, convert rows and records, filter, find what is over.

An id or a key may be any text.  One that is too long for an index, or is not plain text, is stored
as a hash, with the original in JSON beside it, so that a message leaves the tables unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from functools import cache
from typing import Any, ClassVar, Final, Generic, NamedTuple, TypeVar, get_type_hints

from sqlalchemy import (
    Column,
    ColumnElement,
    Delete,
    Row,
    Select,
    Table,
    Text,
    and_,
    bindparam,
    cast,
    delete,
    exists,
    func,
    literal_column,
    null,
    or_,
    select,
    tuple_,
    update,
)
from sqlalchemy.dialects.postgresql import Insert, insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql import Executable

from semel.message import CONFLICT, Partition
from semel.messaging.database import Sweep
from semel.messaging.records import CAME_AS_AT, MessageFilter, came_as, stored_id
from semel.operate.stores import plain
from semel.sql.faults import translated
from semel.sql.schema import learn_naming
from semel.sql.session import HandlerSession
from semel.sql.tables import (
    dead_letter,
    inbox_message,
    outbox_message,
    processed_message,
    waiting_message,
)
from semel.sql.types import CONVERSION, now_us, to_us

Record = TypeVar("Record")


async def naming_in(session: AsyncSession, schema: str | None = None) -> Mapping[str, Any]:
    """Return the execution options with which a statement names the schema of semel's tables.

    Raises:
        TablesMissing: the session's database has none.
        Misuse: there are two schemas that may be meant.
    """
    if isinstance(session, HandlerSession):
        return session.naming
    bind: dict[str, Any] = {"clause": processed_message}
    return await session.run_sync(
        lambda inside: learn_naming(inside.connection(bind_arguments=bind), schema)
    )


class Store:
    """One store in one open transaction: runs its statements."""

    what: ClassVar[str]
    """What the store holds, as errors name it."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def _run(self, statement: Executable, values: Any = None) -> Any:
        async with translated(self.what):
            options = await naming_in(self._session)
            return await self._session.execute(statement, values, execution_options=options)

    async def _count(self, statement: Executable, values: Any = None) -> int:
        """Run a statement; return how many rows it changed."""
        return int((await self._run(statement, values)).rowcount)

    async def _delete_gone(
        self,
        consumer: str,
        is_old: ColumnElement[bool],
        place: Column[Any],
        sweep: Sweep,
        limit: int,
    ) -> int:
        """Delete old rows about messages that the consumer has in no table any more.

        In the order of *place*, from where *sweep* is.
        """
        mine, is_next = place.table.c, place >= sweep.since()
        is_gone = and_(mine.consumer == consumer, _gone(consumer, mine.message_id))
        old = delete_oldest(is_old, is_next, is_gone, order=[place], limit=limit)
        return sweep.note(list((await self._run(old.returning(place))).scalars()))


class ConnectionStore(Store):
    """A store that uses the connection: the session would first flush other messages' rows."""

    async def _run(self, statement: Executable, values: Any = None) -> Any:
        async with translated(self.what):
            connection = await self._session.connection()
            options = await naming_in(self._session)
            return await connection.execute(statement, values, execution_options=options)


class RecordStore(Store, Generic[Record]):
    """A store whose rows are records: dataclasses with the columns' names."""

    table: Table
    record: type[Record]
    order: Sequence[ColumnElement[Any]]
    """In which order the rows are read."""

    def _select(self, *where: ColumnElement[bool]) -> Select[Any]:
        return select(self.table).where(*where).order_by(*self.order)

    async def _about(self, consumer: str, message_id: str) -> list[Record]:
        mine = matching(self.table, MessageFilter(consumer, message_id))
        return await self._read(self._select(mine))

    async def _read(self, found: Executable, values: Any = None) -> list[Record]:
        rows = await self._run(found, values)
        return [record_of(self.table, row, self.record) for row in rows]

    async def _first(self, found: Executable, values: Any = None) -> Record | None:
        records = await self._read(found, values)
        return records[0] if records else None


class MessageStore(RecordStore[Record]):
    """A store with one row for each consumer and message id."""

    time: Column[int]
    """The column that the since and until of a filter mean."""

    erased: ClassVar[Mapping[str, Any]]
    """What erasing writes, beside the time."""

    async def get(self, consumer: str, message_id: str) -> Record | None:
        return await self._first(select_one(self.table), me(consumer, message_id))

    async def find(self, which: MessageFilter, limit: int) -> Sequence[Record]:
        return await self._read(self._select(self._matching(which)).limit(limit))

    async def outlines(self, which: MessageFilter, limit: int) -> Sequence[Record]:
        found = (
            select(*without_payload(self.table)).where(self._matching(which)).order_by(*self.order)
        )
        return await self._read(found.limit(limit))

    async def count(self, which: MessageFilter) -> int:
        counted = select(func.count()).select_from(self.table).where(self._matching(which))
        return int((await self._run(counted)).scalar_one())

    async def remove(self, consumer: str, message_id: str) -> bool:
        return await self._count(delete_one(self.table), me(consumer, message_id)) > 0

    async def erase(self, which: MessageFilter) -> int:
        here = (self._matching(which), self.table.c.erased_at.is_(None))
        erased = update(self.table).where(*here).values(**self.erased, erased_at=now_us())
        return await self._count(erased)

    def _matching(self, which: MessageFilter) -> ColumnElement[bool]:
        return matching(self.table, which, self.time)

    async def _places(
        self,
        columns: Sequence[Column[Any]],
        consumer: str,
        partition: Partition,
        offsets: tuple[int, int],
        limit: int,
    ) -> Any:
        """Read columns of the messages whose records came from these offsets, both included."""
        mine = self.table.c
        came = (
            mine.consumer == consumer,
            mine.partition == partition.number,
            mine.offset.between(*offsets),
            mine.topic == plain(partition.topic),
        )
        return await self._run(select(*columns).where(*came).order_by(*columns).limit(limit))


def without_payload(table: Table) -> list[Any]:
    """Return the columns for a list: large messages must not fill the memory."""
    return [null().label("payload") if c.name == "payload" else c for c in table.c]


def me(consumer: str, message_id: str) -> dict[str, Any]:
    """Return the parameters of a statement about one message."""
    return {"by": consumer, "id": stored_id(message_id)}


def is_me(table: Table) -> ColumnElement[bool]:
    """Return the condition that a row is about the message of the parameters `me`."""
    by, id = bindparam("by", type_=Text), bindparam("id", type_=Text)
    return and_(table.c.consumer == by, table.c.message_id == id)


@cache
def select_one(table: Table) -> Select[Any]:
    """Return the statement that reads one message."""
    return select(table).where(is_me(table))


@cache
def delete_one(table: Table) -> Delete:
    """Return the statement that deletes one message."""
    return delete(table).where(is_me(table))


def insert_new(table: Table, *key: Column[Any]) -> Insert:
    """Insert a row, unless there is one with the same *key*, or the same primary key."""
    return insert(table).on_conflict_do_nothing(index_elements=list(key or table.primary_key))


def insert_or_update(
    table: Table, replaced: Iterable[str], *key: Column[Any], **computed: Any
) -> Insert:
    """Insert a row, or change the one with its *key*: take over the columns *replaced*."""
    taken = {name: new_values(table)[name] for name in replaced}
    return insert(table).on_conflict_do_update(
        index_elements=list(key or table.primary_key), set_={**taken, **computed}
    )


def new_values(table: Table) -> Any:
    """Return the columns of a row that cannot be inserted, because there is one with its key."""
    return insert(table).excluded


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

    *more* are fields that the caller converts.
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
    types = get_type_hints(kind)
    others = [(n, *_conversion(table.c[n], types[n])) for n in both if n not in hashed]
    plan = _Plan(tuple(name for name in both if name in hashed), tuple(others))
    return _PLANS.setdefault((table, kind, without), plan)


def _conversion(
    column: Column[Any], kind: Any
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return how a field of the type *kind* is written into a column, and how it is read."""
    if CONVERSION in column.info:
        write, read = column.info[CONVERSION]
        return write, read
    is_converted = isinstance(kind, type) and issubclass(kind, Enum | bool)
    read = kind if is_converted else _as_it_is
    if isinstance(column.type, Text) and column.name not in _ASKED_FOR:
        return _plain_text, read
    return _number_or_same, read


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


# Fields of filters that are not columns.
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
    if time is not None and given.get("after") is not None:
        at, message_id = given["after"]
        here = tuple_(time, table.c.message_id)
        wanted.append(here > tuple_(to_us(at), stored_id(message_id)))
    if given.get("after_place") is not None:
        wanted.append(table.c.place > given["after_place"])
    return and_(True, *wanted)


def conflicts_with(column: ColumnElement[str], message_id: str) -> ColumnElement[bool]:
    """Return the condition that a column has the id of a conflict with *message_id*."""
    begins = func.substr(column, 1, len(CONFLICT)) == CONFLICT
    return and_(begins, func.substr(column, CAME_AS_AT + 1) == came_as(message_id))


def delete_oldest(*which: ColumnElement[bool], order: Sequence[Column[Any]], limit: int) -> Delete:
    """Delete at most *limit* rows, the first ones of an *order*."""
    table = order[0].table
    key = list(table.primary_key)
    old = select(*key).where(*which).order_by(*order).limit(limit)
    return delete(table).where(tuple_(*key).in_(old))


def is_older(when: Column[Any], seconds: float) -> ColumnElement[bool]:
    """Return the condition that a time is at least that long ago."""
    # In a subquery the clock is read once.  Read for every row, it could not bound a scan.
    return when <= select(now_us() - to_us(seconds)).scalar_subquery()


def _gone(consumer: str, message_id: ColumnElement[str]) -> ColumnElement[bool]:
    """Return the condition that a consumer has no message with the id in a column."""
    claim = processed_message.c
    claimed = exists().where(claim.consumer_name == consumer, claim.message_id == message_id)
    places = (waiting_message, dead_letter, inbox_message)
    return and_(~claimed, *(~_in(one, consumer, message_id) for one in places))


_COLON: Final = literal_column("':'", Text)
_SLASH: Final = literal_column("'/'", Text)


def is_over(consumer: ColumnElement[str], message_id: ColumnElement[str]) -> ColumnElement[bool]:
    """Return the condition that a message does not wait, is not a dead letter, and that
    everything that it sent was published.
    """
    # The format of `semel.messaging.send.outbox.parent_of`.
    parent = cast(func.length(consumer), Text) + _COLON + consumer + _SLASH + message_id
    sent = exists().where(outbox_message.c.parent == parent)
    return and_(~sent, ~is_stored(consumer, message_id))


def is_stored(consumer: ColumnElement[str], message_id: ColumnElement[str]) -> ColumnElement[bool]:
    """Return the condition that a message waits, or is a dead letter."""
    return or_(*(_in(one, consumer, message_id) for one in (waiting_message, dead_letter)))


def _in(
    table: Table, consumer: str | ColumnElement[str], message_id: ColumnElement[str]
) -> ColumnElement[bool]:
    return exists().where(table.c.consumer == consumer, table.c.message_id == message_id)
