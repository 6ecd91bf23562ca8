"""Another turn for a message that the workers of an inbox gave up.

    begin ─▶ send back ─▶ handle ─▶ mark processed ─▶ commit
                             │
                             └─ fails ─▶ begin ─▶ send back ─▶ failed attempt ─▶ commit

That it was sent back is in the audit trail in both cases: the loop guard counts it.
"""

from __future__ import annotations

from dataclasses import replace

from semel.messaging.acts import NotPossible, acting
from semel.messaging.audit import Act
from semel.messaging.consumer import Consumer
from semel.messaging.database import Database
from semel.messaging.failed_attempts import keep_attempt_of_inbox
from semel.messaging.failure import Classified
from semel.messaging.handling import classify, comes_back, says_nothing
from semel.messaging.inbox import InboxMessage
from semel.messaging.inbox_acts import send_back
from semel.messaging.inboxes import handle, message_of
from semel.messaging.letter_topic import keep_letter
from semel.messaging.outcome import DeadLettered, Handled, Outcome, RetryStored, Told
from semel.messaging.retry import RetryIn, verdict
from semel.messaging.review import need_not_too_often
from semel.messaging.tries import Try


async def try_given_up(
    consumer: Consumer, database: Database, stored: InboxMessage, act: Act, at_most: int
) -> Outcome:
    """Handle a message in one transaction with its mark and its entry in the audit trail.

    Where the handler fails, the inbox's workers try it later, or it is a dead letter again,
    as their own attempts would leave it.  Where it could not be asked for, nothing is
    written, and it comes back.

    Raises:
        NotPossible: it cannot be sent back, or was so *at_most* times.
        Undecodable: its payload cannot be read.
        InDoubt: nobody knows whether the commit happened; the row says so later.
    """
    # Its attempts are forgotten when it is sent back.
    message = message_of(consumer, replace(stored, attempts=0))
    state = Try(message)
    try:
        async with acting(database) as unit:
            await need_not_too_often(unit, stored.consumer, stored.message_id, at_most)
            await send_back(unit, stored)
            await unit.audit.append(act)
            state.began = True
            result = await handle(unit, consumer, message)
            state.ended = True
    except Exception as error:
        if isinstance(error, NotPossible) and not state.began:
            raise
        failure = classify(consumer, database, error)
        if says_nothing(error, state) or failure.is_conflict:
            if state.ended:
                raise
            return comes_back(consumer, message, failure)
    else:
        return Handled(result)
    return await _failed(consumer, database, stored, act, failure)


async def _failed(
    consumer: Consumer, database: Database, stored: InboxMessage, act: Act, failure: Classified
) -> Outcome:
    """Write that a message was sent back, and failed: its transaction took both back."""
    name, message_id, settings = stored.consumer, stored.message_id, consumer.settings
    fate = verdict(settings.retry, failure, 1)
    delay_seconds = fate.seconds if isinstance(fate, RetryIn) else None
    async with acting(database) as unit:
        letter = await unit.dead_letters.get(name, message_id)
        await send_back(unit, stored)
        await unit.audit.append(act)
        why = f"{failure.code}: {failure.reason}"
        attempts = await unit.inbox.failed(name, message_id, why, delay_seconds)
        await keep_attempt_of_inbox(unit, name, message_id, failure)
        if delay_seconds is not None:
            return RetryStored(failure, attempts)
        if letter is not None:
            again = replace(
                letter,
                reason=failure.reason,
                exception=failure.exception,
                error_code=failure.code,
                attempts=attempts,
                last_failed_at=await unit.now(),
                owner=settings.dead_letter_owner,
                outcome=Told.DLQ.value,
                needs_review=settings.review_dead_letters,
            )
            await keep_letter(unit, settings, again)
    return DeadLettered(failure)
