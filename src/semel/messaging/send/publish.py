"""Publishing one batch of an outbox: which entries may be sent, and what the answers mean.

    delivered          deleted
    failed for now     its key waits; a sweep after the pause begins with it again
    failed for ever    parked; later entries of its key wait until an operator decides
    topic refused      the whole topic waits

A topic is refused if authorization failed, or if many keys failed and none
succeeded.  After a pause a few of its keys are tried; one success ends the
refusal, another failure makes the pause longer.  Without this, a permission
that is missing for a minute would park the whole outbox.

A waiting key is released only when a sweep begins, never within one: its earlier
entries are behind the cursor then, and its later ones would overtake them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

from semel.clock import Clock
from semel.errors import Fenced, InDoubt, Misuse, Retryable
from semel.events import Events, Metric
from semel.message import Headers, raw_of
from semel.messaging.database import Database
from semel.messaging.failure import (
    RETRYABLE_CLASSES,
    Classification,
    Classified,
    Exhausted,
    FailureClass,
    Hopeless,
    RetryIn,
    Verdict,
    is_retryable,
    listed_codes,
    verdict,
)
from semel.messaging.receive.broker import Outgoing, Publisher
from semel.messaging.send.outbox import MESSAGE_ID_HEADER, Lane, OutboxEntry, lane_of
from semel.messaging.settings import RetryPolicy, backoff

log = logging.getLogger("semel.messaging")


# If this many keys fail together and none of their topic succeeds, the topic is the cause.
MANY_KEYS: Final = 5


# Enough that one message which the broker accepts is among a few that it does not.
KEYS_AHEAD: Final = 10


@dataclass(slots=True)
class _Refused:
    until: float = 0.0
    times: int = 0
    """How often it was refused in a row."""

    is_over: bool = False
    """The broker accepted a message: the next sweep sends everything."""

    is_tried: bool = False
    """Its pause had ended when the sweep began."""

    is_seen: bool = False
    """The sweep found an entry that only waits for the topic."""

    ahead: int = 0
    """How many more keys may be tried in this sweep."""

    gone: set[Lane] = field(default_factory=set)


class RefusedTopics:
    """The topics that the broker refuses as a whole, as one leader has seen them."""

    def __init__(self, retry: RetryPolicy) -> None:
        self._retry = retry
        self._topics: dict[str, _Refused] = {}

    def __bool__(self) -> bool:
        return bool(self._topics)

    @property
    def next_due(self) -> float | None:
        """When the first waiting topic may be tried again; None if none waits."""
        return min((one.until for one in self._topics.values()), default=None)

    def due(self, topic: str) -> float:
        """Return when a waiting topic may be tried again."""
        return self._topics[topic].until

    def begin_sweep(self, now: float) -> None:
        """Allow a few keys of each topic whose pause has ended; forget ended refusals."""
        self._topics = {name: one for name, one in self._topics.items() if not one.is_over}
        for one in self._topics.values():
            one.is_tried = one.until <= now
            one.is_seen = False
            one.ahead = KEYS_AHEAD if one.is_tried else 0
            one.gone.clear()

    def end_sweep(self) -> None:
        """Forget topics that could be tried but had no entry left: parked, dropped or erased.

        Their refusal would never end, and the relay would look for them without a pause.
        """
        self._topics = {
            name: one
            for name, one in self._topics.items()
            if one.is_seen or one.is_over or not one.is_tried
        }

    def may_send(self, entry: OutboxEntry) -> bool:
        """Return whether *entry* may be sent, and count it as a trial of its topic."""
        one = self._topics.get(entry.topic)
        if one is None:
            return True
        one.is_seen = True
        lane = lane_of(entry)
        if one.ahead == 0 or lane in one.gone:
            return False
        one.ahead -= 1
        one.gone.add(lane)
        return True

    def note(
        self,
        delivered: Sequence[OutboxEntry],
        hopeless: Sequence[tuple[OutboxEntry, Classified]],
        now: float,
    ) -> dict[str, Classified]:
        """Record the outcome of a batch; return the topics that were refused as a whole."""
        if not hopeless and not self._topics:
            return {}
        taken = {entry.topic for entry in delivered}
        refused: dict[str, Classified] = {}
        for topic in {entry.topic for entry, _ in hopeless}:
            failures = [failure for entry, failure in hopeless if entry.topic == topic]
            found = self._of_the_topic(topic, failures, taken)
            if found is not None:
                refused[topic] = found
                one = self._topics.setdefault(topic, _Refused())
                one.times += 1
                one.is_over = False
                one.ahead = 0
                one.until = now + backoff(self._retry, one.times)
        for topic in taken & self._topics.keys() - refused.keys():
            self._topics[topic].is_over = True
            self._topics[topic].until = now
        return refused

    def _of_the_topic(
        self, topic: str, failures: Sequence[Classified], taken: Collection[str]
    ) -> Classified | None:
        for failure in failures:
            if failure.failure_class is FailureClass.AUTHORIZATION:
                return failure
        if topic in taken or (topic not in self._topics and len(failures) < MANY_KEYS):
            return None
        return failures[0]


def outgoing_of(entry: OutboxEntry) -> Outgoing:
    """Return the entry as the broker gets it, with its id in a header."""
    headers: Mapping[str, bytes] = {MESSAGE_ID_HEADER: entry.message_id.encode(), **entry.headers}
    if isinstance(entry.headers, Headers):
        headers = Headers([(MESSAGE_ID_HEADER, headers[MESSAGE_ID_HEADER]), *entry.headers.pairs])
    key = None if entry.key is None else raw_of(entry.key)
    return Outgoing(entry.topic, entry.value, key, headers)


@dataclass(frozen=True, slots=True)
class ParkedEntry:
    """An entry that the broker will never accept."""

    entry: OutboxEntry
    reason: str


@dataclass(slots=True)
class SettledBatch:
    """What to write about one published batch."""

    delivered: list[OutboxEntry] = field(default_factory=list)
    """They are durable at the broker."""

    failed: list[OutboxEntry] = field(default_factory=list)
    """They are tried again."""

    parked: list[ParkedEntry] = field(default_factory=list)
    """The broker will never accept them."""

    refused: dict[str, Classified] = field(default_factory=dict)
    """Topics that the broker refuses as a whole, and why."""


class Sending:
    """Which keys of an outbox wait, as one leader has seen them."""

    def __init__(self, retry: RetryPolicy, classification: Classification) -> None:
        self._retry = retry
        listed = listed_codes(retry, classification.codes)
        self._classification = classification.extended(codes=listed)
        self._held: dict[Lane, float] = {}
        """Until when a lane waits, on the caller's clock."""

        self._parked: frozenset[tuple[str, str]] = frozenset()
        self._topics = RefusedTopics(retry)

    def begin_sweep(self, parked_keys: frozenset[tuple[str, str]], now: float) -> None:
        """Release lanes whose pause has ended, and lanes whose parked entry is gone."""
        self._held = {lane: until for lane, until in self._held.items() if until > now}
        self._parked = parked_keys
        self._topics.begin_sweep(now)

    def end_sweep(self) -> None:
        """Note that the sweep has read every entry."""
        self._topics.end_sweep()

    @property
    def next_due(self) -> float | None:
        """When the first waiting lane or topic may be tried again; None if none waits."""
        due = [*self._held.values()]
        if self._topics.next_due is not None:
            due.append(self._topics.next_due)
        return min(due, default=None)

    def sendable(self, entries: Sequence[OutboxEntry]) -> Sequence[OutboxEntry]:
        """Return *entries* without those that would overtake an earlier entry of their lane."""
        if not self._held and not self._parked and not self._topics:
            return entries
        return [e for e in entries if not self._waits(lane_of(e)) and self._topics.may_send(e)]

    def settle(
        self, entries: Sequence[OutboxEntry], answers: Sequence[Exception | None], now: float
    ) -> SettledBatch:
        """Turn the broker's answers into what to write; lanes with a failure wait from now on.

        Raises:
            Misuse: the publisher did not answer for every entry.
        """
        if len(answers) != len(entries):
            raise Misuse(
                f"the publisher answered for {len(answers)} of {len(entries)} messages; "
                f"it must answer for each, in order"
            )
        if not any(answers) and not self._topics:
            return SettledBatch(list(entries))
        settled = SettledBatch()
        failures: list[tuple[OutboxEntry, Classified]] = []
        for entry, error in zip(entries, answers, strict=True):
            if error is None:
                settled.delivered.append(entry)
            elif not self._waits(lane := lane_of(entry)):
                self._held[lane] = now
                failures.append((entry, self._classification.classify(error)))
        hopeless = [one for one in failures if not is_retryable(self._retry, one[1])]
        settled.refused = self._topics.note(settled.delivered, hopeless, now)
        for entry, failure in failures:
            self._settle_failure(entry, failure, settled, now)
        return settled

    def _settle_failure(
        self, entry: OutboxEntry, failure: Classified, settled: SettledBatch, now: float
    ) -> None:
        attempts = entry.attempts + 1
        fate: Verdict = verdict(self._retry, failure, attempts)
        if isinstance(fate, Exhausted) and failure.failure_class in RETRYABLE_CLASSES:
            # A broker's outage ends; with a limit, an outage would park messages.
            fate = RetryIn(backoff(self._retry, attempts))
        if isinstance(fate, Hopeless) and entry.topic in settled.refused:
            # The entry waits with its topic; its last attempt parks it all the same.
            due = self._topics.due(entry.topic)
            fate = RetryIn(due - now) if attempts < self._retry.max_attempts else Exhausted()
        if isinstance(fate, RetryIn):
            self._held[lane_of(entry)] = now + fate.seconds
            settled.failed.append(entry)
        else:
            settled.parked.append(ParkedEntry(entry, failure.reason))

    def _waits(self, lane: Lane) -> bool:
        return lane in self._held or lane in self._parked


