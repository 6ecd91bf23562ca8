"""The leased mode: commit the claim with a lease first, then handle without a time limit.

    begin ─▶ IN_PROGRESS, owner, lease, fence ─▶ commit
             │
             handle …   the lease is renewed beside it; lost ─▶ the handler is cancelled
             │
    begin ─▶ COMPLETED where the fence is still ours ─▶ commit      0 rows: refused
             no answer ─▶ again, while the lease is renewed

For handlers that run for minutes, or whose effect is not in the database.  The effect happens
at least once: a crash after it and before the completion repeats it, unless it has an
idempotency key, or is made inside `Lease.completing`.

If an owner dies, its lease expires, and the stale policy decides about the message.  A message
whose owners died as often as the retry policy allows attempts is parked.

    begin ─▶ Stale, with its fence ─▶ commit
             │
             inspect …   outside of a transaction, because it may take long
             │
    begin ─▶ lock the lease ─▶ COMPLETED, due again or PARKED ─▶ commit
             └─ renewed or taken meanwhile: nothing is written, the delivery comes back
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from semel.clock import SYSTEM_CLOCK, Clock
from semel.crashpoints import CrashPoint, reach
from semel.errors import Fenced, InDoubt, Retryable, SemelError
from semel.message import Message, producer_id
from semel.messaging.database import Database, Unit
from semel.messaging.failed.attempt_failed import keep_attempt
from semel.messaging.failed.waiting import leave_waiting
from semel.messaging.failure import Classified, FailureClass
from semel.messaging.handle.attempt import Attempt
from semel.messaging.handle.cancel import called, end, owned
from semel.messaging.handle.claims import (
    Claimed,
    ClaimLost,
    ClaimRequest,
    ClaimState,
    Duplicate,
    Failure,
    Stale,
)
from semel.messaging.handler import Consumer, holds_key
from semel.messaging.outcome import Handled, Outcome, RetryLater, Skipped
from semel.messaging.receive.offsets import Ended
from semel.messaging.records import WaitingMessage
from semel.policy.vocabulary import StalePolicy

log = logging.getLogger("semel.messaging")


async def settle_stale(
    consumer: Consumer, database: Database, message: Message, stale: Stale
) -> Outcome:
    """Apply the stale policy; write nothing if another owner has the message by then."""
    settings = consumer.settings
    later = RetryLater(settings.held_retry_seconds)
    if settings.stale is StalePolicy.WAIT and _within_grace(consumer, stale):
        return later
    happened = await _inspected(consumer, message, stale)
    async with database.begin() as unit:
        if holds_key(consumer, message):
            await unit.waiting.hold(consumer.name, [message.key or ""])
        if not await unit.claims.lock_expired(consumer.name, message.id, stale.fence):
            return later
        match happened:
            case True:
                return await _complete_stale(consumer, unit, message, stale)
            case False:
                return await _reopen(consumer, unit, message, stale)
            case None:
                return await _abandon(consumer, unit, message, stale)


def _within_grace(consumer: Consumer, stale: Stale) -> bool:
    return stale.seconds_ago < consumer.settings.stale_grace_seconds


async def _inspected(consumer: Consumer, message: Message, stale: Stale) -> bool | None:
    """Ask the consumer whether the effect happened; None if that is unknown."""
    if consumer.settings.stale is not StalePolicy.INSPECT or consumer.inspect is None:
        return None
    try:
        return await called(consumer.inspect(message))
    except Exception:
        # A later inspection may succeed; after the grace period the message is parked.
        if _within_grace(consumer, stale):
            raise
        return None


async def _complete_stale(
    consumer: Consumer, unit: Unit, message: Message, stale: Stale
) -> Outcome:
    await unit.claims.mark_completed(consumer.name, message.id, stale.fence)
    waiting = await unit.waiting.get(consumer.name, message.id)
    came_from = waiting.source if waiting else None
    await leave_waiting(unit, consumer.name, Ended(message.id, came_from, Handled()))
    return Skipped("inspected: its effect had happened")


async def _reopen(consumer: Consumer, unit: Unit, message: Message, stale: Stale) -> Outcome:
    failure = Failure(ClaimState.FAILED_RETRYABLE, stale.attempts, "ABANDONED", 0.0, message.digest)
    if await unit.claims.mark_failed(consumer.name, message.id, failure, stale.fence):
        claim = await unit.claims.look_up(consumer.name, message.id)
        tried = message.tried(stale.attempts)
        await keep_attempt(unit, consumer.name, tried, _abandoned(stale), claim)
    return RetryLater(0.0)


async def _abandon(consumer: Consumer, unit: Unit, message: Message, stale: Stale) -> Outcome:
    attempt = Attempt(consumer, message.tried(stale.attempts), fence=stale.fence)
    return await attempt.park(unit, _abandoned(stale))


def _abandoned(stale: Stale) -> Classified:
    reason = f"its owner {stale.owner} did not finish within the lease"
    return Classified(FailureClass.TRANSIENT, "ABANDONED", reason, "")


async def park_killer(
    consumer: Consumer, unit: Unit, message: Message, claimed: Claimed
) -> Outcome:
    """Park a message, leased in the open transaction, whose owners died too often."""
    attempts = claimed.attempt - 1
    reason = f"its owner {claimed.from_owner} did not finish, nor did {attempts - 1} before it"
    failure = Classified(FailureClass.POISON, "CRASHED", reason, "")
    attempt = Attempt(consumer, message.tried(attempts), fence=claimed.fence)
    return await attempt.park(unit, failure)


@dataclass(slots=True)
class Lease:
    """The second argument of a leased consumer's handler."""

    consumer: str
    message_id: str
    owner: str
    fence: int
    database: Database
    completed: bool = False
    waiting: WaitingMessage | None = None
    """Its row in the waiting table, if it has one; removed when the message is completed."""

    key: str | None = None
    refused: SemelError | None = None
    """Why the last `completing` committed nothing, or may have committed nothing."""

    @asynccontextmanager
    async def completing(self) -> AsyncIterator[Any]:
        """Open a transaction whose commit also completes the message.

        If the commit was refused, the attempt fails even if the handler catches the error.

        Raises:
            ClaimLost: another owner has taken the message; nothing was written.
        """
        self.refused = None
        try:
            async with self.database.begin() as unit:
                yield unit.session
                reach(CrashPoint.LEASED_COMPLETE_BEFORE, self.consumer)
                await self._complete(unit, None)
        except (Retryable, InDoubt, Fenced) as error:
            self.refused = error
            raise
        self.completed = True
        reach(CrashPoint.LEASED_COMPLETE_AFTER, self.consumer)

    async def complete(self, result: str | None) -> None:
        """Complete the message in a transaction of its own; may be repeated.

        Raises:
            ClaimLost: another owner has taken the message.
        """
        async with self.database.begin() as unit:
            reach(CrashPoint.LEASED_COMPLETE_BEFORE, self.consumer)
            try:
                await self._complete(unit, result)
            except ClaimLost:
                if not await self._is_completed(unit):
                    raise
        self.completed = True
        reach(CrashPoint.LEASED_COMPLETE_AFTER, self.consumer)

    async def _is_completed(self, unit: Unit) -> bool:
        """Return whether a commit whose answer was lost completed it under this lease."""
        row = await unit.claims.look_up(self.consumer, self.message_id)
        if row is None or row.state is not ClaimState.COMPLETED:
            return False
        return row.fence == self.fence

    async def _complete(self, unit: Unit, result: str | None) -> None:
        done = await unit.claims.mark_completed(self.consumer, self.message_id, self.fence)
        if not done:
            raise ClaimLost(self.consumer, self.message_id)
        if result is not None:
            await unit.claims.keep_result(self.consumer, self.message_id, result, self.key)
        if self.waiting is not None:
            if self.waiting.held:
                await unit.waiting.hold(self.consumer, [self.waiting.key or ""])
            ended = Ended(self.message_id, self.waiting.source, Handled())
            await leave_waiting(unit, self.consumer, ended)


