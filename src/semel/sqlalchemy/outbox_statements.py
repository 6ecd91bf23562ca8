"""The statements of the outbox, written once for PostgreSQL and SQLite.

LEAD     take or keep the leadership; whoever is new raises the epoch
READ     what the relay sends next
DELETE   what was sent, if the leadership still stands
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Select,
    Text,
    Update,
    bindparam,
    case,
    delete,
    exists,
    func,
    literal,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import insert

from semel.messaging.ids import is_plain_text, stored_id
from semel.messaging.reasons import ERASED_REASON
from semel.sqlalchemy.numbers import among
from semel.sqlalchemy.tables import outbox_leader, outbox_message
from semel.sqlalchemy.times import now_us

_M: Final = outbox_message.c
_L: Final = outbox_leader.c
_OF: Final = _M.outbox == bindparam("of_outbox")
_IS_PARKED: Final = _M.parked_reason.is_not(None)
_MEANT: Final = (_OF, _M.message_id == bindparam("of_id"), _IS_PARKED)

ADD: Final = (
    insert(outbox_message)
    .values(created_at=now_us())
    .on_conflict_do_nothing(index_elements=[_M.outbox, _M.message_id])
    .returning(_M.outbox, _M.message_id)
)

_IS_MINE: Final = _L.owner == bindparam("me")

LEAD: Final = (
    update(outbox_leader)
    .where(
        _L.outbox == bindparam("of_outbox"),
        or_(_IS_MINE, _L.lease_until <= now_us(), _L.owner == bindparam("instead_of")),
    )
    .values(
        epoch=case((_IS_MINE, _L.epoch), else_=_L.epoch + 1),
        owner=bindparam("me"),
        lease_until=now_us() + bindparam("us"),
    )
    .returning(_L.epoch)
)
NEW_LEASE: Final = insert(outbox_leader).on_conflict_do_nothing(index_elements=[_L.outbox])
LEADER: Final = select(_L.owner, _L.epoch, _L.lease_until - now_us()).where(
    _L.outbox == bindparam("of_outbox")
)

_STANDS: Final = (
    _L.outbox == bindparam("of_outbox"),
    _L.owner == bindparam("me"),
    _L.epoch == bindparam("of_epoch"),
)
RESIGN: Final = update(outbox_leader).where(*_STANDS).values(owner="", lease_until=0)
STANDS: Final = select(literal(1)).where(*_STANDS)

# The lock makes a new leader wait for this statement's transaction, or this statement find
# the new epoch: nothing of an old leader comes after the first act of a new one.
_FENCE: Final = exists(select(literal(1)).where(*_STANDS).with_for_update(read=True))
_FENCED: Final = (_OF, among(_M.place, "places"), _FENCE)

DELETE: Final = delete(outbox_message).where(*_FENCED)
FAILED: Final = update(outbox_message).where(*_FENCED).values(attempts=_M.attempts + 1)
# What the broker says of an entry that was erased since it was read may quote its value.
_SAID: Final = bindparam("reason", type_=Text)
PARK: Final = FAILED.values(
    parked_reason=case((_M.erased_at.is_(None), _SAID), else_=_M.parked_reason)
)

UNPARK: Final = (
    update(outbox_message)
    .where(*_MEANT, _M.erased_at.is_(None))
    .values(parked_reason=None, attempts=0)
)
DROP: Final = delete(outbox_message).where(*_MEANT)

# What the relay reads; a message that is read is neither parked nor erased.
_PENDING_ENTRY: Final = (
    func.coalesce(_M.original_id, _M.message_id),
    _M.topic,
    _M.payload,
    _M.key,
    _M.headers,
    _M.place,
    _M.created_at,
    _M.attempts,
    _M.parent,
)
_ENTRY: Final = (*_PENDING_ENTRY, _M.outbox, _M.parked_reason, _M.erased_at)


def _entries(*where: ColumnElement[bool]) -> Select[Any]:
    return select(*_ENTRY).where(*where).order_by(_M.place)


READ: Final = (
    select(*_PENDING_ENTRY)
    .where(_OF, _M.place > bindparam("after_place"), _M.parked_reason.is_(None))
    .order_by(_M.place)
    .limit(bindparam("most"))
)
PARKED: Final = _entries(_OF, _IS_PARKED).limit(bindparam("most"))
KNOWN: Final = _entries(_OF, _M.message_id.in_(bindparam("ids", expanding=True)))
CHILDREN: Final = _entries(_M.parent == bindparam("of_parent"))
PARKED_KEYS: Final = (
    select(_M.topic, _M.key)
    .where(_OF, _IS_PARKED, _M.erased_at.is_(None), _M.key.is_not(None))
    .distinct()
)
_PENDING: Final = _M.parked_reason.is_(None)
NUMBERS: Final = select(
    func.count().filter(_PENDING),
    func.count(_M.parked_reason),
    now_us() - func.min(_M.created_at).filter(_PENDING),
).where(_OF)

_ERASE: Final = (
    update(outbox_message)
    .where(_M.erased_at.is_(None))
    .values(
        payload=None,
        headers="",
        erased_at=now_us(),
        parked_reason=ERASED_REASON,
    )
)


def erasing(*, message_id: str | None, key: str | None, parent: str | None) -> Update:
    """Erase the entries that all of these name; with none of them, that is every one."""
    meant = _ERASE
    if message_id is not None:
        meant = meant.where(_M.message_id == stored_id(message_id))
    if key is not None:
        caused = _M.parent_key == stored_id(key)
        meant = meant.where(or_(_M.key == key, caused) if is_plain_text(key) else caused)
    if parent is not None:
        meant = meant.where(_M.parent == parent)
    return meant
