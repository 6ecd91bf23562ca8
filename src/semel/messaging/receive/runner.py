"""The loop of a service: fetch, handle, commit the database, then settle with the broker.

    fetch ─▶ read ─▶ lanes per key ─▶ claim + handle + commit ─▶ settle ─▶ fetch …

It finishes a fetch before the next one, so it always knows which offsets may be committed;
several lanes run at once inside a fetch.  A separate task measures the lag, so that a handler
that hangs does not hide it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeAlias

from semel.clock import SYSTEM_CLOCK, Clock
from semel.codec import Unreadable
from semel.errors import Fenced, InDoubt, Misuse, Retryable
from semel.events import EVENTS
from semel.lease import Owner
from semel.message import Coordinates, Message, Partition, Record
from semel.messaging.consumer import Consumer
from semel.messaging.database import Database, is_refusal
from semel.messaging.failed.retries import RetryWorker
from semel.messaging.handle.attempt import handle_message, handle_unreadable
from semel.messaging.handle.batch import NOT_ATTEMPTED, consume_many
from semel.messaging.handle.cancel import end, owned, rung
from semel.messaging.handle.lease import handle_leased
from semel.messaging.outcome import Ack, Nack, Outcome, Settlement, settlement, tell, tell_received
from semel.messaging.receive.broker import Subscription
from semel.messaging.receive.crash import TURNS, Membership, Writer, handle_record, noting_as
from semel.messaging.receive.lanes import lanes, run_lanes
from semel.messaging.receive.offsets import Settling
from semel.messaging.records import WaitingMessage
from semel.messaging.redact import reason_of
from semel.messaging.settings import RunnerSettings
from semel.policy.vocabulary import Duplicates, Mode

log = logging.getLogger("semel.messaging")


# A lower limit for the setting, because each measurement asks the broker.
LEAST_SECONDS: Final = 0.05


class LagWatch:
    """Measures the lag at intervals, and at once when other partitions are assigned."""

    def __init__(
        self, consumer: str, measure: Callable[[], Awaitable[None]], seconds: float
    ) -> None:
        self._consumer = consumer
        self._measure = measure
        self._seconds = max(seconds, LEAST_SECONDS)
        self._assigned: frozenset[Partition] = frozenset()
        self._bell = asyncio.Event()

    def assigned(self, partitions: Collection[Partition]) -> None:
        """Note which partitions are assigned now."""
        if self._assigned != partitions:
            self._assigned = frozenset(partitions)
            self._bell.set()

    @asynccontextmanager
    async def beside(self) -> AsyncIterator[None]:
        """Measure while the block runs; a failed measurement is only logged."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            await end([task])

    async def _run(self) -> None:
        while True:
            await rung(self._bell, self._seconds)
            self._bell.clear()
            # Ask the broker only if metrics are collected.
            if EVENTS.is_measured:
                await self._once()

    async def _once(self) -> None:
        try:
            await self._measure()
        except Exception as error:  # noqa: BLE001  the next measurement may succeed
            log.warning(
                "lag could not be measured",
                extra={"consumer": self._consumer, "why": reason_of(error)},
            )


Arrival: TypeAlias = Message | Unreadable


