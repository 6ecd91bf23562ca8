"""The claims in PostgreSQL and SQLite, in any transaction of the caller, and their SQL.

    TAKE     insert a claim: one round trip, and the only one for a new message
    WHY      read the existing claim, and the database's time
    RETAKE   take a claim that failed and is due, or whose lease ran out

A statement that makes or takes a claim changes nothing while a pipeline on Spark runs the
consumer.  The condition is part of the statement, which locks the table before it reads: a
pipeline that has written its row and then locked the table for a moment knows that every claim
after that sees the row.

`claim_sync` runs the same statements, in the same order, on a connection that blocks.

No statement uses `ON CONFLICT DO UPDATE … WHERE`: it locks the row even if the condition is
false, so two deliveries of a handled message would wait for each other.
"""

from __future__ import annotations

import json
from collections.abc import Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Final, TypeVar
from uuid import UUID
from weakref import WeakKeyDictionary

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Compiled,
    Connection,
    CursorResult,
    Executable,
    Float,
    FromClause,
    Insert,
    Integer,
    Row,
    Text,
    Update,
    and_,
    any_,
    bindparam,
    case,
    delete,
    exists,
    func,
    literal,
    literal_column,
    or_,
    select,
    text,
    true,
    update,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.dialects.postgresql import ARRAY, insert, psycopg
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Session

from semel.errors import Misuse
from semel.message import Coordinates, digest_of, producer_id
from semel.messaging.database import Sweep
from semel.messaging.handle.claims import (
    CLOSED,
    DELETED,
    TERMINAL,
    WITHOUT_EFFECT,
    ClaimAnswer,
    Claimed,
    ClaimFound,
    ClaimRequest,
    ClaimRow,
    ClaimState,
    Duplicate,
    Failure,
    NotClaimable,
    RunByPipeline,
    Stale,
    found_of,
    refusal,
)
from semel.messaging.records import SPARK, original_id, stored_id
from semel.messaging.redact import reason_of
from semel.messaging.tables import FIND, found, lean_prefix
from semel.operate.stores import plain
from semel.policy.vocabulary import StalePolicy
from semel.sql.engine import LOCK_SECONDS, SUPPORTED
from semel.sql.faults import (
    DatabaseConflict,
    DatabaseUnavailable,
    claiming,
    translated,
    translated_error,
)
from semel.sql.schema import learn_naming, no_tables
from semel.sql.session import Beginning, HandlerSession
from semel.sql.store import insert_new, is_over, is_stored, naming_in, record_of, stored_name
from semel.sql.tables import consumer_engine, processed_message
from semel.sql.types import now_us, to_seconds, to_us

_C: Final = processed_message.c
_BY: Final = bindparam("by", type_=Text)
_ID: Final = bindparam("id", type_=Text)
_DIGEST: Final = bindparam("digest", type_=Text)
_OWNED_BY: Final = bindparam("owned_by", type_=Text)
_SEEN: Final = bindparam("seen", type_=BigInteger)
_LEASE_US: Final = bindparam("lease_us", type_=BigInteger)
_DELAY_US: Final = bindparam("delay_us", type_=BigInteger)
_AGE_US: Final = bindparam("age_us", type_=BigInteger)
_OF_KEY: Final = bindparam("of_key", type_=Text)
_ME: Final = and_(_C.consumer_name == _BY, _C.message_id == _ID)

_DUE: Final = or_(
    and_(_C.state == ClaimState.FAILED_RETRYABLE.value, _C.due_at <= now_us()),
    and_(_C.state == ClaimState.IN_PROGRESS.value, _C.lease_until <= now_us()),
)

# An empty hash means "unknown", and conflicts with no other hash.
_SAME_PAYLOAD: Final = or_(_C.payload_hash == "", _DIGEST == "", _C.payload_hash == _DIGEST)

# The first known hash stays; only `expect_payload` replaces it.
_KEPT_HASH: Final = case((_C.payload_hash == "", _DIGEST), else_=_C.payload_hash)
_NOT_COMPLETED: Final = _C.state != ClaimState.COMPLETED.value
_NOT_CLOSED: Final = _C.state.not_in([state.value for state in sorted(CLOSED)])

_E: Final = consumer_engine.c
_ON_SPARK: Final = and_(_E.consumer == _BY, _E.engine == literal_column(f"'{SPARK}'", Text))
_BY_SERVICES: Final = ~exists().where(_ON_SPARK)

PIPELINE: Final = select((_E.app + literal_column("'/'", Text) + _E.query).label("run_by")).where(
    _ON_SPARK
)
"""The pipeline that runs the consumer; nothing where services do."""

_RUN_BY: Final = PIPELINE.scalar_subquery().label("run_by")

_LEASED: Final = and_(
    _C.state == ClaimState.IN_PROGRESS.value,
    _C.fence == _SEEN,
    # A pipeline takes leases that have ended, and relies on it that they stay so.
    or_(_C.lease_until > now_us(), _BY_SERVICES),
)


_RELEASED: Final = {"owner": "", "lease_until": 0, "marker": "", "updated_at": now_us()}


def _values(state: Any, **values: Any) -> dict[str, Any]:
    """Return the columns of a new claim."""
    return {
        "consumer_name": _BY,
        "message_id": _ID,
        "original_id": bindparam("original", type_=Text),
        "payload_hash": _DIGEST,
        "source": bindparam("source", type_=Text),
        "first_seen_at": now_us(),
        "updated_at": now_us(),
        "state": state,
        **values,
    }


