"""The events and measurements that logs, metrics and progress displays subscribe to.

    Events     what happened, with the glossary's nouns as fields; each is also a log line
    Measures   counters, durations and gauges, by the names that dashboards use

A subscriber that raises is logged and never stops the work.  No label carries
an id: a metric with an id as a label would create a new series per message.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Final

from semel.errors import Misuse

log = logging.getLogger("semel")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in one scope."""

    scope: str

    @property
    def sentence(self) -> str:
        """The text of the log line, derived from the class name."""
        name = type(self).__name__
        return "".join(f" {c.lower()}" if c.isupper() else c for c in name).strip()


@dataclass(frozen=True, slots=True)
class StepDone(Event):
    """One step of a cycle ended well."""

    cycle: str
    step: str
    seconds: float


@dataclass(frozen=True, slots=True)
class StepFailed(Event):
    """One step of a cycle, or of its abort path, failed."""

    cycle: str
    step: str
    reason: str


@dataclass(frozen=True, slots=True)
class CycleEnded(Event):
    """A cycle has its outcome: ``succeeded``, ``aborted``, ``fatal`` or ``replayed``."""

    cycle: str
    outcome: str
    reason: str = ""
    seconds: float = 0.0
    step_seconds: Mapping[str, float] = field(default_factory=dict)
    rows: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SinkRetried(Event):
    """A commit was refused for now and is tried again in place."""

    cycle: str
    sink: str
    attempt_number: int
    reason: str


@dataclass(frozen=True, slots=True)
class CommitSlow(Event):
    """Committing takes a large part of the interval between two cycles."""

    cycle: str
    commit_seconds: float
    interval_seconds: float


@dataclass(frozen=True, slots=True)
class LeaseTaken(Event):
    """This process owns the scope from now on."""

    epoch: int
    owner: str
    from_owner: str = ""


@dataclass(frozen=True, slots=True)
class LeaseEnded(Event):
    """This process no longer owns the scope: ``released`` or ``lost``."""

    epoch: int
    how: str


@dataclass(frozen=True, slots=True)
class CycleRecovered(Event):
    """Recovery settled one prepared transaction of one sink."""

    cycle: str
    sink: str
    decision: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LeavingsSwept(Event):
    """Recovery removed staged data of attempts that were not committed."""

    sink: str
    attempts: int


@dataclass(frozen=True, slots=True)
class QueryRestarted(Event):
    """The supervisor starts the query again after a retryable failure."""

    restart_number: int
    wait_seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class GapCrossed(Event):
    """A message was applied although earlier versions are missing; the gap policy is ``alert``.

    Its scope is the consumer's name.
    """

    consumer: str
    key: str
    expected: int
    """The first version that is missing."""

    found: int
    """The version that arrived instead."""

    @property
    def sentence(self) -> str:
        """The text of the log line, with the versions."""
        return f"gap crossed, expected version {self.expected}, got {self.found}"


Subscriber = Callable[[Event], None]


_WARNINGS = (StepFailed, SinkRetried, CommitSlow, QueryRestarted, GapCrossed)


class Events:
    """A list of subscribers, called in order, in the thread that emits."""

    def __init__(self) -> None:
        self._subscribers: list[Subscriber] = []
        self._lock = threading.Lock()

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call *subscriber* with every event from now on; return a function that unsubscribes."""
        with self._lock:
            self._subscribers.append(subscriber)

        def unsubscribe() -> None:
            with self._lock:
                if subscriber in self._subscribers:
                    self._subscribers.remove(subscriber)

        return unsubscribe

    def emit(self, event: Event) -> None:
        """Log the event and call every subscriber."""
        level = logging.INFO
        if isinstance(event, _WARNINGS):
            level = logging.WARNING
        elif isinstance(event, CycleEnded) and event.outcome == "fatal":
            level = logging.ERROR
        if log.isEnabledFor(level):
            nouns = {f.name: getattr(event, f.name) for f in fields(event)}
            told = ", ".join(f"{k} {v}" for k, v in nouns.items() if isinstance(v, str) and v)
            log.log(level, "%s: %s", event.sentence, told, extra=nouns)
        # A copy, because a subscriber may unsubscribe while it is called, which takes the lock.
        with self._lock:
            subscribers = tuple(self._subscribers)
        for subscriber in subscribers:
            try:
                subscriber(event)
            except Exception:  # a broken display must not stop the pipeline
                log.exception("event subscriber failed", extra={"event": type(event).__name__})

    def __reduce__(self) -> tuple[type[Events], tuple[()]]:
        """Subscribers belong to the process that added them: a copy starts without any."""
        return (Events, ())


EVENTS = Events()
"""The process's own list, used wherever no other is given."""