class Runner:
    """Runs one consumer on one subscription; several processes may do so at once."""

    def __init__(
        self,
        consumer: Consumer,
        subscription: Subscription,
        database: Database,
        settings: RunnerSettings | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        owner: Owner | None = None,
    ) -> None:
        self.consumer = consumer
        self.subscription = subscription
        self.database = database
        self.settings = settings or RunnerSettings()
        _check(consumer, self.settings)
        self._clock = clock
        self._owner = owner or Owner.here()
        self._writer = Writer(self._owner.instance)
        self._settling = Settling(consumer.name, subscription, database, clock)
        self._membership = Membership(
            consumer,
            subscription,
            database,
            self._owner,
            self.settings.max_records,
            self.settings.member_seconds,
        )
        handle = self._leased if self.settings.mode is Mode.LEASED else None
        self._retries = RetryWorker(consumer, database, handle=handle, group=subscription.group)
        self._lag = LagWatch(consumer.name, self._settling.measure_lag, self.settings.lag_seconds)
        self._stopping = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        subscription.on_revoked(self._revoked)
        self._begins_again = False
        self._left_behind = False
        self._stop_by = 0.0
        self._next_renewal = 0.0

    async def run(self) -> None:
        """Work until `stop`; then finish, commit, settle, and leave the group.

        A broker or a database that does not answer is asked again; nothing is acknowledged
        meanwhile.

        Raises:
            NeedsOperator: the broker no longer has what was not handled yet; nothing is skipped.
        """
        retrying = owned(self._retries.run())
        try:
            try:
                async with self._lag.beside():
                    while not self._stopping.is_set():
                        if retrying.done():
                            # Raise its error: otherwise waiting messages would silently not be
                            # handled any more.
                            retrying.result()
                        await self._pass()
            finally:
                await self._end(retrying)
            await self._writer.clear_the_rest(self.consumer.name, self.database)
            if not self._left_behind:
                await self._membership.leave()
        finally:
            await self.subscription.close()

    async def _end(self, retrying: asyncio.Task[None]) -> None:
        """Let the running retry end within the deadline, too."""
        self._retries.stop()
        try:
            if not retrying.done():
                left = self._stop_by - self._clock.monotonic()
                await asyncio.wait({retrying}, timeout=max(left, 0.0))
            if not retrying.done():
                log.error("deadline passed: a retry is cancelled, its message comes back")
        finally:
            await self._cancel(retrying)

    async def run_until_signal(self) -> None:
        """Run until SIGTERM or SIGINT, then stop as `stop` does."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        try:
            await self.run()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Finish the current batch within the deadline, then return from `run`."""
        if not self._stopping.is_set():
            self._stop_by = self._clock.monotonic() + self.settings.stop_seconds
        self._stopping.set()
        self._retries.stop()

    async def run_until_idle(self) -> None:
        """Work until a fetch finds nothing and nothing waits to come back: for tests and jobs."""
        async with self._lag.beside():
            while True:
                due_in = self._settling.resume_due()
                if not await self._pass() and due_in is None:
                    return

    async def _pass(self) -> bool:
        """Fetch once and handle the records; False if there were none."""
        try:
            if self._begins_again:
                await self._begin_again()
            due_in = self._settling.resume_due()
            wait = self.settings.wait_seconds
            wait = wait if due_in is None else min(wait, max(due_in, 0.0))
            records = await self.subscription.fetch(self.settings.max_records, wait)
            # From here on a revocation waits until the fetched records are settled.
            self._idle.clear()
            self._settling.keep_only(self.subscription.assignment)
            await self._membership.work_on(self.subscription.assignment)
            self._lag.assigned(self.subscription.assignment)
            await self._from_time_to_time()
            if not records:
                return False
            await self._work(records)
        except Fenced as error:
            log.warning(
                "partitions lost", extra={"consumer": self.consumer.name, "why": str(error)}
            )
            self._begins_again = True
        except (Retryable, InDoubt) as error:
            log.warning("runner waits", extra={"consumer": self.consumer.name, "why": str(error)})
            await self._wait()
        except Exception as error:
            if not is_refusal(self.database, self.consumer.name, error):
                raise
            await self._wait()
        finally:
            self._idle.set()
        return True

    async def _wait(self) -> None:
        """Wait a little, or for the stop; the next pass begins again."""
        self._begins_again = True
        await rung(self._stopping, self.consumer.settings.held_retry_seconds)

    async def _begin_again(self) -> None:
        """Go back to the committed offsets, so that unsettled records are fetched again.

        Nothing is fetched before this has succeeded: the next commit would otherwise pass the
        unsettled records, and lose them.
        """
        self._settling.keep_only(frozenset())
        for partition in self.subscription.assignment:
            self.subscription.seek(partition, await self.subscription.committed(partition))
            self.subscription.resume(partition)
        self._begins_again = False

    async def _from_time_to_time(self) -> None:
        await self._writer.clear_the_rest(self.consumer.name, self.database)
        now = self._clock.monotonic()
        if now >= self._next_renewal:
            self._next_renewal = now + self.settings.member_seconds / 3
            await self._membership.renew()

    async def _work(self, records: Sequence[Record]) -> None:
        work = owned(self._handle_all(records))
        stop = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await asyncio.wait({work}, timeout=self.settings.stop_seconds)
            if not work.done():
                log.error("deadline passed: handlers are cancelled, their messages come back")
                return
        finally:
            await self._cancel(work, stop)
        await self._settling.settle(work.result())

    async def _cancel(self, *tasks: asyncio.Task[Any]) -> None:
        """Cancel what still runs, and wait a while for its end.

        A task that ignores the cancellation is left running, and this process's row stays: the
        next owner of its partitions handles records one at a time, as after a crash.
        """
        try:
            await end(tasks, self.settings.cancel_seconds)
        finally:
            if not all(task.done() for task in tasks) and not self._left_behind:
                self._left_behind = True
                log.error(
                    "a handler ignores its cancellation and is left behind",
                    extra={"consumer": self.consumer.name},
                )

    async def _revoked(self, partitions: Collection[Partition]) -> None:
        """Wait for the batch, so that its offsets are committed before the revocation."""
        try:
            async with asyncio.timeout(self.settings.stop_seconds):
                await self._idle.wait()
                if not self._left_behind:
                    # Nothing is in flight: the next owner need not handle records one at a time.
                    await self._membership.give_up(partitions)
        except (TimeoutError, Retryable, InDoubt):
            pass  # the row stays: the next owner handles records one at a time
        except Exception as error:
            if not is_refusal(self.database, self.consumer.name, error):
                raise
        finally:
            self._settling.forget(partitions)

    async def _handle_all(self, records: Sequence[Record]) -> dict[Coordinates, Outcome]:
        outcomes: dict[Coordinates, Outcome] = {}
        for record in records:
            await self._settling.deliver(record.at)
        rest = await self._carefully(records, outcomes)
        if not rest:
            return outcomes
        async with TURNS.beside_others():
            arrivals = [self._received(self.consumer.reading.read(record)) for record in rest]
            if self.settings.mode is Mode.BATCHED:
                await self._in_batches(arrivals, outcomes)
            else:
                await self._in_lanes(arrivals, outcomes)
        return outcomes

    def _received(self, arrival: Arrival) -> Arrival:
        tell_received(arrival, self.subscription.group)
        return arrival

    async def _carefully(
        self, records: Sequence[Record], outcomes: dict[Coordinates, Outcome]
    ) -> list[Record]:
        """Read and handle suspects one at a time; return the records that are not suspects."""
        rest: list[Record] = []
        blocked: set[Partition] = set()
        for record in records:
            at = record.at
            if at.place in blocked:
                outcomes[at] = NOT_ATTEMPTED
            elif await self._membership.is_careful(at):
                with noting_as(self._writer):
                    outcomes[at] = await handle_record(
                        self.consumer, self.database, record, self._suspect, self._quarantined
                    )
                if isinstance(settlement(outcomes[at]), Nack):
                    blocked.add(at.place)
                else:
                    await self._membership.handled_alone(at)
            else:
                rest.append(record)
        return rest

    async def _suspect(self, arrival: Arrival) -> Outcome:
        return await self._one(self._received(arrival))

    def _quarantined(self, arrival: Arrival, outcome: Outcome) -> None:
        tell(self._received(arrival), outcome, self.subscription.group)

    async def _in_lanes(
        self, arrivals: Sequence[Arrival], outcomes: dict[Coordinates, Outcome]
    ) -> None:
        async def work(arrival: Arrival) -> Settlement:
            outcome = await self._one(arrival)
            outcomes[_at(arrival)] = outcome
            return settlement(outcome)

        split = lanes(arrivals, self.consumer.settings.order)
        ran = await run_lanes(split, work, self.settings.concurrency)
        for arrival in ran.not_attempted:
            outcomes[_at(arrival)] = NOT_ATTEMPTED

    async def _one(self, arrival: Arrival) -> Outcome:
        """Handle one arrival, timed and counted."""
        began = self._clock.monotonic()
        outcome = await self._handle(arrival)
        tell(arrival, outcome, self.subscription.group, self._clock.monotonic() - began)
        return outcome

    async def _handle(self, arrival: Arrival) -> Outcome:
        if isinstance(arrival, Unreadable):
            return await handle_unreadable(self.consumer, self.database, arrival)
        if self.settings.mode is Mode.LEASED:
            return await self._leased(arrival)
        return await handle_message(self.consumer, self.database, arrival)

    async def _leased(self, message: Message, waiting: WaitingMessage | None = None) -> Outcome:
        owner = self._owner.instance
        return await handle_leased(
            self.consumer, self.database, message, owner, self._clock, waiting
        )

    async def _in_batches(
        self, arrivals: Sequence[Arrival], outcomes: dict[Coordinates, Outcome]
    ) -> None:
        """Split the arrivals into as many batches as run at once, whole lanes each."""
        split = lanes(arrivals, self.consumer.settings.order)
        shares: list[list[Arrival]] = [[] for _ in range(self.settings.concurrency)]
        for number, lane in enumerate(split):
            shares[number % len(shares)].extend(lane)

        shares = [sorted(share, key=_at) for share in shares if share]

        async def work(share: list[Arrival]) -> Settlement:
            await self._share(share, outcomes, is_only=len(shares) == 1)
            return Ack()

        await run_lanes([[share] for share in shares], work, self.settings.concurrency)

    async def _share(
        self, arrivals: Sequence[Arrival], outcomes: dict[Coordinates, Outcome], *, is_only: bool
    ) -> None:
        """Handle a share; the only one of a fetch writes the fetch's marks in its transaction."""
        for arrival in arrivals:
            if isinstance(arrival, Unreadable):
                outcomes[_at(arrival)] = await self._one(arrival)
        messages = [arrival for arrival in arrivals if isinstance(arrival, Message)]
        began = self._clock.monotonic()
        marks = None
        if is_only and messages:
            # The outcomes of unreadable records and of suspects are durable already.
            marks = self._settling.marks(outcomes, [_at(message) for message in messages])
        found = await consume_many(self.consumer, self.database, messages, marks)
        each = (self._clock.monotonic() - began) / max(len(messages), 1)
        for message, outcome in zip(messages, found, strict=True):
            outcomes[_at(message)] = outcome
            tell(message, outcome, self.subscription.group, each)


def _check(consumer: Consumer, settings: RunnerSettings) -> None:
    """Check that the consumer's settings fit the mode of the runner.

    Raises:
        Misuse: they do not.
    """
    is_leased = settings.mode is Mode.LEASED
    if consumer.mode is not None and (consumer.mode is Mode.LEASED) != is_leased:
        raise Misuse(
            f"consumer {consumer.name} is one of mode {consumer.mode}, its runner of mode "
            f"{settings.mode}: its handler would get the other kind of second argument"
        )
    settings.check_batch(consumer.settings.batch)
    if not is_leased:
        return
    if consumer.settings.versioned:
        raise Misuse(f"consumer {consumer.name}: versions are not checked in mode leased")
    if consumer.settings.duplicates is Duplicates.INVOKE:
        raise Misuse(f"consumer {consumer.name}: a duplicate has no lease to be invoked under")
    if consumer.takes_batches:
        raise Misuse(f"consumer {consumer.name}: in mode leased messages are handled one by one")


def _at(arrival: Arrival) -> Coordinates:
    if isinstance(arrival, Unreadable):
        return arrival.record.at
    at = arrival.fetched_from or arrival.source
    if at is None:
        raise ValueError("a message from a broker has coordinates")
    return at