# How long a cancelled publisher may take to clean up before the relay continues without it.
CLEAN_UP_SECONDS: Final = 1.0


class NoAnswer(Retryable):
    """The publisher did not answer in time: the messages may or may not be at the broker."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds

    def __str__(self) -> str:
        return (
            f"the publisher did not answer within {self.seconds:g} s; "
            f"its batch is published again, with the same ids"
        )


class TimedPublisher:
    """Calls a publisher with a deadline; a stop makes the deadline shorter."""

    def __init__(
        self, publisher: Publisher, publish_seconds: float, stop_seconds: float, clock: Clock
    ) -> None:
        if publish_seconds <= 0 or stop_seconds < 0:
            raise Misuse("publish_seconds must be greater than 0, and stop_seconds at least 0")
        self._publisher = publisher
        self._publish_seconds = publish_seconds
        self._stop_seconds = stop_seconds
        self._clock = clock
        self._stop_by = 0.0
        self.stopped = asyncio.Event()
        """Set when the relay must end."""

    def stop_soon(self) -> None:
        """Give the current batch *stop_seconds* to end; the caller sets the event."""
        self._stop_by = self._clock.monotonic() + self._stop_seconds

    async def together(self, batch: Sequence[Outgoing]) -> Sequence[Exception | None]:
        """Publish a batch.

        Raises:
            NoAnswer: the deadline has passed.
        """
        asking = asyncio.ensure_future(self._publisher.publish(batch))
        began = self._clock.monotonic()
        try:
            await self._wait(asking)
            if asking.done() and not asking.cancelled():
                return asking.result()
        finally:
            await _abandon(asking)
        raise NoAnswer(self._clock.monotonic() - began)

    async def singly(self, entries: Sequence[OutboxEntry]) -> list[Exception | None]:
        """Publish entries one by one, each key until its first failure.

        A publisher that raises `Retryable` has lost the broker: no further message is sent,
        because each would wait for the same timeout.
        """
        answers: list[Exception | None] = []
        failed: dict[Lane, Exception] = {}
        silence: Retryable | None = None
        for entry in entries:
            lane = lane_of(entry)
            if lane not in failed:
                answer: Exception | None = silence
                if silence is None:
                    try:
                        [answer] = await self.together([outgoing_of(entry)])
                    except (Fenced, Misuse):
                        raise
                    except Retryable as error:
                        answer = silence = error
                    except Exception as error:  # noqa: BLE001  the answer for this one message
                        answer = error
                if answer is not None:
                    failed[lane] = answer
            answers.append(failed.get(lane))
        return answers

    async def _wait(self, asking: asyncio.Future[Sequence[Exception | None]]) -> None:
        stopping = asyncio.ensure_future(self.stopped.wait())
        try:
            either: set[asyncio.Future[Any]] = {asking, stopping}
            await asyncio.wait(
                either, timeout=self._publish_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if not asking.done() and self.stopped.is_set():
                left = min(self._stop_by - self._clock.monotonic(), self._publish_seconds)
                await asyncio.wait({asking}, timeout=max(0.0, left))
        finally:
            stopping.cancel()


async def _abandon(asking: asyncio.Future[Sequence[Exception | None]]) -> None:
    if not asking.done():
        asking.cancel()
        # Reads a late exception, so that asyncio does not log it as never retrieved.
        asking.add_done_callback(lambda one: one.cancelled() or one.exception())
        await asyncio.wait({asking}, timeout=CLEAN_UP_SECONDS)


MEASURE_SECONDS: Final = 15.0

_TOPIC: Final = attrgetter("topic")


class RelayMetrics:
    """The metrics and log lines of one relay."""

    def __init__(self, database: Database, outbox: str, events: Events, clock: Clock) -> None:
        self._database = database
        self._outbox = outbox
        self._events = events
        self._clock = clock
        self._measured = -MEASURE_SECONDS

    async def measure(self) -> None:
        """Measure how full the outbox is, at most once in `MEASURE_SECONDS`."""
        now = self._clock.monotonic()
        if now < self._measured + MEASURE_SECONDS:
            return
        self._measured = now
        try:
            async with self._database.begin() as unit:
                numbers = await unit.outbox.numbers(self._outbox)
        except (Retryable, InDoubt):
            return  # a metric is not worth a retry; the next call measures again
        count = self._events.measure
        count(Metric.OUTBOX_PENDING, self._outbox, value=numbers.pending)
        count(Metric.OUTBOX_OLDEST_SECONDS, self._outbox, value=numbers.oldest_seconds)

    def tell(self, settled: SettledBatch) -> None:
        """Count the outcomes of a batch, and log what an operator must know."""
        became = {
            "ok": settled.delivered,
            "retried": settled.failed,
            "parked": [parking.entry for parking in settled.parked],
        }
        for status, entries in became.items():
            for topic, number in Counter(map(_TOPIC, entries)).items():
                labels = (self._outbox, topic, status)
                self._events.measure(Metric.OUTBOX_PUBLISHED, *labels, value=number)
        for topic, failure in settled.refused.items():
            nouns = {"outbox": self._outbox, "topic": topic}
            log.error("topic refused, trying again", extra={**nouns, "reason": failure.reason})
        for parking in settled.parked:
            nouns = {"outbox": self._outbox, "id": parking.entry.message_id}
            log.error("message parked", extra={**nouns, "reason": parking.reason})
