"""Into the waiting room, behind those of its key, and out of it when its turn comes.

    a delivery, its key is held ─▶ queues up BEHIND (or overtakes, if its version is next)
    its turn comes              ─▶ still there, still the same? then it is handled

In the transaction that handles the message, under the lock of its key.
"""

from __future__ import annotations

from dataclasses import replace

from semel.message import Message
from semel.messaging.claims import ERASED, ClaimState, Failure, refusal
from semel.messaging.consumer import Consumer
from semel.messaging.database import Unit
from semel.messaging.failing import holds_key
from semel.messaging.keeping import mark_waiting, parked_without_payload
from semel.messaging.outcome import (
    NO_LONGER_WAITING,
    Outcome,
    ParkedAway,
    Refused,
    RetryLater,
    RetryStored,
    Skipped,
)
from semel.messaging.overtaking import is_next
from semel.messaging.reasons import ERASED_REASON
from semel.messaging.refusing import not_claimed
from semel.messaging.tries import Try
from semel.messaging.waiting import BEHIND, WaitingMessage, Waits


async def into_the_room(
    consumer: Consumer, unit: Unit, message: Message, state: Try | None = None
) -> Outcome | None:
    """Queue a delivery up whose key is held; None where it may be handled now."""
    if not holds_key(consumer, message):
        return None
    key = message.key or ""
    if key not in await unit.waiting.hold(consumer.name, [key]):
        return None
    return await behind_others(consumer, unit, state or Try(message))


async def out_of_the_room(consumer: Consumer, unit: Unit, message: Message) -> Outcome | None:
    """Make sure that a waiting message still waits for its turn; None where it does.

    Another worker may have handled or parked it since it was read, and a person may have
    changed it: then it is read again, with what it says now.
    """
    if holds_key(consumer, message):
        await unit.waiting.hold(consumer.name, [message.key or ""])
    waiting = await unit.waiting.take(consumer.name, message.id)
    if waiting is None:
        left = await unit.waiting.get(consumer.name, message.id)
        if left is None:
            return Skipped(NO_LONGER_WAITING)
        if left.waits is Waits.PARKED:
            return Refused("parked")
        return RetryLater(consumer.settings.held_retry_seconds)
    if waiting.payload_hash != message.digest:
        return RetryLater(0.0)
    if waiting.waits is Waits.BEHIND:
        # Its claim says parked, too, and under the key's lock nobody else can have it.
        await unit.claims.reopen(consumer.name, message.id)
    return None


async def behind_others(consumer: Consumer, unit: Unit, state: Try) -> Outcome | None:
    """Queue a message up whose key is held; None where its version says that it is next."""
    message = state.message
    if await is_next(consumer, unit, message):
        state.overtakes = True
        return None
    row = await unit.claims.look_up(consumer.name, message.id)
    if row is not None:
        no = refusal(row, message.digest, await unit.now())
        if no is not None:
            return await not_claimed(consumer, unit, state, no)
    if await unit.waiting.get(consumer.name, message.id) is not None:
        return RetryStored()
    erased_at = None if row is None else row.erased_at
    if not await unit.claims.mark_failed(consumer.name, message.id, _behind(message, erased_at)):
        return RetryLater(consumer.settings.held_retry_seconds)
    return await _queue_up(consumer, unit, message, erased_at)


async def queue_claimed_up(consumer: Consumer, unit: Unit, message: Message) -> Outcome:
    """Put a message that this transaction has claimed behind the one of its key that failed."""
    row = await unit.claims.undo(consumer.name, message.id, _behind(message))
    if row.erased_at is not None:
        await unit.claims.undo(consumer.name, message.id, _behind(message, row.erased_at))
    return await _queue_up(consumer, unit, message, row.erased_at)


def _behind(message: Message, erased_at: float | None = None) -> Failure:
    """Return what the claim of a message says that waits for an earlier one of its key."""
    code = BEHIND if erased_at is None else ERASED
    return Failure(ClaimState.PARKED, 0, code, payload_hash=message.digest)


async def _queue_up(
    consumer: Consumer, unit: Unit, message: Message, erased_at: float | None
) -> ParkedAway:
    """Put a message behind those of its key; without payload where its claim says erased."""
    why = "an earlier message of its key waits" if erased_at is None else ERASED_REASON
    waiting = WaitingMessage.of(consumer.name, message, Waits.BEHIND, held=True)
    waiting = replace(waiting, reason=why)
    if erased_at is not None:
        waiting = replace(parked_without_payload(waiting, erased_at), error_code=ERASED)
    await unit.waiting.put(waiting)
    await mark_waiting(unit, consumer.name, message)
    return ParkedAway(why)
