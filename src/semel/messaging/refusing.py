"""The answer to a delivery whose claim says that it is not ours to handle now."""

from __future__ import annotations

from typing import assert_never

from semel.message import Message
from semel.messaging.claims import (
    ClaimAnswer,
    Conflict,
    Duplicate,
    HeldElsewhere,
    NotDue,
    NotOurs,
    Parked,
    Stale,
    Terminal,
)
from semel.messaging.consumer import Consumer
from semel.messaging.context import handling
from semel.messaging.database import Unit
from semel.messaging.failing import forget_tries, invokes, write_conflict
from semel.messaging.outcome import Outcome, Refused, RetryLater, RetryStored, Skipped
from semel.messaging.tries import Try


async def not_claimed(consumer: Consumer, unit: Unit, state: Try, answer: NotOurs) -> Outcome:
    """Answer as `refused` does; *state* tells whether the handler was invoked all the same."""
    if invokes(consumer, answer):
        state.message = state.message.repeated()
        state.began = True
    return await refused(consumer, unit, state.message, answer)


async def refused(
    consumer: Consumer,
    unit: Unit,
    message: Message,
    answer: NotOurs,
) -> Outcome:
    """Answer a delivery whose message is not ours to handle now."""
    settings = consumer.settings
    match answer:
        case Duplicate(result):
            if invokes(consumer, answer):
                await unit.begin_message()
                with handling(consumer.name, message.repeated()) as now:
                    await consumer.invoke(now.message, unit.session)
                await forget_tries(unit, consumer, message)
            return Skipped("duplicate", result)
        case NotDue(seconds_left):
            if settings.stores_retries and await unit.waiting.get(consumer.name, message.id):
                return RetryStored()
            return RetryLater(max(seconds_left, 0.0))
        case HeldElsewhere(seconds_left=seconds):
            return RetryLater(min(max(seconds, 0.05), settings.held_retry_seconds))
        case Stale():
            return RetryLater(settings.held_retry_seconds)
        case Parked():
            return Refused("parked")
        case Terminal(error_code):
            return Refused(f"dead letter ({error_code})")
        case Conflict(expected):
            return await write_conflict(unit, consumer, message, expected)
        case _ as never:
            assert_never(never)


def ends_waiting(answer: ClaimAnswer) -> bool:
    """Tell whether a message out of the waiting room is over with this answer to its claim."""
    return not isinstance(answer, Parked | NotDue | HeldElsewhere)
