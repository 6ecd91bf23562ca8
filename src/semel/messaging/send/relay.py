"""The relay: publishes the messages of an outbox to a broker, in order per key, losing none.

    read ─▶ publish ─▶ delete         the next batch is read and published
             read ─▶ publish ─▶ delete     while the one before is deleted

One leader relays an outbox.  Its lease makes other relays wait, its epoch fences
a leader that was replaced.  It publishes outside of any transaction and deletes
exactly the entries that the broker accepted, in one statement with the check of
its epoch.  A crash between the two publishes again, with the same ids.

A sweep reads to the end and starts again at the beginning, because an entry whose
transaction commits late has a place behind the cursor.
"""

from __future__ import annotations

import asyncio
import json
import logging
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, TypeVar

from semel.clock import SYSTEM_CLOCK, Clock
from semel.crashpoints import CrashPoint, reach
from semel.errors import Fenced, InDoubt, Misuse, Retryable
from semel.events import EVENTS, Events
from semel.lease import Owner, is_gone
from semel.messaging.database import Database, OutboxStore, is_refusal
from semel.messaging.failure import CLASSIFICATION, Classification
from semel.messaging.handle.cancel import rung
from semel.messaging.receive.broker import Publisher
from semel.messaging.redact import reason_of
from semel.messaging.send.outbox import Leadership, LeadershipLost, OutboxEntry
from semel.messaging.send.publish import (
    RelayMetrics,
    Sending,
    SettledBatch,
    TimedPublisher,
    outgoing_of,
)
from semel.messaging.settings import RetryPolicy, backoff

log = logging.getLogger("semel.messaging")


# A leader may miss two renewals before it loses the lease.
RENEWALS_PER_LEASE: Final = 3


# After a failed renewal the pauses are shorter, so that a short outage does not cost the lease.
TRIES_PER_LEASE: Final = 15


