"""The statements of the waiting room, written once for PostgreSQL and SQLite.

SQLite has no locks on rows, and needs none: there is one writer at a time.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Insert,
    Integer,
    Text,
    and_,
    any_,
    bindparam,
    case,
    delete,
    func,
    literal_column,
    not_,
    or_,
    select,
)
from sqlalchemy.dialects.postgresql import ARRAY, insert

from semel.messaging.ids import stored_id
from semel.messaging.reasons import ERASED_REASON
from semel.messaging.waiting import WaitingFilter, Waits
from semel.sqlalchemy.origins import conflicts_with, stored_name
from semel.sqlalchemy.tables import waiting_key, waiting_message
from semel.sqlalchemy.times import now_us, to_us

_C: Final = waiting_message.c
_K: Final = waiting_key.c

_BY: Final = bindparam("by", type_=Text)
_ID: Final = bindparam("id", type_=Text)
_KEYS: Final = bindparam("keys", type_=ARRAY(Text))
_AT_MOST: Final = bindparam("at_most", type_=Integer)

_RETRY: Final = Waits.RETRY.value
_PARKED: Final = Waits.PARKED.value
_BEHIND: Final = Waits.BEHIND.value

GET: Final = select(waiting_message).where(_C.consumer == _BY, _C.message_id == _ID)


def _make_keys() -> Insert:
    given = func.unnest(_KEYS).table_valued("key").render_derived(name="given")
    rows = select(_BY, given.c.key, now_us()).order_by(given.c.key.collate("C"))
    return (
        insert(waiting_key)
        .from_select(["consumer", "key", "used_at"], rows, include_defaults=False)
        .on_conflict_do_nothing(index_elements=list(waiting_key.primary_key))
        .returning(_K.key)
    )


# Both are sorted by bytes, as Python sorts text: two workers that lock several keys wait for
# each other in one direction only.
MAKE_KEYS: Final = _make_keys()
"""PostgreSQL's; a row that this made is locked by it."""

LOCK_KEYS: Final = (
    select(_K.key)
    .where(_K.consumer == _BY, _K.key == any_(_KEYS))
    .order_by(_K.key.collate("C"))
    .with_for_update()
)

_HELD: Final = select(_C.key).where(_C.consumer == _BY, _C.held == 1).distinct()
HELD: Final = _HELD.where(_C.key == any_(_KEYS))
HELD_SQLITE: Final = _HELD.where(_C.key.in_(bindparam("keys", expanding=True)))

# Read once: a clock that is read for every row is read a million times.
_LONG_AGO: Final = select(now_us() - bindparam("age_us", type_=BigInteger)).scalar_subquery()
_OLD_KEYS: Final = (
    select(_K.key)
    .where(_K.consumer == _BY, _K.used_at <= _LONG_AGO)
    .limit(_AT_MOST)
    .with_for_update(skip_locked=True)
)
# What is returned is counted: SQLite does not count what a statement with a CTE deletes.
FORGET_KEYS: Final = (
    delete(waiting_key)
    .where(_K.consumer == _BY, _K.key.in_(select(_OLD_KEYS.cte("old").c.key)))
    .returning(_K.key)
)


# A time that is not given is the database's now.
_NEW: Final = insert(waiting_message).values(
    due_at=now_us() + bindparam("delay_us", type_=BigInteger),
    since=func.coalesce(bindparam("came_at", type_=BigInteger), now_us()),
    first_failed_at=func.coalesce(bindparam("failed_at", type_=BigInteger), now_us()),
)
_SAID: Final = _NEW.excluded
PUT: Final = _NEW.on_conflict_do_update(
    index_elements=[_C.consumer, _C.message_id],
    set_={
        # Nothing can be handled whose payload is gone.
        "waits": case((_C.erased_at.is_not(None), _PARKED), else_=_SAID.waits),
        "due_at": _SAID.due_at,
        "attempts": _SAID.attempts,
        # Why it failed again may quote what was erased.
        "reason": case((_C.erased_at.is_not(None), ERASED_REASON), else_=_SAID.reason),
        "error_code": _SAID.error_code,
        "exception": _SAID.exception,
        "first_failed_at": case(
            (_C.first_failed_at == 0, _SAID.first_failed_at), else_=_C.first_failed_at
        ),
    },
)
HERE: Final = select(_C.place).where(_C.consumer == _BY, _C.message_id == _ID).with_for_update()

