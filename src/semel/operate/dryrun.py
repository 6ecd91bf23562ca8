"""A dry run: the handler runs in a transaction that is always rolled back (B-15).

It shows what the handler would change and send.  It takes no claim: a message that was
handled, parked or dead-lettered can be tried any number of times.  What a handler does
outside of its database really happens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

from semel.message import Message
from semel.messaging.database import Unit
from semel.messaging.failed.deadletters import is_letter_record
from semel.messaging.failure import Classification, Classified
from semel.messaging.handle.attempt import Attempt
from semel.messaging.handle.claims import ClaimLost, ClaimState
from semel.messaging.handle.lease import Lease
from semel.messaging.handler import Consumer
from semel.messaging.outcome import Handled, Outcome, Skipped
from semel.messaging.receive.broker import Reader
from semel.messaging.send.outbox import OutboxEntry, parent_of
from semel.operate.replay_message import find_message, read_message
from semel.operate.selection import MessageSource, Selection, settled
from semel.operate.stores import OperatorDatabase, OperatorUnit, RowChange
from semel.policy.vocabulary import Mode


@dataclass(frozen=True, slots=True)
class DryRun:
    """What handling a message would do; nothing of it was kept."""

    message_id: str
    claim: ClaimState | None = None
    """How the message stands; None where its consumer has never seen it, or it was not tried."""

    outcome: Outcome | None = None
    """What would become of it, if it were claimed; None where it cannot be handled."""

    failure: Classified | None = None
    changes: Sequence[RowChange] = field(default_factory=tuple)
    """Of a handler that failed: what it had done before."""

    outgoing: Sequence[OutboxEntry] = field(default_factory=tuple)
    not_possible: str = ""
    """Why it cannot be handled: its payload is in no table, or it cannot be read."""

    @property
    def why(self) -> str:
        """Why it fails, or cannot be handled; empty where it succeeds."""
        return f"{self.failure.code}: {self.failure.reason}" if self.failure else self.not_possible


@dataclass(frozen=True, slots=True)
class DryRuns:
    """What handling the messages of a selection would do."""

    consumer: str
    messages: Sequence[DryRun]

    @property
    def needs_attention(self) -> bool:
        """One of them fails, or cannot be handled."""
        return any(one.why for one in self.messages)


class _RolledBack(Exception):
    """Ends a transaction of which nothing is kept."""


async def dry_run(consumer: Consumer, database: OperatorDatabase, message: Message) -> DryRun:
    """Run the handler of *message*, and take everything back.

    A handler of batches gets a batch of one; one of mode leased gets a lease whose
    transactions are taken back, too.

    Raises:
        Retryable: the database does not answer.
    """
    attempt = Attempt(consumer, message)
    if consumer.rehearse is not None:
        async with database.begin() as unit:
            stands = await _stands(unit, attempt)
        # In a thread, because the handler may have a loop of its own.
        rehearsed: DryRun = await asyncio.to_thread(consumer.rehearse, attempt.message)
        return replace(rehearsed, claim=stands)
    claim: ClaimState | None = None
    changes: list[RowChange] = []
    outgoing: Sequence[OutboxEntry] = ()
    outcome: Outcome = Skipped()
    try:
        async with _rolled_back(database) as unit:
            claim = await _stands(unit, attempt)
            async with unit.watching() as changes:
                outcome = await _handled(database, unit, attempt)
            written = await unit.outbox.children(parent_of(consumer.name, message.id))
            # A claim of a dead letter exists because the message failed before.
            outgoing = [entry for entry in written if not is_letter_record(entry)]
    except Exception as error:
        if not attempt.began:
            raise
        failure = attempt.failure(database, error)
        outcome = await _after(database, attempt, failure)
        return DryRun(message.id, claim, outcome, failure, tuple(changes))
    return DryRun(message.id, claim, outcome, None, tuple(changes), tuple(outgoing))


@asynccontextmanager
async def _rolled_back(database: OperatorDatabase) -> AsyncIterator[OperatorUnit]:
    """Open a transaction of which nothing is kept."""
    with suppress(_RolledBack):
        async with database.begin() as unit:
            yield unit
            raise _RolledBack


async def _stands(unit: OperatorUnit, attempt: Attempt) -> ClaimState | None:
    row = await unit.claims.look_up(attempt.consumer.name, attempt.message.id)
    if row is None:
        return None
    again = row.state is ClaimState.FAILED_RETRYABLE
    attempt.message = attempt.message.tried(row.attempts + 1 if again else 1)
    return row.state


async def _handled(database: OperatorDatabase, unit: OperatorUnit, attempt: Attempt) -> Outcome:
    if attempt.consumer.mode is Mode.LEASED:
        name, message_id = attempt.consumer.name, attempt.message.id
        within = _Within(unit, database.classification)
        lease = _RehearsedLease(name, message_id, "dry run", fence=0, database=within)
        return Handled(await attempt.invoke(lease))
    outcome = await attempt.apply(unit)
    if outcome == Skipped("old version"):
        return await attempt.call(unit)
    return outcome


@dataclass(frozen=True, slots=True)
class _Within:
    """A database whose transactions are parts of one that is taken back."""

    unit: OperatorUnit
    classification: Classification

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[OperatorUnit]:
        async with self.unit.savepoint():
            yield self.unit

    async def close(self) -> None:
        """Nothing to give back."""


class _RehearsedLease(Lease):
    """The lease that a dry run gives to the handler; no claim is behind it."""

    async def _complete(self, unit: Unit, result: str | None) -> None:
        if self.completed:
            raise ClaimLost(self.consumer, self.message_id)


async def _after(database: OperatorDatabase, attempt: Attempt, failure: Classified) -> Outcome:
    """Find out what would be written of the failure."""
    async with _rolled_back(database) as unit:
        await unit.claims.reopen(attempt.consumer.name, attempt.message.id)
        return await attempt.write_failure(unit, failure)


async def dry_runs(
    consumer: Consumer,
    database: OperatorDatabase,
    selection: Selection,
    *,
    limit: int,
    reader: Reader | None = None,
) -> list[DryRun]:
    """Run the handler for the first messages of a selection, and take everything back.

    Allowed where a replay is not.
    """
    async with database.begin() as unit:
        selection = await settled(selection, consumer.name, unit, reader)
    source = MessageSource(selection, consumer, database, reader)
    done: list[DryRun] = []
    async with aclosing(source.items()) as items:
        async for item in items:
            async with database.begin() as unit:
                found = await find_message(unit, consumer.name, item)
            message = read_message(consumer, found)
            if isinstance(message, str):
                done.append(DryRun(item.message_id, not_possible=message))
            else:
                done.append(await dry_run(consumer, database, message))
            if len(done) >= limit:
                break
    return done
