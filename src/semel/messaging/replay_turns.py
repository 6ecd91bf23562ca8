"""What became of one message of a replay, and how an outcome of the engine is told there."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from semel.errors import Retryable
from semel.messaging.outcome import (
    Conflicted,
    DeadLettered,
    Handled,
    Outcome,
    ParkedAway,
    Refused,
    RetryLater,
    RetryStored,
    Skipped,
)


class ReplayInterrupted(Retryable):
    """A message could not be tried: the database does not answer, or a lock is held."""

    def __init__(self, consumer: str, message_id: str, why: str) -> None:
        super().__init__(consumer, message_id, why)
        self.consumer = consumer
        self.message_id = message_id
        self.why = why

    def __str__(self) -> str:
        return (
            f"consumer {self.consumer}: message {self.message_id!r} could not be tried "
            f"({self.why}); run the replay again, and it goes on with it"
        )


class Turn(StrEnum):
    """What became of one message of a replay."""

    HANDLED = "handled"
    DUPLICATE = "duplicate"
    """It was handled before, or has an old version: nothing was done."""

    FAILED = "failed"
    """Its handler failed; it waits, or is parked or dead, as after any delivery."""

    REFUSED = "refused"
    """It must not be replayed: a person has to look at it."""

    LEFT = "left"
    """It waits behind another one, or for its time, or another worker has it."""

    MISSING = "missing"
    """Nobody has its payload any more."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """A message of a replay that had its turn."""

    message_id: str
    turn: Turn
    why: str = ""
    code: str = ""
    """Of a failure; what stays where its words must not."""


def replayed(message_id: str, outcome: Outcome) -> Replayed:
    """Say what an outcome of the engine is in a replay."""
    match outcome:
        case Handled():
            return Replayed(message_id, Turn.HANDLED)
        case Skipped(why):
            return Replayed(message_id, Turn.DUPLICATE, "" if why == "duplicate" else why)
        case Refused(why):
            return Replayed(message_id, Turn.REFUSED, why)
        case Conflicted():
            return Replayed(message_id, Turn.REFUSED, "its id is known with another payload")
        case RetryLater() | RetryStored() | ParkedAway() | DeadLettered():
            if outcome.failure is None:
                why = "it waits for its turn, or another worker has it"
                return Replayed(message_id, Turn.LEFT, why)
            code = outcome.failure.code
            words = f"{code}: {outcome.failure.reason}"
            return Replayed(message_id, Turn.FAILED, words, code)
        case _ as never:
            assert_never(never)
