"""The approvals in PostgreSQL and SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Row, Select, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql import Executable

from semel.messaging.approvals import Approval, Asked, Decision
from semel.messaging.audit import plain
from semel.messaging.ids import stored_id
from semel.messaging.sweep import Sweep
from semel.sqlalchemy.faults import translated
from semel.sqlalchemy.gone import delete_of_gone
from semel.sqlalchemy.operator_tables import approval
from semel.sqlalchemy.origins import original_names, seconds_or_none, stored_names
from semel.sqlalchemy.times import now_us, to_seconds

_C: Final = approval.c


class SqlApprovals:
    """The requests of one open transaction."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def ask(
        self,
        act: Asked,
        consumer: str,
        message_id: str,
        asked_by: str,
        reason: str,
        payload_hash: str = "",
    ) -> Approval:
        """Write a request, with a number and the database's time."""
        written = (
            insert(approval)
            .values(
                **stored_names(message_id=message_id),
                act=act.value,
                consumer=consumer,
                asked_by=plain(asked_by),
                reason=plain(reason),
                payload_hash=payload_hash,
                asked_at=now_us(),
            )
            .returning(approval)
        )
        return _approval((await self._run(written)).one())

    async def get(self, number: int) -> Approval | None:
        """Return one request."""
        found = await self._requests(select(approval).where(_C.number == number))
        return found[0] if found else None

    async def open_ones(self, consumer: str | None, limit: int) -> Sequence[Approval]:
        """Return requests that nobody has decided, the oldest first."""
        found = select(approval).where(_C.decision == Decision.OPEN.value).limit(limit)
        if consumer is not None:
            found = found.where(_C.consumer == consumer)
        return await self._requests(found)

    async def about(self, consumer: str, message_id: str) -> Sequence[Approval]:
        """Return the requests about one message, in order."""
        mine = (_C.consumer == consumer, _C.message_id == stored_id(message_id))
        return await self._requests(select(approval).where(*mine))

    async def decide(self, number: int, decided_by: str, decision: Decision) -> bool:
        """Write the decision; False, and nothing changed, where there is one already."""
        decided = (
            update(approval)
            .where(_C.number == number, _C.decision == Decision.OPEN.value)
            .values(decided_by=plain(decided_by), decided_at=now_us(), decision=decision.value)
        )
        return bool((await self._run(decided)).rowcount)

    async def delete_decided(
        self, consumer: str, ttl_seconds: float, limit: int, sweep: Sweep | None = None
    ) -> int:
        """Delete requests decided so long ago whose message is gone; return how many."""
        sweep = sweep or Sweep()
        old = delete_of_gone(_C.decided_at, _C.number, consumer, ttl_seconds, sweep.since(), limit)
        return sweep.note(list((await self._run(old)).scalars()))

    async def _requests(self, found: Select[Any]) -> list[Approval]:
        return [_approval(row) for row in await self._run(found.order_by(_C.number))]

    async def _run(self, statement: Executable) -> Any:
        async with translated("the approvals"):
            return await self._session.execute(statement)


def _approval(row: Row[Any]) -> Approval:
    return Approval(
        **original_names(row, "message_id"),
        number=row.number,
        act=Asked(row.act),
        consumer=row.consumer,
        asked_by=row.asked_by,
        reason=row.reason,
        asked_at=to_seconds(row.asked_at),
        decided_by=row.decided_by,
        decided_at=seconds_or_none(row.decided_at),
        decision=Decision(row.decision),
        payload_hash=row.payload_hash,
    )
