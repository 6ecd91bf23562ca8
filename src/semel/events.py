"""The one bus that logs, metrics and progress displays listen to.

    Event          what happened, with the glossary's nouns as fields; each is also a log line
    Measurement    a counter's step, a duration or a gauge, by the names that dashboards use

A subscriber that raises is logged and never stops the work.  No label carries
an id: a metric with an id as a label would create a new series per message.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Final, TypeVar, overload

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
class RowsRejected(Event):
    """Rows of a committed cycle that can never be written are in the sink's reject table."""

    cycle: str
    sink: str
    rows: int


@dataclass(frozen=True, slots=True)
class SinkReturned(Event):
    """A sink that was not configured for some cycles is back; `semel sink add` writes them."""

    sink: str
    missed: int
    first: str
    last: str


@dataclass(frozen=True, slots=True)
class SinkStranded(Event):
    """How many committed cycles a sink has not shown yet, and how old the oldest decision is."""

    sink: str
    cycles: int
    oldest_seconds: float


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


@dataclass(frozen=True, slots=True)
class CircuitOpened(Event):
    """A consumer stands still: its recent failures are an outage, and cost no attempts.

    Its scope is the consumer's name.
    """

    consumer: str
    error_code: str
    """The code of the last failure."""


@dataclass(frozen=True, slots=True)
class CircuitClosed(Event):
    """A message succeeded after an outage, and the consumer goes on."""

    consumer: str
    seconds: float
    """How long it stood still."""


class Metric(StrEnum):
    """The name of a metric, as exporters spell it."""

    RECEIVED = "consumer.messages.received.total"
    PROCESSED = "consumer.messages.processed.total"
    DURATION = "consumer.processing.duration"
    DUPLICATES = "consumer.duplicates.total"
    RETRIES = "consumer.retries.total"
    DLQ = "consumer.dlq.total"
    LAG = "consumer.lag"
    LAG_SECONDS = "consumer.lag.seconds"
    OFFSET_COMMITS = "consumer.offset.commits.total"
    DESERIALIZATION_FAILURES = "consumer.deserialization.failures.total"
    POISON = "consumer.poison.detected.total"
    FAILURES = "message.failures.total"
    CIRCUIT = "consumer.circuit.open"
    OUTBOX_PENDING = "outbox.pending"
    OUTBOX_OLDEST_SECONDS = "outbox.oldest.age"
    OUTBOX_PUBLISHED = "outbox.published.total"
    CYCLES = "pipeline.cycles.total"
    STEP_DURATION = "pipeline.step.duration"
    REJECTED = "pipeline.rejected.total"
    STRANDED = "pipeline.stranded"
    STRANDED_OLDEST_SECONDS = "pipeline.stranded.oldest.age"


_CONSUMER = ("topic", "consumer_group", "event_type")


LABELS: Final[Mapping[Metric, tuple[str, ...]]] = {
    Metric.RECEIVED: _CONSUMER,
    Metric.PROCESSED: (*_CONSUMER, "outcome"),
    Metric.DURATION: _CONSUMER,
    Metric.DUPLICATES: _CONSUMER,
    Metric.RETRIES: (*_CONSUMER, "reason"),
    Metric.DLQ: (*_CONSUMER, "reason"),
    Metric.LAG: ("topic", "consumer_group", "partition"),
    Metric.LAG_SECONDS: ("topic", "consumer_group", "partition"),
    Metric.OFFSET_COMMITS: ("topic", "consumer_group", "status"),
    Metric.DESERIALIZATION_FAILURES: ("topic", "reason"),
    Metric.POISON: ("topic", "event_type"),
    Metric.FAILURES: ("event_type", "reason"),
    Metric.CIRCUIT: ("consumer",),
    Metric.OUTBOX_PENDING: ("outbox",),
    Metric.OUTBOX_OLDEST_SECONDS: ("outbox",),
    Metric.OUTBOX_PUBLISHED: ("outbox", "topic", "status"),
    Metric.CYCLES: ("scope", "outcome"),
    Metric.STEP_DURATION: ("scope", "step"),
    Metric.REJECTED: ("scope", "sink"),
    Metric.STRANDED: ("scope", "sink"),
    Metric.STRANDED_OLDEST_SECONDS: ("scope", "sink"),
}
"""The labels of each metric, in order."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One reading: a counter's step, a duration's seconds, or a gauge's value."""

    metric: Metric
    labels: Mapping[str, str]
    value: float = 1.0
    readings: int = 1
    """How many durations of about this value it stands for: pipelines on Spark add them up."""


