"""The audit trail in PostgreSQL and SQLite."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Row,
    Select,
    Text,
    bindparam,
    insert,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import insert as insert_once
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql import Executable

from semel.messaging.audit import (
    ERASE,
    FIRST_HASH,
    Act,
    AuditEntry,
    hash_of,
    is_erasure_of,
    recorded,
)
from semel.messaging.ids import stored_id
from semel.sqlalchemy.faults import translated
from semel.sqlalchemy.operator_tables import audit_entry, audit_head
from semel.sqlalchemy.times import now_us, to_seconds, to_us

ONLY_ROW: Final = 1

# Far beyond every lock timeout: so long may whoever asks wait for an erasure.
MOST_WAITED_SECONDS: Final = 3600

_C: Final = audit_entry.c

HEAD: Final = select(audit_head.c.number, audit_head.c.hash, now_us().label("now"))
LOCK_HEAD: Final = HEAD.with_for_update()
# Few acts are about no consumer, so that the index finds them.  Asking the head, too, waits
# for an erasure that is under way.
ERASED: Final = select(audit_entry, now_us().label("now")).where(
    _C.consumer == "",
    or_(_C.message_id == "", _C.message_id == bindparam("id", type_=Text)),
    _C.act == ERASE,
    _C.at >= now_us() - bindparam("age_us", type_=BigInteger),
    _C.number <= select(audit_head.c.number).scalar_subquery(),
)
# A SELECT holds its own lock on the table until its transaction ends.
LOCK_ASKING: Final = text(f"LOCK TABLE {audit_head.name} IN ACCESS EXCLUSIVE MODE")
# Two first appends at once: the second waits for the first's row, and finds it.
MAKE_HEAD: Final = (
    insert_once(audit_head)
    .values(only_row=ONLY_ROW, number=0, hash=FIRST_HASH)
    .on_conflict_do_nothing(index_elements=list(audit_head.primary_key))
)


class SqlAuditTrail:
    """The trail of one open transaction."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def append(self, act: Act) -> AuditEntry:
        """Write an act at the end of the chain; writers wait for one another."""
        act = recorded(act)
        head = (await self._run(LOCK_HEAD)).first()
        if head is None:
            await self._run(MAKE_HEAD)
            head = (await self._run(LOCK_HEAD)).one()
        number, at = head.number + 1, to_seconds(head.now)
        entry = AuditEntry(number, at, act, head.hash, hash_of(number, at, act, head.hash))
        await self._run(insert(audit_entry).values(_values(entry, head.now)))
        await self._run(update(audit_head).values(number=number, hash=entry.hash))
        return entry

    async def read(self, after: int, limit: int) -> Sequence[AuditEntry]:
        """Return the entries behind number *after*, in order."""
        return await self._entries(select(audit_entry).where(_C.number > after).limit(limit))

    async def about(self, consumer: str, message_id: str) -> Sequence[AuditEntry]:
        """Return the entries about one message, in order."""
        mine = (_C.consumer == consumer, _C.message_id == stored_id(message_id))
        return await self._entries(select(audit_entry).where(*mine))

    async def head(self) -> tuple[int, str]:
        """Return number and hash of the last entry, as the head's own record has them."""
        row = (await self._run(HEAD)).first()
        return (0, FIRST_HASH) if row is None else (row.number, row.hash)

    async def begin_erasing(self) -> None:
        """Keep everybody who asks `was_erased` waiting until this transaction ends."""
        # In SQLite there is one writer at a time.
        if self._session.get_bind(clause=audit_head).dialect.name == "postgresql":
            await self._run(LOCK_ASKING)

    async def was_erased(self, message_id: str, key: str | None, seconds: float) -> bool:
        """Tell whether a message, or its key, was erased within so many seconds until now."""
        asked = {"id": stored_id(message_id), "age_us": to_us(seconds + MOST_WAITED_SECONDS)}
        asked_at = time.monotonic()
        found = (await self._run(ERASED, asked)).all()
        # The database's clock went on while an erasure was waited for.
        age_us = to_us(seconds + time.monotonic() - asked_at)
        since_then = [_entry(row) for row in found if row.at >= row.now - age_us]
        return any(is_erasure_of(entry.act, message_id, key) for entry in since_then)

    async def _entries(self, found: Select[Any]) -> list[AuditEntry]:
        return [_entry(row) for row in await self._run(found.order_by(_C.number))]

    async def _run(self, statement: Executable, values: Any = None) -> Any:
        async with translated("the audit trail"):
            return await self._session.execute(statement, values)


def _values(entry: AuditEntry, at_us: int) -> dict[str, Any]:
    return {
        "number": entry.number,
        "at": at_us,
        "actor": entry.act.actor,
        "act": entry.act.act,
        "consumer": entry.act.consumer,
        "message_id": entry.act.message_id,
        "reason": entry.act.reason,
        "details": json.dumps(entry.act.details),
        "previous_hash": entry.previous_hash,
        "hash": entry.hash,
    }


def _entry(row: Row[Any]) -> AuditEntry:
    act = Act(row.actor, row.act, row.consumer, row.message_id, row.reason, json.loads(row.details))
    return AuditEntry(row.number, to_seconds(row.at), act, row.previous_hash, row.hash)
