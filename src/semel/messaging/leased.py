"""The other mode: commit the claim with a lease first, then take as long as it needs.

    begin ─▶ IN_PROGRESS, owner, lease, fence ─▶ commit
             │
             handle …   the lease is renewed beside it; lost ─▶ the handler is cancelled
             │
    begin ─▶ COMPLETED where the fence is still ours ─▶ commit      0 rows: refused

An owner that dies leaves its lease, and the stale policy says what becomes of
the message; one that dies as often as the policy allows attempts is parked.

For handlers that run for minutes, or whose effect is not in the database.  The
effect happens at least once: a crash behind it and before the completion
repeats it, unless it carries an idempotency key, or is made inside
`Lease.completing`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from semel.clock import SYSTEM_CLOCK, Clock
from semel.crashpoints import CrashPoint, reach
from semel.errors import SemelError
from semel.message import Message
from semel.messaging.claims import (
    Claimed,
    ClaimLost,
    ClaimRequest,
    ClaimState,
    Duplicate,
    Failure,
    HeldElsewhere,
    NotDue,
    Parked,
    Stale,
    StalePolicy,
)
from semel.messaging.consumer import Consumer
from semel.messaging.context import handling
from semel.messaging.database import Database, Unit
from semel.messaging.failing import leave_the_room, park_poison
from semel.messaging.failure import Classified, FailureClass
from semel.messaging.handling import (
    Try,
    after_failure,
    classify,
    into_the_room,
    out_of_the_room,
    refused,
)
from semel.messaging.outcome import Handled, Outcome, RetryLater, Skipped
from semel.messaging.waiting import WaitingMessage

log = logging.getLogger("semel.messaging")


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
    """What it is in the waiting room, which it leaves when it is completed."""

    key: str | None = None

    @asynccontextmanager
    async def completing(self) -> AsyncIterator[Any]:
        """Open a transaction whose commit completes the message, with whatever is written in it.

        Raises:
            ClaimLost: another owner has taken the message; nothing was written.
        """
        async with self.database.begin() as unit:
            yield unit.session
            reach(CrashPoint.LEASED_COMPLETE_BEFORE, self.consumer)
            await self._complete(unit, None)
        self.completed = True
        reach(CrashPoint.LEASED_COMPLETE_AFTER, self.consumer)

    async def complete(self, result: str | None) -> None:
        """Complete the message in a transaction of its own.

        Raises:
            ClaimLost: another owner has taken the message.
        """
        async with self.database.begin() as unit:
            reach(CrashPoint.LEASED_COMPLETE_BEFORE, self.consumer)
            await self._complete(unit, result)
        self.completed = True
        reach(CrashPoint.LEASED_COMPLETE_AFTER, self.consumer)

    async def _complete(self, unit: Unit, result: str | None) -> None:
        done = await unit.claims.mark_completed(self.consumer, self.message_id, self.fence)
        if not done:
            raise ClaimLost(self.consumer, self.message_id)
        if result is not None:
            await unit.claims.keep_result(self.consumer, self.message_id, result, self.key)
        if self.waiting is not None:
            if self.waiting.held:
                await unit.waiting.hold(self.consumer, [self.waiting.key or ""])
            await leave_the_room(unit, self.consumer, self.message_id)


async def handle_leased(
    consumer: Consumer,
    database: Database,
    message: Message,
    owner: str,
    clock: Clock = SYSTEM_CLOCK,
    waiting: WaitingMessage | None = None,
) -> Outcome:
    """Handle one delivery under a lease; never raises for what a message or a handler does.

    *waiting*: the message comes out of the waiting room, not from the broker.
    """
    settings = consumer.settings
    asked_at = clock.monotonic()
    try:
        async with database.begin() as unit:
            reach(CrashPoint.CLAIM_BEFORE, consumer.name)
            answer = await _leased(consumer, unit, message, owner, waiting)
    except Exception as error:  # noqa: BLE001  nothing was claimed; the delivery comes back
        failure = classify(consumer, database, error)
        log.warning(
            "message comes back",
            extra={"consumer": consumer.name, "id": message.id, "reason": failure.reason},
        )
        return RetryLater(settings.held_retry_seconds, failure)
    if not isinstance(answer, Claimed):
        return answer
    reach(CrashPoint.LEASED_CLAIM_AFTER, consumer.name)
    state = Try(message.tried(answer.attempt), began=True, from_waiting=waiting is not None)
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
        return await _under_lease(consumer, state, lease, asked_at, clock)
    except ClaimLost as error:
        log.warning("claim lost", extra={"consumer": consumer.name, "id": message.id})
        return RetryLater(settings.held_retry_seconds, classify(consumer, database, error))
    except Exception as error:  # noqa: BLE001  whatever a handler raises is classified
        if lease.completed:
            return Handled()
        failure = classify(consumer, database, error)
        return await after_failure(consumer, database, state, failure, lease.fence)


async def _leased(
    consumer: Consumer, unit: Unit, message: Message, owner: str, waiting: WaitingMessage | None
) -> Claimed | Outcome:
    """Lease a message in the open transaction, or say what became of it instead."""
    settings = consumer.settings
    room = into_the_room if waiting is None else out_of_the_room
    gone = await room(consumer, unit, message)
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
        return answer if not killed else await _park_killer(consumer, unit, message, answer)
    if isinstance(answer, Stale):
        return await _stale(consumer, unit, message, answer)
    if waiting is not None and not isinstance(answer, Parked | NotDue | HeldElsewhere):
        await leave_the_room(unit, consumer.name, message.id)
    if isinstance(answer, Duplicate):
        return Skipped("duplicate", answer.result)
    return await refused(consumer, unit, message, answer)


def _most_attempts(consumer: Consumer) -> int:
    """Return how often a message may take its owner's lease with it.

    Failures count as attempts, too, and a message that failed as often as it may is not yet
    one that kills.
    """
    return max(consumer.settings.poison_attempts, consumer.settings.retry.max_attempts)


async def _park_killer(
    consumer: Consumer, unit: Unit, message: Message, claimed: Claimed
) -> Outcome:
    attempts = claimed.attempt - 1
    reason = f"its owner {claimed.from_owner} did not finish, nor did {attempts - 1} before it"
    failure = Classified(FailureClass.POISON, "CRASHED", reason, "")
    parked = await park_poison(unit, consumer, message.tried(attempts), failure)
    return Skipped() if parked is None else parked


async def _stale(consumer: Consumer, unit: Unit, message: Message, stale: Stale) -> Outcome:
    """Do what the stale policy says about a lease that ran out."""
    settings = consumer.settings
    within_grace = stale.seconds_ago < settings.stale_grace_seconds
    if settings.stale is StalePolicy.INSPECT and consumer.inspect is not None:
        try:
            happened = await consumer.inspect(message)
        except Exception:
            # It may know the next time; it is not asked for ever.
            if within_grace:
                raise
            happened = None
        if happened:
            await unit.claims.mark_completed(consumer.name, message.id)
            await leave_the_room(unit, consumer.name, message.id)
            return Skipped("inspected: its effect had happened")
        if happened is False:
            failure = Failure(
                ClaimState.FAILED_RETRYABLE, stale.attempts, "ABANDONED", 0.0, message.digest
            )
            await unit.claims.mark_failed(consumer.name, message.id, failure)
            return RetryLater(0.0)
    if settings.stale is StalePolicy.WAIT and within_grace:
        return RetryLater(settings.held_retry_seconds)
    reason = f"its owner {stale.owner} did not finish within the lease"
    parked = await park_poison(
        unit,
        consumer,
        message.tried(stale.attempts),
        Classified(FailureClass.TRANSIENT, "ABANDONED", reason, ""),
    )
    return Skipped() if parked is None else parked


async def _under_lease(
    consumer: Consumer, state: Try, lease: Lease, asked_at: float, clock: Clock
) -> Outcome:
    """Run the handler with the renewal beside it; the first one to fail ends the other."""
    seconds = consumer.settings.lease_seconds
    with handling(consumer.name, state.message):
        work = asyncio.create_task(consumer.invoke(state.message, lease))
    renewal = asyncio.create_task(_renew(lease, seconds, asked_at, clock))
    try:
        await asyncio.wait({work, renewal}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await work
            raise ClaimLost(lease.consumer, lease.message_id)
        result = work.result()
    finally:
        for task in (work, renewal):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
    reach(CrashPoint.HANDLE_AFTER, consumer.name)
    if not lease.completed:
        kept = json.dumps(result, default=str) if consumer.settings.keeps_results else None
        await lease.complete(kept)
    return Handled(result)


async def _renew(lease: Lease, seconds: float, asked_at: float, clock: Clock) -> None:
    """Renew the lease until it is lost; returns then.

    The lease is counted from before it was asked for, so that it never ends later here than
    in the database.
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
            # Completed by the handler itself, or lost: the handler's end tells which.
            if lease.completed:
                continue
            return
        until = asked_at + seconds


async def _renew_once(lease: Lease, seconds: float) -> bool:
    async with lease.database.begin() as unit:
        return await unit.claims.renew(lease.consumer, lease.message_id, lease.fence, seconds)