_WARNINGS = (
    StepFailed,
    RowsRejected,
    SinkRetried,
    SinkReturned,
    CommitSlow,
    QueryRestarted,
    GapCrossed,
    CircuitOpened,
)

Kind = TypeVar("Kind", Event, Measurement)


class Events:
    """A list of subscribers, called in order, in the thread that emits."""

    def __init__(self) -> None:
        self._subscribers: tuple[tuple[type, Callable[[Any], None]], ...] = ()
        self._lock = threading.Lock()

    @overload
    def subscribe(self, subscriber: Callable[[Event], None]) -> Callable[[], None]: ...

    @overload
    def subscribe(
        self, subscriber: Callable[[Kind], None], kind: type[Kind]
    ) -> Callable[[], None]: ...

    def subscribe(
        self, subscriber: Callable[[Any], None], kind: type = Event
    ) -> Callable[[], None]:
        """Call *subscriber* with every event, or `Measurement`, of *kind* from now on.

        Return a function that unsubscribes.
        """
        entry = (kind, subscriber)
        with self._lock:
            self._subscribers = (*self._subscribers, entry)

        def unsubscribe() -> None:
            with self._lock:
                self._subscribers = tuple(one for one in self._subscribers if one is not entry)

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
        self._pass_on(event)
        self._measure_cycle(event)

    def _measure_cycle(self, event: Event) -> None:
        """Turn what happened to a cycle into the pipeline's metrics."""
        match event:
            case CycleEnded():
                self.measure(Metric.CYCLES, event.scope, event.outcome)
            case StepDone():
                self.measure(Metric.STEP_DURATION, event.scope, event.step, value=event.seconds)
            case RowsRejected():
                self.measure(Metric.REJECTED, event.scope, event.sink, value=event.rows)
            case SinkStranded():
                place = (event.scope, event.sink)
                self.measure(Metric.STRANDED, *place, value=event.cycles)
                self.measure(Metric.STRANDED_OLDEST_SECONDS, *place, value=event.oldest_seconds)

    @property
    def is_measured(self) -> bool:
        """Whether anything listens to measurements; without it, skip those that cost a query."""
        return any(issubclass(Measurement, kind) for kind, _ in self._subscribers)

    def measure(self, metric: Metric, *labels: str, value: float = 1.0, readings: int = 1) -> None:
        """Pass one reading on; *labels* in the order of `LABELS`.  It is not logged.

        Raises:
            Misuse: the metric has other labels.
        """
        # This stands on the way of every message: without an exporter it must cost nothing.
        if not self.is_measured:
            return
        names = LABELS[metric]
        if len(names) != len(labels):
            raise Misuse(f"metric {metric} needs the labels {', '.join(names)}, got {len(labels)}")
        named = dict(zip(names, labels, strict=True))
        self._pass_on(Measurement(metric, named, value, readings))

    def _pass_on(self, found: Event | Measurement) -> None:
        for kind, subscriber in self._subscribers:
            if not isinstance(found, kind):
                continue
            try:
                subscriber(found)
            except Exception:  # a broken display or exporter must not stop the work
                what = (
                    found.metric.value if isinstance(found, Measurement) else type(found).__name__
                )
                log.exception("event subscriber failed", extra={"event": what})

    def __reduce__(self) -> tuple[type[Events], tuple[()]]:
        """Subscribers belong to the process that added them: a copy starts without any."""
        return (Events, ())


EVENTS: Final = Events()
"""The process's own bus, used wherever no other is given."""