class Leading:
    """Takes, renews and resigns the leadership of one outbox for one relay."""

    def __init__(self, database: Database, outbox: str, lease_seconds: float, clock: Clock) -> None:
        self.patience_seconds = lease_seconds / RENEWALS_PER_LEASE
        """How long to wait before asking for the leadership again."""

        self._database = database
        self._outbox = outbox
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._ends = 0.0
        self._owner = ""

    def begin(self) -> None:
        """Take a new identity: a process that is forked or restarted is another owner."""
        self._owner = json.dumps(Owner.here().to_json())

    async def take(self, outbox: OutboxStore) -> Leadership | None:
        """Take the leadership, unless an owner that may still run holds it."""
        # Measured before the call: the database counts from a later moment, so this
        # process always stops before its lease ends there.
        ends = self._clock.monotonic() + self._lease_seconds
        taken = await outbox.lead(self._outbox, self._owner, self._lease_seconds)
        if taken is None:
            held = await outbox.leader(self._outbox)
            if held is not None and is_gone(held.owner):
                taken = await outbox.lead(
                    self._outbox, self._owner, self._lease_seconds, instead_of=held.owner
                )
        if taken is not None:
            self._ends = ends
        return taken

    def check(self, leadership: Leadership) -> None:
        """Raise if the lease has ended by this process's own clock.

        The epoch would refuse its deletes anyway, but its messages would be published twice.

        Raises:
            LeadershipLost: the lease has ended; another relay may have started.
        """
        if self._clock.monotonic() > self._ends:
            raise LeadershipLost(leadership.outbox, leadership.epoch)

    async def while_leading(
        self,
        leadership: Leadership,
        work: Coroutine[Any, Any, None],
        each_time: Callable[[], Awaitable[None]],
    ) -> None:
        """Run *work* and renew the lease meanwhile; resign when *work* ends.

        *each_time* is called at the beginning and with every renewal.

        Raises:
            LeadershipLost: another relay took over, or may have; the work was cancelled.
        """
        working = asyncio.create_task(work)
        renewing = asyncio.create_task(self._renew(leadership, each_time))
        try:
            await asyncio.wait({working, renewing}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                await renewing
            await working
        except LeadershipLost:
            raise
        except Exception:
            await self._resign(leadership)
            raise
        finally:
            working.cancel()
            renewing.cancel()
            await asyncio.gather(working, renewing, return_exceptions=True)
        await self._resign(leadership)

    async def _renew(
        self, leadership: Leadership, each_time: Callable[[], Awaitable[None]]
    ) -> None:
        """Renew until cancelled, or until the lease is lost."""
        await each_time()
        pause = self._lease_seconds / RENEWALS_PER_LEASE
        while True:
            await asyncio.sleep(pause)
            ends = self._clock.monotonic() + self._lease_seconds
            try:
                async with self._database.begin() as unit:
                    kept = await unit.outbox.lead(self._outbox, self._owner, self._lease_seconds)
            except (Retryable, InDoubt) as error:
                self.check(leadership)
                why = {"outbox": self._outbox, "reason": reason_of(error)}
                log.warning("lease not renewed, trying again", extra=why)
                pause = self._lease_seconds / TRIES_PER_LEASE
                continue
            if kept != leadership:
                raise LeadershipLost(leadership.outbox, leadership.epoch)
            self._ends = ends
            pause = self._lease_seconds / RENEWALS_PER_LEASE
            await each_time()

    async def _resign(self, leadership: Leadership) -> None:
        """Give up the lease, so that the next relay need not wait for its end."""
        try:
            async with self._database.begin() as unit:
                await unit.outbox.resign(leadership)
        except (Retryable, InDoubt) as error:
            why = {"outbox": self._outbox, "reason": reason_of(error)}
            log.warning("not resigned, the lease has to end", extra=why)


T = TypeVar("T")

BATCH: Final = 2000

POLL_SECONDS: Final = 0.5

LEASE_SECONDS: Final = 15.0

SWEEP_SECONDS: Final = 10.0

PUBLISH_SECONDS: Final = 75.0

STOP_SECONDS: Final = 10.0

RETRY: Final = RetryPolicy(
    max_attempts=10, initial_delay_seconds=0.2, max_delay_seconds=30.0, jitter=True
)


# The pause after a sweep that found entries, or after a wake; each empty sweep doubles it, up
# to the poll interval.
FIRST_PAUSE_SECONDS: Final = 0.005

# Entries that wait behind a parked message are read and skipped by every whole sweep; a long
# queue of them must not keep the database busy.  Between whole sweeps, the relay reads only
# new entries.
PAUSE_PER_SKIPPED_SECONDS: Final = 0.0001

MAX_PAUSE_SECONDS: Final = 30.0

_RUNNING: weakref.WeakSet[Relay] = weakref.WeakSet()


def is_relayed_here(outbox: str) -> bool:
    """Return whether a relay of *outbox* runs in this process."""
    return any(relay.outbox == outbox for relay in _RUNNING)


def wake_relays(outbox: str) -> None:
    """Wake this process's relays of *outbox*, so that they read new entries at once."""
    for relay in list(_RUNNING):
        if relay.outbox == outbox:
            relay.wake()


class Relay:
    """Publishes one outbox's messages to a broker.

    Any number of relays may run, in any number of processes: one leads, and the others wait
    for its lease to end.
    """

    def __init__(
        self,
        database: Database,
        publisher: Publisher,
        outbox: str = "outbox",
        *,
        batch: int = BATCH,
        poll_seconds: float = POLL_SECONDS,
        lease_seconds: float = LEASE_SECONDS,
        sweep_seconds: float = SWEEP_SECONDS,
        publish_seconds: float = PUBLISH_SECONDS,
        stop_seconds: float = STOP_SECONDS,
        retry: RetryPolicy = RETRY,
        classification: Classification = CLASSIFICATION,
        events: Events = EVENTS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Set the outbox, the broker and the limits.

        *sweep_seconds* is how long a sweep may last before it starts again at the beginning,
        with late entries and keys whose pause has ended.  *retry* sets the pauses after a
        failure; its limit holds for unknown errors, a broker's own errors are always retried.

        A batch that the publisher has not answered after *publish_seconds* is published again
        with the same ids.  Choose it longer than the publisher's own timeout, or messages are
        sent twice.  After `stop` the publisher has *stop_seconds*.
        """
        if batch < 1 or lease_seconds <= 0:
            raise Misuse(
                f"batch must be at least 1 and lease_seconds greater than 0, "
                f"got {batch} and {lease_seconds:g}"
            )
        self.outbox = outbox
        self.published = 0
        """How many messages the broker has accepted from this relay."""

        self._database = database
        self._publishing = TimedPublisher(publisher, publish_seconds, stop_seconds, clock)
        self._batch = batch
        self._poll_seconds = poll_seconds
        self._sweep_seconds = sweep_seconds
        self._retry = retry
        self._sending = Sending(retry, classification)
        self._clock = clock
        self._leading = Leading(database, outbox, lease_seconds, clock)
        self._telling = RelayMetrics(database, outbox, events, clock)
        self._outages = 0
        """How many times in a row the broker was unavailable."""

        self._bell = asyncio.Event()
        """Set when there may be work: new messages, or a stop."""

        self._stopped = self._publishing.stopped
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self) -> None:
        """Relay until `stop`; wait for the leadership while another relay has it.

        Raises:
            Misuse: the publisher breaks the protocol `Publisher`.
        """
        await self._run(until_empty=False)

    async def run_until_empty(self) -> int:
        """Relay until no entry is left that can be sent, and return how many were sent.

        Parked entries stay, and so do the entries that wait behind them.
        """
        before = self.published
        await self._run(until_empty=True)
        return self.published - before

    def stop(self) -> None:
        """Finish the current batch and give up the leadership; `run` returns then.

        A batch that the publisher does not answer in time is left to the next relay.
        """
        if not self._stopped.is_set():
            self._publishing.stop_soon()
        self._ring(self._stopped)
        self._ring(self._bell)

    def wake(self) -> None:
        """Look for new messages now; may be called from any thread."""
        self._ring(self._bell)

    def _ring(self, event: asyncio.Event) -> None:
        if event.is_set():
            return
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        loop = self._loop
        if loop is None or loop is here:
            event.set()
        elif not loop.is_closed():
            loop.call_soon_threadsafe(event.set)

    async def _run(self, *, until_empty: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._leading.begin()
        _RUNNING.add(self)
        try:
            while not self._stopped.is_set() and not await self._has_led(until_empty):
                await rung(self._stopped, self._leading.patience_seconds)
        finally:
            _RUNNING.discard(self)
            self._loop = None
            self._stopped.clear()

    async def _has_led(self, until_empty: bool) -> bool:
        """Lead until the work ends; return False if another relay leads."""
        try:
            leadership = await self._insist(self._leading.take)
            if leadership is None:
                return False
            work = self._relay(leadership, until_empty)
            await self._leading.while_leading(leadership, work, self._telling.measure)
        except Fenced as lost:
            self._warn("leadership lost", lost)
            return False
        except (Retryable, InDoubt) as error:
            self._warn("stopped while the database was unavailable", error)
        except Exception as error:
            if until_empty or not is_refusal(self._database, f"outbox {self.outbox}", error):
                raise
            return False
        return True

    async def _relay(self, leadership: Leadership, until_empty: bool) -> None:
        pause = FIRST_PAUSE_SECONDS
        place, whole_due = 0, 0.0
        while not self._stopped.is_set():
            self._bell.clear()
            if self._now() >= whole_due:
                place = 0
            sweep = await self._sweep(leadership, place)
            if place == 0:
                whole_due = self._now() + min(
                    sweep.skipped * PAUSE_PER_SKIPPED_SECONDS, MAX_PAUSE_SECONDS
                )
            if sweep.goes_on:
                place, pause = sweep.end, FIRST_PAUSE_SECONDS
                continue
            due = self._sending.next_due
            if until_empty and due is None and place == 0:
                return
            place = sweep.end
            limit = pause
            if due is not None:
                # Only a whole sweep releases a waiting key.
                limit = min(pause, max(0.0, max(due, whole_due) - self._now()))
            woken = await rung(self._bell, limit)
            pause = FIRST_PAUSE_SECONDS if woken else min(pause * 2, self._poll_seconds)

    async def _sweep(self, leadership: Leadership, start: int) -> _Sweep:
        """Publish every entry behind the place *start* once."""
        if start == 0:
            parked = await self._insist(lambda outbox: outbox.parked_keys(self.outbox))
            self._sending.begin_sweep(parked, self._now())
        sweep = _Sweep(start)
        ends = self._now() + self._sweep_seconds
        try:
            sweep.ahead = asyncio.create_task(self._read(start))
            while entries := await sweep.ahead:
                reach(CrashPoint.RELAY_READ_AFTER, self.outbox)
                is_last = len(entries) < self._batch or self._now() > ends
                if not is_last:
                    sweep.ahead = asyncio.create_task(self._read(entries[-1].place))
                sendable = self._sending.sendable(entries)
                sweep.skipped += len(entries) - len(sendable)
                if sendable:
                    sweep.goes_on = True
                    answers = await self._publish(leadership, sendable)
                    if answers is None:
                        break
                    settled = self._sending.settle(sendable, answers, self._now())
                    self.published += len(settled.delivered)
                    self._telling.tell(settled)
                    # At most one batch is behind, so a crash publishes at most two again.
                    await sweep.settled()
                    sweep.behind = asyncio.create_task(self._write_down(leadership, settled))
                sweep.end = entries[-1].place
                if is_last or self._stopped.is_set():
                    break
            if len(entries) < self._batch:
                self._sending.end_sweep()
            await sweep.settled()
        finally:
            await sweep.drop()
        return sweep

    async def _read(self, after_place: int) -> Sequence[OutboxEntry]:
        return await self._insist(lambda outbox: outbox.read(self.outbox, after_place, self._batch))

    async def _publish(
        self, leadership: Leadership, entries: Sequence[OutboxEntry]
    ) -> Sequence[Exception | None] | None:
        """Send a batch; return None, after a pause, if the broker is unavailable.

        The caller then reads the batch again: a message of it may have been erased meanwhile.
        """
        self._leading.check(leadership)
        reach(CrashPoint.RELAY_PUBLISH_BEFORE, self.outbox)
        try:
            answers = await self._publishing.together([outgoing_of(entry) for entry in entries])
        except (Fenced, Misuse):
            raise
        except Retryable as error:
            self._warn("broker unavailable", error)
            self._outages += 1
            await rung(self._stopped, backoff(self._retry, self._outages))
            return None
        except Exception as error:  # noqa: BLE001  one message causes it; the others can be sent
            self._warn("a batch was refused, sending its messages one by one", error)
            answers = await self._publishing.singly(entries)
        self._outages = 0
        reach(CrashPoint.RELAY_PUBLISH_AFTER, self.outbox)
        return answers

    async def _write_down(self, leadership: Leadership, settled: SettledBatch) -> None:
        """Delete the delivered entries and record the failed ones, in one transaction."""

        async def act(outbox: OutboxStore) -> None:
            if settled.delivered:
                await outbox.delete(leadership, [entry.place for entry in settled.delivered])
            if settled.failed:
                await outbox.failed(leadership, [entry.place for entry in settled.failed])
            for parking in settled.parked:
                await outbox.park(leadership, parking.entry.place, parking.reason)

        reach(CrashPoint.RELAY_DELETE_BEFORE, self.outbox)
        await self._insist(act)
        reach(CrashPoint.RELAY_DELETE_AFTER, self.outbox)

    async def _insist(self, act: Callable[[OutboxStore], Awaitable[T]]) -> T:
        """Run *act* in its own transaction, again while the database is unavailable.

        *act* must be repeatable: after a lost answer it runs again.  The lease's end cancels it.

        Raises:
            Retryable, InDoubt: the relay is stopped while the database is unavailable.
        """
        for attempt in count(1):
            try:
                async with self._database.begin() as unit:
                    return await act(unit.outbox)
            except (Retryable, InDoubt) as error:
                self._warn("database unavailable", error)
                if await rung(self._stopped, backoff(self._retry, attempt)):
                    raise
        raise AssertionError("the loop ends only by returning")

    def _warn(self, what: str, error: BaseException) -> None:
        log.warning(what, extra={"outbox": self.outbox, "reason": reason_of(error)})

    def _now(self) -> float:
        return self._clock.monotonic()


@dataclass(slots=True)
class _Sweep:
    """One sweep through the outbox, and its tasks beside publishing."""

    end: int
    """The last place that was read."""

    skipped: int = 0
    """How many entries wait behind others."""

    goes_on: bool = False
    """It sent something: look for entries behind its end at once."""

    ahead: asyncio.Task[Sequence[OutboxEntry]] | None = None
    """The task that reads the next batch."""

    behind: asyncio.Task[None] | None = None
    """The task that deletes the batch before."""

    async def settled(self) -> None:
        """Wait until the batch before is deleted."""
        if self.behind is not None:
            await self.behind

    async def drop(self) -> None:
        """Cancel the tasks that still run."""
        left = [task for task in (self.ahead, self.behind) if task is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
