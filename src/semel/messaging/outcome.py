"""The outcome of a delivery: one table for the broker's answer, metrics, marks and replays.

Every delivery is settled: by an ack after its outcome is durable, or by a nack
that brings it back.  A delivery that is neither is lost at the next ack.

An outcome is counted once per attempt, after the commit.  An attempt that did
not begin is not counted: the message comes back, or another worker counts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple, TypeAlias

from semel.codec import Unreadable
from semel.events import EVENTS, GapCrossed, Metric
from semel.message import Message, Partition, StoredRecord
from semel.messaging.failure import Classified, FailureClass
from semel.messaging.records import Gap, StoredMessage, WaitingMessage

NO_LONGER_WAITING: Final = "no longer waiting"
"""The reason for skipping a message of the waiting table that another worker has handled."""


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
    """The missing versions before it, which `GapPolicy.ALERT` allows."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """It was handled before, or its version is older than the current one; no effect."""

    why: str = "duplicate"
    result: str | None = None
    """What the handler returned the first time, as JSON, if the consumer keeps results."""


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
    """Its dead letter is durable."""

    failure: Classified
    told: Told = Told.DLQ
    is_new: bool = field(default=True, compare=False)
    """True if this attempt wrote the dead letter; False if it existed before."""


@dataclass(frozen=True, slots=True)
class ParkedAway:
    """It waits for a person, or behind a message of its key that does."""

    why: str
    failure: Classified | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """An earlier delivery made it a dead letter or parked it; no effect."""

    why: str


@dataclass(frozen=True, slots=True)
class Conflicted:
    """Its id was used with another payload; a dead letter holds both hashes."""

    expected: str
    found: str
    is_new: bool = field(default=True, compare=False)
    """True if this attempt wrote the dead letter."""


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


class Mark(StrEnum):
    """What the database records for an offset when its message enters or leaves our tables."""

    HANDLED = "ended_handled"
    """A retry or a replay handled it."""

    SKIPPED = "ended_skipped"
    """A person decided that it has no effect."""

    DELETED = "ended_deleted"
    """Two people decided to delete it."""

    DUPLICATE = "ended_duplicate"
    """Another delivery of its message was handled, or its version was older."""

    REFUSED = "ended_refused"
    """Its message is stored, or has ended, under the offset of another delivery."""

    KEPT = "kept"
    """Its message is in the waiting table or is a dead letter."""


class Meaning(NamedTuple):
    """What one kind of outcome means to the broker, dashboards, the audit and a replay."""

    ack: bool
    """The broker may forget the delivery: something about it is durable in our tables."""

    told: Told
    """Its name in metrics and records; a dead letter may have a closer one."""

    end: Mark | None
    """The mark of its offset when a stored message ends like this; None: it stays stored."""

    replay: str
    """The word for it in a replay (`ReplayResult`), if the attempt began."""


# fmt: off
MEANING: Final[Mapping[type, Meaning]] = {
    #                      ack    name in metrics          mark of its offset  in a replay
    Handled:      Meaning(True,  Told.SUCCESS,            Mark.HANDLED,       "handled"),
    Skipped:      Meaning(True,  Told.DUPLICATE_SKIPPED,  Mark.DUPLICATE,     "duplicate"),
    Refused:      Meaning(True,  Told.TERMINAL_FAILURE,   Mark.REFUSED,       "refused"),
    Conflicted:   Meaning(True,  Told.CONFLICT,           None,               "refused"),
    RetryLater:   Meaning(False, Told.RETRYABLE_FAILURE,  None,               "failed"),
    RetryStored:  Meaning(True,  Told.RETRYABLE_FAILURE,  None,               "failed"),
    ParkedAway:   Meaning(True,  Told.PARKED,             None,               "failed"),
    DeadLettered: Meaning(True,  Told.DLQ,                None,               "failed"),
}
# fmt: on
"""The one table of outcomes."""


def settlement(outcome: Outcome) -> Settlement:
    """Return the answer to the broker."""
    if MEANING[type(outcome)].ack or not isinstance(outcome, RetryLater):
        return Ack()
    return Nack(outcome.seconds)


def told(outcome: Outcome) -> Told:
    """Return the outcome's name in metrics and records."""
    return outcome.told if isinstance(outcome, DeadLettered) else MEANING[type(outcome)].told


def end_of(outcome: Outcome) -> Mark | None:
    """Return how a stored message ended; None if it stays in our tables."""
    return MEANING[type(outcome)].end


def alert(outcomes: Iterable[Outcome]) -> None:
    """Emit GapCrossed events; call it after the commit.

    A crash between the two loses the event; the gap is listed in the database all the same.
    """
    for outcome in outcomes:
        if isinstance(outcome, Handled) and (gap := outcome.gap) is not None:
            EVENTS.emit(GapCrossed(gap.consumer, gap.consumer, gap.key, gap.expected, gap.found))


