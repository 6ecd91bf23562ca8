"""The inbox: messages are stored first, and handled in the same transaction or by a worker later.

    store_and_handle   begin ─▶ store ─▶ claim, handle ─▶ mark processed ─▶ commit ─▶ (ack)
    store              begin ─▶ store ─▶ commit ─▶ (ack)       … and an inbox's worker, later

An id is stored once for each consumer.  Acknowledge after the answer: then the message or its
effect is durable.  The worker is an ordinary runner whose broker is the table: claims, retries,
dead letters and the search for a message that kills are the runner's.

    fetch: rows that are due ─▶ runner ─▶ commit: rows have what their claims show
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from semel.clock import SYSTEM_CLOCK, Clock
from semel.crashpoints import CrashPoint, reach
from semel.errors import Fenced, InDoubt, Misuse, Retryable
from semel.lease import Owner
from semel.message import Coordinates, Message, Partition, Record, producer_id
from semel.messaging.database import Database, Unit, is_refusal
from semel.messaging.failed.attempt_failed import write_conflict
from semel.messaging.handle.attempt import Attempt
from semel.messaging.handle.cancel import rung
from semel.messaging.handle.claims import HeldElsewhere, NotDue, refusal
from semel.messaging.handler import Consumer, record_of
from semel.messaging.outcome import Outcome, RetryLater, Skipped, tell, tell_received
from semel.messaging.receive.broker import INBOX, Revoked
from semel.messaging.receive.runner import Runner
from semel.messaging.records import InboxMessage
from semel.messaging.redact import reason_of
from semel.messaging.send.relay import LEASE_SECONDS, Leading
from semel.messaging.settings import Order, RunnerSettings
from semel.policy.vocabulary import Duplicates, Mode, RetryMode

log = logging.getLogger("semel.messaging")


@dataclass(frozen=True, slots=True)
class Stored:
    """The message is durable, and a worker handles it."""


class Inbox:
    """The inbox of one consumer."""

    def __init__(self, consumer: Consumer, database: Database) -> None:
        """Use *consumer*, with order per key and a retry table: no broker delivers again.

        Raises:
            Misuse: it checks versions, or is called for duplicates: an inbox supports neither.
        """
        settings = consumer.settings
        if settings.versioned:
            raise Misuse(f"consumer {consumer.name}: an inbox does not check versions")
        if settings.duplicates is Duplicates.INVOKE:
            raise Misuse(
                f"consumer {consumer.name}: an inbox does not call the handler for a duplicate; "
                f"send through an outbox, and use Duplicates.SKIP"
            )
        retry = replace(settings.retry, mode=RetryMode.RETRY_TABLE)
        settings = replace(settings, order=Order.KEY, holds_keys=None, retry=retry)
        self.consumer = consumer.with_settings(settings)
        self.database = database

    async def store(self, message: Message) -> Stored | Outcome:
        """Make a message durable, to be handled by an `InboxWorker`.

        Acknowledge after any answer: the message is stored, was stored or handled before, or is
        dead-lettered because its id is known with another payload.

        Raises:
            Retryable: nothing was stored; do not acknowledge.
            InDoubt: the commit is unknown; do not acknowledge, storing it again is safe.
            Misuse: its id begins like one that semel generates.
        """
        async with self.database.begin() as unit:
            known = await self._known(unit, message)
            reach(CrashPoint.MESSAGE_COMMIT_BEFORE, self.consumer.name)
        reach(CrashPoint.MESSAGE_COMMIT_AFTER, self.consumer.name)
        if known is None:
            # No events here: the worker's runner counts it.
            return Stored()
        tell_received(message, self.consumer.name)
        tell(message, known, self.consumer.name)
        return known

    async def store_and_handle(self, message: Message) -> Outcome:
        """Store and handle a message in one transaction.

        An exception of the handler is raised here, and nothing is kept: the broker delivers the
        message again.  A violated constraint of the handler's own tables is such a failure,
        never a duplicate.  If an earlier message of its key waits, it waits behind that one.

        Raises:
            Retryable: nothing happened; do not acknowledge.
            InDoubt: the commit is unknown; do not acknowledge, the next delivery finds out.
            Misuse: the consumer's handler takes a lease, and this is one transaction.
        """
        name = self.consumer.name
        if self.consumer.mode is Mode.LEASED:
            raise Misuse(f"consumer {name}: one transaction has no lease to give; use `store`")
        began = SYSTEM_CLOCK.monotonic()
        async with self.database.begin() as unit:
            outcome = await self._known(unit, message)
            if outcome is None:
                outcome = await Attempt(self.consumer, message).run(unit)
                await unit.inbox.settle(name, [message.id])
            if isinstance(outcome, RetryLater):
                raise Retryable(f"consumer {name}: message {message.id!r} cannot be handled now")
            reach(CrashPoint.MESSAGE_COMMIT_BEFORE, name)
        reach(CrashPoint.MESSAGE_COMMIT_AFTER, name)
        tell_received(message, name)
        tell(message, outcome, name, SYSTEM_CLOCK.monotonic() - began)
        return outcome

    async def _known(self, unit: Unit, message: Message) -> Outcome | None:
        """Store a message; return what is known of its id if it is not new."""
        name = self.consumer.name
        producer_id(message.id)
        claim = await unit.claims.look_up(name, message.id)
        if claim is not None:
            answer = refusal(claim, message.digest, await unit.now())
            if isinstance(answer, HeldElsewhere):
                raise Retryable(f"consumer {name}: {answer.owner} is handling {message.id!r}")
            if answer is not None and not isinstance(answer, NotDue):
                return await Attempt(self.consumer, message).refuse(unit, answer)
            if await unit.waiting.get(name, message.id) is not None:
                return Skipped("stored before")
        if await unit.inbox.store(InboxMessage.of(name, message)):
            return None
        known = await unit.inbox.get(name, message.id)
        if known is None:
            # Retention deleted it between two statements.
            raise Retryable(f"consumer {name}: message {message.id!r} was deleted just now")
        if known.payload_hash and known.payload_hash != message.digest:
            return await write_conflict(unit, self.consumer, message, known.payload_hash)
        return Skipped("duplicate" if known.processed_at is not None else "stored before")


class InboxSubscription:
    """The rows of one inbox that are due, as the only partition of a `Subscription`.

    An offset is the place of a row.  A transaction that commits late adds a row before those
    that were fetched already: so each fetch begins with the first row that is due, and a commit
    settles exactly the rows that were fetched.
    """

    assignment: Final = frozenset({INBOX})

    def __init__(
        self,
        consumer: str,
        database: Database,
        bell: asyncio.Event,
        found_none: Callable[[], Awaitable[None]],
    ) -> None:
        """Wait for *bell* if nothing is due, after a call of *found_none*."""
        self.group = consumer
        self._database = database
        self._bell = bell
        self._found_none = found_none
        self._fetched: dict[int, str] = {}
        """The ids of the fetched rows that are not settled, by their places."""

        self._is_paused = False

    def on_revoked(self, listener: Revoked) -> None:
        """Do nothing: a leader that loses its inbox ends its whole runner."""

    async def fetch(self, max_records: int, wait_seconds: float) -> Sequence[Record]:
        """Return the first rows that are due; if there are none, wait for the next look.

        A fetch begins with the first row that is due, so the rows of the one before are settled
        first.
        """
        self._bell.clear()
        if self._fetched:
            await rung(self._bell, wait_seconds)
            return []
        rows: Sequence[InboxMessage] = ()
        if not self._is_paused:
            async with self._database.begin() as unit:
                rows = await unit.inbox.due(self.group, max_records)
        self._fetched = {row.place: row.message_id for row in rows}
        if not rows:
            await self._found_none()
            async with self._database.begin() as unit:
                # Not while there is a backlog: the statement would read all of it.
                await unit.inbox.settle_again(self.group)
            await rung(self._bell, wait_seconds)
        return [record_of(row, Coordinates(INBOX.topic, INBOX.number, row.place)) for row in rows]

    async def commit(self, offsets: Mapping[Partition, int]) -> None:
        """Settle the fetched rows before an offset; the runner has ended them."""
        settled = [id for place, id in self._fetched.items() if place < offsets[INBOX]]
        try:
            async with self._database.begin() as unit:
                await unit.inbox.settle(self.group, settled)
        finally:
            # What cannot be settled now is fetched again, and found to be handled.
            self._fetched = {p: id for p, id in self._fetched.items() if p >= offsets[INBOX]}
            self._bell.set()

    async def committed(self, partition: Partition) -> int:
        """Return the place of the first row that is due."""
        return (await self._bounds())[0]

    async def end(self, partition: Partition) -> int:
        """Return the place after the last row that is due."""
        return (await self._bounds())[1]

    async def _bounds(self) -> tuple[int, int]:
        async with self._database.begin() as unit:
            return await unit.inbox.bounds(self.group)

    def seek(self, partition: Partition, offset: int) -> None:
        """Fetch what is due again."""
        self._fetched = {}

    def pause(self, partition: Partition) -> None:
        """Fetch nothing until `resume`."""
        self._is_paused = True

    def resume(self, partition: Partition) -> None:
        """Fetch again."""
        self._is_paused = False

    async def close(self) -> None:
        """Do nothing: the leadership belongs to the worker."""


BATCH: Final = 20
POLL_SECONDS: Final = 1.0
UNTIL_EMPTY_SECONDS: Final = 0.05


class InboxWorker:
    """Handles stored messages, those of one key in the order of their arrival.

    Any number of workers may be started, in any number of processes: one leads, and the others
    wait until it stops or its lease ends.
    """

    def __init__(
        self,
        consumer: Consumer,
        database: Database,
        *,
        batch: int = BATCH,
        concurrency: int = 1,
        poll_seconds: float = POLL_SECONDS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Fetch up to *batch* messages at once, and handle those of *concurrency* keys at once.

        Each message has a transaction of its own, unless the consumer's mode is another one.
        """
        self.consumer = Inbox(consumer, database).consumer
        self.database = database
        mode = consumer.mode or (Mode.BATCHED if consumer.takes_batches else Mode.TRANSACTIONAL)
        self._settings = RunnerSettings(
            mode,
            max_records=batch,
            concurrency=concurrency,
            wait_seconds=poll_seconds,
        )
        self._clock = clock
        self._leading = Leading(database, f"inbox:{consumer.name}", LEASE_SECONDS, clock)
        self._runner: Runner | None = None
        self._bell = asyncio.Event()
        """Set when there may be messages, or at the stop."""

        self._stopping = asyncio.Event()
        self._until_empty = False

    async def run(self) -> None:
        """Handle what is stored until `stop`; try again if the database does not answer.

        Also if it refuses: then each refusal is logged.
        """
        self._leading.begin()
        try:
            while not self._stopping.is_set() and not await self._has_led():
                await rung(self._stopping, self._poll_seconds)
                await self._stop_if_empty()
        finally:
            self._stopping.clear()

    async def run_until_empty(self) -> None:
        """Handle messages until none is left that will be tried, by this worker or another."""
        self._until_empty = True
        try:
            await self.run()
        finally:
            self._until_empty = False

    def stop(self) -> None:
        """Finish the current batch, then return from `run`."""
        self._stopping.set()
        self._bell.set()
        if self._runner is not None:
            self._runner.stop()

    def wake(self) -> None:
        """Look for new messages now; call it on the worker's event loop."""
        self._bell.set()

    @property
    def _poll_seconds(self) -> float:
        poll_seconds = self._settings.wait_seconds
        return min(poll_seconds, UNTIL_EMPTY_SECONDS) if self._until_empty else poll_seconds

    async def _has_led(self) -> bool:
        """Lead until the stop; return False if another worker leads, or this one cannot."""
        try:
            async with self.database.begin() as unit:
                leadership = await self._leading.take(unit.outbox)
            if leadership is None:
                return False
            self._runner = self._new_runner()
            if self._stopping.is_set():
                self._runner.stop()
            await self._leading.while_leading(leadership, self._runner.run(), _nothing)
        except (Retryable, InDoubt, Fenced) as error:
            why = {"consumer": self.consumer.name, "reason": reason_of(error)}
            log.warning("inbox worker waits", extra=why)
            return False
        except Exception as error:
            if not is_refusal(self.database, self.consumer.name, error):
                raise
            return False
        finally:
            self._runner = None
        return True

    def _new_runner(self, owner: Owner | None = None) -> Runner:
        subscription = InboxSubscription(
            self.consumer.name, self.database, self._bell, self._stop_if_empty
        )
        return Runner(
            self.consumer,
            subscription,
            self.database,
            replace(self._settings, wait_seconds=self._poll_seconds),
            clock=self._clock,
            owner=owner,
        )

    async def _stop_if_empty(self) -> None:
        """Stop if this is a run until the inbox is empty, and nothing waits for a retry."""
        if not self._until_empty:
            return
        async with self.database.begin() as unit:
            pending = await unit.inbox.pending(self.consumer.name)
            if not pending and await unit.waiting.seconds_to_next(self.consumer.name) is None:
                self.stop()


async def _nothing() -> None:
    """Do nothing with a renewal of the lease."""
