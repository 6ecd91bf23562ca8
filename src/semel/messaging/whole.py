"""A batch that is kept whole or not at all.

all in one transaction ──▶ kept
        │
        ├─ a message fails ──▶ nothing is kept, its attempt counts, all come back
        │                      given up? it leaves the batch, and the rest begins again
        └─ the commit fails ─▶ nobody knows whose fault: one transaction per message
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from semel.crashpoints import CrashPoint, reach
from semel.errors import Fenced, InDoubt
from semel.message import Message
from semel.messaging.alerts import alert
from semel.messaging.consumer import Consumer
from semel.messaging.database import Database, TransactionEnded, Unit
from semel.messaging.failing import holds_key, write_failure
from semel.messaging.failure import Classified
from semel.messaging.handling import (
    after_failure,
    claim_and_handle,
    classify,
    comes_back,
    says_nothing,
)
from semel.messaging.one_by_one import consume_each
from semel.messaging.outcome import Nack, Outcome, RetryLater, Skipped, settlement
from semel.messaging.reasons import reason_of
from semel.messaging.tries import Try

log = logging.getLogger("semel.messaging")

AtOnce: TypeAlias = Callable[[Consumer, Database, Sequence[Message]], Awaitable[list[Outcome]]]
"""One call of the handler for all messages, in one transaction; raises where that fails."""


async def all_or_nothing(
    consumer: Consumer, database: Database, messages: Sequence[Message], at_once: AtOnce
) -> list[Outcome]:
    """Keep all of the batch or nothing; a message that is given up leaves it first.

    A commit that fails says nothing about a message, and would fail again: the attempts are
    bounded because it is then one transaction per message, up to the first that comes back.

    Raises:
        TransactionEnded: a handler committed past every guard; nothing may be acknowledged.
    """
    outcomes: dict[int, Outcome] = {}
    while True:
        left = [i for i in range(len(messages)) if i not in outcomes]
        rest = [messages[i] for i in left]
        try:
            found = await _kept_whole(consumer, database, rest, at_once)
        except _Failed as failed:
            outcome = failed.outcome or await _counted(consumer, database, failed)
            outcomes[left[failed.index]] = outcome
            if not isinstance(settlement(outcome), Nack):
                continue
            # The attempt was this one's; the others come back with it.
            found = [_comes_along(outcome)] * len(left)
            found[failed.index] = outcome
        except TransactionEnded:
            raise
        except (InDoubt, Fenced) as error:
            # It may be kept: the claims know, and the next deliveries ask them.
            failure = classify(consumer, database, error)
            found = [RetryLater(consumer.settings.held_retry_seconds, failure)] * len(left)
        except Exception as error:  # noqa: BLE001  whatever it was, one by one will say
            why = classify(consumer, database, error).reason
            log.info("batch is not kept whole", extra={"consumer": consumer.name, "why": why})
            found = await consume_each(consumer, database, rest)
        outcomes.update(zip(left, found, strict=True))
        return [outcomes[i] for i in range(len(messages))]


def _comes_along(outcome: Outcome) -> Outcome:
    return RetryLater(outcome.seconds) if isinstance(outcome, RetryLater) else outcome


class _Failed(Exception):
    """A message of the batch failed, and with it the batch."""

    def __init__(self, index: int, state: Try, outcome: Outcome | None) -> None:
        super().__init__(index)
        self.index = index
        self.state = state
        self.outcome = outcome
        """What became of it, where it did not fail but comes back."""


async def _counted(consumer: Consumer, database: Database, failed: _Failed) -> Outcome:
    """Write the failure of the message that failed, as if it had been alone."""
    error = failed.__cause__ or failed
    failure = classify(consumer, database, error)
    if says_nothing(error, failed.state):
        return comes_back(consumer, failed.state.message, failure)
    return await after_failure(consumer, database, failed.state, failure)


async def _kept_whole(
    consumer: Consumer, database: Database, messages: Sequence[Message], at_once: AtOnce
) -> list[Outcome]:
    """Run the whole transaction, again after a deadlock or a serialization failure."""
    if consumer.takes_batches:
        try:
            return await at_once(consumer, database, messages)
        except (TransactionEnded, InDoubt, Fenced):
            raise
        except Exception as error:  # noqa: BLE001  batches of one tell which message it is
            why = classify(consumer, database, error).reason
            log.info("batch is split", extra={"consumer": consumer.name, "why": why})
    for left in reversed(range(consumer.settings.conflict_tries)):
        try:
            return await _in_order(consumer, database, messages, runs_again=left > 0)
        except Exception as error:
            cause = error.__cause__ if isinstance(error, _Failed) else error
            is_conflict = cause and classify(consumer, database, cause).is_conflict
            if not (left and is_conflict):
                raise
    raise AssertionError("the last try returns or raises")


def _stands_behind(consumer: Consumer, before: Sequence[Message], message: Message) -> bool:
    """Tell whether others of its key come first: they must not queue up behind it."""
    return holds_key(consumer, message) and any(one.key == message.key for one in before)


async def _given_up(
    consumer: Consumer, unit: Unit, failed: _Failed, failure: Classified, error: Exception
) -> Outcome:
    """Write a failure in its place in the batch, unless the message comes back."""
    message, gap = failed.state.message, failed.state.gap
    if says_nothing(error, failed.state):
        raise failed from error
    try:
        outcome = await write_failure(unit, consumer, message, failure, gap)
    except Exception as second:  # noqa: BLE001  the failure itself must not be lost
        log.info("failure is written alone", extra={"id": message.id, "why": reason_of(second)})
        raise failed from error
    if isinstance(outcome, RetryLater):
        raise failed from error
    return Skipped() if outcome is None else outcome


async def _in_order(
    consumer: Consumer, database: Database, messages: Sequence[Message], *, runs_again: bool
) -> list[Outcome]:
    """Handle one message after the other in one transaction; the first that fails ends it."""
    outcomes: list[Outcome] = []
    async with database.begin() as unit:
        for index, message in enumerate(messages):
            state = Try(message)
            try:
                async with unit.savepoint():
                    outcome = await claim_and_handle(consumer, unit, state)
            except TransactionEnded:
                raise
            except Exception as error:
                failed = _Failed(index, state, None)
                if not _stands_behind(consumer, messages[:index], message):
                    raise failed from error
                failure = classify(consumer, database, error)
                if runs_again and failure.is_conflict:
                    raise failed from error
                outcome = await _given_up(consumer, unit, failed, failure, error)
            if isinstance(settlement(outcome), Nack):
                raise _Failed(index, state, outcome)
            outcomes.append(outcome)
        reach(CrashPoint.MESSAGE_COMMIT_BEFORE, consumer.name)
    alert(outcomes)
    reach(CrashPoint.MESSAGE_COMMIT_AFTER, consumer.name)
    return outcomes
