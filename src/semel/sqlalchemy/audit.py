"""The audit trail in PostgreSQL and SQLite."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Row, Select, insert, select, update
from sqlalchemy.dialects.postgresql import insert as insert_once
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql import Executable

from semel.messaging.audit import FIRST_HASH, Act, AuditEntry, hash_of, recorded
from semel.messaging.ids import stored_id
from semel.sqlalchemy.faults import translated
from semel.sqlalchemy.operator_tables import audit_entry, audit_head
from semel.sqlalchemy.times import now_us, to_seconds

ONLY_ROW: Final = 1

_C: Final = audit_entry.c

HEAD: Final = select(audit_head.c.number, audit_head.c.hash, now_us().label("now"))
LOCK_HEAD: Final = HEAD.with_for_update()
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

    async def _entries(self, found: Select[Any]) -> list[AuditEntry]:
        return [_entry(row) for row in await self._run(found.order_by(_C.number))]

    async def _run(self, statement: Executable) -> Any:
        async with translated("the audit trail"):
            return await self._session.execute(statement)


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