Delivered: TypeAlias = Message | Unreadable | StoredMessage
"""What came from a broker, or out of our own tables."""


_REPETITIONS: Final = frozenset({"duplicate", "stored before"})


def tell_received(arrival: Delivered, group: str) -> None:
    """Count one delivery."""
    EVENTS.measure(Metric.RECEIVED, *_labels(arrival, group))


def tell(arrival: Delivered, outcome: Outcome, group: str, seconds: float | None = None) -> None:
    """Count the outcome of one attempt; without *seconds* if the handler did not run."""
    if not EVENTS.is_measured or _did_not_begin(arrival, outcome):
        return
    topic, _, kind = labels = _labels(arrival, group)
    EVENTS.measure(Metric.PROCESSED, *labels, told(outcome).value)
    if seconds is not None:
        EVENTS.measure(Metric.DURATION, *labels, value=seconds)
    match outcome:
        case Skipped(why) if why in _REPETITIONS:
            EVENTS.measure(Metric.DUPLICATES, *labels)
        case ParkedAway(failure=failure) if failure is not None:
            EVENTS.measure(Metric.FAILURES, kind, failure.code)
        case RetryLater(failure=failure) | RetryStored(failure=failure) if failure is not None:
            EVENTS.measure(Metric.RETRIES, *labels, failure.code)
            EVENTS.measure(Metric.FAILURES, kind, failure.code)
        case DeadLettered(failure, name, is_new=True):
            EVENTS.measure(Metric.DLQ, *labels, failure.code)
            EVENTS.measure(Metric.FAILURES, kind, failure.code)
            if name is Told.DESERIALIZATION_FAILURE:
                EVENTS.measure(Metric.DESERIALIZATION_FAILURES, topic, failure.code)
        case Conflicted(is_new=True):
            EVENTS.measure(Metric.DLQ, *labels, "PAYLOAD_CONFLICT")
            EVENTS.measure(Metric.FAILURES, kind, "PAYLOAD_CONFLICT")
        case _:
            pass
    if _is_poison(outcome):
        EVENTS.measure(Metric.POISON, topic, kind)


def _did_not_begin(arrival: Delivered, outcome: Outcome) -> bool:
    match outcome:
        case RetryLater(failure=None):
            return True
        case Skipped(why) if why == NO_LONGER_WAITING:
            return True
        case Refused("parked"):
            # Another worker parked the waiting message after this one read it.
            return isinstance(arrival, WaitingMessage)
        case _:
            return False


def _is_poison(outcome: Outcome) -> bool:
    """Return whether this attempt dead-lettered or parked a message that always fails."""
    match outcome:
        case DeadLettered(failure, Told.DLQ, is_new=True) | ParkedAway(failure=failure):
            return failure is not None and failure.failure_class is FailureClass.POISON
        case Conflicted(is_new=is_new):
            return is_new
        case _:
            return False


def _labels(arrival: Delivered, group: str) -> tuple[str, str, str]:
    match arrival:
        case Unreadable(record=StoredRecord(message=message)):
            return _labels(message, group)
        case Unreadable(record=record):
            return record.at.topic, group, ""
        case Message(source=source, type=kind):
            return source.topic if source else "", group, kind
        case StoredMessage():
            return arrival.topic, group, arrival.message_type


HOLE: Final = "hole"
"""The outcome of offsets that have no record."""


CYCLE: Final = "cycle"
"""The outcome of the offsets of cycles on Spark, of which only counts are kept."""


_DELIVERIES: Final = frozenset(map(str, (*Told, HOLE, CYCLE)))

ENDS: Final = frozenset[str](Mark) - {Mark.KEPT}
"""Marks after which the message is no longer in our tables."""


def is_delivery(outcome: str) -> bool:
    """Return whether *outcome* is that of a delivery or a hole, and not a mark."""
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


@dataclass(frozen=True, slots=True)
class CycleOutcomes:
    """What became of one partition's offsets in a cycle on Spark."""

    cycle: str
    """Generation and batch: ``g1.b42``."""

    attempt: str
    first: int
    last: int
    totals: Mapping[str, int]
    """How many offsets had each outcome; offsets without a record have none."""

    at: float
    """When it was committed."""

    @property
    def length(self) -> int:
        """How many offsets it covers."""
        return self.last - self.first + 1

    @property
    def counted(self) -> int:
        """How many of them have an outcome."""
        return sum(self.totals.values())


def ranges_of(
    partition: Partition, outcomes: Sequence[tuple[int, str]], position: int | None = None
) -> list[OutcomeRange]:
    """Fold (offset, outcome) pairs in order of offset into ranges.

    From *position* on, offsets between delivered records are holes, which have no record:
    Kafka skips transaction markers and compacted records.
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