class Metric(StrEnum):
    """The name of a metric, as exporters spell it."""

    RECEIVED = "consumer.messages.received.total"
    PROCESSED = "consumer.messages.processed.total"
    DURATION = "consumer.processing.duration"
    DUPLICATES = "consumer.duplicates.total"
    RETRIES = "consumer.retries.total"
    DLQ = "consumer.dlq.total"
    LAG = "consumer.lag"
    OFFSET_COMMITS = "consumer.offset.commits.total"
    DESERIALIZATION_FAILURES = "consumer.deserialization.failures.total"
    POISON = "consumer.poison.detected.total"
    OUTBOX_PENDING = "outbox.pending"
    OUTBOX_OLDEST_SECONDS = "outbox.oldest.age"
    OUTBOX_PUBLISHED = "outbox.published.total"


_CONSUMER = ("topic", "consumer_group", "event_type")


LABELS: Final[Mapping[Metric, tuple[str, ...]]] = {
    Metric.RECEIVED: _CONSUMER,
    Metric.PROCESSED: (*_CONSUMER, "outcome"),
    Metric.DURATION: _CONSUMER,
    Metric.DUPLICATES: _CONSUMER,
    Metric.RETRIES: (*_CONSUMER, "reason"),
    Metric.DLQ: (*_CONSUMER, "reason"),
    Metric.LAG: ("topic", "consumer_group", "partition"),
    Metric.OFFSET_COMMITS: ("topic", "consumer_group", "status"),
    Metric.DESERIALIZATION_FAILURES: ("topic", "reason"),
    Metric.POISON: ("topic", "event_type"),
    Metric.OUTBOX_PENDING: ("outbox",),
    Metric.OUTBOX_OLDEST_SECONDS: ("outbox",),
    Metric.OUTBOX_PUBLISHED: ("outbox", "topic", "status"),
}
"""The labels of each metric, in order."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One reading: a counter's step, a duration's seconds, or a gauge's value."""

    metric: Metric
    labels: Mapping[str, str]
    value: float = 1.0


class Measures:
    """A list of subscribers to measurements."""

    def __init__(self) -> None:
        self._subscribers: tuple[Callable[[Measurement], None], ...] = ()

    def subscribe(self, subscriber: Callable[[Measurement], None]) -> Callable[[], None]:
        """Call *subscriber* with every measurement from now on; return a function to stop it."""
        self._subscribers = (*self._subscribers, subscriber)

        def unsubscribe() -> None:
            self._subscribers = tuple(s for s in self._subscribers if s is not subscriber)

        return unsubscribe

    @property
    def are_heard(self) -> bool:
        """Whether there is a subscriber; without one, skip measurements that cost a query."""
        return bool(self._subscribers)

    def count(self, metric: Metric, *labels: str, value: float = 1.0) -> None:
        """Pass one reading to every subscriber; *labels* in the order of `LABELS`.

        Raises:
            Misuse: the metric has other labels.
        """
        if not self._subscribers:
            return
        names = LABELS[metric]
        if len(names) != len(labels):
            raise Misuse(f"metric {metric} needs the labels {', '.join(names)}, got {len(labels)}")
        measured = Measurement(metric, dict(zip(names, labels, strict=True)), value)
        for subscriber in self._subscribers:
            try:
                subscriber(measured)
            except Exception:  # a broken exporter must not stop a service
                log.exception("measurement subscriber failed", extra={"metric": metric.value})


MEASURES: Final = Measures()
"""The process's own list, used wherever no other is given."""
