"""Waiting messages in one transaction: what one each would leave, at the speed of a batch.

    hold the keys, sorted ─▶ lock what is still due ─▶ claim 1, 2, 4 … ─▶ handle, a savepoint each

A savepoint each, and not one for many: what waits has failed before, and a
handler should not be called again because its neighbour failed once more.
The keys are locked until the commit, so the transaction ends when its time is
up: with slow handlers it has one message.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from semel.clock import SYSTEM_CLOCK
from semel.crashpoints import CrashPoint, reach
from semel.message import Message
from semel.messaging.claims import (
    ClaimAnswer,
    Claimed,
    ClaimRequest,
    HeldElsewhere,
    NotDue,
    Parked,
)
from semel.messaging.consumer import Consumer
from semel.messaging.database import Database, TransactionEnded, Unit
from semel.messaging.failing import Held, holds_key, write_failure
from semel.messaging.handling import (
    CONFLICT_CODE,
    Try,
    apply,
    classify,
    not_claimed,
    says_nothing,
)
from semel.messaging.notes import outlived
from semel.messaging.outcome import Outcome, RetryLater, Skipped
from semel.messaging.waiting import Waits

log = logging.getLogger("semel.messaging")

# Well under the lock timeout: a delivery of a key that is locked here waits that long.
TOGETHER_SECONDS: Final = 0.25


async def handle_together(
    consumer: Consumer, database: Database, messages: Mapping[str, Message]
) -> dict[str, Outcome]:
    """Handle messages that wait, by id, as many as there is time for; returns their outcomes.

    None at all where the transaction was not kept: then one transaction each will say why.

    Raises:
        TransactionEnded: a handler committed past every guard; nothing may be taken for handled.
    """
    drain = _Drain(consumer, database)
    try:
        async with database.begin() as unit:
            await drain.run(unit, messages)
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
    reach(CrashPoint.MESSAGE_COMMIT_AFTER, consumer.name)
    return drain.outcomes


@dataclass(slots=True)
class _Drain:
    """What becomes of the messages of one transaction."""

    consumer: Consumer
    database: Database
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    _waits: dict[str, Waits] = field(default_factory=dict)
    _leaving: list[str] = field(default_factory=list)

    async def run(self, unit: Unit, messages: Mapping[str, Message]) -> None:
        """Handle what is still due, in its order."""
        name, size = self.consumer.name, 1
        left = await self._still_due(unit, messages)
        until = SYSTEM_CLOCK.monotonic() + TOGETHER_SECONDS
        while left and (size == 1 or SYSTEM_CLOCK.monotonic() < until):
            await self._some(unit, left[:size])
            left, size = left[size:], 2 * size
        await unit.waiting.remove_many(name, self._leaving)
        # Nothing is outlived before the commit is, and it takes the suspicion along.
        await outlived(unit, name, list(self.outcomes))

    async def _some(self, unit: Unit, messages: Sequence[Message]) -> None:
        name = self.consumer.name
        for message in messages:
            if self._waits[message.id] is Waits.BEHIND:
                # Its claim says parked, too, and under the key's lock nobody else can have it.
                await unit.claims.reopen(name, message.id)
        reach(CrashPoint.CLAIM_BEFORE, name)
        requests = [ClaimRequest.of(message) for message in messages]
        answers = await unit.claims.try_claim_many(name, requests)
        reach(CrashPoint.CLAIM_AFTER, name)
        for message, answer in zip(messages, answers, strict=True):
            self.outcomes[message.id] = await self._one(unit, message, answer)

    async def _still_due(self, unit: Unit, messages: Mapping[str, Message]) -> list[Message]:
        """Lock what nobody has handled, locked or changed since it was read."""
        keys = {m.key or "" for m in messages.values() if holds_key(self.consumer, m)}
        if keys:
            await unit.waiting.hold(self.consumer.name, sorted(keys))
        due = await unit.waiting.take_due(self.consumer.name, 2 * len(messages))
        self._waits = {
            waiting.message_id: waiting.waits
            for waiting in due
            if waiting.message_id in messages
            and waiting.payload_hash == messages[waiting.message_id].digest
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
            is_over = isinstance(error, TransactionEnded) or failure.code == CONFLICT_CODE
            if is_over or not state.began or says_nothing(error, state):
                raise
            held = Held(by_this_transaction=isinstance(answer, Claimed), from_waiting=True)
            written = await write_failure(
                unit, self.consumer, state.message, failure, state.gap, held
            )
            return Skipped() if written is None else written
        if not isinstance(answer, Parked | NotDue | HeldElsewhere):
            self._leaving.append(message.id)
        return outcome