def _new(state: Any, *where: ColumnElement[bool], **values: Any) -> Insert:
    """Insert a claim unless there is one, or a pipeline runs the consumer."""
    rows = _values(state, **values)
    given = select(*rows.values()).where(_BY_SERVICES, *where)
    return insert_new(processed_message).from_select(list(rows), given)


def _change(*where: ColumnElement[bool], **values: Any) -> Update:
    """Change the state of this claim, and end its lease unless *values* set a new one."""
    return update(processed_message).where(_ME, *where).values({**_RELEASED, **values})


_COMPLETED: Final = literal(ClaimState.COMPLETED.value, Text)
_LEASING: Final = literal(ClaimState.IN_PROGRESS.value, Text)

TAKE: Final = _new(_COMPLETED).returning(_C.message_id)

# A claim in a session of the caller's own must not wait for ever, and the caller's own statements
# as long as the caller wants.  So the statement itself sets the limit, before it inserts, and
# removes it with the row that it returns; a statement for each would triple the round trips.
# A limit of the caller, or of the engine, stays: ours has a value that tells it from others.
_LIMIT: Final = "lock_timeout"
_OURS: Final = round(LOCK_SECONDS * 1000) - 1
_IS_NONE: Final = func.current_setting(_LIMIT, type_=Text) == "0"
_IS_OURS: Final = func.current_setting(_LIMIT, type_=Text) == f"{_OURS}ms"
_SET: Final = case((_IS_NONE, func.set_config(_LIMIT, str(_OURS), true())), else_="kept")
_UNSET: Final = func.set_config(_LIMIT, "0", true(), type_=Text)

TAKE_LIMITED: Final = _new(_COMPLETED, _SET.is_not(None)).returning(
    _C.message_id, case((_IS_OURS, _UNSET))
)
UNLIMIT: Final = select(_UNSET).where(_IS_OURS)

WHY: Final = select(processed_message, now_us().label("now"), _RUN_BY).where(_ME)

RETAKE: Final = _change(
    _BY_SERVICES,
    _DUE,
    _SAME_PAYLOAD,
    _C.fence == _SEEN,
    state=ClaimState.COMPLETED.value,
    attempts=_C.attempts + 1,
    payload_hash=_KEPT_HASH,
    error_code="",
    due_at=0,
).returning(_C.attempts)

# The time as fence: a value that was never used before, even if retention has deleted the
# claim with the last one.  If the clock went back, the fence still rises.
_NEXT_FENCE: Final = case((_C.fence >= now_us(), _C.fence + 1), else_=now_us())

LEASE: Final = _new(
    _LEASING,
    owner=_OWNED_BY,
    fence=now_us(),
    lease_until=now_us() + _LEASE_US,
).returning(_C.fence)

LEASE_AGAIN: Final = _change(
    _BY_SERVICES,
    _DUE,
    _SAME_PAYLOAD,
    _C.fence == _SEEN,
    state=ClaimState.IN_PROGRESS.value,
    owner=_OWNED_BY,
    lease_until=now_us() + _LEASE_US,
    fence=_NEXT_FENCE,
    attempts=_C.attempts + 1,
    payload_hash=_KEPT_HASH,
    due_at=0,
).returning(_C.attempts, _C.fence)

RENEW: Final = (
    update(processed_message).where(_ME, _LEASED).values(lease_until=now_us() + _LEASE_US)
)

# An update that changes no value: it locks the row, so the condition holds until the
# transaction ends.
LOCK_EXPIRED: Final = (
    update(processed_message)
    .where(_ME, _LEASED, _C.lease_until <= now_us())
    .values(lease_until=_C.lease_until)
)

_RESULT: Final = case(
    (_C.erased_at.is_(None), func.coalesce(bindparam("returned", type_=Text), _C.result))
)

COMPLETE_LEASED: Final = _change(
    _LEASED, state=ClaimState.COMPLETED.value, result=_RESULT, error_code="", due_at=0
)

# What a person ended keeps its marker, and the code of the failure before.
COMPLETE: Final = _change(
    _BY_SERVICES,
    _NOT_COMPLETED,
    state=ClaimState.COMPLETED.value,
    result=_RESULT,
    error_code=case((_C.marker == "", ""), else_=_C.error_code),
    marker=_C.marker,
    due_at=0,
)

COMPLETE_NEW: Final = _new(_COMPLETED, result=bindparam("returned", type_=Text)).returning(
    _C.message_id
)

_FAILED: Final[dict[str, Any]] = {
    "state": bindparam("into", type_=Text),
    "attempts": bindparam("tried", type_=Integer),
    "error_code": bindparam("code", type_=Text),
    "marker": bindparam("marked", type_=Text),
    "due_at": now_us() + _DELAY_US,
    "failed_at": now_us(),
}

FAIL_NEW: Final = _new(**_FAILED).returning(_C.message_id)
FAIL: Final = _change(_BY_SERVICES, _NOT_CLOSED, payload_hash=_KEPT_HASH, **_FAILED)
FAIL_LEASED: Final = _change(_LEASED, payload_hash=_KEPT_HASH, **_FAILED)
UNDO: Final = _change(payload_hash=_KEPT_HASH, **_FAILED).returning(processed_message)

# A claim that never failed and was never leased was inserted by this transaction.
GIVE_BACK_NEW: Final = delete(processed_message).where(_ME, _C.failed_at.is_(None), _C.fence == 0)

GIVE_BACK: Final = _change(
    state=case(
        (_OWNED_BY == "", ClaimState.FAILED_RETRYABLE.value), else_=ClaimState.IN_PROGRESS.value
    ),
    owner=_OWNED_BY,
    error_code=bindparam("code", type_=Text),
    attempts=_C.attempts - 1,
)

