"""What is counted, by the names and labels that dashboards and alerts know.

A measurement is made where the thing happens and handed to whoever
subscribed: an exporter, or a test.  Without a subscriber it costs a check, and
one that fails is logged and never disturbs the work.
No label carries an id: ids are in logs, and a metric with an id in it has no
end of series.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from semel.errors import Misuse

log = logging.getLogger("semel")


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
        """Call *subscriber* with every measurement from now on; return how to stop that."""
        self._subscribers = (*self._subscribers, subscriber)

        def unsubscribe() -> None:
            self._subscribers = tuple(s for s in self._subscribers if s is not subscriber)

        return unsubscribe

    @property
    def are_heard(self) -> bool:
        """Whether anybody subscribed: what is costly to find out can be left out otherwise."""
        return bool(self._subscribers)

    def count(self, metric: Metric, *labels: str, value: float = 1.0) -> None:
        """Hand one reading on; *labels* in the order of `LABELS`.

        Raises:
            Misuse: the metric has other labels.
        """
        if not self._subscribers:
            return
        names = LABELS[metric]
        if len(names) != len(labels):
            raise Misuse(f"metric {metric} has the labels {', '.join(names)}")
        measured = Measurement(metric, dict(zip(names, labels, strict=True)), value)
        for subscriber in self._subscribers:
            try:
                subscriber(measured)
            except Exception:  # a broken exporter must not stop a service
                log.exception("measurement subscriber failed", extra={"metric": metric.value})


MEASURES: Final = Measures()
"""The process's own list, used wherever no other is given."""
