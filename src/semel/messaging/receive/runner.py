"""The loop of a service: fetch, handle, commit the database, then settle with the broker.

    fetch ─▶ read ─▶ lanes per key        one loop: it alone fetches, seeks and resumes
                        │ take
                     claim + handle + commit ─▶ settle        *concurrency* workers

Fetching goes on behind a slow message, up to a number of records in flight: it holds its own
lane, and the committed offset of its partition, which alone is paused at that number.  A separate
task measures the lag, so that a handler that hangs does not hide it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeAlias, TypeVar

from semel.clock import SYSTEM_CLOCK, Clock
from semel.codec import Unreadable
from semel.errors import Fenced, InDoubt, Misuse, Retryable, SemelError
from semel.events import EVENTS
from semel.lease import Owner
from semel.message import Coordinates, Message, Partition, Record
from semel.messaging.database import Database, is_refusal
from semel.messaging.failed.retries import RetryWorker
from semel.messaging.failed.retrytopic import came_by_retry, read_delivery, seconds_until_due
from semel.messaging.handle.attempt import handle_message, handle_unreadable
from semel.messaging.handle.batch import NOT_ATTEMPTED, consume_many
from semel.messaging.handle.cancel import end, owned, rung
from semel.messaging.handle.lease import handle_leased
from semel.messaging.handler import Consumer, holds_key
from semel.messaging.outcome import Nack, Outcome, RetryLater, settlement, tell, tell_received
from semel.messaging.receive.broker import MemberEnded, Subscription
from semel.messaging.receive.crash import TURNS, Membership, Writer, handle_record, noting_as
from semel.messaging.receive.lanes import Lanes
from semel.messaging.receive.offsets import Settling
from semel.messaging.records import WaitingMessage, Waits
from semel.messaging.redact import reason_of
from semel.messaging.settings import RunnerSettings
from semel.policy.vocabulary import BatchPolicy, Duplicates, Mode

log = logging.getLogger("semel.messaging")


# How long a fetch waits while handlers run.
BUSY_SECONDS: Final = 0.05

STOPPING: Final = frozenset({BatchPolicy.STOP, BatchPolicy.FAIL_BATCH})
"""The policies after which nothing of a partition runs until the failed message comes back."""

# How often a refused commit is repeated at the end of the work.
MOST_COMMITS: Final = 10

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
Result = TypeVar("Result")


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
        check_settings(consumer, database, self.settings)
        self._clock = consumer.circuit.clock = clock
        self._owner = owner or Owner.here()
        self._writer = Writer(self._owner.instance)
        self._settling = Settling(consumer.name, subscription, database, clock)
        self._most_in_flight = max(self.settings.max_in_flight, self.settings.max_records)
        self._lanes: Lanes[Arrival] = Lanes(consumer.settings.order)
        self._workers: list[asyncio.Task[None]] = []
        self._done: dict[Coordinates, Outcome] = {}
        """The outcomes that are durable and not settled yet."""

        self._settles = asyncio.Lock()
        self._settled_at = 0.0
        self._work_came = asyncio.Event()
        self._work_ended = asyncio.Event()
        self._membership = Membership(
            consumer,
            subscription,
            database,
            self._owner,
            self._most_in_flight,
            self.settings.member_seconds,
        )
        handle = self._leased if self.settings.mode is Mode.LEASED else None
        self._retries = RetryWorker(consumer, database, handle=handle, group=subscription.group)
        self._lag = LagWatch(consumer.name, self._settling.measure_lag, self.settings.lag_seconds)
        self._stopping = asyncio.Event()
        self._is_fed = asyncio.Event()
        """Not set between a fetch and the moment when its records wait in lanes."""

        self._is_fed.set()
        subscription.on_revoked(self._revoked)
        self._begins_again = False
        self._left_behind = False
        self._leaving: frozenset[Partition] = frozenset()
        """Partitions that were given up, and are still assigned for a moment."""

        self._stop_by = 0.0
        self._next_renewal = clock.monotonic() + self.settings.member_seconds / 3

    async def run(self) -> None:
        """Work until `stop`; then finish, commit, settle, and leave the group.

        A broker or a database that does not answer is asked again; nothing is acknowledged
        meanwhile.

        Raises:
            NeedsOperator: the broker no longer has what was not handled yet, and nothing is
                skipped; or a pipeline runs the consumer.
            MemberEnded: the client of the broker has failed permanently; a new process can go on.
        """
        try:
            await self._need_service()
            retrying = owned(self._retries.run())
            try:
                async with self._lag.beside():
                    while not self._stopping.is_set():
                        if retrying.done():
                            # Raise its error: otherwise waiting messages would silently not be
                            # handled any more.
                            retrying.result()
                        await self._pass()
                    await self._drain(self._stop_by)
            finally:
                await self._end_workers()
                await self._end(retrying)
            await self._commit_again(self._stop_by)
            await self._leave()
        finally:
            await self.subscription.close()

    async def _need_service(self) -> None:
        """Raise if a pipeline runs the consumer, before waiting messages are looked at.

        A database that does not answer is asked again when partitions are assigned.
        """
        try:
            await self._membership.need_service()
        except (Retryable, InDoubt) as error:
            log.warning("runner waits", extra={"consumer": self.consumer.name, "why": str(error)})
        except Exception as error:
            if not is_refusal(self.database, self.consumer.name, error):
                raise

    async def _leave(self) -> None:
        """Remove this process's row, if the database answers before the deadline.

        Otherwise the row stays: the next owner handles records one at a time, as after a crash.
        """
        left = self._stop_by - self._clock.monotonic()
        try:
            async with asyncio.timeout(max(left, self.settings.cancel_seconds)):
                await self._writer.clear_the_rest(self.consumer.name, self.database)
                if not self._left_behind:
                    await self._membership.leave()
        except (TimeoutError, Fenced, Retryable, InDoubt) as error:
            nouns = {"consumer": self.consumer.name, "why": reason_of(error)}
            log.warning("stopped without an answer of the database", extra=nouns)
        except Exception as error:
            if not is_refusal(self.database, self.consumer.name, error):
                raise

    async def _commit_again(self, until: float) -> None:
        """Commit offsets that the broker refused, until it takes them or the deadline has passed.

        Without this, their records would be behind the committed offset when retention deletes
        them, and the next start would need an operator.
        """
        for _ in range(MOST_COMMITS):
            if not self._settling.is_behind:
                return
            await self._settled_or_told()
            left = until - self._clock.monotonic()
            if left <= 0 or not self._settling.is_behind:
                return
            await asyncio.sleep(min(self.consumer.settings.held_retry_seconds, left))

    async def _settled_or_told(self) -> None:
        try:
            await self._settle()
        except (Fenced, Retryable, InDoubt) as error:
            log.warning("not settled", extra={"consumer": self.consumer.name, "why": str(error)})

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
        self._work_ended.set()
        self._retries.stop()

    async def run_until_idle(self) -> None:
        """Work until a fetch finds nothing and nothing waits to come back: for tests and jobs."""
        try:
            async with self._lag.beside():
                while await self._pass():
                    pass
                await self._commit_again(self._clock.monotonic() + self.settings.stop_seconds)
        finally:
            await self._end_workers()

    async def _pass(self) -> bool:
        """Fetch once and let the records wait in lanes; False if there is nothing to do."""
        try:
            if self._begins_again:
                await self._begin_again()
            self._keep_workers()
            if self._done and self._is_due:
                await self._settle()
            for partition in self._settling.coming_back:
                if not self._lanes.holds(partition):
                    self._settling.bring_back(partition)
                    self._lanes.drop({partition})
            due_in = self._settling.resume_due()
            wait = self.settings.wait_seconds
            wait = wait if due_in is None else min(wait, max(due_in, 0.0))
            await self._from_time_to_time()
            room = self._settling.room(self._most_in_flight)
            if self._lanes.is_busy:
                # Not behind a full partition: then the end of its work is waited for.
                wait = 0.0 if self._settling.is_full else min(wait, BUSY_SECONDS)
            records = await self.subscription.fetch(min(self.settings.max_records, room), wait)
            # From here on a revocation waits until the records are in lanes.
            self._is_fed.clear()
            assignment = self.subscription.assignment
            self._refuse_own_letters(assignment)
            self._settling.keep_only(assignment)
            self._leaving = (self._leaving & assignment) - {record.at.place for record in records}
            await self._membership.work_on(assignment - self._leaving)
            self._lag.assigned(assignment)
            if records:
                await self._feed(records)
            elif self._lanes.is_busy:
                await self._until_work_ends(BUSY_SECONDS)
            else:
                self._keep_workers()
                is_done = not (self._done or self._settles.locked())
                if not is_done or self._is_late:
                    await self._settle()
                if is_done:
                    return self._settling.is_waiting
        except Fenced as error:
            log.warning(
                "partitions lost", extra={"consumer": self.consumer.name, "why": str(error)}
            )
            self._begins_again = True
        except MemberEnded:
            raise
        except (Retryable, InDoubt) as error:
            log.warning("runner waits", extra={"consumer": self.consumer.name, "why": str(error)})
            await self._wait()
        except Exception as error:
            if not is_refusal(self.database, self.consumer.name, error):
                raise
            await self._wait()
        finally:
            self._is_fed.set()
        return True

    def _refuse_own_letters(self, assignment: Collection[Partition]) -> None:
        """Raise if the consumer reads its own dead letters: each would become another one.

        Raises:
            Misuse: it does; nothing of this fetch was handled.
        """
        settings = self.consumer.settings
        own = {settings.dead_letter_topic, settings.unreadable_topic} - {""}
        read = sorted(own & {partition.topic for partition in assignment}) if own else []
        if read:
            raise Misuse(
                f"consumer {self.consumer.name} reads {read[0]}, the topic of its own dead letters:"
                f" each of them would become another one. Read it with another consumer"
            )

    async def _until_work_ends(self, seconds: float) -> None:
        """Wait until a worker has ended something, or for the stop."""
        self._work_ended.clear()
        if not self._stopping.is_set():
            await rung(self._work_ended, seconds)

    async def _wait(self) -> None:
        """Wait a little, or for the stop; the next pass begins again."""
        self._begins_again = True
        await rung(self._stopping, self.consumer.settings.held_retry_seconds)

    async def _begin_again(self) -> None:
        """Go back to the committed offsets, so that unsettled records are fetched again.

        Nothing is fetched before this has succeeded: the next commit would otherwise pass the
        unsettled records, and lose them.  Running handlers finish first, unless one of them is
        the reason.
        """
        self._lanes.drop(self._lanes.partitions)
        await self._drain(self._clock.monotonic() + self.settings.stop_seconds)
        self._settling.keep_only(frozenset())
        for partition in self.subscription.assignment:
            self.subscription.seek(partition, await self.subscription.committed(partition))
            self.subscription.resume(partition)
        self._begins_again = False

    async def _from_time_to_time(self) -> None:
        await self._writer.clear_the_rest(self.consumer.name, self.database)
        now = self._clock.monotonic()
        if now >= self._next_renewal or self._membership.tells_otherwise:
            self._next_renewal = now + self.settings.member_seconds / 3
            try:
                lag = await self._settling.lag()
            except SemelError:
                lag = None  # people read it, and nothing else
            await self._membership.renew(lag)

    def _keep_workers(self) -> None:
        """Start the workers, or raise the error of one that failed."""
        self._raise_failures()
        if not self._workers:
            self._workers = [owned(self._work()) for _ in range(self.settings.concurrency)]
            for worker in self._workers:
                # Nothing else ends the wait for a worker that failed.
                worker.add_done_callback(lambda _: self._work_ended.set())

    def _raise_failures(self) -> None:
        for worker in self._workers:
            if worker.done():
                worker.result()

    async def _drain(self, until: float) -> None:
        """Finish what was fetched within the deadline, settle it, and end the workers."""
        try:
            await self._finish(until)
        except (Fenced, Retryable, InDoubt) as error:
            log.warning("not settled", extra={"consumer": self.consumer.name, "why": str(error)})
        except Exception as error:
            if not is_refusal(self.database, self.consumer.name, error):
                raise
        finally:
            await self._end_workers()

    async def _finish(self, until: float) -> None:
        """Wait until nothing runs any more or a worker has failed, then settle what is done.

        Raises:
            Exception: a worker's, or of settling.
        """
        if self.consumer.circuit.is_open:
            # Nothing of this would be handled before the deadline.
            self._lanes.drop(self._lanes.partitions)
        while self._lanes.is_busy and not any(worker.done() for worker in self._workers):
            left = until - self._clock.monotonic()
            if left <= 0:
                log.error("deadline passed: handlers are cancelled, their messages come back")
                break
            self._work_ended.clear()
            await rung(self._work_ended, left)
        self._keep_workers()
        if not (self._lanes.is_busy and self._settles.locked()):
            # Otherwise a batch that has no end holds the lock.
            await self._settle()
            self._keep_workers()

    async def _end_workers(self) -> None:
        """Cancel what runs, and forget what waits and what is not settled."""
        workers, self._workers = self._workers, []
        await self._cancel(*workers)
        self._lanes.clear()
        self._done.clear()

    async def _work(self) -> None:
        """Take what is ready, handle it, settle from time to time."""
        is_batched = self.settings.mode is Mode.BATCHED
        at_most = -(-self.settings.max_records // self.settings.concurrency) if is_batched else 1
        circuit = self.consumer.circuit
        while True:
            if self._lanes.is_ready and circuit.seconds_left:
                await asyncio.sleep(min(circuit.seconds_left, BUSY_SECONDS))
                continue
            taken = self._lanes.take(1 if circuit.is_open else at_most)
            if taken and circuit.is_open:
                circuit.trying()
            if not taken:
                self._work_came.clear()
                await self._work_came.wait()
                continue
            async with TURNS.beside_others():
                outcomes = await (self._batch(taken) if is_batched else self._alone(taken))
            if asyncio.current_task() not in self._workers:
                return  # it ignored its cancellation, and others have its lanes by now
            self._done |= outcomes
            back = [
                arrival
                for arrival in taken
                if isinstance(settlement(outcomes[_at(arrival)]), Nack)
                and self._settling.expects(_at(arrival))
            ]
            self._lanes.done(taken, back)
            if self.consumer.settings.batch in STOPPING:
                self._lanes.close({_at(arrival).place for arrival in back})
            self._work_ended.set()
            self._work_came.set()
            if is_batched or self._is_due:
                await self._settle()

    @property
    def _is_due(self) -> bool:
        """Settle now: enough is done, or nothing else is ready to run."""
        waited = asyncio.get_running_loop().time() - self._settled_at
        late = waited >= self.settings.settle_seconds
        return late or len(self._done) >= self.settings.max_records or not self._lanes.is_ready

    @property
    def _is_late(self) -> bool:
        """A commit failed a while ago, and no further message came since."""
        waited = asyncio.get_running_loop().time() - self._settled_at
        return self._settling.is_behind and waited >= self.consumer.settings.held_retry_seconds

    async def _settle(self) -> None:
        """Settle what is done, one settling at a time."""
        async with self._settles:
            # A settling that failed while this one waited is the end of all work first.
            self._raise_failures()
            done, self._done = self._done, {}
            self._settled_at = asyncio.get_running_loop().time()
            if done or self._settling.is_behind:
                await self._settling.settle(done)

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
        """Wait for running messages, so that their offsets are committed before the revocation.

        What waits in lanes is left to the next owner.
        """
        self._leaving |= frozenset(partitions)
        try:
            async with asyncio.timeout(self.settings.stop_seconds):
                await self._is_fed.wait()
                self._lanes.drop(partitions)
                while self._lanes.runs(partitions):
                    self._work_ended.clear()
                    await self._work_ended.wait()
                await self._settle()
                if not self._left_behind:
                    # Nothing is in flight: the next owner need not handle records one at a time.
                    await self._membership.give_up(partitions)
        except (TimeoutError, Retryable, InDoubt, Fenced):
            pass  # the row stays: the next owner handles records one at a time
        except Exception as error:
            if not is_refusal(self.database, self.consumer.name, error):
                raise
        finally:
            self._settling.forget(partitions)

    async def _feed(self, records: Sequence[Record]) -> None:
        """Handle suspects alone, and let the other records wait in lanes."""
        for record in records:
            if await self._settling.deliver(record.at, record.timestamp):
                # Whatever an earlier ownership of the partition left there.
                self._lanes.drop({record.at.place})
        alone: dict[Coordinates, Outcome] = {}
        rest = await self._until_stopped(self._carefully(records, alone), ())
        if alone:
            self._done |= alone
            await self._settle()
        if not self._lanes.is_busy:
            self._settled_at = asyncio.get_running_loop().time()
        self._lanes.add([self._received(read_delivery(self.consumer, record)) for record in rest])
        self._work_came.set()

    async def _until_stopped(self, work: Coroutine[Any, Any, Result], otherwise: Result) -> Result:
        """Await work that a stop cancels when the deadline has passed."""
        task = owned(work)
        stop = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.wait({task}, timeout=self.settings.stop_seconds)
            if not task.done():
                log.error("deadline passed: handlers are cancelled, their messages come back")
                return otherwise
        finally:
            await self._cancel(task, stop)
        return task.result()

    def _received(self, arrival: Arrival) -> Arrival:
        tell_received(arrival, self.subscription.group)
        return arrival

    async def _carefully(
        self, records: Sequence[Record], outcomes: dict[Coordinates, Outcome]
    ) -> Sequence[Record]:
        """Read and handle suspects one at a time; return the records that are not suspects.

        A record of the retry topic that is not due comes back with all behind it.
        """
        rest: list[Record] = []
        blocked: set[Partition] = set()
        for record in records:
            at = record.at
            if at.place in blocked:
                outcomes[at] = NOT_ATTEMPTED
            elif (wait := seconds_until_due(self.consumer, record, self._clock.now())) > 0:
                outcomes[at] = RetryLater(wait)
                blocked.add(at.place)
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

    async def _alone(self, arrivals: Sequence[Arrival]) -> dict[Coordinates, Outcome]:
        return {_at(arrival): await self._one(arrival) for arrival in arrivals}

    async def _one(self, arrival: Arrival) -> Outcome:
        """Handle one arrival, timed and counted."""
        began = self._clock.monotonic()
        outcome = await self._handle(arrival)
        self.consumer.note(outcome)
        tell(arrival, outcome, self.subscription.group, self._clock.monotonic() - began)
        return outcome

    async def _handle(self, arrival: Arrival) -> Outcome:
        if isinstance(arrival, Unreadable):
            return await handle_unreadable(self.consumer, self.database, arrival)
        waiting = None
        if came_by_retry(arrival) is not None:
            held = holds_key(self.consumer, arrival)
            waiting = WaitingMessage.of(self.consumer.name, arrival, Waits.RETRY, held=held)
        if self.settings.mode is Mode.LEASED:
            return await self._leased(arrival, waiting)
        return await handle_message(self.consumer, self.database, arrival, waiting)

    async def _leased(self, message: Message, waiting: WaitingMessage | None = None) -> Outcome:
        owner = self._owner.instance
        return await handle_leased(
            self.consumer, self.database, message, owner, self._clock, waiting
        )

    async def _batch(self, arrivals: Sequence[Arrival]) -> dict[Coordinates, Outcome]:
        """Handle a batch in one transaction; a single worker's also writes the offsets' marks."""
        outcomes: dict[Coordinates, Outcome] = {}
        arrivals = sorted(arrivals, key=_at)
        for arrival in arrivals:
            # A retry has a row in the waiting table, and a transaction of its own.
            if isinstance(arrival, Unreadable) or came_by_retry(arrival) is not None:
                outcomes[_at(arrival)] = await self._one(arrival)
        messages = [
            arrival
            for arrival in arrivals
            if isinstance(arrival, Message) and came_by_retry(arrival) is None
        ]
        if not messages:
            return outcomes
        began = self._clock.monotonic()
        places = [_at(message) for message in messages]
        if self.settings.concurrency > 1:
            found = await consume_many(self.consumer, self.database, messages)
        else:
            # The lock: a mark must not be written twice, by this transaction and by a settling.
            async with self._settles:
                marks = self._settling.marks({**self._done, **outcomes}, places)
                found = await consume_many(self.consumer, self.database, messages, marks)
        each = (self._clock.monotonic() - began) / len(messages)
        for message, outcome in zip(messages, found, strict=True):
            outcomes[_at(message)] = outcome
            self.consumer.note(outcome)
            tell(message, outcome, self.subscription.group, each)
        return outcomes


def check_settings(consumer: Consumer, database: Database, settings: RunnerSettings) -> None:
    """Check that a runner's settings fit its consumer, and the pool of its database.

    Raises:
        Misuse: they do not.
    """
    _check_pool(consumer, database, settings)
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


# One for its row and the offsets, and one for the retry worker.
OWN_CONNECTIONS: Final = 2


def _check_pool(consumer: Consumer, database: Database, settings: RunnerSettings) -> None:
    """Check that every worker can have a connection, and the runner itself two.

    Raises:
        Misuse: some would only wait for one, until their messages fail.
    """
    # Only a database with a pool has a limit.
    most: int | None = getattr(database, "most_connections", None)
    needed = settings.concurrency + OWN_CONNECTIONS
    if most is not None and needed > most:
        raise Misuse(
            f"consumer {consumer.name}: concurrency is {settings.concurrency}, which needs "
            f"{needed} connections, and the pool of its database has {most}; open it with "
            f"SqlDatabase(url, pool_size={needed}), or lower concurrency"
        )


def _at(arrival: Arrival) -> Coordinates:
    if isinstance(arrival, Unreadable):
        return arrival.record.at
    at = arrival.fetched_from or arrival.source
    if at is None:
        raise ValueError("a message from a broker has coordinates")
    return at