KEEP_RESULT: Final = (
    update(processed_message)
    .where(_ME, _C.erased_at.is_(None))
    .values(result=bindparam("returned", type_=Text), result_key=_OF_KEY)
)

PASS_OVER: Final = (
    update(processed_message).where(_ME).values(marker=bindparam("marked", type_=Text))
)

EXPECT_PAYLOAD: Final = update(processed_message).where(_ME).values(payload_hash=_DIGEST)

REOPEN: Final = _change(
    _C.state.in_([ClaimState.FAILED_TERMINAL.value, ClaimState.PARKED.value]),
    state=ClaimState.FAILED_RETRYABLE.value,
    attempts=0,
    due_at=now_us(),
)

# A person's decision counts in every engine; a pipeline is protected from it elsewhere
# (`semel.operate.audit.acting`).
DECIDE: Final = (
    insert(processed_message)
    .values(_values(**_FAILED))
    .on_conflict_do_update(
        index_elements=list(processed_message.primary_key),
        set_={
            **_RELEASED,
            **_FAILED,
            "payload_hash": _KEPT_HASH,
        },
        where=_NOT_COMPLETED,
    )
    .returning(_C.message_id)
)

# `updated_at` stays: erasing is not a change of state, and must not restart retention.
ERASED: Final = (
    update(processed_message).where(_ME).values(erased_at=func.coalesce(_C.erased_at, now_us()))
)

_FORGET: Final = update(processed_message).values(
    result=None, result_key=None, erased_at=func.coalesce(_C.erased_at, now_us())
)

FORGET_RESULT: Final = _FORGET.where(_ME, _C.result.is_not(None))
FORGET_RESULTS: Final = _FORGET.where(_C.result_key == _OF_KEY)

# In a subquery the clock is read once.  Read for every row, it could not bound an index scan.
_LONG_AGO: Final = select(now_us() - _AGE_US).scalar_subquery()

_OLD: Final = (
    select(_C.message_id)
    .where(
        _C.consumer_name == _BY,
        _C.state == bindparam("over", type_=Text),
        _C.updated_at >= bindparam("since", type_=BigInteger),
        _C.updated_at <= _LONG_AGO,
        # Keep the claim while the message exists elsewhere: sending the message back reads from
        # it whether it was handled, and `erase` which outgoing messages belong to it.
        is_over(_BY, _C.message_id),
    )
    .order_by(_C.updated_at)
    .limit(bindparam("at_most", type_=Integer))
    .with_for_update(skip_locked=True, of=processed_message)
    .cte("old")
)

# A day is over when the next one begins.  Its table is beside that of the other claims.
_OLD_DAYS: Final = text("""
SELECT format('"%s"."%s"', n.nspname, c.relname)
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relname ~ :names AND c.relkind = 'r'
   AND c.relnamespace = (SELECT p.relnamespace FROM pg_catalog.pg_class p
                          WHERE p.oid = to_regclass(concat_ws('.', quote_ident(:space),
                                                              'processed_message')))
   AND (to_date(right(c.relname, 8), 'YYYYMMDD') + 1)::timestamp AT TIME ZONE 'UTC'
       < clock_timestamp() - make_interval(secs => :age)
 ORDER BY c.relname""").bindparams(bindparam("space", type_=Text), bindparam("age", type_=Float))

DELETE_OLD: Final = (
    delete(processed_message)
    .where(_C.consumer_name == _BY, _C.message_id.in_(select(_OLD.c.message_id)))
    # With RETURNING, because sqlite3 has no row count for a DELETE that begins with WITH.
    .returning(_C.updated_at)
)


def _take_many(given: FromClause, collation: str) -> Insert:
    """Insert a batch: one statement, whose text is the same for every length."""
    # Read the clock once, not once for each row.
    moment = select(now_us()).scalar_subquery()
    rows = {
        _C.consumer_name: _BY,
        _C.message_id: given.c.id,
        _C.original_id: given.c.original,
        _C.payload_hash: given.c.digest,
        _C.source: given.c.source,
        _C.state: _COMPLETED,
        _C.first_seen_at: moment,
        _C.updated_at: moment,
    }
    of_services = select(*rows.values()).where(_BY_SERVICES)
    sorted_rows = of_services.order_by(given.c.id.collate(collation))
    taken = insert_new(processed_message).from_select(list(rows), sorted_rows)
    return taken.returning(_C.message_id)


TAKE_MANY: Final = _take_many(
    func.unnest(
        bindparam("ids", type_=ARRAY(Text)),
        bindparam("originals", type_=ARRAY(Text)),
        bindparam("digests", type_=ARRAY(Text)),
        bindparam("sources", type_=ARRAY(Text)),
    )
    .table_valued("id", "original", "digest", "source")
    .render_derived(name="given"),
    "C",
)
"""For PostgreSQL.  Sorted by bytes, as Python sorts text: two workers cannot deadlock."""

_EACH: Final = func.json_each(bindparam("given", type_=Text)).table_valued("value")

TAKE_MANY_SQLITE: Final = _take_many(
    select(
        *(
            func.json_extract(_EACH.c.value, literal_column(f"'$.{name}'"), type_=Text).label(name)
            for name in ("id", "original", "digest", "source")
        )
    ).subquery("given"),
    "BINARY",
)