async def handle_leased(
    consumer: Consumer,
    database: Database,
    message: Message,
    owner: str,
    clock: Clock = SYSTEM_CLOCK,
    waiting: WaitingMessage | None = None,
) -> Outcome:
    """Handle one delivery under a lease; errors of a message or a handler become outcomes.

    *waiting* is its row, if the message comes from the waiting table.

    Raises:
        Misuse: its id begins like one that semel generates.
    """
    producer_id(message.id)
    asked_at = clock.monotonic()
    attempt = Attempt(consumer, message, from_waiting=waiting is not None)
    try:
        async with database.begin() as unit:
            reach(CrashPoint.CLAIM_BEFORE, consumer.name)
            answer = await _leased(attempt, unit, owner)
        if isinstance(answer, Stale):
            return await settle_stale(consumer, database, message, answer)
    except Exception as error:  # noqa: BLE001  nothing was claimed; the delivery comes back
        return attempt.comes_back(attempt.failure(database, error))
    if not isinstance(answer, Claimed):
        return answer
    reach(CrashPoint.LEASED_CLAIM_AFTER, consumer.name)
    attempt.message = message.tried(answer.attempt)
    attempt.fence = answer.fence
    attempt.began = True
    lease = Lease(
        consumer.name,
        message.id,
        owner,
        answer.fence,
        database,
        waiting=waiting,
        key=message.key,
    )
    try:
        return await _under_lease(attempt, lease, asked_at, clock)
    except Exception as error:  # noqa: BLE001  every exception of a handler is classified
        if lease.completed:
            return Handled()
        failure = attempt.failure(database, error)
        if isinstance(error, ClaimLost) or attempt.ended:
            # Count no attempt: the next owner finds in the claim what became of the lease.
            why = "claim lost" if isinstance(error, ClaimLost) else "completion failed"
            return attempt.comes_back(failure, why)
        if consumer.circuit.spares(failure):
            return await _spare(attempt, database, failure)
        return await attempt.fail(database, failure)


