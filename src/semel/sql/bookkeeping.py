"""Members, crash notes, outcomes of offsets, and versions, in PostgreSQL and SQLite."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    FromClause,
    Insert,
    Integer,
    Select,
    TableClause,
    Text,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    table,
    union,
    update,
)
from sqlalchemy import column as sql_column

from semel.message import Coordinates, Partition
from semel.messaging.outcome import CYCLE, ENDS, CycleOutcomes, OutcomeRange
from semel.messaging.records import (
    SPARK,
    ConsumerEngine,
    Gap,
    Member,
    Note,
    original_id,
    stored_id,
)
from semel.sql.store import (
    ConnectionStore,
    RecordStore,
    delete_oldest,
    insert_new,
    insert_or_update,
    is_older,
    record_of,
    values_of,
)
from semel.sql.tables import (
    aggregate_version,
    consumer_engine,
    consumer_member,
    consumer_outcome,
    crash_suspect,
    cycle_outcome,
    dead_letter,
    inbox_message,
    outbox_leader,
    outbox_message,
    processed_message,
    sequence_gap,
    waiting_message,
)
from semel.sql.types import now_us, partitions_to_text, to_seconds, to_us

_M: Final = consumer_member.c
_S: Final = crash_suspect.c
_E: Final = consumer_engine.c
_ENGINE: Final = select(consumer_engine).where(_E.engine == SPARK)
ENTER: Final = insert_or_update(
    consumer_member,
    ["owner", "partitions", "in_flight", "expires_at", "standing_since", "lag", "refusals"],
)
SUSPECT: Final = insert_or_update(
    crash_suspect, ["writer", "noted_at"], tries=_S.tries + 1
).returning(_S.tries)
NOTE: Final = insert_new(crash_suspect).returning(_S.message_id)
_FOUND: Final = select(crash_suspect).order_by(_S.message_id)


_CYCLE: Final = ("scope", "sink", "generation", "batch")


def _book(schema: str, name: str) -> TableClause:
    """Return a table of the books that the sinks of pipelines keep, with the columns of a cycle."""
    return table(name, *map(sql_column, (*_CYCLE, "state")), schema=schema)


def _names(column: Column[str]) -> Select[Any]:
    """Read the distinct values of an indexed column, one look into the index for each."""
    named = select(func.min(column).label("name")).cte(f"in_{column.table.name}", recursive=True)
    following = select(func.min(column)).where(column > named.c.name).scalar_subquery()
    every = named.union_all(select(following).where(named.c.name.is_not(None)))
    return select(every.c.name).where(every.c.name.is_not(None))


CONSUMERS: Final = union(
    _names(processed_message.c.consumer_name),
    *(
        _names(one.c.consumer)
        for one in (
            dead_letter,
            waiting_message,
            inbox_message,
            consumer_member,
            consumer_outcome,
            sequence_gap,
            consumer_engine,
        )
    ),
).order_by("name")
OUTBOXES: Final = union(_names(outbox_message.c.outbox), _names(outbox_leader.c.outbox)).order_by(
    "name"
)


class SqlMembers(ConnectionStore, RecordStore[Member]):
    """The members and their crash notes, in one open transaction."""

    what = "the members"
    table = consumer_member
    record = Member
    order = (_M.name,)

    async def enter(self, member: Member, seconds: float) -> None:
        values = values_of(consumer_member, member, "expires_at")
        await self._run(ENTER.values(**values, expires_at=now_us() + to_us(seconds)))

    async def leave(self, consumer: str, name: str) -> None:
        await self._run(delete(consumer_member).where(_M.consumer == consumer, _M.name == name))

    async def others(
        self, consumer: str, name: str, partitions: Collection[Partition]
    ) -> Sequence[Member]:
        members = await self._read(self._select(_M.consumer == consumer, _M.name != name))
        return [member for member in members if member.partitions & frozenset(partitions)]

    async def running(self, consumer: str) -> Sequence[Member]:
        live = (_M.consumer == consumer, _M.expires_at > now_us())
        return await self._read(self._select(*live))

    async def engine(self, consumer: str) -> ConsumerEngine | None:
        found = (await self._run(_ENGINE.where(_E.consumer == consumer))).first()
        return None if found is None else record_of(consumer_engine, found, ConsumerEngine)

    async def engines(self) -> Sequence[ConsumerEngine]:
        found = await self._run(_ENGINE.order_by(_E.consumer))
        return [record_of(consumer_engine, row, ConsumerEngine) for row in found]

    async def lock_engine(self, consumer: str) -> ConsumerEngine | None:
        mine = _ENGINE.where(_E.consumer == consumer).with_for_update()
        found = (await self._run(mine)).first()
        return None if found is None else record_of(consumer_engine, found, ConsumerEngine)

    async def remove_engine(self, consumer: str) -> bool:
        return await self._count(delete(consumer_engine).where(_E.consumer == consumer)) > 0

    async def unsettled(self, engine: ConsumerEngine) -> Sequence[str]:
        if self._session.get_bind().dialect.name != "postgresql":
            return []  # only PostgreSQL has a sink for messages
        attempt, proof = (_book(engine.books, name) for name in ("sink_attempt", "sink_proof"))
        # Before the sink's first start there are no books, and nothing can be prepared.
        exists_yet = func.to_regclass(func.format("%I.%I", engine.books, attempt.name))
        if (await self._run(select(exists_yet.is_(None)))).scalar_one():
            return []
        proved = exists().where(*(proof.c[name] == attempt.c[name] for name in _CYCLE))
        found = await self._run(
            select(attempt.c.generation, attempt.c.batch)
            .where(attempt.c.scope == engine.scope, attempt.c.state == "prepared", ~proved)
            .distinct()
            .order_by(attempt.c.generation, attempt.c.batch)
        )
        return [f"g{row.generation}.b{row.batch}" for row in found]

    async def consumers(self) -> Sequence[str]:
        return list((await self._run(CONSUMERS)).scalars())

    async def outboxes(self) -> Sequence[str]:
        return list((await self._run(OUTBOXES)).scalars())

    async def suspect(self, consumer: str, message_id: str, writer: str) -> int:
        one = _try(consumer, stored_id(message_id), writer)
        return int((await self._run(SUSPECT.values(**one))).scalar_one())

    async def note(
        self, consumer: str, message_ids: Collection[str], writer: str
    ) -> Mapping[str, Note]:
        by_name = {stored_id(message_id): message_id for message_id in message_ids}
        if not by_name:
            return {}
        # Sorted, so that two workers lock the rows in the same order and cannot deadlock.
        rows = [_try(consumer, name, writer) for name in sorted(by_name)]
        new = set((await self._run(NOTE.values(rows))).scalars())
        known = {name: message_id for name, message_id in by_name.items() if name not in new}
        return await self._find(consumer, known, _FOUND.with_for_update())

    async def notes(self, consumer: str, message_ids: Collection[str]) -> Mapping[str, Note]:
        by_name = {stored_id(message_id): message_id for message_id in message_ids}
        return await self._find(consumer, by_name, _FOUND)

    async def _find(
        self, consumer: str, by_name: Mapping[str, str], found: Select[Any]
    ) -> dict[str, Note]:
        if not by_name:
            return {}
        mine = (_S.consumer == consumer, _S.message_id.in_(sorted(by_name)))
        rows = await self._run(found.where(*mine))
        return {
            by_name[row.message_id]: Note(row.tries, row.writer, to_seconds(row.noted_at))
            for row in rows
        }

    async def clear_notes(
        self, consumer: str, message_ids: Collection[str], writer: str | None = None
    ) -> None:
        if message_ids:
            here = _S.message_id.in_(sorted(map(stored_id, message_ids)))
            mine = () if writer is None else (_S.writer == writer,)
            await self._run(delete(crash_suspect).where(_S.consumer == consumer, here, *mine))

    async def forget_notes(self, consumer: str, older_than_seconds: float, limit: int) -> int:
        old = (_S.consumer == consumer, is_older(_S.noted_at, older_than_seconds))
        # Repeat the condition: the note may have been written anew while this waited for its lock.
        gone = delete_oldest(*old, order=[_S.message_id], limit=limit).where(*old)
        return await self._count(gone)

    async def release(self, consumer: str, name: str, partition: Partition) -> None:
        me = (_M.consumer == consumer, _M.name == name)
        found = await self._first(self._select(*me).with_for_update())
        if found is None:
            return
        left = found.partitions - {partition}
        if not left:
            gone = delete(consumer_member).where(*me, _M.expires_at <= now_us())
            if await self._count(gone):
                return
        left_text = partitions_to_text(left)
        await self._run(update(consumer_member).where(*me).values(partitions=left_text))

    async def forget_expired(self, consumer: str) -> int:
        ended = (_M.partitions == partitions_to_text(()), _M.expires_at <= now_us())
        gone = delete(consumer_member).where(_M.consumer == consumer, *ended)
        return await self._count(gone)


def _try(consumer: str, name: str, writer: str) -> dict[str, Any]:
    values = {"consumer": consumer, "message_id": name, "tries": 1, "writer": writer}
    return {**values, "noted_at": now_us()}


_O: Final = consumer_outcome.c
_Y: Final = cycle_outcome.c
_FROM: Final = bindparam("from_offset", type_=BigInteger)
_UNTIL: Final = bindparam("until", type_=BigInteger)
_RANGE: Final[dict[str, Any]] = {
    "consumer": bindparam("of", type_=Text),
    "topic": bindparam("in_topic", type_=Text),
    "partition": bindparam("at", type_=Integer),
    "outcome": bindparam("what", type_=Text),
}
_ENDS_BEFORE: Final = and_(*(_O[name] == new for name, new in _RANGE.items()), _O.last == _FROM - 1)
# After redeliveries, two ranges may end at the same offset: extend only one of them.
_NEIGHBOUR: Final = select(_O.number).where(_ENDS_BEFORE).limit(1).scalar_subquery()
_NEW_RANGE: Final[dict[str, Any]] = {"first": _FROM, "last": _UNTIL, **_RANGE}


def _extend_or_add() -> Insert:
    # Repeats the condition of the subquery: if another process extended the range while this
    # one waited for its lock, the range must not become shorter.
    here = update(consumer_outcome).where(_O.number == _NEIGHBOUR, _ENDS_BEFORE)
    extended = here.values(last=_UNTIL).returning(_O.number).cte("extended")
    new = select(*_NEW_RANGE.values()).where(~select(extended.c.number).exists())
    return insert(consumer_outcome).from_select(list(_NEW_RANGE), new)


RECORD: Final = _extend_or_add()
"""For PostgreSQL."""

# SQLite has no UPDATE within another statement, but one writer at a time: no other process can
# change the neighbour between its number and its update.  Without a neighbour the number is NULL,
# and SQLite gives one.
RECORD_SQLITE: Final = insert_or_update(consumer_outcome, ["last"]).values(
    number=_NEIGHBOUR, **_NEW_RANGE
)


class SqlOutcomeStore(ConnectionStore):
    """The outcome ranges, in one open transaction."""

    what = "the outcomes"

    async def record(self, consumer: str, ranges: Sequence[OutcomeRange]) -> None:
        values = [
            {
                "of": consumer,
                "in_topic": new.partition.topic,
                "at": new.partition.number,
                "from_offset": new.first,
                "until": new.last,
                "what": new.outcome,
            }
            for new in ranges
        ]
        is_postgres = self._session.get_bind().dialect.name == "postgresql"
        await self._run(RECORD if is_postgres else RECORD_SQLITE, values)

    async def ranges(self, consumer: str, partition: Partition) -> Sequence[OutcomeRange]:
        found = select(consumer_outcome).where(_in(consumer, partition))
        return await self._ranges(found.order_by(_O.first, _O.last, _O.outcome))

    async def covering(self, consumer: str, at: Coordinates) -> Sequence[OutcomeRange]:
        covers = (_in(consumer, at.place), _O.first <= at.offset, _O.last >= at.offset)
        return await self._ranges(select(consumer_outcome).where(*covers).order_by(_O.number))

    async def _ranges(self, found: Select[Any]) -> list[OutcomeRange]:
        return [
            OutcomeRange(Partition(row.topic, row.partition), row.first, row.last, row.outcome)
            for row in await self._run(found)
        ]

    async def partitions(self, consumer: str) -> Sequence[Partition]:
        found = await self._run(
            select(_O.topic, _O.partition)
            .where(_O.consumer == consumer)
            .distinct()
            .order_by(_O.topic, _O.partition)
        )
        return [Partition(row.topic, row.partition) for row in found]

    async def prune(self, consumer: str, partition: Partition, below: int, limit: int) -> int:
        says_kept = consumer_outcome.alias()
        is_needed = exists().where(
            _in(consumer, partition, says_kept),
            says_kept.c.outcome.not_in(ENDS),
            says_kept.c.first <= _O.last,
            says_kept.c.last >= _O.first,
            says_kept.c.last >= below,
        )
        old = (_in(consumer, partition), _O.last < below, or_(_O.outcome.not_in(ENDS), ~is_needed))
        low = delete_oldest(*old, order=[_O.first, _O.number], limit=limit)
        # Repeat the condition: the range may have been extended while this waited for its lock.
        return await self._count(low.where(_O.last < below))

    async def cycle_partitions(self, consumer: str) -> Sequence[Partition]:
        found = await self._run(
            select(_Y.topic, _Y.partition)
            .where(_Y.consumer == consumer)
            .distinct()
            .order_by(_Y.topic, _Y.partition)
        )
        return [Partition(row.topic, row.partition) for row in found]

    async def cycle_ranges(self, consumer: str, partition: Partition) -> Sequence[OutcomeRange]:
        one = _cycles(consumer, partition).subquery("one")
        before = func.max(one.c.last).over(order_by=one.c.first, rows=(None, -1))
        begins = case((one.c.first <= before + 1, 0), else_=1).label("begins")
        cut = select(one.c.first, one.c.last, begins).subquery("cut")
        number = func.sum(cut.c.begins).over(order_by=cut.c.first, rows=(None, 0)).label("number")
        part = select(cut.c.first, cut.c.last, number).subquery("part")
        whole = select(func.min(part.c.first).label("first"), func.max(part.c.last).label("last"))
        found = await self._run(whole.group_by(part.c.number).order_by("first"))
        return [OutcomeRange(partition, row.first, row.last, CYCLE) for row in found]

    async def cycle_totals(self, consumer: str, partition: Partition) -> Mapping[str, int]:
        found = await self._run(
            select(_Y.outcome, func.sum(_Y.total).label("total"))
            .where(_in(consumer, partition, cycle_outcome))
            .group_by(_Y.outcome)
        )
        return {row.outcome: int(row.total) for row in found}

    async def short_cycles(
        self, consumer: str, partition: Partition, limit: int
    ) -> Sequence[CycleOutcomes]:
        length = func.max(_Y.last) - func.min(_Y.first) + 1
        short = _cycles(consumer, partition).having(func.sum(_Y.total) < length)
        found = await self._run(short.order_by("first").limit(limit))
        return [_cycle(row, {"": int(row.total)}) for row in found]

    async def cycles_covering(self, consumer: str, at: Coordinates) -> Sequence[CycleOutcomes]:
        mine = _cycles(consumer, at.place)
        covers = (func.min(_Y.first) <= at.offset, func.max(_Y.last) >= at.offset)
        found = (await self._run(mine.having(and_(*covers)).order_by("at"))).all()
        cycles = []
        for row in found:
            here = (_in(consumer, at.place, cycle_outcome), _Y.scope == row.scope)
            rows = await self._run(
                select(_Y.outcome, _Y.total)
                .where(*here, _Y.cycle == row.cycle, _Y.attempt == row.attempt)
                .order_by(_Y.outcome)
            )
            cycles.append(_cycle(row, {one.outcome: one.total for one in rows}))
        return cycles

    async def delete_cycles(self, consumer: str, ttl_seconds: float, limit: int) -> int:
        # 0 is no time: such a row was written without one.
        old = (_Y.consumer == consumer, _Y.at > 0, is_older(_Y.at, ttl_seconds))
        return await self._count(delete_oldest(*old, order=[_Y.number], limit=limit))


def _cycles(consumer: str, partition: Partition) -> Select[Any]:
    """Read each cycle of a partition; its outcomes have extents of their own."""
    return (
        select(
            _Y.scope,
            _Y.cycle,
            _Y.attempt,
            func.min(_Y.first).label("first"),
            func.max(_Y.last).label("last"),
            func.sum(_Y.total).label("total"),
            func.max(_Y.at).label("at"),
        )
        .where(_in(consumer, partition, cycle_outcome))
        .group_by(_Y.scope, _Y.cycle, _Y.attempt)
    )


def _cycle(row: Any, totals: Mapping[str, int]) -> CycleOutcomes:
    return CycleOutcomes(row.cycle, row.attempt, row.first, row.last, totals, to_seconds(row.at))


def _in(
    consumer: str, partition: Partition, table: FromClause = consumer_outcome
) -> ColumnElement[bool]:
    return and_(
        table.c.consumer == consumer,
        table.c.topic == partition.topic,
        table.c.partition == partition.number,
    )


_V: Final = aggregate_version.c
_G: Final = sequence_gap.c

BEGIN: Final = insert_new(aggregate_version)
ADVANCE: Final = insert_or_update(aggregate_version, ["version"])
OPEN: Final = insert_or_update(
    sequence_gap,
    ["found"],
    # An open gap keeps its time; a closed one opens again with a new time.
    since=case((_G.closed_at.is_(None), _G.since), else_=now_us()),
    closed_at=None,
    how="",
)


class SqlVersions(ConnectionStore):
    """The applied versions and the gaps, in one open transaction."""

    what = "the versions"

    async def current(self, consumer: str, key: str) -> int | None:
        name = stored_id(key)
        locked = select(_V.version).where(_V.consumer == consumer, _V.key == name).with_for_update()
        found = (await self._run(locked)).first()
        if found is None:
            # Without a row there is nothing to lock, and two transactions that both see no row
            # would both apply the first version.
            await self._run(BEGIN.values(consumer=consumer, key=name, version=None))
            found = (await self._run(locked)).one()
        return None if found.version is None else int(found.version)

    async def advance(self, consumer: str, key: str, version: int) -> None:
        applied = {"consumer": consumer, "key": stored_id(key), "version": version}
        await self._run(ADVANCE.values(**applied))

    async def open_gap(self, gap: Gap) -> None:
        await self._run(
            OPEN.values(
                consumer=gap.consumer,
                key=stored_id(gap.key),
                original_key=original_id(gap.key),
                expected=gap.expected,
                found=gap.found,
                since=now_us(),
            )
        )

    async def close_gaps(
        self, consumer: str, key: str, up_to: int, how: str, after: int | None = None
    ) -> int:
        closing = update(sequence_gap).where(
            _G.consumer == consumer,
            _G.key == stored_id(key),
            _G.closed_at.is_(None),
            _G.found - 1 <= up_to,
        )
        if after is not None:
            closing = closing.where(_G.found - 1 > after)
        return await self._count(closing.values(closed_at=now_us(), how=how))

    async def gaps(
        self, consumer: str | None, limit: int, *, key: str | None = None
    ) -> Sequence[Gap]:
        found = select(sequence_gap).where(_G.closed_at.is_(None))
        if consumer is not None:
            found = found.where(_G.consumer == consumer)
        if key is not None:
            found = found.where(_G.key == stored_id(key))
        rows = await self._run(found.order_by(_G.since, _G.consumer, _G.key).limit(limit))
        return [record_of(sequence_gap, row, Gap, key=row.original_key or row.key) for row in rows]

    async def delete_closed(self, consumer: str, ttl_seconds: float, limit: int) -> int:
        old = (_G.consumer == consumer, is_older(_G.closed_at, ttl_seconds))
        # Repeat the condition: the gap may have opened again while this waited for its lock.
        gone = delete_oldest(*old, order=[_G.closed_at], limit=limit).where(*old)
        return await self._count(gone)
