"""One outcome, in the metrics that dashboards know.

Whoever handles messages tells, once for each attempt and after the commit: the
runner, the retry worker, the inbox and its worker, and replays.  What did not
begin is not told: it comes back, or another worker has told it.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from semel.codec import Unreadable
from semel.measures import MEASURES, Metric
from semel.message import Message
from semel.messaging.failure import FailureClass
from semel.messaging.inbox import InboxMessage
from semel.messaging.outcome import (
    NO_LONGER_WAITING,
    Conflicted,
    DeadLettered,
    Outcome,
    ParkedAway,
    Refused,
    RetryLater,
    RetryStored,
    Skipped,
    Told,
    told,
)
from semel.messaging.waiting import WaitingMessage

Delivered: TypeAlias = Message | Unreadable | WaitingMessage | InboxMessage
"""What came from a broker, or out of our own tables."""

_REPETITIONS: Final = frozenset({"duplicate", "stored before"})


def tell_received(arrival: Delivered, group: str) -> None:
    """Count one delivery."""
    MEASURES.count(Metric.RECEIVED, *_labels(arrival, group))


def tell(arrival: Delivered, outcome: Outcome, group: str, seconds: float | None = None) -> None:
    """Count what became of one attempt; without *seconds* where nothing was handled."""
    if not MEASURES.are_heard or _did_not_begin(arrival, outcome):
        return
    topic, _, kind = labels = _labels(arrival, group)
    MEASURES.count(Metric.PROCESSED, *labels, told(outcome).value)
    if seconds is not None:
        MEASURES.count(Metric.DURATION, *labels, value=seconds)
    match outcome:
        case Skipped(why) if why in _REPETITIONS:
            MEASURES.count(Metric.DUPLICATES, *labels)
        case RetryLater(failure=failure) | RetryStored(failure=failure) if failure is not None:
            MEASURES.count(Metric.RETRIES, *labels, failure.code)
        case DeadLettered(failure, name, is_new=True):
            MEASURES.count(Metric.DLQ, *labels, failure.code)
            if name is Told.DESERIALIZATION_FAILURE:
                MEASURES.count(Metric.DESERIALIZATION_FAILURES, topic, failure.code)
        case Conflicted(is_new=True):
            MEASURES.count(Metric.DLQ, *labels, "PAYLOAD_CONFLICT")
        case _:
            pass
    if _is_poison(outcome):
        MEASURES.count(Metric.POISON, topic, kind)


def _did_not_begin(arrival: Delivered, outcome: Outcome) -> bool:
    match outcome:
        case RetryLater(failure=None):
            return True
        case Skipped(why) if why == NO_LONGER_WAITING:
            return True
        case Refused("parked"):
            # A message that waits was parked by somebody else since it was taken.
            return isinstance(arrival, WaitingMessage)
        case _:
            return False


def _is_poison(outcome: Outcome) -> bool:
    """Tell whether a message was put aside, just now, that fails every time."""
    match outcome:
        case DeadLettered(failure, Told.DLQ, is_new=True) | ParkedAway(failure=failure):
            return failure is not None and failure.failure_class is FailureClass.POISON
        case Conflicted(is_new=is_new):
            return is_new
        case _:
            return False


def _labels(arrival: Delivered, group: str) -> tuple[str, str, str]:
    match arrival:
        case Unreadable(record=record):
            return record.at.topic, group, ""
        case Message(source=source, type=kind):
            return source.topic if source else "", group, kind
        case WaitingMessage() | InboxMessage():
            return arrival.topic, group, arrival.message_type
