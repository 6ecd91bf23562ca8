"""What becomes of a lease that ran out, where the policy is not simply to take it over.

begin ─▶ Stale, with its fence ─▶ commit
         │
         inspect …   in no transaction: it may take as long as it needs
         │
begin ─▶ lock the lease ─▶ COMPLETED, due again or PARKED ─▶ commit
         └─ renewed or taken meanwhile: nothing is written, the delivery comes back
"""

from __future__ import annotations

from semel.message import Message
from semel.messaging.cancelling import called
from semel.messaging.claims import Claimed, ClaimState, Failure, Stale, StalePolicy
from semel.messaging.consumer import Consumer
from semel.messaging.database import Database, Unit
from semel.messaging.failed_attempts import keep_attempt
from semel.messaging.failing import Held, holds_key, leave_the_room, park_poison
from semel.messaging.failure import Classified, FailureClass
from semel.messaging.outcome import Handled, Outcome, RetryLater, Skipped


async def settle_stale(
    consumer: Consumer, database: Database, message: Message, stale: Stale
) -> Outcome:
    """Do what the stale policy says; nothing where somebody else is at the message by then."""
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
                return await _complete(consumer, unit, message, stale)
            case False:
                return await _reopen(consumer, unit, message, stale)
            case None:
                return await _abandon(consumer, unit, message, stale)


def _within_grace(consumer: Consumer, stale: Stale) -> bool:
    return stale.seconds_ago < consumer.settings.stale_grace_seconds


async def _inspected(consumer: Consumer, message: Message, stale: Stale) -> bool | None:
    """Ask the consumer whether the effect happened; None where nobody knows."""
    if consumer.settings.stale is not StalePolicy.INSPECT or consumer.inspect is None:
        return None
    try:
        return await called(consumer.inspect(message))
    except Exception:
        # It may know the next time; it is not asked for ever.
        if _within_grace(consumer, stale):
            raise
        return None


async def _complete(consumer: Consumer, unit: Unit, message: Message, stale: Stale) -> Outcome:
    await unit.claims.mark_completed(consumer.name, message.id, stale.fence)
    waiting = await unit.waiting.get(consumer.name, message.id)
    came_from = waiting.source if waiting else None
    await leave_the_room(unit, consumer.name, message.id, Handled(), came_from)
    return Skipped("inspected: its effect had happened")


async def _reopen(consumer: Consumer, unit: Unit, message: Message, stale: Stale) -> Outcome:
    failure = Failure(ClaimState.FAILED_RETRYABLE, stale.attempts, "ABANDONED", 0.0, message.digest)
    if await unit.claims.mark_failed(consumer.name, message.id, failure, stale.fence):
        claim = await unit.claims.look_up(consumer.name, message.id)
        tried = message.tried(stale.attempts)
        await keep_attempt(unit, consumer.name, tried, _abandoned(stale), claim)
    return RetryLater(0.0)


async def _abandon(consumer: Consumer, unit: Unit, message: Message, stale: Stale) -> Outcome:
    held, tried = Held(fence=stale.fence), message.tried(stale.attempts)
    parked = await park_poison(unit, consumer, tried, _abandoned(stale), held)
    return Skipped() if parked is None else parked


def _abandoned(stale: Stale) -> Classified:
    reason = f"its owner {stale.owner} did not finish within the lease"
    return Classified(FailureClass.TRANSIENT, "ABANDONED", reason, "")


async def park_killer(
    consumer: Consumer, unit: Unit, message: Message, claimed: Claimed
) -> Outcome:
    """Park a message, leased in the open transaction, that took too many owners with it."""
    attempts = claimed.attempt - 1
    reason = f"its owner {claimed.from_owner} did not finish, nor did {attempts - 1} before it"
    failure = Classified(FailureClass.POISON, "CRASHED", reason, "")
    held = Held(fence=claimed.fence)
    parked = await park_poison(unit, consumer, message.tried(attempts), failure, held)
    return Skipped() if parked is None else parked
