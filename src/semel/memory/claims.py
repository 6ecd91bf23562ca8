"""The claims in memory: the pure functions of the claim table, on rows that can be taken back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from semel.errors import Misuse
from semel.memory.gone import is_over
from semel.memory.tables import Table
from semel.message import Coordinates
from semel.messaging.database import Sweep
from semel.messaging.handle.claims import (
    CLOSED,
    TERMINAL,
    WITHOUT_EFFECT,
    ClaimAnswer,
    Claimed,
    ClaimRequest,
    ClaimRow,
    ClaimState,
    Duplicate,
    Failure,
    Found,
    NotClaimable,
    Stale,
    found_of,
    refusal,
)
from semel.policy.vocabulary import StalePolicy

if TYPE_CHECKING:
    from semel.memory.tables import MemoryTables


class MemoryProcessedMessageStore:
    """The claims of the transaction that is open in *tables*."""

    def __init__(self, tables: MemoryTables) -> None:
        self._tables = tables
        self._claims: Table[tuple[str, str], ClaimRow] = tables.table("processed_message")

    async def claim(self, *, consumer_name: str, event_id: str) -> bool:
        """Claim a message; False where it was handled before.

        Raises:
            NotClaimable: it is neither: held elsewhere, not due, parked, dead, or a conflict.
        """
        answer = await self.try_claim(consumer_name, ClaimRequest(event_id))
        if isinstance(answer, Claimed):
            return True
        if isinstance(answer, Duplicate):
            return False
        raise NotClaimable(consumer_name, event_id, answer)

    async def try_claim(self, consumer: str, request: ClaimRequest) -> ClaimAnswer:
        """Claim in its final state: COMPLETED, if and when the transaction commits."""
        row = self._get(consumer, request.message_id)
        no = None if row is None else refusal(row, request.payload_hash, self._now)
        if no is not None:
            return no
        taken = self._taken(row, consumer, request, ClaimState.COMPLETED)
        self._put(taken)
        return Claimed(taken.attempts, from_owner=row.owner if row else "")

    async def try_claim_many(
        self, consumer: str, requests: Sequence[ClaimRequest]
    ) -> list[ClaimAnswer]:
        """Claim a batch; answers in the given order, those that claims one by one would give."""
        return [await self.try_claim(consumer, request) for request in requests]

    async def lease(
        self,
        consumer: str,
        request: ClaimRequest,
        *,
        owner: str,
        seconds: float,
        stale: StalePolicy = StalePolicy.RECLAIM,
    ) -> ClaimAnswer:
        """Claim as IN_PROGRESS with a lease; the caller commits before it handles."""
        row, now = self._get(consumer, request.message_id), self._now
        no = None if row is None else refusal(row, request.payload_hash, now)
        if no is not None:
            return no
        expired = found_of(row, request.payload_hash, now) is Found.LEASE_EXPIRED
        if row is not None and expired and stale is not StalePolicy.RECLAIM:
            return Stale(row.owner, now - row.lease_until, row.attempts, row.fence)
        leased = replace(
            self._taken(row, consumer, request, ClaimState.IN_PROGRESS),
            owner=owner,
            lease_until=now + seconds,
            # Counted for all claims: none is given twice, whatever retention removes.
            fence=self._tables.next_number("fence"),
        )
        self._put(leased)
        return Claimed(leased.attempts, leased.fence, row.owner if row else "")

    async def renew(self, consumer: str, message_id: str, fence: int, seconds: float) -> bool:
        """Make the lease last *seconds* from now; False where another owner has it, or nobody.

        A lease that ran out and that nobody took is still its owner's.
        """
        row = self._leased(consumer, message_id, fence)
        if row is None:
            return False
        # No change of state: retention counts on from the last one.
        self._claims.put(_key(row), replace(row, lease_until=self._now + seconds))
        return True

    async def lock_expired(self, consumer: str, message_id: str, fence: int) -> bool:
        """Tell whether a lease ran out under *fence*; no other transaction runs meanwhile."""
        row = self._leased(consumer, message_id, fence)
        return row is not None and row.lease_until <= self._now

    async def mark_completed(
        self, consumer: str, message_id: str, fence: int | None = None, result: str | None = None
    ) -> bool:
        """Complete a leased claim; False, and nothing changed, where *fence* is not its fence.

        Without a fence: complete whatever is not completed, a message without a claim
        included; False where it is completed.
        """
        row = self._writable(consumer, message_id, fence)
        if row is None:
            return False
        kept = row.result if result is None or row.erased_at is not None else result
        self._put(_released(row, state=ClaimState.COMPLETED, result=kept, due_at=0.0))
        return True

    async def mark_failed(
        self, consumer: str, message_id: str, failure: Failure, fence: int | None = None
    ) -> bool:
        """Write a failed attempt; False, and nothing changed, where its state is `CLOSED`.

        With a fence: only if the claim is still leased under it.
        """
        row = self._writable(consumer, message_id, fence)
        if row is None or row.state in CLOSED:
            return False
        self._put(self._failed(row, failure))
        return True

    async def erase(self, consumer: str, message_id: str) -> bool:
        """Remove the kept result of a message, and note that its payload was erased."""
        row = self._get(consumer, message_id)
        if row is None:
            return False
        erased_at = self._now if row.erased_at is None else row.erased_at
        gone = replace(row, result=None, result_key=None, erased_at=erased_at)
        self._claims.put(_key(row), gone)
        return row.result is not None

    async def erase_key(self, key: str) -> int:
        """Remove the results that were kept with this key, and note that; say how many."""
        rows = [row for row in self._claims.rows() if row.result_key == key]
        return sum([await self.erase(row.consumer, row.message_id) for row in rows])

    async def undo(self, consumer: str, message_id: str, failure: Failure) -> ClaimRow:
        """Turn a claim that *this* transaction took into a failed attempt, and return it.

        Raises:
            Misuse: there is no such claim.
        """
        row = self._get(consumer, message_id)
        if row is None:
            raise Misuse(
                f"consumer {consumer}: message {message_id!r}: there is no claim to undo; "
                f"this transaction did not take it"
            )
        return self._put(self._failed(row, failure))

    async def give_back(self, consumer: str, message_id: str, claimed: Claimed) -> None:
        """Let go of a claim that *this* transaction took, as if it had never been asked for."""
        row = self._get(consumer, message_id)
        if row is None:
            return
        if not row.error_code and not row.fence:
            # It never failed and was never leased: it is new with this transaction.
            self._claims.remove(_key(row))
            return
        leased = bool(claimed.from_owner)
        state = ClaimState.IN_PROGRESS if leased else ClaimState.FAILED_RETRYABLE
        before = _released(row, state=state, attempts=row.attempts - 1)
        self._put(replace(before, owner=claimed.from_owner))

    async def keep_result(
        self, consumer: str, message_id: str, result: str, key: str | None = None
    ) -> None:
        """Write what the handler returned beside a claim that this transaction took."""
        row = self._get(consumer, message_id)
        if row is not None and row.erased_at is None:
            self._claims.put(_key(row), replace(row, result=result, result_key=key))

    async def pass_over(self, consumer: str, message_id: str, code: str) -> None:
        """Write beside a claim that this transaction took why its message has no effect."""
        row = self._get(consumer, message_id)
        if row is not None:
            self._claims.put(_key(row), replace(row, error_code=code))

    async def expect_payload(self, consumer: str, message_id: str, payload_hash: str) -> None:
        """Replace the hash that repetitions are compared with, after an audited revision."""
        row = self._get(consumer, message_id)
        if row is not None:
            self._claims.put(_key(row), replace(row, payload_hash=payload_hash))

    async def reopen(self, consumer: str, message_id: str) -> bool:
        """Make a dead or parked message claimable again, its attempts counted from the start.

        False, and nothing changed, in every other state.
        """
        row = self._get(consumer, message_id)
        if row is None or row.state not in (ClaimState.FAILED_TERMINAL, ClaimState.PARKED):
            return False
        again = ClaimState.FAILED_RETRYABLE
        self._put(_released(row, state=again, attempts=0, due_at=self._now))
        return True

    async def look_up(self, consumer: str, message_id: str) -> ClaimRow | None:
        """Read a claim."""
        return self._get(consumer, message_id)

    async def in_progress(
        self, consumer: str, limit: int, *, expired: bool = False
    ) -> Sequence[ClaimRow]:
        """List the claims under a lease, the one that ends first before the others."""
        until = self._now if expired else math.inf
        leased = (
            row
            for row in self._claims.rows()
            if row.consumer == consumer
            and row.state is ClaimState.IN_PROGRESS
            and row.lease_until <= until
        )
        return sorted(leased, key=lambda row: (row.lease_until, row.message_id))[:limit]

    async def consumers_of(self, message_id: str) -> Sequence[str]:
        """Name the consumers that have a claim on a message, in order."""
        return sorted(row.consumer for row in self._claims.rows() if row.message_id == message_id)

    async def handled_from(
        self, consumer: str, places: Sequence[Coordinates]
    ) -> Sequence[Coordinates]:
        """Return those places whose messages have a claim that is COMPLETED, with its effect."""
        handled = {
            row.source
            for row in self._claims.rows()
            if row.consumer == consumer
            and row.state is ClaimState.COMPLETED
            and row.error_code not in WITHOUT_EFFECT
        }
        return [at for at in places if str(at) in handled]

    async def delete_expired(
        self, consumer: str, older_than_seconds: float, limit: int, sweep: Sweep | None = None
    ) -> int:
        """Delete at most *limit* terminal claims that were last changed so long ago."""
        long_ago, sweep = self._now - older_than_seconds, sweep or Sweep()
        old = [
            row
            for row in self._claims.rows()
            if row.consumer == consumer and row.state in TERMINAL
            if sweep.since() <= row.updated_at <= long_ago
            # Whoever sends it back asks the claim whether it was handled, and `erase` asks it
            # whose outgoing messages are meant.
            if is_over(self._tables, consumer, row.message_id)
        ]
        chosen = sorted(old, key=lambda row: row.updated_at)[:limit]
        for row in chosen:
            self._claims.remove(_key(row))
        return sweep.note([row.updated_at for row in chosen])

    @property
    def _now(self) -> float:
        return self._tables.clock.now()

    def _get(self, consumer: str, message_id: str) -> ClaimRow | None:
        return self._claims.get((consumer, message_id))

    def _put(self, row: ClaimRow) -> ClaimRow:
        changed = replace(row, updated_at=self._now)
        self._claims.put(_key(row), changed)
        return changed

    def _leased(self, consumer: str, message_id: str, fence: int) -> ClaimRow | None:
        row = self._get(consumer, message_id)
        if row is None or row.state is not ClaimState.IN_PROGRESS or row.fence != fence:
            return None
        return row

    def _writable(self, consumer: str, message_id: str, fence: int | None) -> ClaimRow | None:
        """Return the claim that may end, a new one where there is none; None where it may not."""
        if fence is not None:
            return self._leased(consumer, message_id, fence)
        row = self._get(consumer, message_id)
        if row is None:
            return ClaimRow(consumer, message_id, ClaimState.IN_PROGRESS, first_seen_at=self._now)
        return None if row.state is ClaimState.COMPLETED else row

    def _taken(
        self, row: ClaimRow | None, consumer: str, request: ClaimRequest, state: ClaimState
    ) -> ClaimRow:
        if row is None:
            return ClaimRow(
                consumer,
                request.message_id,
                state,
                payload_hash=request.payload_hash,
                first_seen_at=self._now,
                source=request.source,
            )
        kept = row.payload_hash or request.payload_hash
        return _released(row, state=state, attempts=row.attempts + 1, due_at=0.0, payload_hash=kept)

    def _failed(self, row: ClaimRow, failure: Failure) -> ClaimRow:
        return _released(
            row,
            state=failure.state,
            attempts=failure.attempts,
            error_code=failure.error_code,
            due_at=self._now + failure.delay_seconds,
            payload_hash=row.payload_hash or failure.payload_hash,
            source=row.source or failure.source,
            failed_at=self._now,
        )


def _key(row: ClaimRow) -> tuple[str, str]:
    return row.consumer, row.message_id


def _released(row: ClaimRow, **changes: Any) -> ClaimRow:
    return replace(row, owner="", lease_until=0.0, **changes)