_MINE: Final = select(processed_message, now_us().label("now"), _RUN_BY).where(
    _C.consumer_name == _BY
)
WHY_MANY: Final = _MINE.where(_C.message_id == any_(bindparam("ids", type_=ARRAY(Text))))
WHY_MANY_SQLITE: Final = _MINE.where(_C.message_id.in_(bindparam("ids", expanding=True)))

IN_PROGRESS: Final = (
    select(processed_message)
    .where(_C.consumer_name == _BY, _C.state == ClaimState.IN_PROGRESS.value)
    .order_by(_C.lease_until, _C.message_id)
    .limit(bindparam("at_most", type_=Integer))
)

EXPIRED: Final = IN_PROGRESS.where(_C.lease_until <= now_us())

HANDLED_FROM: Final = select(_C.source).where(
    _C.consumer_name == _BY,
    _C.state == ClaimState.COMPLETED.value,
    _C.marker.not_in(sorted(WITHOUT_EFFECT)),
    _C.source.in_(bindparam("sources", expanding=True)),
)

WITHOUT_MESSAGE: Final = (
    select(_C.source)
    .where(
        _C.consumer_name == _BY,
        _C.state.in_(
            [
                state.value
                for state in sorted(ClaimState)
                if state not in (ClaimState.COMPLETED, ClaimState.IN_PROGRESS)
            ]
        ),
        _C.marker != DELETED,
        ~is_stored(_BY, _C.message_id),
    )
    .limit(bindparam("at_most", type_=Integer))
)

CONSUMERS: Final = select(_C.consumer_name).order_by(_C.consumer_name)
"""The consumers that have a claim on a message: for explanations."""

# A further turn means that another transaction changed or removed the claim between two of
# our statements.  After five turns the caller gives up and tries again later.
MOST_TURNS: Final = 5


@dataclass(frozen=True, slots=True, eq=False)
class ClaimAsked:
    """One message of one consumer, as the statements name it."""

    consumer: str
    request: ClaimRequest
    id: str

    @classmethod
    def of(cls, consumer: str, request: ClaimRequest) -> ClaimAsked:
        """Return the message with its id as it is stored."""
        return cls(consumer, request, stored_id(request.message_id))

    def key(self) -> dict[str, Any]:
        """Return the parameters that select the row."""
        return {"by": self.consumer, "id": self.id}

    def key_and_hash(self) -> dict[str, Any]:
        """Return the parameters that select the row, and the payload's hash."""
        return {**self.key(), "digest": self.request.payload_hash}

    def new(self) -> dict[str, Any]:
        """Return the parameters of a new row."""
        more = {"original": self.original, "source": self.source}
        return {**self.key_and_hash(), **more}

    @property
    def source(self) -> str:
        """The coordinates of the delivery, as they are stored."""
        return plain(self.request.source)

    @property
    def original(self) -> str | None:
        """The original id, stored beside a hashed one; None where the id is not hashed."""
        asked = self.request.message_id
        return None if asked == self.id else original_id(asked)

    def row(self, found: Row[Any]) -> ClaimRow:
        """Read the row of this message."""
        names = {"consumer": self.consumer, "message_id": self.request.message_id}
        return record_of(processed_message, found, ClaimRow, **names)

    def changes_all_the_time(self) -> DatabaseConflict:
        """Return the error for a claim that other transactions changed in every turn."""
        return DatabaseConflict(
            f"{self}: other transactions changed the claim {MOST_TURNS} times between reading and "
            f"taking it; nothing was changed here, the message comes back"
        )

    def __str__(self) -> str:
        return f"consumer {self.consumer}: message {self.request.message_id!r}"


def _written(failure: Failure) -> dict[str, Any]:
    """Return the parameters of a statement that writes a failure."""
    return {
        "into": failure.state.value,
        "tried": failure.attempts,
        "code": failure.error_code,
        "marked": failure.marker,
        "delay_us": to_us(failure.delay_seconds),
    }


