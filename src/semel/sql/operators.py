"""The stores of operators in PostgreSQL and SQLite: audit, approvals, revisions, replays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import ColumnElement, Row, Select, and_, func, insert, or_, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from semel.messaging.database import Sweep
from semel.messaging.records import MessageFilter, stored_id
from semel.operate.stores import (
    FIRST_HASH,
    OVER,
    Act,
    Approval,
    ApprovalAsked,
    ApprovalDecision,
    AuditEntry,
    ReplayRun,
    ReplayState,
    Revision,
    hash_of,
    plain,
    recorded,
)
from semel.sql.schema import qualified
from semel.sql.store import (
    RecordStore,
    Store,
    conflicts_with,
    delete_oldest,
    insert_new,
    is_older,
    matching,
    naming_in,
    original_names,
    record_of,
    stored_names,
    values_of,
)
from semel.sql.tables import approval, audit_entry, audit_head, message_revision, replay_run
from semel.sql.types import now_us, to_seconds

_APPROVAL: Final = approval.c
_IS_OPEN: Final = _APPROVAL.decision == ApprovalDecision.OPEN.value


class SqlApprovals(RecordStore[Approval]):
    """The requests for approval, in one open transaction."""

    what = "the approvals"
    table = approval
    record = Approval
    order = (_APPROVAL.number,)

    async def ask(
        self,
        act: ApprovalAsked,
        consumer: str,
        message_id: str,
        asked_by: str,
        reason: str,
        payload_hash: str = "",
    ) -> Approval:
        written = insert(approval).values(
            **stored_names(message_id=message_id),
            act=act.value,
            consumer=consumer,
            asked_by=plain(asked_by),
            reason=plain(reason),
            payload_hash=payload_hash,
            asked_at=now_us(),
        )
        (request,) = await self._read(written.returning(approval))
        return request

    async def get(self, number: int) -> Approval | None:
        return await self._first(self._select(_APPROVAL.number == number))

    async def open_ones(self, consumer: str | None, limit: int) -> Sequence[Approval]:
        mine = matching(approval, MessageFilter(consumer))
        return await self._read(self._select(mine, _IS_OPEN).limit(limit))

    async def about(self, consumer: str, message_id: str) -> Sequence[Approval]:
        return await self._about(consumer, message_id)

    async def decide(
        self, number: int, decided_by: str, decision: ApprovalDecision
    ) -> Approval | None:
        decided = {"decided_by": plain(decided_by), "decision": decision.value}
        here = update(approval).where(_APPROVAL.number == number, _IS_OPEN)
        return await self._first(here.values(**decided, decided_at=now_us()).returning(approval))

    async def delete_decided(
        self, consumer: str, ttl_seconds: float, limit: int, sweep: Sweep | None = None
    ) -> int:
        is_old, place = is_older(_APPROVAL.decided_at, ttl_seconds), _APPROVAL.number
        return await self._delete_gone(consumer, is_old, place, sweep or Sweep(), limit)


ONLY_ROW: Final = 1
_ENTRY: Final = audit_entry.c
HEAD: Final = select(audit_head.c.number, audit_head.c.hash, now_us().label("now"))
LOCK_HEAD: Final = HEAD.with_for_update()

# If two transactions append the first entry at once, the second waits for the first one's row.
MAKE_HEAD: Final = insert_new(audit_head).values(only_row=ONLY_ROW, number=0, hash=FIRST_HASH)


class SqlAuditTrail(Store):
    """The audit trail, in one open transaction."""

    what = "the audit trail"

    def __init__(self, session: AsyncSession) -> None:
        super().__init__(session)
        self.written: list[Act] = []

    async def append(self, act: Act) -> AuditEntry:
        act = recorded(act)
        head = (await self._run(LOCK_HEAD)).first()
        if head is None:
            await self._run(MAKE_HEAD)
            head = (await self._run(LOCK_HEAD)).one()
        number, at = head.number + 1, to_seconds(head.now)
        entry = AuditEntry(number, at, act, head.hash, hash_of(number, at, act, head.hash))
        await self._run(insert(audit_entry).values(_values(entry)))
        await self._run(update(audit_head).values(number=number, hash=entry.hash))
        self.written.append(act)
        return entry

    async def read(self, after: int, limit: int) -> Sequence[AuditEntry]:
        return await self._entries(select(audit_entry).where(_ENTRY.number > after).limit(limit))

    async def about(self, consumer: str, message_id: str) -> Sequence[AuditEntry]:
        mine = (_ENTRY.consumer == consumer, _ENTRY.message_id == stored_id(message_id))
        return await self._entries(select(audit_entry).where(*mine))

    async def head(self) -> tuple[int, str]:
        row = (await self._run(HEAD)).first()
        return (0, FIRST_HASH) if row is None else (row.number, row.hash)

    async def _entries(self, found: Select[Any]) -> list[AuditEntry]:
        return [_entry(row) for row in await self._run(found.order_by(_ENTRY.number))]


def _values(entry: AuditEntry) -> dict[str, Any]:
    return {**values_of(audit_entry, entry, "act"), **values_of(audit_entry, entry.act)}


def _entry(row: Row[Any]) -> AuditEntry:
    return record_of(audit_entry, row, AuditEntry, act=record_of(audit_entry, row, Act))


_REVISION: Final = message_revision.c


class SqlRevisions(RecordStore[Revision]):
    """The revisions, in one open transaction."""

    what = "the revisions"
    table = message_revision
    record = Revision
    order = (_REVISION.number,)

    async def add(self, revision: Revision) -> Revision:
        mine = matching(message_revision, MessageFilter(revision.consumer, revision.message_id))
        last = select(func.coalesce(func.max(_REVISION.number), -1)).where(mine)
        number = (await self._run(last)).scalar_one() + 1
        written = (
            insert(message_revision)
            .values(values_of(message_revision, revision, "number", "at"))
            .values(number=number, at=now_us())
            .returning(_REVISION.at)
        )
        at = (await self._run(written)).scalar_one()
        return replace(revision, number=number, at=to_seconds(at))

    async def of(self, consumer: str, message_id: str) -> Sequence[Revision]:
        return await self._about(consumer, message_id)

    async def other_names(self, message_id: str) -> frozenset[str]:
        name = stored_id(message_id)
        renamed = and_(
            _REVISION.new_id.is_not(None),
            or_(_REVISION.message_id == name, _REVISION.new_id == name),
        )
        meant = or_(renamed, conflicts_with(_REVISION.message_id, message_id))
        rows = await self._run(select(message_revision).where(meant))
        found = [original_names(row, "message_id", "new_id") for row in rows]
        names = {name for one in found for name in one.values() if name}
        return frozenset(names - {message_id})

    async def erase(self, which: MessageFilter) -> int:
        here = (matching(message_revision, which), _REVISION.erased_at.is_(None))
        erased = update(message_revision).where(*here).values(payload=None, erased_at=now_us())
        return await self._count(erased)


_RUN: Final = replay_run.c
_OVER: Final = sorted(OVER)


class SqlReplays(RecordStore[ReplayRun]):
    """The replays, in one open transaction."""

    what = "the replays"
    table = replay_run
    record = ReplayRun
    order = (_RUN.began_at.desc(), _RUN.name)

    async def begin(self, run: ReplayRun) -> bool:
        values = values_of(replay_run, run, "began_at", "updated_at")
        written = insert_new(replay_run).values(**values, began_at=now_us(), updated_at=now_us())
        return (await self._run(written.returning(_RUN.name))).first() is not None

    async def get(self, name: str) -> ReplayRun | None:
        return await self._first(self._select(_RUN.name == name))

    async def advance(self, run: ReplayRun, cursor_before: str) -> bool:
        new = {"state": run.state.value, "cursor": run.cursor, "done": run.done}
        at_cursor = _RUN.cursor == cursor_before
        return await self._change(
            run.name, ReplayState.RUNNING, at_cursor, **new, failed=run.failed
        )

    async def set_state(self, name: str, before: ReplayState, after: ReplayState) -> bool:
        return await self._change(name, before, state=after.value)

    async def _change(
        self, name: str, before: ReplayState, *where: ColumnElement[bool], **values: Any
    ) -> bool:
        here = (_RUN.name == name, _RUN.state == before.value, *where)
        return (
            await self._count(update(replay_run).where(*here).values(**values, updated_at=now_us()))
            > 0
        )

    async def find(self, consumer: str | None, limit: int) -> Sequence[ReplayRun]:
        mine = matching(replay_run, MessageFilter(consumer))
        return await self._read(self._select(mine).limit(limit))

    async def unfinished(self, consumer: str) -> Sequence[str]:
        connection = await self._session.connection()
        if connection.dialect.name == "postgresql":
            # A replay that begins has no row to lock yet, so lock the table.  Not in SHARE mode:
            # two transactions that then delete replays would deadlock.  SQLite has one writer.
            naming = await naming_in(self._session)
            table = qualified(replay_run.name, connection.dialect, naming)
            await self._run(text(f"LOCK TABLE {table} IN SHARE ROW EXCLUSIVE MODE"))
        names = select(_RUN.name).where(_RUN.consumer == consumer, _RUN.state.not_in(_OVER))
        return list((await self._run(names.order_by(_RUN.name))).scalars())

    async def delete_over(self, consumer: str, ttl_seconds: float, limit: int) -> int:
        over = (_RUN.consumer == consumer, _RUN.state.in_(_OVER))
        old = is_older(_RUN.updated_at, ttl_seconds)
        return await self._count(delete_oldest(*over, old, order=[_RUN.updated_at], limit=limit))