_EARLIER: Final = waiting_message.alias("earlier")
_IS_FIRST: Final = or_(
    _C.held == 0,
    not_(
        select(literal_column("1"))
        .where(
            _EARLIER.c.consumer == _C.consumer,
            _EARLIER.c.key == _C.key,
            _EARLIER.c.held == 1,
            _EARLIER.c.place < _C.place,
        )
        .exists()
    ),
)
WHOSE_TURN: Final = select(waiting_message).where(
    _C.consumer == _BY,
    or_(_C.waits == _BEHIND, and_(_C.waits == _RETRY, _C.due_at <= now_us())),
    _IS_FIRST,
)
TAKE_DUE: Final = WHOSE_TURN.order_by(_C.place).limit(_AT_MOST).with_for_update(skip_locked=True)
# A statement of its own: from a bound that is not known, the other one would be planned worse.
TAKE_DUE_BEHIND: Final = TAKE_DUE.where(_C.place > bindparam("after", type_=BigInteger))
TAKE: Final = WHOSE_TURN.where(_C.message_id == _ID).with_for_update(skip_locked=True)
_THESE: Final = _C.message_id.in_(bindparam("ids", type_=Text, expanding=True))
TAKE_MANY: Final = WHOSE_TURN.where(_THESE).with_for_update(skip_locked=True)
_MINE_BY_TURN: Final = select(_C.due_at).where(_C.consumer == _BY, _IS_FIRST).limit(1)
# Each walks an index and ends at the first row whose turn it is: a minimum would look at all.
_IS_BEHIND_NOBODY: Final = (
    _MINE_BY_TURN.with_only_columns(literal_column("0")).where(_C.waits == _BEHIND)
).scalar_subquery()
_NEXT_RETRY: Final = (_MINE_BY_TURN.where(_C.waits == _RETRY).order_by(_C.due_at)).scalar_subquery()
US_TO_NEXT: Final = select(func.coalesce(_IS_BEHIND_NOBODY, _NEXT_RETRY - now_us()))

_OF_KEY: Final = (
    select(
        _C.key,
        func.min(_C.place).label("first"),
        func.count().label("messages"),
        func.min(_C.since).label("held_since"),
    )
    .where(_C.consumer == _BY, _C.held == 1)
    .group_by(_C.key)
    .subquery("of_key")
)
HELD_KEYS: Final = (
    select(waiting_message, _OF_KEY.c.messages, _OF_KEY.c.held_since)
    .join(_OF_KEY, _OF_KEY.c.first == _C.place)
    .order_by(_OF_KEY.c.held_since, _C.place)
    .limit(_AT_MOST)
)


def me(consumer: str, message_id: str) -> ColumnElement[bool]:
    """Say that one message is meant."""
    return and_(_C.consumer == consumer, _C.message_id == stored_id(message_id))


def matching(which: WaitingFilter) -> ColumnElement[bool]:
    """Say *which* in SQL."""
    equal = {
        _C.consumer: which.consumer,
        _C.message_id: stored_name(which.message_id),
        _C.key: stored_name(which.key),
        _C.waits: which.waits,
        _C.label: which.label,
        _C.error_code: which.error_code,
        _C.held: None if which.held is None else int(which.held),
    }
    wanted = [column == value for column, value in equal.items() if value is not None]
    if which.conflicts_with is not None:
        wanted.append(conflicts_with(_C.message_id, which.conflicts_with))
    if which.since is not None:
        wanted.append(_C.since >= to_us(which.since))
    if which.until is not None:
        wanted.append(_C.since < to_us(which.until))
    if which.after_place is not None:
        wanted.append(_C.place > which.after_place)
    return and_(True, *wanted)