class SqlAlchemyProcessedMessageStore:
    """The claims, in the transaction of *session*; this class may begin it, and never ends it.

    Any `AsyncSession` will do.  If the transaction begins with a claim, it is READ COMMITTED on
    PostgreSQL, regardless of the engine's default.  On SQLite the engine must come from
    `semel.sql.engine`.  After `Locked` or any other error, roll the transaction back.

    *schema* says where semel's tables are on PostgreSQL, if that is neither the schema ``semel``
    nor one of the search path.
    """

    def __init__(self, session: AsyncSession, *, schema: str | None = None) -> None:
        given: object = session
        if isinstance(given, async_scoped_session):
            session = given = given()
        if not isinstance(given, AsyncSession):
            raise Misuse(
                f"claims with SqlAlchemyProcessedMessageStore need an AsyncSession, got "
                f"{type(given).__name__}: make sessions with async_sessionmaker, or claim with "
                f"semel.messaging.claim_sync"
            )
        self._session = session
        self._schema = schema
        self._beginning = Beginning(session)

    @property
    def session(self) -> AsyncSession:
        """The session of the transaction that the claims are in."""
        return self._session

    async def claim(self, *, consumer_name: str, event_id: str | int | UUID) -> bool:
        event_id = producer_id(event_id)
        answer = await self.try_claim(consumer_name, ClaimRequest(event_id))
        return _is_claimed(consumer_name, event_id, answer)

    async def try_claim(self, consumer: str, request: ClaimRequest) -> ClaimAnswer:
        me = ClaimAsked.of(consumer, request)
        may_wait = self._may_wait
        for _ in range(MOST_TURNS):
            if await self._row(TAKE_LIMITED if may_wait else TAKE, me, me.new()):
                return Claimed()
            why = await self._why(me)
            if why is not None and (answer := await self._answer(me, why)) is not None:
                if may_wait:
                    await self._row(UNLIMIT, me, {})
                return answer
        raise me.changes_all_the_time()

    async def try_claim_many(
        self, consumer: str, requests: Sequence[ClaimRequest]
    ) -> list[ClaimAnswer]:
        asked = [ClaimAsked.of(consumer, request) for request in requests]
        first = {me.id: me for me in reversed(asked)}
        taken = await self._take_many(consumer, first)
        missed = sorted(first.keys() - taken)
        whys = {row.message_id: row for row in await self._why_many(consumer, missed)}
        for row in whys.values():
            if row.run_by is not None:
                raise RunByPipeline(consumer, row.run_by)
        answers: dict[str, ClaimAnswer] = {}
        for id in missed:
            why = whys.get(id)
            answer = None if why is None else await self._answer(first[id], why)
            answers[id] = answer or await self.try_claim(consumer, first[id].request)
        new = Claimed()
        return [
            (new if me.id in taken else answers[me.id])
            if me is first[me.id]
            else await self.try_claim(consumer, me.request)
            for me in asked
        ]

    async def lease(
        self,
        consumer: str,
        request: ClaimRequest,
        *,
        owner: str,
        seconds: float,
        stale: StalePolicy = StalePolicy.RECLAIM,
    ) -> ClaimAnswer:
        me = ClaimAsked.of(consumer, request)
        terms = {"owned_by": owner, "lease_us": to_us(seconds)}
        for _ in range(MOST_TURNS):
            taken = await self._row(LEASE, me, {**me.new(), **terms})
            if taken is not None:
                return Claimed(fence=taken.fence)
            why = await self._why(me)
            if why is not None and (answer := await self._lease_again(me, why, terms, stale)):
                return answer
        raise me.changes_all_the_time()

    async def renew(self, consumer: str, message_id: str, fence: int, seconds: float) -> bool:
        until = {"seen": fence, "lease_us": to_us(seconds)}
        return await self._change_one(RENEW, consumer, message_id, **until)

    async def lock_expired(self, consumer: str, message_id: str, fence: int) -> bool:
        return await self._change_one(LOCK_EXPIRED, consumer, message_id, seen=fence)

    async def mark_completed(
        self, consumer: str, message_id: str, fence: int | None = None, result: str | None = None
    ) -> bool:
        me = ClaimAsked.of(consumer, ClaimRequest(message_id))
        returned = {"returned": result}
        if fence is not None:
            leased = {**me.key(), **returned, "seen": fence}
            return await self._change(COMPLETE_LEASED, me, leased)
        for _ in range(MOST_TURNS):
            if await self._change(COMPLETE, me, {**me.key(), **returned}):
                return True
            if await self._row(COMPLETE_NEW, me, {**me.new(), **returned}):
                return True
            if await self._is_in({ClaimState.COMPLETED}, me):
                return False
        raise me.changes_all_the_time()

    async def mark_failed(
        self, consumer: str, message_id: str, failure: Failure, fence: int | None = None
    ) -> bool:
        me = ClaimAsked.of(consumer, ClaimRequest(message_id, failure.payload_hash, failure.source))
        if fence is not None:
            leased = {**me.key_and_hash(), **_written(failure), "seen": fence}
            return await self._change(FAIL_LEASED, me, leased)
        new = {**me.new(), **_written(failure)}
        # The rollback of the first attempt has removed its claim; later ones find a row.
        is_known = failure.attempts > 1
        for _ in range(MOST_TURNS):
            if not is_known and await self._row(FAIL_NEW, me, new):
                return True
            if await self._change(FAIL, me, {**me.key_and_hash(), **_written(failure)}):
                return True
            is_known = False
            if await self._is_in(CLOSED, me):
                return False
        raise me.changes_all_the_time()

    async def undo(self, consumer: str, message_id: str, failure: Failure) -> ClaimRow:
        me = ClaimAsked.of(consumer, ClaimRequest(message_id, failure.payload_hash, failure.source))
        undone = await self._row(UNDO, me, {**me.key_and_hash(), **_written(failure)})
        if undone is None:
            raise Misuse(f"{me}: there is no claim to undo; this transaction did not take it")
        return me.row(undone)

    async def give_back(self, consumer: str, message_id: str, claimed: Claimed) -> None:
        if not await self._change_one(GIVE_BACK_NEW, consumer, message_id):
            before = {"owned_by": claimed.from_owner, "code": claimed.from_code}
            await self._change_one(GIVE_BACK, consumer, message_id, **before)

    async def keep_result(
        self, consumer: str, message_id: str, result: str, key: str | None = None
    ) -> None:
        kept = {"returned": result, "of_key": stored_name(key)}
        await self._change_one(KEEP_RESULT, consumer, message_id, **kept)

    async def pass_over(self, consumer: str, message_id: str, marker: str) -> None:
        await self._change_one(PASS_OVER, consumer, message_id, marked=marker)

    async def decide(self, consumer: str, message_id: str, failure: Failure) -> bool:
        me = ClaimAsked.of(consumer, ClaimRequest(message_id, failure.payload_hash, failure.source))
        return await self._row(DECIDE, me, {**me.new(), **_written(failure)}) is not None

    async def expect_payload(self, consumer: str, message_id: str, payload_hash: str) -> None:
        await self._change_one(EXPECT_PAYLOAD, consumer, message_id, digest=payload_hash)

    async def reopen(self, consumer: str, message_id: str) -> bool:
        return await self._change_one(REOPEN, consumer, message_id)

    async def look_up(self, consumer: str, message_id: str) -> ClaimRow | None:
        me = ClaimAsked.of(consumer, ClaimRequest(message_id))
        row = await self._row(WHY, me, me.key())
        return None if row is None else me.row(row)

    async def erase(self, consumer: str, message_id: str) -> bool:
        had = await self._change_one(FORGET_RESULT, consumer, message_id)
        await self._change_one(ERASED, consumer, message_id)
        return had

    async def erase_key(self, key: str) -> int:
        of_key = {"of_key": stored_id(key)}
        return (await self._execute(FORGET_RESULTS, "results of a key", of_key)).rowcount

    async def in_progress(
        self, consumer: str, limit: int, *, expired: bool = False
    ) -> Sequence[ClaimRow]:
        statement = EXPIRED if expired else IN_PROGRESS
        what = f"the claims of consumer {consumer}"
        found = await self._execute(statement, what, {"by": consumer, "at_most": limit})
        names = [(row, row.original_id or row.message_id) for row in found]
        return [ClaimAsked.of(consumer, ClaimRequest(name)).row(row) for row, name in names]

    async def consumers_of(self, message_id: str) -> Sequence[str]:
        named = CONSUMERS.where(processed_message.c.message_id == stored_id(message_id))
        return list((await self._execute(named, f"message {message_id!r}", {})).scalars())

    async def without_message(self, consumer: str, limit: int) -> Sequence[str]:
        asked = {"by": consumer, "at_most": limit}
        found = await self._execute(WITHOUT_MESSAGE, f"the claims of consumer {consumer}", asked)
        return list(found.scalars())

    async def handled_from(
        self, consumer: str, places: Sequence[Coordinates]
    ) -> Sequence[Coordinates]:
        named = {plain(str(at)): at for at in places}
        asked = {"by": consumer, "sources": list(named)}
        found = await self._execute(HANDLED_FROM, f"the claims of consumer {consumer}", asked)
        return [named[source] for source in found.scalars()]

    async def delete_expired(
        self, consumer: str, older_than_seconds: float, limit: int, sweep: Sweep | None = None
    ) -> int:
        """Delete at most *limit* terminal claims that did not change within the TTL.

        Claims that another transaction has locked are left for the next run.
        """
        deleted, sweep = 0, sweep or Sweep()
        for state in sorted(TERMINAL):
            which = {"by": consumer, "over": state.value, "age_us": to_us(older_than_seconds)}
            old = {**which, "at_most": limit - deleted, "since": sweep.since(state)}
            done = await self._execute(DELETE_OLD, f"the claims of consumer {consumer}", old)
            deleted += sweep.note(list(done.scalars()), state)
        return deleted

    async def drop_days(self, consumer: str, older_than_seconds: float) -> int:
        await self._beginning.begin()
        if not self._beginning.is_postgres:
            return 0  # only PostgreSQL has a sink for messages
        what = f"the lean claims of consumer {consumer}"
        options = await naming_in(self._session, self._schema)
        space = options.get("schema_translate_map", {}).get(None)
        asked = {"space": space, "age": older_than_seconds}
        asked["names"] = f"^{lean_prefix(consumer)}[0-9]{{8}}$"
        days = list((await self._execute(_OLD_DAYS, what, asked)).scalars())
        for day in days:
            names = f'{day}, {day[:-1]}_filter"'
            await self._execute(text(f"DROP TABLE IF EXISTS {names}"), what, {})
        return len(days)

    @property
    def _may_wait(self) -> bool:
        """The locks of this transaction may have no limit: its session is the caller's."""
        return self._beginning.is_postgres and not isinstance(self._session, HandlerSession)

    async def _answer(self, me: ClaimAsked, why: Row[Any]) -> ClaimAnswer | None:
        """Answer for a claim that exists, or take it again; None if it changed meanwhile."""
        row, now = me.row(why), to_seconds(why.now)
        no = refusal(row, me.request.payload_hash, now)
        if no is not None:
            return no
        taken = await self._row(RETAKE, me, {**me.key_and_hash(), "seen": why.fence})
        if taken is None:
            return None
        return Claimed(taken.attempts, from_owner=row.owner, from_code=row.error_code)

    async def _lease_again(
        self, me: ClaimAsked, why: Row[Any], terms: Mapping[str, Any], stale: StalePolicy
    ) -> ClaimAnswer | None:
        row, now = me.row(why), to_seconds(why.now)
        no = refusal(row, me.request.payload_hash, now)
        if no is not None:
            return no
        expired = found_of(row, me.request.payload_hash, now) is ClaimFound.LEASE_EXPIRED
        if expired and stale is not StalePolicy.RECLAIM:
            return Stale(row.owner, now - row.lease_until, row.attempts, row.fence)
        again = {**me.key_and_hash(), **terms, "seen": why.fence}
        taken = await self._row(LEASE_AGAIN, me, again)
        if taken is None:
            return None
        return Claimed(taken.attempts, taken.fence, row.owner)

    async def _take_many(self, consumer: str, batch: Mapping[str, ClaimAsked]) -> set[str]:
        if not batch:
            return set()
        ids = sorted(batch)
        if self._beginning.is_postgres:
            statement = TAKE_MANY
            parameters = {
                "ids": ids,
                "originals": [batch[id].original for id in ids],
                "digests": [batch[id].request.payload_hash for id in ids],
                "sources": [batch[id].source for id in ids],
            }
        else:
            statement = TAKE_MANY_SQLITE
            parameters = {"given": json.dumps([batch[id].new() for id in ids])}
        what = f"a batch of {len(batch)} messages of consumer {consumer}"
        return set((await self._execute(statement, what, {"by": consumer, **parameters})).scalars())

    async def _why_many(self, consumer: str, ids: Sequence[str]) -> Sequence[Row[Any]]:
        if not ids:
            return []
        statement = WHY_MANY if self._beginning.is_postgres else WHY_MANY_SQLITE
        what = f"the claims of consumer {consumer}"
        return (await self._execute(statement, what, {"by": consumer, "ids": list(ids)})).all()

    async def _is_in(self, states: Set[ClaimState], me: ClaimAsked) -> bool:
        row = await self._why(me)
        return row is not None and row.state in states

    async def _why(self, me: ClaimAsked) -> Row[Any] | None:
        """Read a claim that could not be taken; None if there is none.

        Raises:
            RunByPipeline: a pipeline runs the consumer; what it did with the message is its own.
        """
        row = await self._row(WHY, me, me.key())
        by = await self._row(PIPELINE, me, me.key()) if row is None else row
        if by is not None and by.run_by is not None:
            raise RunByPipeline(me.consumer, by.run_by)
        return row

    async def _row(self, statement: Executable, me: ClaimAsked, values: Any) -> Row[Any] | None:
        return (await self._execute(statement, str(me), values)).one_or_none()

    async def _change_one(
        self, statement: Executable, consumer: str, message_id: str, **values: Any
    ) -> bool:
        me = ClaimAsked.of(consumer, ClaimRequest(message_id))
        return await self._change(statement, me, {**me.key(), **values})

    async def _change(self, statement: Executable, me: ClaimAsked, values: Any) -> bool:
        return (await self._execute(statement, str(me), values)).rowcount > 0

    async def _execute(self, statement: Executable, what: str, values: Any) -> CursorResult[Any]:
        # In a unit, the runner waits for the end of a migration by the driver's own error.
        how = translated if isinstance(self._session, HandlerSession) else claiming
        async with how(what):
            await self._beginning.begin()
            options = await naming_in(self._session, self._schema)
            done: Any = await self._session.execute(statement, values, execution_options=options)
            return done  # type: ignore[no-any-return]