async def _spare(attempt: Attempt, database: Database, failure: Classified) -> Outcome:
    """Release the lease of a message that failed in an outage, without counting the attempt."""
    consumer, message = attempt.consumer, attempt.message
    spared = Failure(ClaimState.FAILED_RETRYABLE, message.attempt - 1, failure.code)
    try:
        async with database.begin() as unit:
            await unit.claims.mark_failed(consumer.name, message.id, spared, attempt.fence)
    except Exception as error:  # noqa: BLE001  the lease ends by itself
        return attempt.comes_back(attempt.failure(database, error))
    return attempt.comes_back(failure)


async def _leased(attempt: Attempt, unit: Unit, owner: str) -> Claimed | Stale | Outcome:
    """Lease a message in the open transaction, or return why it cannot be leased."""
    consumer, message = attempt.consumer, attempt.message
    settings = consumer.settings
    gone = await attempt.enter(unit)
    if gone is not None:
        return gone
    answer = await unit.claims.lease(
        consumer.name,
        ClaimRequest.of(message),
        owner=owner,
        seconds=settings.lease_seconds,
        stale=settings.stale,
    )
    if isinstance(answer, Claimed):
        killed = answer.from_owner and answer.attempt > _most_attempts(consumer)
        return answer if not killed else await park_killer(consumer, unit, message, answer)
    if isinstance(answer, Stale):
        return answer
    if isinstance(answer, Duplicate):
        outcome: Outcome = Skipped("duplicate", answer.result)
    else:
        outcome = await attempt.refuse(unit, answer)
    await attempt.leave(unit, answer, outcome)
    return outcome


def _most_attempts(consumer: Consumer) -> int:
    """Return how many attempts a message may have before it counts as one that kills.

    At least as many as the retry policy allows: failures count as attempts, too, and a message
    that only failed must not be taken for one that kills.
    """
    return max(consumer.settings.poison_attempts, consumer.settings.retry.max_attempts)


async def _under_lease(attempt: Attempt, lease: Lease, asked_at: float, clock: Clock) -> Outcome:
    """Run the handler and complete, while a task renews the lease; a lost lease cancels both.

    A handler that ignores the cancellation may run at the same time as the next owner: its
    `Lease.completing` is refused, and its other effects happen at least once.
    """
    consumer, settings = attempt.consumer, attempt.consumer.settings
    work = owned(attempt.invoke(lease, settings.leased_handler_seconds))
    renewal = asyncio.create_task(_renew(lease, settings.lease_seconds, asked_at, clock))
    try:
        await asyncio.wait({work, renewal}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClaimLost(lease.consumer, lease.message_id)
        result = work.result()
        if not lease.completed:
            if lease.refused is not None:
                # Do not complete the message without what was to be written with it.
                raise lease.refused
            kept = json.dumps(result, default=str) if settings.keeps_results else None
            attempt.ended = True
            await _complete(consumer, lease, kept, renewal)
        return Handled(result)
    finally:
        # Wait for at most one more lease; then the partition continues without the handler.
        if not await end([work, renewal], settings.lease_seconds):
            log.error(
                "a handler that lost its lease ignores its cancellation and is left behind",
                extra={"consumer": consumer.name, "id": lease.message_id},
            )


async def _complete(
    consumer: Consumer, lease: Lease, kept: str | None, renewal: asyncio.Task[None]
) -> None:
    """Complete a handled message; repeat it while no answer comes and the lease lasts.

    Try once more after the end of the lease: the fence refuses a completion that is too late, and
    an earlier commit whose answer was lost is found.

    Raises:
        ClaimLost: the result is unknown at the end of the lease, or another owner has it.
    """
    settings = consumer.settings
    while True:
        was_last = renewal.done()
        try:
            async with asyncio.timeout(settings.lease_seconds):
                return await lease.complete(kept)
        except (Retryable, InDoubt, TimeoutError) as error:
            if was_last:
                raise ClaimLost(lease.consumer, lease.message_id) from error
            log.warning(
                "completion is tried again",
                extra={"consumer": lease.consumer, "id": lease.message_id, "why": str(error)},
            )
        await asyncio.wait({renewal}, timeout=settings.held_retry_seconds)


async def _renew(lease: Lease, seconds: float, asked_at: float, clock: Clock) -> None:
    """Renew the lease; return when it is lost.

    Its time is counted from before the request, so it never ends later here than in the
    database.
    """
    until = asked_at + seconds
    while True:
        await asyncio.sleep(seconds / 3)
        asked_at = clock.monotonic()
        asking = asyncio.create_task(_renew_once(lease, seconds))
        # A database that does not answer must not keep a handler alive beyond its lease.
        done, _ = await asyncio.wait({asking}, timeout=max(until - asked_at, 0.0))
        if not done:
            asking.cancel()
            asking.add_done_callback(lambda task: task.cancelled() or task.exception())
            return
        error = asking.exception()
        if error is not None:
            if not isinstance(error, SemelError):
                raise error
            if clock.monotonic() >= until:
                return
            continue
        if not asking.result():
            # The handler has completed it, or it is lost.
            if lease.completed:
                continue
            return
        until = asked_at + seconds


async def _renew_once(lease: Lease, seconds: float) -> bool:
    async with lease.database.begin() as unit:
        return await unit.claims.renew(lease.consumer, lease.message_id, lease.fence, seconds)
