"""One outcome, in the metrics that dashboards know."""

from __future__ import annotations

from semel.codec import Unreadable
from semel.measures import MEASURES, Metric
from semel.message import Message
from semel.messaging.failure import FailureClass
from semel.messaging.outcome import (
    DeadLettered,
    Outcome,
    RetryLater,
    RetryStored,
    Skipped,
    Told,
    told,
)


def tell(arrival: Message | Unreadable, outcome: Outcome, group: str, seconds: float) -> None:
    """Count what became of one delivery."""
    if isinstance(arrival, Unreadable):
        topic, kind = arrival.record.at.topic, ""
    else:
        topic, kind = arrival.source.topic if arrival.source else "", arrival.type
    MEASURES.count(Metric.PROCESSED, topic, group, kind, told(outcome).value)
    MEASURES.count(Metric.DURATION, topic, group, kind, value=seconds)
    match outcome:
        case Skipped(why="duplicate"):
            MEASURES.count(Metric.DUPLICATES, topic, group, kind)
        case RetryLater(failure=failure) | RetryStored(failure=failure) if failure is not None:
            MEASURES.count(Metric.RETRIES, topic, group, kind, failure.code)
        case DeadLettered(failure, name):
            MEASURES.count(Metric.DLQ, topic, group, kind, failure.code)
            if name is Told.DESERIALIZATION_FAILURE:
                MEASURES.count(Metric.DESERIALIZATION_FAILURES, topic, failure.code)
            elif failure.failure_class is FailureClass.POISON:
                MEASURES.count(Metric.POISON, topic, kind)
