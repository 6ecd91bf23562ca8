"""The stores of operators in PostgreSQL and SQLite: audit, approvals, revisions, replays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import (
    Row,
    Select,
    and_,
    delete,
    func,
    insert,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import insert as insert_once

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
from semel.sql.store import (
    Store,
    conflicts_with,
    delete_of_gone,
    matching,
    original_names,
    record_of,
    stored_names,
    values_of,
)
from semel.sql.tables import approval, audit_entry, audit_head, message_revision, replay_run
from semel.sql.types import now_us, to_seconds, to_us

_APPROVAL: Final = approval.c


class SqlApprovals(Store):
    """The requests for approval, in one open transaction."""

    what = "the approvals"

    async def ask(
        self,
        act: ApprovalAsked,
        consumer: str,
        message_id: str,
        asked_by: str,
        reason: str,
        payload_hash: str = "",
    ) -> Approval:
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
        found = await self._requests(select(approval).where(_APPROVAL.number == number))
        return found[0] if found else None

    async def open_ones(self, consumer: str | None, limit: int) -> Sequence[Approval]:
        found = (
            select(approval).where(_APPROVAL.decision == ApprovalDecision.OPEN.value).limit(limit)
        )
        if consumer is not None:
            found = found.where(_APPROVAL.consumer == consumer)
        return await self._requests(found)

    async def about(self, consumer: str, message_id: str) -> Sequence[Approval]:
        mine = (_APPROVAL.consumer == consumer, _APPROVAL.message_id == stored_id(message_id))
        return await self._requests(select(approval).where(*mine))

    async def decide(self, number: int, decided_by: str, decision: ApprovalDecision) -> bool:
        decided = (
            update(approval)
            .where(_APPROVAL.number == number, _APPROVAL.decision == ApprovalDecision.OPEN.value)
            .values(decided_by=plain(decided_by), decided_at=now_us(), decision=decision.value)
        )
        return await self._count(decided) > 0

    async def delete_decided(
        self, consumer: str, ttl_seconds: float, limit: int, sweep: Sweep | None = None
    ) -> int:
        sweep = sweep or Sweep()
        old = delete_of_gone(
            _APPROVAL.decided_at, _APPROVAL.number, consumer, ttl_seconds, sweep.since(), limit
        )
        return sweep.note(list((await self._run(old)).scalars()))

    async def _requests(self, found: Select[Any]) -> list[Approval]:
        return [_approval(row) for row in await self._run(found.order_by(_APPROVAL.number))]


def _approval(row: Row[Any]) -> Approval:
    enums = {"act": ApprovalAsked(row.act), "decision": ApprovalDecision(row.decision)}
    return record_of(approval, row, Approval, **enums)


ONLY_ROW: Final = 1
_ENTRY: Final = audit_entry.c
HEAD: Final = select(audit_head.c.number, audit_head.c.hash, now_us().label("now"))
LOCK_HEAD: Final = HEAD.with_for_update()

# If two transactions append the first entry at once, the second waits for the first one's row.
MAKE_HEAD: Final = (
    insert_once(audit_head)
    .values(only_row=ONLY_ROW, number=0, hash=FIRST_HASH)
    .on_conflict_do_nothing(index_elements=list(audit_head.primary_key))
)


class SqlAuditTrail(Store):
    """The audit trail, in one open transaction."""

    what = "the audit trail"

    async def append(self, act: Act) -> AuditEntry:
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
        return await self._entries(select(audit_entry).where(_ENTRY.number > after).limit(limit))

    async def about(self, consumer: str, message_id: str) -> Sequence[AuditEntry]:
        mine = (_ENTRY.consumer == consumer, _ENTRY.message_id == stored_id(message_id))
        return await self._entries(select(audit_entry).where(*mine))

    async def head(self) -> tuple[int, str]:
        row = (await self._run(HEAD)).first()
        return (0, FIRST_HASH) if row is None else (row.number, row.hash)

    async def _entries(self, found: Select[Any]) -> list[AuditEntry]:
        return [_entry(row) for row in await self._run(found.order_by(_ENTRY.number))]


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


_REVISION: Final = message_revision.c


class SqlRevisions(Store):
    """The revisions, in one open transaction."""

    what = "the revisions"

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
        mine = matching(message_revision, MessageFilter(consumer, message_id))
        found = select(message_revision).where(mine).order_by(_REVISION.number)
        return [record_of(message_revision, row, Revision) for row in await self._run(found)]

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
        erased = (
            update(message_revision)
            .where(matching(message_revision, which), _REVISION.erased_at.is_(None))
            .values(payload=None, erased_at=now_us())
        )
        return await self._count(erased)


_RUN: Final = replay_run.c
_OVER: Final = sorted(OVER)


class SqlReplays(Store):
    """The replays, in one open transaction."""

    what = "the replays"

    async def begin(self, run: ReplayRun) -> bool:
        written = (
            insert_once(replay_run)
            .values(values_of(replay_run, run, "began_at", "updated_at"))
            .values(began_at=now_us(), updated_at=now_us())
            .on_conflict_do_nothing(index_elements=[_RUN.name])
            .returning(_RUN.name)
        )
        return (await self._run(written)).first() is not None

    async def get(self, name: str) -> ReplayRun | None:
        row = (await self._run(select(replay_run).where(_RUN.name == name))).first()
        return None if row is None else _read(row)

    async def advance(self, run: ReplayRun, cursor_before: str) -> bool:
        ours = (
            _RUN.name == run.name,
            _RUN.state == ReplayState.RUNNING.value,
            _RUN.cursor == cursor_before,
        )
        written = (
            update(replay_run)
            .where(*ours)
            .values(
                state=run.state.value,
                cursor=run.cursor,
                done=run.done,
                failed=run.failed,
                updated_at=now_us(),
            )
        )
        return await self._count(written) > 0

    async def set_state(self, name: str, before: ReplayState, after: ReplayState) -> bool:
        written = (
            update(replay_run)
            .where(_RUN.name == name, _RUN.state == before.value)
            .values(state=after.value, updated_at=now_us())
        )
        return await self._count(written) > 0

    async def find(self, consumer: str | None, limit: int) -> Sequence[ReplayRun]:
        found = select(replay_run).order_by(_RUN.began_at.desc(), _RUN.name).limit(limit)
        if consumer is not None:
            found = found.where(_RUN.consumer == consumer)
        return [_read(row) for row in await self._run(found)]

    async def unfinished(self, consumer: str) -> Sequence[str]:
        connection = await self._session.connection()
        if connection.dialect.name == "postgresql":
            # A replay that begins has no row to lock yet, so lock the table.  Not in SHARE mode:
            # two transactions that then delete replays would deadlock.  SQLite has one writer.
            await self._run(text(f"LOCK TABLE {replay_run.name} IN SHARE ROW EXCLUSIVE MODE"))
        names = select(_RUN.name).where(_RUN.consumer == consumer, _RUN.state.not_in(_OVER))
        return list((await self._run(names.order_by(_RUN.name))).scalars())

    async def delete_over(self, consumer: str, ttl_seconds: float, limit: int) -> int:
        old = (
            select(_RUN.name)
            .where(
                _RUN.consumer == consumer,
                _RUN.state.in_(_OVER),
                _RUN.updated_at <= now_us() - to_us(ttl_seconds),
            )
            .order_by(_RUN.updated_at)
            .limit(limit)
        )
        return await self._count(delete(replay_run).where(_RUN.name.in_(old)))


def _read(row: Row[Any]) -> ReplayRun:
    return record_of(replay_run, row, ReplayRun, state=ReplayState(row.state))
