"""The claims in PostgreSQL and SQLite, in the transaction of any `AsyncSession`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from sqlalchemy import CursorResult, Executable, Row
from sqlalchemy.ext.asyncio import AsyncSession

from semel.errors import Misuse
from semel.message import Coordinates
from semel.messaging.database import Sweep
from semel.messaging.handle.claims import (
    CLOSED,
    TERMINAL,
    ClaimAnswer,
    Claimed,
    ClaimFound,
    ClaimRequest,
    ClaimRow,
    ClaimState,
    Duplicate,
    Failure,
    NotClaimable,
    Stale,
    found_of,
    refusal,
)
from semel.messaging.records import stored_id
from semel.operate.stores import plain
from semel.policy.vocabulary import StalePolicy
from semel.sql import claim_statements as sql
from semel.sql.claim_statements import MOST_TURNS, ClaimAsked, row_of, written
from semel.sql.faults import translated
from semel.sql.session import Beginning
from semel.sql.store import stored_name
from semel.sql.tables import processed_message
from semel.sql.types import to_seconds, to_us


class SqlAlchemyProcessedMessageStore:
    """The claims, in the transaction of *session*; this class may begin it, and never ends it.

    Any `AsyncSession` will do.  If the transaction begins with a claim, it is READ COMMITTED on
    PostgreSQL, regardless of the engine's default.  On SQLite the engine must come from
    `semel.sql.engine`.  After `Locked` or any other error, roll the transaction back.
    """

    def __init__(self, session: AsyncSession) -> None:
        self._session = session
        self._beginning = Beginning(session)

    @property
    def session(self) -> AsyncSession:
        """The session of the transaction that the claims are in."""
        return self._session

    async def claim(self, *, consumer_name: str, event_id: str) -> bool:
        answer = await self.try_claim(consumer_name, ClaimRequest(event_id))
        if isinstance(answer, Claimed):
            return True
        if isinstance(answer, Duplicate):
            return False
        raise NotClaimable(consumer_name, event_id, answer)

    async def try_claim(self, consumer: str, request: ClaimRequest) -> ClaimAnswer:
        me = ClaimAsked.of(consumer, request)
        for _ in range(MOST_TURNS):
            if await self._row(sql.TAKE, me, me.new()):
                return Claimed()
            why = await self._row(sql.WHY, me, me.key())
            if why is not None and (answer := await self._answer(me, why)) is not None:
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
            taken = await self._row(sql.LEASE, me, {**me.new(), **terms})
            if taken is not None:
                return Claimed(fence=taken.fence)
            why = await self._row(sql.WHY, me, me.key())
            if why is not None and (answer := await self._lease_again(me, why, terms, stale)):
                return answer
        raise me.changes_all_the_time()

    async def renew(self, consumer: str, message_id: str, fence: int, seconds: float) -> bool:
        me = ClaimAsked.of(consumer, ClaimRequest(message_id))
        return await self._change(
            sql.RENEW, me, {**me.key(), "seen": fence, "lease_us": to_us(seconds)}
        )

    async def lock_expired(self, consumer: str, message_id: str, fence: int) -> bool:
        me = ClaimAsked.of(consumer, ClaimRequest(message_id))
        return await self._change(sql.LOCK_EXPIRED, me, {**me.key(), "seen": fence})

    async def mark_completed(
        self, consumer: str, message_id: str, fence: int | None = None, result: str | None = None
    ) -> bool:
        me = ClaimAsked.of(consumer, ClaimRequest(message_id))
        returned = {"returned": result}
        if fence is not None:
            leased = {**me.key(), **returned, "seen": fence}
            return await self._change(sql.COMPLETE_LEASED, me, leased)
        for _ in range(MOST_TURNS):
            if await self._change(sql.COMPLETE, me, {**me.key(), **returned}):
                return True
            if await self._row(sql.COMPLETE_NEW, me, {**me.new(), **returned}):
                return True
            if await self._is_in({ClaimState.COMPLETED}, me):
                return False
        raise me.changes_all_the_time()

    async def mark_failed(
        self, consumer: str, message_id: str, failure: Failure, fence: int | None = None
    ) -> bool:
        me = ClaimAsked.of(consumer, ClaimRequest(message_id, failure.payload_hash, failure.source))
        if fence is not None:
            leased = {**me.key_and_hash(), **written(failure), "seen": fence}
            return await self._change(sql.FAIL_LEASED, me, leased)
        new = {**me.new(), **written(failure)}
        # The rollback of the first attempt has removed its claim; later ones find a row.
        is_known = failure.attempts > 1
        for _ in range(MOST_TURNS):
            if not is_known and await self._row(sql.FAIL_NEW, me, new):
                return True
            if await self._change(sql.FAIL, me, {**me.key_and_hash(), **written(failure)}):
                return True
            is_known = False
            if await self._is_in(CLOSED, me):
                return False
        raise me.changes_all_the_time()

    async def undo(self, consumer: str, message_id: str, failure: Failure) -> ClaimRow:
        me = ClaimAsked.of(consumer, ClaimRequest(message_id, failure.payload_hash, failure.source))
        undone = await self._row(sql.UNDO, me, {**me.key_and_hash(), **written(failure)})
        if undone is None:
            raise Misuse(f"{me}: there is no claim to undo; this transaction did not take it")
        return me.row(undone)

    async def give_back(self, consumer: str, message_id: str, claimed: Claimed) -> None:
        me = ClaimAsked.of(consumer, ClaimRequest(message_id))
        if not await self._change(sql.GIVE_BACK_NEW, me, me.key()):
            before = {**me.key(), "owned_by": claimed.from_owner}
            await self._change(sql.GIVE_BACK, me, before)

    async def keep_result(
        self, consumer: str, message_id: str, result: str, key: str | None = None
    ) -> None:
        me = ClaimAsked.of(consumer, ClaimRequest(message_id))
        kept = {"returned": result, "of_key": stored_name(key)}
        await self._change(sql.KEEP_RESULT, me, {**me.key(), **kept})

    async def pass_over(self, consumer: str, message_id: str, code: str) -> None:
        me = ClaimAsked.of(consumer, ClaimRequest(message_id))
        await self._change(sql.PASS_OVER, me, {**me.key(), "code": code})

    async def expect_payload(self, consumer: str, message_id: str, payload_hash: str) -> None:
        me = ClaimAsked.of(consumer, ClaimRequest(message_id, payload_hash))
        await self._change(sql.EXPECT_PAYLOAD, me, me.key_and_hash())

    async def reopen(self, consumer: str, message_id: str) -> bool:
        me = ClaimAsked.of(consumer, ClaimRequest(message_id))
        return await self._change(sql.REOPEN, me, me.key())

    async def look_up(self, consumer: str, message_id: str) -> ClaimRow | None:
        me = ClaimAsked.of(consumer, ClaimRequest(message_id))
        row = await self._row(sql.WHY, me, me.key())
        return None if row is None else me.row(row)

    async def erase(self, consumer: str, message_id: str) -> bool:
        me = ClaimAsked.of(consumer, ClaimRequest(message_id))
        had = await self._change(sql.FORGET_RESULT, me, me.key())
        await self._change(sql.ERASED, me, me.key())
        return had

    async def erase_key(self, key: str) -> int:
        of_key = {"of_key": stored_id(key)}
        return (await self._execute(sql.FORGET_RESULTS, "results of a key", of_key)).rowcount

    async def in_progress(
        self, consumer: str, limit: int, *, expired: bool = False
    ) -> Sequence[ClaimRow]:
        statement = sql.EXPIRED if expired else sql.IN_PROGRESS
        what = f"the claims of consumer {consumer}"
        found = await self._execute(statement, what, {"by": consumer, "at_most": limit})
        return [row_of(consumer, row.original_id or row.message_id, row) for row in found]

    async def consumers_of(self, message_id: str) -> Sequence[str]:
        named = sql.CONSUMERS.where(processed_message.c.message_id == stored_id(message_id))
        return list((await self._execute(named, f"message {message_id!r}", {})).scalars())

    async def handled_from(
        self, consumer: str, places: Sequence[Coordinates]
    ) -> Sequence[Coordinates]:
        named = {plain(str(at)): at for at in places}
        asked = {"by": consumer, "sources": list(named)}
        found = await self._execute(sql.HANDLED_FROM, f"the claims of consumer {consumer}", asked)
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
            done = await self._execute(sql.DELETE_OLD, f"the claims of consumer {consumer}", old)
            deleted += sweep.note(list(done.scalars()), state)
        return deleted

    async def _answer(self, me: ClaimAsked, why: Row[Any]) -> ClaimAnswer | None:
        """Answer for a claim that exists, or take it again; None if it changed meanwhile."""
        row, now = me.row(why), to_seconds(why.now)
        no = refusal(row, me.request.payload_hash, now)
        if no is not None:
            return no
        taken = await self._row(sql.RETAKE, me, {**me.key_and_hash(), "seen": why.fence})
        if taken is None:
            return None
        return Claimed(taken.attempts, from_owner=row.owner)

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
        taken = await self._row(sql.LEASE_AGAIN, me, again)
        if taken is None:
            return None
        return Claimed(taken.attempts, taken.fence, row.owner)

    async def _take_many(self, consumer: str, batch: Mapping[str, ClaimAsked]) -> set[str]:
        if not batch:
            return set()
        ids = sorted(batch)
        statement: Executable = sql.TAKE
        parameters: Any
        if self._beginning.is_postgres:
            statement = sql.TAKE_MANY
            parameters = {
                "by": consumer,
                "ids": ids,
                "originals": [batch[id].original for id in ids],
                "digests": [batch[id].request.payload_hash for id in ids],
                "sources": [batch[id].source for id in ids],
            }
        else:
            parameters = [batch[id].new() for id in ids]
        what = f"a batch of {len(batch)} messages of consumer {consumer}"
        return set((await self._execute(statement, what, parameters)).scalars())

    async def _why_many(self, consumer: str, ids: Sequence[str]) -> Sequence[Row[Any]]:
        if not ids:
            return []
        statement = sql.WHY_MANY if self._beginning.is_postgres else sql.WHY_MANY_SQLITE
        what = f"the claims of consumer {consumer}"
        return (await self._execute(statement, what, {"by": consumer, "ids": list(ids)})).all()

    async def _is_in(self, states: Set[ClaimState], me: ClaimAsked) -> bool:
        row = await self._row(sql.WHY, me, me.key())
        return row is not None and row.state in states

    async def _row(self, statement: Executable, me: ClaimAsked, values: Any) -> Row[Any] | None:
        return (await self._execute(statement, str(me), values)).one_or_none()

    async def _change(self, statement: Executable, me: ClaimAsked, values: Any) -> bool:
        return (await self._execute(statement, str(me), values)).rowcount > 0

    async def _execute(self, statement: Executable, what: str, values: Any) -> CursorResult[Any]:
        async with translated(what):
            await self._beginning.begin()
            return await self._session.execute(statement, values)  # type: ignore[return-value]
