"""The SQL of the claims, written once for PostgreSQL and SQLite, and how rows are read.

    TAKE     insert a claim: one round trip, and the only one for a new message
    WHY      read the existing claim, and the database's time
    RETAKE   take a claim that failed and is due, or whose lease ran out

No statement uses `ON CONFLICT DO UPDATE … WHERE`: it locks the row even if the condition is
false, so two deliveries of a handled message would wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Insert,
    Integer,
    Row,
    Select,
    Text,
    Update,
    and_,
    any_,
    bindparam,
    case,
    delete,
    func,
    literal,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY, insert

from semel.messaging.handle.claims import (
    CLOSED,
    WITHOUT_EFFECT,
    ClaimRequest,
    ClaimRow,
    ClaimState,
    Failure,
)
from semel.messaging.records import original_id, stored_id
from semel.operate.stores import plain
from semel.sql.faults import DatabaseConflict
from semel.sql.store import is_over
from semel.sql.tables import processed_message
from semel.sql.types import now_us, seconds_or_none, to_seconds, to_us

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
_LEASED: Final = and_(_C.state == ClaimState.IN_PROGRESS.value, _C.fence == _SEEN)
_NOT_COMPLETED: Final = _C.state != ClaimState.COMPLETED.value
_NOT_CLOSED: Final = _C.state.not_in([state.value for state in sorted(CLOSED)])


def _new(**values: Any) -> Insert:
    """Insert a claim unless there is one."""
    return (
        insert(processed_message)
        .values(
            consumer_name=_BY,
            message_id=_ID,
            original_id=bindparam("original", type_=Text),
            payload_hash=_DIGEST,
            source=bindparam("source", type_=Text),
            first_seen_at=now_us(),
            updated_at=now_us(),
            **values,
        )
        .on_conflict_do_nothing(index_elements=list(processed_message.primary_key))
    )


def _change(*where: ColumnElement[bool], **values: Any) -> Update:
    """Change the state of this claim, and end its lease unless *values* set a new one."""
    released = {"owner": "", "lease_until": 0, "updated_at": now_us()}
    return update(processed_message).where(_ME, *where).values({**released, **values})


TAKE: Final = _new(state=ClaimState.COMPLETED.value).returning(_C.message_id)
WHY: Final = select(processed_message, now_us().label("now")).where(_ME)

RETAKE: Final = _change(
    _DUE,
    _SAME_PAYLOAD,
    _C.fence == _SEEN,
    state=ClaimState.COMPLETED.value,
    attempts=_C.attempts + 1,
    payload_hash=_KEPT_HASH,
    due_at=0,
).returning(_C.attempts)

# The time as fence: a value that was never used before, even if retention has deleted the
# claim with the last one.  If the clock went back, the fence still rises.
_NEXT_FENCE: Final = case((_C.fence >= now_us(), _C.fence + 1), else_=now_us())

LEASE: Final = _new(
    state=ClaimState.IN_PROGRESS.value,
    owner=_OWNED_BY,
    fence=now_us(),
    lease_until=now_us() + _LEASE_US,
).returning(_C.fence)

LEASE_AGAIN: Final = _change(
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
    _LEASED, state=ClaimState.COMPLETED.value, result=_RESULT, due_at=0
)

COMPLETE: Final = _change(
    _NOT_COMPLETED, state=ClaimState.COMPLETED.value, result=_RESULT, due_at=0
)

COMPLETE_NEW: Final = _new(
    state=ClaimState.COMPLETED.value, result=bindparam("returned", type_=Text)
).returning(_C.message_id)

_FAILED: Final[dict[str, Any]] = {
    "state": bindparam("into", type_=Text),
    "attempts": bindparam("tried", type_=Integer),
    "error_code": bindparam("code", type_=Text),
    "due_at": now_us() + _DELAY_US,
    "failed_at": now_us(),
}

FAIL_NEW: Final = _new(**_FAILED).returning(_C.message_id)
FAIL: Final = _change(_NOT_CLOSED, payload_hash=_KEPT_HASH, **_FAILED)
FAIL_LEASED: Final = _change(_LEASED, payload_hash=_KEPT_HASH, **_FAILED)
UNDO: Final = _change(payload_hash=_KEPT_HASH, **_FAILED).returning(processed_message)

# A claim that never failed and was never leased was inserted by this transaction.
GIVE_BACK_NEW: Final = delete(processed_message).where(_ME, _C.error_code == "", _C.fence == 0)

GIVE_BACK: Final = _change(
    state=case(
        (_OWNED_BY == "", ClaimState.FAILED_RETRYABLE.value), else_=ClaimState.IN_PROGRESS.value
    ),
    owner=_OWNED_BY,
    attempts=_C.attempts - 1,
)

KEEP_RESULT: Final = (
    update(processed_message)
    .where(_ME, _C.erased_at.is_(None))
    .values(result=bindparam("returned", type_=Text), result_key=_OF_KEY)
)

PASS_OVER: Final = (
    update(processed_message).where(_ME).values(error_code=bindparam("code", type_=Text))
)

EXPECT_PAYLOAD: Final = update(processed_message).where(_ME).values(payload_hash=_DIGEST)

REOPEN: Final = _change(
    _C.state.in_([ClaimState.FAILED_TERMINAL.value, ClaimState.PARKED.value]),
    state=ClaimState.FAILED_RETRYABLE.value,
    attempts=0,
    due_at=now_us(),
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

DELETE_OLD: Final = (
    delete(processed_message)
    .where(_C.consumer_name == _BY, _C.message_id.in_(select(_OLD.c.message_id)))
    # With RETURNING, because sqlite3 has no row count for a DELETE that begins with WITH.
    .returning(_C.updated_at)
)


def _take_many_at_once() -> Insert:
    """Insert a batch from arrays: one statement, whose text is the same for every length."""
    given = (
        func.unnest(
            bindparam("ids", type_=ARRAY(Text)),
            bindparam("originals", type_=ARRAY(Text)),
            bindparam("digests", type_=ARRAY(Text)),
            bindparam("sources", type_=ARRAY(Text)),
        )
        .table_valued("id", "original", "digest", "source")
        .render_derived(name="given")
    )
    # Read the clock once, not once for each row.
    moment = select(now_us()).scalar_subquery()
    rows = {
        _C.consumer_name: _BY,
        _C.message_id: given.c.id,
        _C.original_id: given.c.original,
        _C.payload_hash: given.c.digest,
        _C.source: given.c.source,
        _C.state: literal(ClaimState.COMPLETED.value, Text),
        _C.first_seen_at: moment,
        _C.updated_at: moment,
    }
    return (
        insert(processed_message)
        .from_select(list(rows), select(*rows.values()).order_by(given.c.id.collate("C")))
        .on_conflict_do_nothing(index_elements=list(processed_message.primary_key))
        .returning(_C.message_id)
    )


TAKE_MANY: Final = _take_many_at_once()
"""For PostgreSQL.  Sorted by bytes, as Python sorts text: two workers cannot deadlock."""

WHY_MANY: Final[Select[Any]] = select(processed_message, now_us().label("now")).where(
    _C.consumer_name == _BY, _C.message_id == any_(bindparam("ids", type_=ARRAY(Text)))
)

WHY_MANY_SQLITE: Final[Select[Any]] = select(processed_message, now_us().label("now")).where(
    _C.consumer_name == _BY, _C.message_id.in_(bindparam("ids", expanding=True))
)

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
    _C.error_code.not_in(sorted(WITHOUT_EFFECT)),
    _C.source.in_(bindparam("sources", expanding=True)),
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
        return row_of(self.consumer, self.request.message_id, found)

    def changes_all_the_time(self) -> DatabaseConflict:
        """Return the error for a claim that other transactions changed in every turn."""
        return DatabaseConflict(
            f"{self}: other transactions changed the claim {MOST_TURNS} times between reading and "
            f"taking it; nothing was changed here, the message comes back"
        )

    def __str__(self) -> str:
        return f"consumer {self.consumer}: message {self.request.message_id!r}"


def row_of(consumer: str, message_id: str, found: Row[Any]) -> ClaimRow:
    """Read the claim of the message with this id."""
    return ClaimRow(
        consumer,
        message_id,
        ClaimState(found.state),
        found.attempts,
        found.owner,
        found.fence,
        to_seconds(found.lease_until),
        to_seconds(found.due_at),
        found.payload_hash,
        to_seconds(found.first_seen_at),
        to_seconds(found.updated_at),
        found.error_code,
        found.result,
        found.source,
        seconds_or_none(found.failed_at),
        seconds_or_none(found.erased_at),
        found.result_key,
    )


def written(failure: Failure) -> dict[str, Any]:
    """Return the parameters of a statement that writes a failure."""
    return {
        "into": failure.state.value,
        "tried": failure.attempts,
        "code": failure.error_code,
        "delay_us": to_us(failure.delay_seconds),
    }