def claim_sync(
    transaction: Any,
    *,
    consumer: str,
    message_id: str | int | UUID,
    payload: bytes | None = None,
    schema: str | None = None,
) -> bool:
    """Claim a message in the open transaction of a program without asyncio.

    *transaction* is a `Session` or `Connection` of SQLAlchemy, the ``connection`` of Django, or a
    connection of psycopg, psycopg2 or sqlite3.  The caller commits the claim together with its
    own rows, or rolls both back.  If a `Session` begins with the claim, its transaction is READ
    COMMITTED on PostgreSQL.  *payload* tells a duplicate from another message with the same id.
    *schema* says where semel's tables are on PostgreSQL, if that is neither the schema ``semel``
    nor one of the search path.

    True: handle the message.  False: it was handled before.

    Raises:
        NotClaimable: it is held elsewhere, not due, parked or dead, or has another payload.
        Retryable: the database could not be asked.  Roll back, and try the message again later.
        Misuse: the connection is in AUTOCOMMIT, where a rollback would not undo the claim; or the
            id is empty, or begins like one that semel generates.
    """
    message_id = producer_id(message_id)
    request = ClaimRequest(message_id, "" if payload is None else digest_of(payload))
    claims = _BlockingClaims(transaction, schema)
    answer = _without_waiting(claims.try_claim(consumer, request))
    return _is_claimed(consumer, message_id, answer)


