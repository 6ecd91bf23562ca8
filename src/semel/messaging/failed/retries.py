"""The retry worker: handles the messages of the waiting table that are due, in their order."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, TypeAlias

from semel.clock import SYSTEM_CLOCK
from semel.codec import Unreadable
from semel.crashpoints import CrashPoint, reach
from semel.errors import Fenced, InDoubt, NeedsOperator, Retryable, SemelError
from semel.message import Message
from semel.messaging.database import Database, TransactionEnded, is_refusal
from semel.messaging.failed.attempt_failed import fence_to_park
from semel.messaging.failed.waiting import leave_waiting
from semel.messaging.failure import Classified, FailureClass
from semel.messaging.handle.attempt import classify, handle_message
from semel.messaging.handle.batch import drain
from semel.messaging.handle.cancel import rung
from semel.messaging.handle.claims import ERASED, ClaimRequest, ClaimState, Failure, NotClaimable
from semel.messaging.handler import Consumer, message_of
from semel.messaging.outcome import (
    NO_LONGER_WAITING,
    Nack,
    Outcome,
    ParkedAway,
    RetryLater,
    Skipped,
    settlement,
    tell,
)
from semel.messaging.receive.crash import (
    TURNS,
    Writer,
    clear_note_left_behind,
    clearing_own_notes,
    ends_notes,
    handle_waiting,
    note_tries,
    noting_as,
    unless_begun,
)
from semel.messaging.receive.offsets import Ended
from semel.messaging.records import WaitingMessage, Waits
from semel.messaging.redact import place_of, reason_of
from semel.policy.vocabulary import Duplicates

log = logging.getLogger("semel.messaging")

POLL_SECONDS = 1.0
TAKEN_AT_ONCE = 20
# A worker that found nothing waits this many times as long as its query took.
RESTS: Final = 4

UNREADABLE: Final = Classified(
    FailureClass.SCHEMA, "SCHEMA_INVALID", "its payload is erased or cannot be read", ""
)
"""The failure of a message whose payload was erased, or broken by a revision."""

Handle: TypeAlias = Callable[[Message, WaitingMessage], Awaitable[Outcome]]


async def retry_due(
    consumer: Consumer,
    database: Database,
    limit: int = TAKEN_AT_ONCE,
    handle: Handle | None = None,
    stopping: Callable[[], bool] = lambda: False,
    group: str = "",
) -> list[tuple[str, Outcome]]:
    """Handle what is due, as if in one transaction each; return the ids with their outcomes.

    It takes *limit* messages at once, and continues after them only if all of them must come
    back.  *handle* is how the consumer's runner handles a message, if not in one transaction.
    After *stopping* returns True no transaction begins, and the rest stays unchanged.  Metrics
    name the consumer by its *group*, or by its name if it has none.

    Two workers may run at once: one skips the messages that the other has locked, and a message
    that the other has handled is a duplicate.  A process that dies leaves crash notes of its
    messages; those are handled one at a time, until the one that kills is found.  A process that
    survives clears its notes, even if handling failed.
    """
    found: dict[str, Outcome] = {}
    place = 0
    while True:
        due, done = await _some(
            consumer, database, limit, place, handle, stopping, group or consumer.name
        )
        found |= done
        # Messages that another owner has leased stay due, and must not hide the ones after them.
        hides = all(isinstance(settlement(outcome), Nack) for outcome in done.values())
        if stopping() or len(due) < limit or not hides:
            return list(found.items())
        place = due[-1].place


async def _some(
    consumer: Consumer,
    database: Database,
    limit: int,
    after_place: int,
    handle: Handle | None,
    stopping: Callable[[], bool],
    group: str,
) -> tuple[Sequence[WaitingMessage], dict[str, Outcome]]:
    """Handle up to *limit* messages that are due; return them, and the outcomes in their order."""
    name = consumer.name
    # Read and handle within one turn: a message that was read must not wait for a suspect,
    # because another process could handle it meanwhile.
    async with TURNS.beside_others():
        noted: list[str] = []
        async with unless_begun(name, database, noted), database.begin() as unit:
            due = await unit.waiting.take_due(name, limit, after_place)
            # A duplicate that is invoked may be quarantined: `_one` asks for its dead letter.
            invokes = consumer.settings.duplicates is Duplicates.INVOKE
            if handle is None and (len(due) > 1 or not invokes):
                noted += [waiting.message_id for waiting in due]
            suspects = await note_tries(unit, name, noted, are_locked=True)
        reach(CrashPoint.RETRY_TAKE_AFTER, name)
        fresh = [one for one in due if one.message_id in noted and one.message_id not in suspects]
        done = await _noted(consumer, database, fresh, stopping, group)
    for waiting in due:
        if waiting.message_id not in done and not stopping():
            began = SYSTEM_CLOCK.monotonic()
            outcome = await _one(consumer, database, waiting, handle)
            consumer.note(outcome)
            tell(waiting, outcome, group, SYSTEM_CLOCK.monotonic() - began)
            done[waiting.message_id] = outcome
    names = [waiting.message_id for waiting in due]
    return due, {name: done[name] for name in names if name in done}


async def _noted(
    consumer: Consumer,
    database: Database,
    due: Sequence[WaitingMessage],
    stopping: Callable[[], bool],
    group: str,
) -> dict[str, Outcome]:
    """Handle messages whose tries are noted; the caller handles those without an outcome alone."""
    done: dict[str, Outcome] = {}
    by_id = {waiting.message_id: waiting for waiting in due}
    noted = set(by_id)
    began = SYSTEM_CLOCK.monotonic()
    async with clearing_own_notes(consumer.name, database, noted):
        async for found in _tried(consumer, database, due, stopping):
            done.update(found)
            # `drain` clears the notes of all that it tried.
            is_cleared = len(due) > 1 or all(map(ends_notes, found.values()))
            noted.difference_update(found if is_cleared else ())
            each = (SYSTEM_CLOCK.monotonic() - began) / len(found)
            for message_id, outcome in found.items():
                consumer.note(outcome)
                tell(by_id[message_id], outcome, group, each)
            began = SYSTEM_CLOCK.monotonic()
    return done


async def _tried(
    consumer: Consumer,
    database: Database,
    due: Sequence[WaitingMessage],
    stopping: Callable[[], bool],
) -> AsyncIterator[dict[str, Outcome]]:
    """Yield the outcomes of one transaction after the other, by id."""
    messages = _readable(consumer, due)
    if len(due) > 1:
        async for found in drain(consumer, database, messages, stopping):
            yield found
    elif messages and not stopping():
        # A transaction of its own for the failure, without a savepoint: an erasure between the
        # attempt and its failure finds the message where it waits.
        [message] = messages.values()
        yield {message.id: await handle_message(consumer, database, message, due[0])}


def _readable(consumer: Consumer, due: Sequence[WaitingMessage]) -> dict[str, Message]:
    found: dict[str, Message] = {}
    for waiting in due:
        with suppress(Exception):
            message = message_of(consumer, waiting)
            if isinstance(message, Message) and waiting.erased_at is None:
                found[waiting.message_id] = message
    return found


async def _one(
    consumer: Consumer, database: Database, waiting: WaitingMessage, handle: Handle | None
) -> Outcome:
    """Handle one message; an unexpected error parks this message alone.

    Raises:
        SemelError: the database does not answer, which is not the fault of this message.
    """

    async def read_and_handle() -> Outcome:
        message = message_of(consumer, waiting)
        if isinstance(message, Unreadable):
            return await _park_unhandled(consumer, database, waiting, UNREADABLE)
        if handle is not None:
            return await handle(message, waiting)
        return await handle_message(consumer, database, message, waiting)

    try:
        if waiting.erased_at is not None:
            return await _park_unhandled(consumer, database, waiting, UNREADABLE)
        return await handle_waiting(consumer, database, waiting, read_and_handle)
    except (Retryable, InDoubt, Fenced, NeedsOperator, TransactionEnded):
        raise
    except Exception as error:  # noqa: BLE001  one message must not stop the worker
        why = classify(consumer, database, error)
    try:
        return await _park_unhandled(consumer, database, waiting, why)
    except (Retryable, InDoubt, Fenced, NeedsOperator):
        raise
    except Exception as error:  # noqa: BLE001  one message must not stop the worker
        log.error(  # noqa: TRY400  a traceback shows the parameters of statements
            "waiting message could not be parked; it is tried again",
            extra={
                "consumer": consumer.name,
                "id": waiting.message_id,
                "reason": reason_of(error),
                "at": place_of(error),
            },
        )
        return RetryLater(consumer.settings.held_retry_seconds, why)


async def _park_unhandled(
    consumer: Consumer, database: Database, waiting: WaitingMessage, why: Classified
) -> Outcome:
    """Park a message that cannot be handled, with the reason for the person who looks at it."""
    log.error(
        "waiting message parked: it cannot be handled",
        extra={"consumer": consumer.name, "id": waiting.message_id, "reason": why.reason},
    )
    async with database.begin() as unit:
        now = await unit.waiting.get(consumer.name, waiting.message_id)
        if now is None:
            return Skipped(NO_LONGER_WAITING)
        code = why.code if now.erased_at is None else ERASED
        marker = "" if now.erased_at is None else ERASED
        failure = Failure(ClaimState.PARKED, now.attempts, why.code, marker=marker)
        try:
            fence = await fence_to_park(unit, consumer, ClaimRequest(now.message_id))
        except NotClaimable:
            return RetryLater(consumer.settings.held_retry_seconds, why)
        await unit.claims.reopen(consumer.name, now.message_id)
        if not await unit.claims.mark_failed(consumer.name, now.message_id, failure, fence):
            handled = Skipped()
            await leave_waiting(unit, consumer.name, Ended(now.message_id, now.source, handled))
            return handled
        parked = replace(now, waits=Waits.PARKED, reason=why.reason, exception=why.exception)
        await unit.waiting.put(replace(parked, error_code=code))
        await clear_note_left_behind(unit, consumer.name, now.message_id)
    return ParkedAway(why.reason, why)


def _is_failure(outcome: Outcome) -> bool:
    return getattr(outcome, "failure", None) is not None


class RetryWorker:
    """Runs `retry_due` whenever a message may be due."""

    def __init__(
        self,
        consumer: Consumer,
        database: Database,
        poll_seconds: float = POLL_SECONDS,
        handle: Handle | None = None,
        group: str = "",
    ) -> None:
        self.consumer = consumer
        self.database = database
        self._handle = handle
        self._group = group
        self._poll_seconds = poll_seconds
        self._writer = Writer(uuid.uuid4().hex)
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Work until `stop`; a database that does not answer is asked again.

        Raises:
            TransactionEnded: a handler committed past every guard.  The worker stops, because
                claims without effects may be durable; start it again after comparing them.
        """
        with noting_as(self._writer):
            await self._run()
        await self._writer.clear_the_rest(self.consumer.name, self.database)

    async def _run(self) -> None:
        circuit = self.consumer.circuit
        while not self._stopping.is_set():
            if circuit.seconds_left:
                await rung(self._stopping, min(circuit.seconds_left, self._poll_seconds))
                continue
            began, was_open = SYSTEM_CLOCK.monotonic(), circuit.is_open
            try:
                await self._writer.clear_the_rest(self.consumer.name, self.database)
                done = await retry_due(
                    self.consumer,
                    self.database,
                    1 if was_open else TAKEN_AT_ONCE,
                    handle=self._handle,
                    stopping=self._ends_now,
                    group=self._group,
                )
                if was_open and circuit.is_open and any(_is_failure(one) for _, one in done):
                    circuit.trying()
                    continue
                if any(not isinstance(settlement(outcome), Nack) for _, outcome in done):
                    continue
                # A message that another worker handles stays due until that worker is done.
                wait = self._poll_seconds
                if not done:
                    wait = await self._wait_seconds()
                    # The query takes long if very many messages wait: do not repeat it at once.
                    wait = max(wait, RESTS * (SYSTEM_CLOCK.monotonic() - began))
            except TransactionEnded:
                raise
            except SemelError as error:
                log.warning(
                    "retry worker waits", extra={"consumer": self.consumer.name, "why": str(error)}
                )
                wait = self._poll_seconds
            except Exception as error:
                if not is_refusal(self.database, self.consumer.name, error):
                    raise
                wait = self._poll_seconds
            await rung(self._stopping, wait)

    async def _wait_seconds(self) -> float:
        async with self.database.begin() as unit:
            left = await unit.waiting.seconds_to_next(self.consumer.name)
        if left is None:
            return self._poll_seconds
        return min(max(left, 0.01), self._poll_seconds)

    def _ends_now(self) -> bool:
        return self._stopping.is_set() or self.consumer.circuit.seconds_left > 0

    def stop(self) -> None:
        """Finish the current transaction, then return from `run`."""
        self._stopping.set()
