"""Waiting messages in one transaction: what one each would leave, at the speed of a batch.

    hold the keys, sorted ─▶ lock what is still due ─▶ claim, sorted ─▶ handle, a savepoint each

A savepoint each, and not one for many: what waits has failed before, and a
handler should not be called again because its neighbour failed once more.
The keys are locked until the commit, so a transaction has as many messages as
there is time for: twice those of the one before, and one again behind a slow one.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from semel.clock import SYSTEM_CLOCK
from semel.crashpoints import CrashPoint, reach
from semel.message import Message
from semel.messaging.alerts import alert
from semel.messaging.claims import (
    ClaimAnswer,
    Claimed,
    ClaimRequest,
)
from semel.messaging.consumer import Consumer
from semel.messaging.database import Database, TransactionEnded, Unit
from semel.messaging.failing import Held, holds_key, write_failure
from semel.messaging.handling import apply, classify, says_nothing
from semel.messaging.marks import Ended, mark_ends
from semel.messaging.notes import outlived
from semel.messaging.outcome import Outcome, RetryLater, Skipped
from semel.messaging.refusing import ends_waiting, not_claimed
from semel.messaging.tries import Try
from semel.messaging.waiting import Waits

log = logging.getLogger("semel.messaging")

# Well under the lock timeout: a delivery of a key that is locked here waits that long.
TOGETHER_SECONDS: Final = 0.25


async def drain(
    consumer: Consumer,
    database: Database,
    messages: Mapping[str, Message],
    stopping: Callable[[], bool],
) -> AsyncIterator[dict[str, Outcome]]:
    """Handle messages that wait, by id, 1, 2, 4 … to a transaction; yields their outcomes.

    Ends early where a transaction was not kept: then one transaction each will say why; and
    between two of them, when it is *stopping*.

    Raises:
        TransactionEnded: a handler committed past every guard; nothing may be taken for handled.
    """
    left, size = list(messages), 1
    while left and not stopping():
        began = SYSTEM_CLOCK.monotonic()
        found = await _handle_together(consumer, database, {id: messages[id] for id in left[:size]})
        if not found:
            break
        yield found
        left = left[size:]
        size = 2 * size if SYSTEM_CLOCK.monotonic() < began + TOGETHER_SECONDS else 1


async def _handle_together(
    consumer: Consumer, database: Database, messages: Mapping[str, Message]
) -> dict[str, Outcome]:
    """Handle messages in one transaction; none at all where it was not kept."""
    drained = _Drain(consumer, database)
    try:
        async with database.begin() as unit:
            await drained.run(unit, messages)
            reach(CrashPoint.MESSAGE_COMMIT_BEFORE, consumer.name)
    except TransactionEnded:
        raise
    except Exception as error:  # noqa: BLE001  whatever it was, one by one will say
        why = classify(consumer, database, error).reason
        log.info(
            "waiting messages fall back to one transaction each",
            extra={"consumer": consumer.name, "why": why},
        )
        return {}
    alert(drained.outcomes.values())
    reach(CrashPoint.MESSAGE_COMMIT_AFTER, consumer.name)
    return drained.outcomes


@dataclass(slots=True)
class _Drain:
    """What becomes of the messages of one transaction."""

    consumer: Consumer
    database: Database
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    _waits: dict[str, Waits] = field(default_factory=dict)
    _leaving: list[Ended] = field(default_factory=list)

    async def run(self, unit: Unit, messages: Mapping[str, Message]) -> None:
        """Handle what is still due, in its order."""
        name = self.consumer.name
        due = await self._still_due(unit, messages)
        for message in due:
            if self._waits[message.id] is Waits.BEHIND:
                # Its claim says parked, too, and under the key's lock nobody else can have it.
                await unit.claims.reopen(name, message.id)
        reach(CrashPoint.CLAIM_BEFORE, name)
        # All at once, as they are sorted then: redelivered batches claim, too.
        answers = await unit.claims.try_claim_many(name, [ClaimRequest.of(one) for one in due])
        reach(CrashPoint.CLAIM_AFTER, name)
        for message, answer in zip(due, answers, strict=True):
            self.outcomes[message.id] = await self._one(unit, message, answer)
        over = [ended.message_id for ended in self._leaving]
        await unit.waiting.remove_many(name, over)
        await mark_ends(unit, name, self._leaving)
        # Nothing is outlived before the commit is, and it takes the note along.
        await outlived(unit, name, list(self.outcomes))
        for message_id in await unit.members.notes(name, over):
            # Another worker's, which may die before it takes it back.
            await unit.members.acquit(name, message_id)

    async def _still_due(self, unit: Unit, messages: Mapping[str, Message]) -> list[Message]:
        """Lock what nobody has handled, locked or changed since it was read."""
        keys = {m.key or "" for m in messages.values() if holds_key(self.consumer, m)}
        if keys:
            await unit.waiting.hold(self.consumer.name, sorted(keys))
        due = await unit.waiting.take_many(self.consumer.name, messages.keys())
        self._waits = {
            waiting.message_id: waiting.waits
            for waiting in due
            if waiting.payload_hash == messages[waiting.message_id].digest
        }
        for message_id in messages.keys() - self._waits.keys():
            self.outcomes[message_id] = RetryLater(self.consumer.settings.held_retry_seconds)
        return [messages[message_id] for message_id in self._waits]

    async def _one(self, unit: Unit, message: Message, answer: ClaimAnswer) -> Outcome:
        state = Try(message, from_waiting=True)
        try:
            async with unit.savepoint():
                if isinstance(answer, Claimed):
                    state.message = message.tried(answer.attempt)
                    outcome = await apply(self.consumer, unit, state)
                else:
                    outcome = await not_claimed(self.consumer, unit, state, answer)
        except Exception as error:
            failure = classify(self.consumer, self.database, error)
            is_over = isinstance(error, TransactionEnded) or failure.is_conflict
            if is_over or says_nothing(error, state):
                raise
            held = Held(by_this_transaction=isinstance(answer, Claimed), from_waiting=True)
            written = await write_failure(
                unit, self.consumer, state.message, failure, state.gap, held
            )
            return Skipped() if written is None else written
        if ends_waiting(answer):
            self._leaving.append(Ended(message.id, message.source, outcome))
        return outcome
