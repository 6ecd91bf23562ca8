"""What became of a delivery: one table for the broker's answer, metrics, marks and replays.

What became of a delivery, and what the broker is told.

Every delivery is settled: by an ack after something about it is durable, or
by a nack that brings it back.  A delivery that is left alone is lost at the
next ack.

What is said aloud, once it is durable: that versions of a key did not come.

One outcome, in the metrics that dashboards know.

Whoever handles messages tells, once for each attempt and after the commit: the
runner, the retry worker, the inbox and its worker, and replays.  What did not
begin is not told: it comes back, or another worker has told it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeAlias, assert_never

from semel.codec import Unreadable
from semel.events import EVENTS, MEASURES, GapCrossed, Metric
from semel.message import Message, Partition
from semel.messaging.failure import Classified, FailureClass
from semel.messaging.records import Gap, StoredMessage, WaitingMessage

NO_LONGER_WAITING: Final = "no longer waiting"
"""Why a message out of the waiting room was left alone: another worker has had it."""


class Told(StrEnum):
    """The outcome's name in metrics, records and reports (S3-53, and ``conflict``)."""

    SUCCESS = "success"
    DUPLICATE_SKIPPED = "duplicate_skipped"
    RETRYABLE_FAILURE = "retryable_failure"
    TERMINAL_FAILURE = "terminal_failure"
    DLQ = "dlq"
    PARKED = "parked"
    DESERIALIZATION_FAILURE = "deserialization_failure"
    SCHEMA_INCOMPATIBLE = "schema_incompatible"
    CONFLICT = "conflict"


@dataclass(frozen=True, slots=True)
class Handled:
    """The effect is durable."""

    result: Any = None
    gap: Gap | None = field(default=None, repr=False)
    """The missing versions that it was applied across, as `GapPolicy.ALERT` says."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """It was handled before, or its version is an old one; nothing was done."""

    why: str = "duplicate"
    result: str | None = None
    """What the handler returned the first time, as JSON, where the consumer keeps results."""


@dataclass(frozen=True, slots=True)
class RetryLater:
    """This attempt failed, or could not begin; the delivery comes back."""

    seconds: float
    failure: Classified | None = None
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class RetryStored:
    """This attempt failed, or its key waits; the retry table holds the message."""

    failure: Classified | None = None
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class DeadLettered:
    """It is a dead letter, durably."""

    failure: Classified
    told: Told = Told.DLQ
    is_new: bool = field(default=True, compare=False)
    """It was none before: a repetition only finds the letter that is there."""


@dataclass(frozen=True, slots=True)
class ParkedAway:
    """It waits for a person, or behind a message of its key that does."""

    why: str
    failure: Classified | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """It is a dead letter or parked from an earlier delivery; nothing was done."""

    why: str


@dataclass(frozen=True, slots=True)
class Conflicted:
    """Its id is known with another payload; both hashes are kept in a dead letter."""

    expected: str
    found: str
    is_new: bool = field(default=True, compare=False)
    """Its dead letter was not there before."""


Outcome: TypeAlias = (
    Handled | Skipped | RetryLater | RetryStored | DeadLettered | ParkedAway | Refused | Conflicted
)


@dataclass(frozen=True, slots=True)
class Ack:
    """The broker may forget the delivery."""


@dataclass(frozen=True, slots=True)
class Nack:
    """The broker delivers it again, after a while."""

    seconds: float


Settlement: TypeAlias = Ack | Nack


def settlement(outcome: Outcome) -> Settlement:
    """Say what to tell the broker.

    Whatever is acknowledged is durable in our own tables by now: as an effect, a claim, a
    dead letter, or a waiting message.
    """
    match outcome:
        case RetryLater(seconds):
            return Nack(seconds)
        case (
            Handled()
            | Skipped()
            | RetryStored()
            | DeadLettered()
            | ParkedAway()
            | Refused()
            | Conflicted()
        ):
            return Ack()
        case _ as never:
            assert_never(never)


def told(outcome: Outcome) -> Told:
    """Name the outcome as metrics and records do."""
    match outcome:
        case Handled():
            return Told.SUCCESS
        case Skipped():
            return Told.DUPLICATE_SKIPPED
        case RetryLater() | RetryStored():
            return Told.RETRYABLE_FAILURE
        case DeadLettered(told=name):
            return name
        case ParkedAway():
            return Told.PARKED
        case Refused():
            return Told.TERMINAL_FAILURE
        case Conflicted():
            return Told.CONFLICT
        case _ as never:
            assert_never(never)


def alert(outcomes: Iterable[Outcome]) -> None:
    """Tell of the gaps that messages were applied across; call it after the commit.

    A crash between the two leaves a gap untold, and listed all the same.
    """
    for outcome in outcomes:
        if isinstance(outcome, Handled) and (gap := outcome.gap) is not None:
            EVENTS.emit(GapCrossed(gap.consumer, gap.consumer, gap.key, gap.expected, gap.found))


Delivered: TypeAlias = Message | Unreadable | StoredMessage
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
        case StoredMessage():
            return arrival.topic, group, arrival.message_type


HOLE: Final = "hole"
"""The outcome of offsets that have no record."""


class Mark(StrEnum):
    """What is noted of an offset when its message comes into our tables, or leaves them."""

    HANDLED = "ended_handled"
    """A retry or a replay handled it."""

    SKIPPED = "ended_skipped"
    """A person decided that it has no effect."""

    DELETED = "ended_deleted"
    """Two people decided to delete it."""

    DUPLICATE = "ended_duplicate"
    """Another delivery of its message was handled, or its version was an old one."""

    REFUSED = "ended_refused"
    """Its message is kept, or ended, under the offset of another delivery."""

    KEPT = "kept"
    """Its message came into the waiting room or among the dead letters."""


_DELIVERIES: Final = frozenset(map(str, (*Told, HOLE)))


ENDS: Final = frozenset[str](Mark) - {Mark.KEPT}
"""Behind these a message is in our tables no more."""


def is_delivery(outcome: str) -> bool:
    """Tell an outcome that a delivery noted, or a hole, from a mark."""
    return outcome in _DELIVERIES


@dataclass(frozen=True, slots=True, order=True)
class OutcomeRange:
    """Neighbouring offsets of one partition with the same outcome; both ends included."""

    partition: Partition
    first: int
    last: int
    outcome: str

    @property
    def length(self) -> int:
        """How many offsets it covers."""
        return self.last - self.first + 1


def ranges_of(
    partition: Partition, outcomes: Sequence[tuple[int, str]], position: int | None = None
) -> list[OutcomeRange]:
    """Fold (offset, outcome) pairs in order of offset into ranges.

    From *position* on, offsets between delivered records are holes: the broker went past them.
    """
    ranges: list[OutcomeRange] = []
    following = position
    for offset, outcome in outcomes:
        if following is not None and offset > following:
            ranges.append(OutcomeRange(partition, following, offset - 1, HOLE))
        last = ranges[-1] if ranges else None
        if last is not None and last.outcome == outcome and last.last == offset - 1:
            ranges[-1] = OutcomeRange(partition, last.first, offset, outcome)
        else:
            ranges.append(OutcomeRange(partition, offset, offset, outcome))
        following = offset + 1
    return ranges