def _is_claimed(consumer: str, message_id: str, answer: ClaimAnswer) -> bool:
    if isinstance(answer, Claimed):
        return True
    if isinstance(answer, Duplicate):
        return False
    raise NotClaimable(consumer, message_id, answer)


Answer = TypeVar("Answer")


def _without_waiting(coroutine: Coroutine[Any, Any, Answer]) -> Answer:
    """Return the answer of a coroutine that awaits nothing which has to wait."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        answer: Answer = done.value
        return answer
    raise AssertionError("a claim on a connection that blocks has nothing to wait for")


class _BlockingClaims(SqlAlchemyProcessedMessageStore):
    """The claims on a connection that blocks: no coroutine of it ever waits."""

    def __init__(self, transaction: Any, schema: str | None) -> None:
        self._schema = schema
        self._connection = driver = _connection_of(transaction)
        if isinstance(driver, Connection):
            is_nested, driver = driver.in_nested_transaction(), driver.connection.dbapi_connection
            if is_nested and getattr(driver, "isolation_level", None) == "":
                raise Misuse(
                    "sqlite3 does not begin a transaction before a savepoint: releasing it could "
                    "commit the claim. Claim before session.begin_nested()"
                )
        _refuse_autocommit(driver)

    @property
    def _may_wait(self) -> bool:
        given = self._connection
        is_alchemy = isinstance(given, Connection)
        return (given.dialect.name if is_alchemy else _dialect_of(given)) == "postgresql"

    async def _row(self, statement: Executable, me: ClaimAsked, values: Any) -> Any:
        if isinstance(self._connection, Connection):
            async with claiming(str(me)):
                options = learn_naming(self._connection, self._schema)
                done = self._connection.execute(statement, values, execution_options=options)
                return done.one_or_none()
        driver = self._connection
        try:
            dialect = _dialect_of(driver)
            compiled = _compiled(statement, dialect, _driver_schema(driver, dialect, self._schema))
            return _driver_row(driver, compiled, values)
        except driver.Error as error:
            if ours := translated_error(error, str(me)):
                raise ours from error
            # psycopg's error for a lost connection has no SQLSTATE.
            if getattr(driver, "closed", False):
                raise DatabaseUnavailable(f"{me}: {reason_of(error)}") from error
            raise


def _connection_of(transaction: Any) -> Any:
    """Return the SQLAlchemy or the driver's connection that the caller's transaction is on.

    Raises:
        Misuse: claims cannot be kept there, or not without asyncio.
    """
    if isinstance(transaction, Session):
        transaction = _session_connection(transaction)
    if isinstance(transaction, Connection):
        dialect = transaction.dialect
        if dialect.name not in SUPPORTED or dialect.is_async:
            raise Misuse(
                f"claim_sync works on PostgreSQL and SQLite without asyncio, not on "
                f"{dialect.name}+{dialect.driver}; SqlAlchemyProcessedMessageStore claims in an "
                f"AsyncSession"
            )
        return transaction
    if hasattr(transaction, "ensure_connection"):  # Django's, which connects on first use
        transaction.ensure_connection()
        transaction = transaction.connection
    _dialect_of(transaction)
    return transaction


def _session_connection(session: Session) -> Connection:
    """Return the session's connection; one that it takes only now is READ COMMITTED."""
    of_claims: Any = {"clause": processed_message}
    bind, begun = session.get_bind(clause=processed_message), session.get_transaction()
    # As in `Beginning`: a connection that is in use keeps its level.
    is_in_use = isinstance(bind, Connection) or (begun is not None and begun._connections)
    if is_in_use or bind.dialect.name != "postgresql":
        return session.connection(of_claims)
    return session.connection(of_claims, execution_options={"isolation_level": "READ COMMITTED"})


