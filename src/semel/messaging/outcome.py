"""What became of a delivery, and what the broker is told.

Every delivery is settled: by an ack after something about it is durable, or
by a nack that brings it back.  A delivery that is left alone is lost at the
next ack.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeAlias, assert_never

from semel.messaging.failure import Classified
from semel.messaging.sequence import Gap

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