_DRIVERS: Final = {
    ("psycopg", "Connection"): "postgresql",
    ("psycopg2", "connection"): "postgresql",
    ("sqlite3", "Connection"): "sqlite",
}


def _dialect_of(driver: Any) -> str:
    """Return the database of a driver's connection, by its class: no driver is imported here."""
    for kind in type(driver).__mro__:
        known = _DRIVERS.get((kind.__module__.partition(".")[0], kind.__name__))
        if known is not None:
            return known
    raise Misuse(
        f"claim_sync does not know {type(driver).__module__}.{type(driver).__qualname__}; it takes "
        f"a Session or Connection of SQLAlchemy, Django's connection, or a connection of psycopg "
        f"or sqlite3. In an AsyncSession, claim with SqlAlchemyProcessedMessageStore"
    )


def _refuse_autocommit(driver: Any) -> None:
    """Raise if no transaction is open, and the driver begins none with the next statement."""
    if hasattr(driver, "in_transaction"):
        # -1, and always before Python 3.12: isolation_level decides.
        mode = getattr(driver, "autocommit", -1)
        begins = driver.isolation_level is not None if mode == -1 else not mode
        is_open = driver.in_transaction
    else:
        begins = not driver.autocommit
        status = getattr(getattr(driver, "info", None), "transaction_status", 0)
        is_open = status != 0
    if not (begins or is_open):
        raise Misuse(
            "the connection is in AUTOCOMMIT, and no transaction is open: the claim would be "
            "durable before its message is handled. Begin a transaction first (in Django: "
            "transaction.atomic)"
        )


_SCHEMAS: Final[WeakKeyDictionary[Any, dict[str | None, str | None]]] = WeakKeyDictionary()


def _driver_schema(driver: Any, dialect: str, schema: str | None) -> str | None:
    """Return the schema to name; each connection of PostgreSQL is asked once.

    Raises:
        TablesMissing: there are no tables.
        Misuse: a schema is named on SQLite, or there are two that may be meant.
    """
    if dialect != "postgresql":
        if schema is not None:
            raise Misuse(f"{dialect} has no schemas: leave out schema={schema!r}")
        return None
    known = _SCHEMAS.setdefault(driver, {})
    if schema not in known:
        tables = found([tuple(row.values()) for row in _driver_rows(driver, FIND)], schema)
        if not tables.are_there:
            raise no_tables("the database of this connection", tables)
        # The search path decides in each transaction anew: a pool's next user may set another.
        known[schema] = None if tables.by_search_path else tables.schema
    return known[schema]


@cache
def _compiled(statement: Any, dialect: str, schema: str | None) -> Compiled:
    """Return the text of a statement, with the parameters as the driver names them."""
    kind: Any = psycopg.dialect if dialect == "postgresql" else sqlite.dialect
    style = "pyformat" if dialect == "postgresql" else "named"
    compiled: Compiled = statement.compile(
        dialect=kind(paramstyle=style),
        schema_translate_map={None: schema} if schema else None,
        render_schema_translate=schema is not None,
    )
    return compiled


def _driver_row(driver: Any, compiled: Compiled, values: Mapping[str, Any]) -> Any:
    """Run a statement on a driver's own connection; return the row as SQLAlchemy shows rows."""
    rows = _driver_rows(driver, str(compiled), compiled.construct_params(values))
    return SimpleNamespace(_mapping=rows[0], **rows[0]) if rows else None


def _driver_rows(driver: Any, statement: str, *values: Any) -> list[dict[str, Any]]:
    cursor = driver.cursor()
    try:
        cursor.execute(statement, *values)
        # All of them: SQLite ends a statement with RETURNING when its last row is read.
        rows = [row.values() if isinstance(row, Mapping) else row for row in cursor.fetchall()]
        names = [column[0] for column in cursor.description]
    finally:
        cursor.close()
    return [dict(zip(names, row, strict=True)) for row in rows]
