"""The claim: the durable statement that a consumer takes a message, and its states.

    (nothing) ──▶ COMPLETED                          transactional: claim, effect and
        │                                            state in one transaction
        ├──▶ IN_PROGRESS ──▶ COMPLETED               leased: for long handlers
        │        │
        └────────┴──▶ FAILED_RETRYABLE ──▶ COMPLETED | FAILED_TERMINAL | PARKED
                      (due again later)

If the database cannot be asked, a claim raises, and the delivery comes back: an error never
counts as a duplicate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

from semel.errors import Fenced, Misuse, NeedsOperator, Retryable
from semel.message import Message


class ClaimState(StrEnum):
    """The state of one message of one consumer."""

    IN_PROGRESS = "IN_PROGRESS"
    """An owner holds a lease on it."""

    COMPLETED = "COMPLETED"
    """Its effect is durable."""

    FAILED_RETRYABLE = "FAILED_RETRYABLE"
    """It failed and may be tried again when it is due."""

    FAILED_TERMINAL = "FAILED_TERMINAL"
    """It is a dead letter."""

    PARKED = "PARKED"
    """It waits for a person, or behind a message of its key that does."""


TERMINAL: Final = frozenset({ClaimState.COMPLETED, ClaimState.FAILED_TERMINAL})
"""The only states that retention may delete."""

CLOSED: Final = TERMINAL | {ClaimState.PARKED}
"""States that no attempt can change: a failure that comes late is not written."""

_ANY = frozenset(ClaimState)

ARROWS: Final[Mapping[ClaimState, frozenset[ClaimState]]] = {
    ClaimState.IN_PROGRESS: _ANY,
    ClaimState.FAILED_RETRYABLE: _ANY,
    ClaimState.COMPLETED: frozenset(),
    # Only an operator can reopen these two, and the act is audited.
    ClaimState.FAILED_TERMINAL: frozenset({ClaimState.FAILED_RETRYABLE}),
    ClaimState.PARKED: frozenset(
        {ClaimState.FAILED_RETRYABLE, ClaimState.COMPLETED, ClaimState.FAILED_TERMINAL}
    ),
}
"""The allowed changes of state; COMPLETED never changes."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """The caller may handle the message."""

    attempt: int = 1
    """Counts from 1."""

    fence: int = 0
    """The fence that `mark_completed` and `renew` of a leased claim must pass."""

    from_owner: str = ""
    """The owner of the expired lease that was taken over; empty if there was none."""

    from_code: str = field(default="", compare=False)
    """The code of the failure before; `give_back` restores it."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The effect is durable already: settle with an ack."""

    result: str | None = None
    """What the handler returned the first time, as JSON, where the consumer keeps results."""

    had_effect: bool = True
    """False: the message was completed without an effect, and there is nothing to send again."""


# Markers: in a column of their own, because a handler chooses its error codes freely.
SKIPPED: Final = "SKIPPED"
"""COMPLETED without an effect: a person decided to skip the message."""

REPLACED: Final = "REPLACED"
"""COMPLETED without an effect: the message is handled under another id."""

DELETED: Final = "DELETED"
"""FAILED_TERMINAL: two people decided to delete the message; a repetition is refused."""

ERASED: Final = "ERASED"
"""PARKED: the payload was erased, and nothing is left to handle."""

OLD_VERSION: Final = "OLD_VERSION"
"""COMPLETED without an effect: a later version of its aggregate had been applied."""

WITHOUT_EFFECT: Final = frozenset({SKIPPED, REPLACED, DELETED, ERASED, OLD_VERSION})
"""The markers of claims without an effect: by a person's act, or of an old version."""


@dataclass(frozen=True, slots=True)
class NotDue:
    """It failed, and its next attempt is later."""

    seconds_left: float
    attempts: int


@dataclass(frozen=True, slots=True)
class HeldElsewhere:
    """Another owner handles it, and may still fail: no ack, it comes back."""

    owner: str = ""
    seconds_left: float = 0.0


@dataclass(frozen=True, slots=True)
class Stale:
    """The lease ran out, and the stale policy is not simply to reclaim it."""

    owner: str
    seconds_ago: float
    attempts: int
    fence: int = 0
    """The fence of the expired lease: what is decided about it must pass this."""


@dataclass(frozen=True, slots=True)
class Parked:
    """It waits for a person; never silently handled again."""


@dataclass(frozen=True, slots=True)
class Terminal:
    """It is a dead letter; never silently handled again."""

    error_code: str = ""


@dataclass(frozen=True, slots=True)
class Conflict:
    """The id is known with another payload."""

    expected: str
    found: str


NotOurs: TypeAlias = Duplicate | NotDue | HeldElsewhere | Stale | Parked | Terminal | Conflict
ClaimAnswer: TypeAlias = Claimed | NotOurs


class ClaimFound(StrEnum):
    """What a claim can find: with the stale policy, it determines the answer."""

    NOTHING = "nothing"
    COMPLETED = "COMPLETED"
    RETRYABLE_DUE = "FAILED_RETRYABLE, due"
    RETRYABLE_LATER = "FAILED_RETRYABLE, not yet due"
    LEASE_LIVE = "IN_PROGRESS with a live lease"
    LEASE_EXPIRED = "IN_PROGRESS with an expired lease"
    TERMINAL = "FAILED_TERMINAL"
    PARKED = "PARKED"
    LOCKED = "a lock that did not come free in time"
    OTHER_PAYLOAD = "the same id with another payload"


@dataclass(frozen=True, slots=True)
class ClaimRow:
    """One row of ``processed_message``."""

    consumer: str
    message_id: str
    state: ClaimState
    attempts: int = 1
    owner: str = ""
    fence: int = 0
    lease_until: float = 0.0
    due_at: float = 0.0
    payload_hash: str = ""
    first_seen_at: float = 0.0
    updated_at: float = 0.0
    error_code: str = ""
    """The code of the last failure; empty after a success."""

    marker: str = ""
    """Why it has this state without an attempt, such as `SKIPPED`; never a handler's code."""

    result: str | None = None
    source: str = ""
    """Coordinates of the delivery that was claimed first; empty if unknown."""

    failed_at: float | None = None
    """When an attempt failed last."""

    erased_at: float | None = None
    """When the message's payload was erased: no part of it may be written again."""

    result_key: str | None = None
    """The key of the message, if a result is kept."""


def found_of(row: ClaimRow | None, payload_hash: str, now: float) -> ClaimFound:
    """Return what a claim with *payload_hash* finds; the pure model of the SQL.

    An empty hash on either side means "unknown", and conflicts with no other hash.
    """
    if row is None:
        return ClaimFound.NOTHING
    if row.payload_hash and payload_hash and row.payload_hash != payload_hash:
        return ClaimFound.OTHER_PAYLOAD
    match row.state:
        case ClaimState.COMPLETED:
            return ClaimFound.COMPLETED
        case ClaimState.FAILED_TERMINAL:
            return ClaimFound.TERMINAL
        case ClaimState.PARKED:
            return ClaimFound.PARKED
        case ClaimState.FAILED_RETRYABLE:
            return ClaimFound.RETRYABLE_DUE if row.due_at <= now else ClaimFound.RETRYABLE_LATER
        case ClaimState.IN_PROGRESS:
            return ClaimFound.LEASE_EXPIRED if row.lease_until <= now else ClaimFound.LEASE_LIVE


def refusal(row: ClaimRow, payload_hash: str, now: float) -> NotOurs | None:
    """Return the answer for a row that cannot be claimed; None if it can."""
    match found_of(row, payload_hash, now):
        case ClaimFound.OTHER_PAYLOAD:
            return Conflict(expected=row.payload_hash, found=payload_hash)
        case ClaimFound.COMPLETED:
            return Duplicate(row.result, row.marker not in WITHOUT_EFFECT)
        case ClaimFound.TERMINAL:
            return Terminal(row.marker or row.error_code)
        case ClaimFound.PARKED:
            return Parked()
        case ClaimFound.RETRYABLE_LATER:
            return NotDue(row.due_at - now, row.attempts)
        case ClaimFound.LEASE_LIVE:
            return HeldElsewhere(row.owner, row.lease_until - now)
        case _:
            return None


def is_leased(row: ClaimRow, now: float) -> bool:
    """Return whether an owner holds the message under a lease that has not expired."""
    return found_of(row, "", now) is ClaimFound.LEASE_LIVE


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """Which message is to be claimed."""

    message_id: str
    payload_hash: str = ""
    source: str = ""
    """The coordinates of the delivery; written with a new claim."""

    def __post_init__(self) -> None:
        if not self.message_id:
            raise Misuse("a message without an id cannot be claimed: every such one is the same")

    @classmethod
    def of(cls, message: Message) -> ClaimRequest:
        """Return the request for *message*."""
        return cls(message.id, message.digest, source_of(message))


@dataclass(frozen=True, slots=True)
class Failure:
    """What the claim stores of a failed attempt."""

    state: ClaimState
    attempts: int
    error_code: str
    delay_seconds: float = 0.0
    """The time until it is due again, on the database's clock."""

    payload_hash: str = ""
    source: str = ""
    """The coordinates of the delivery; written if there is no claim yet."""

    marker: str = ""
    """Why, if no attempt failed: one of `WITHOUT_EFFECT`, or `BEHIND`."""


def source_of(message: Message) -> str:
    """Return a message's coordinates as text; empty if it has none."""
    return "" if message.source is None else str(message.source)


class NotClaimable(Retryable):
    """The message is not this caller's now, and not known to be done: do not ack it."""

    def __init__(self, consumer: str, message_id: str, answer: ClaimAnswer) -> None:
        super().__init__(consumer, message_id, answer)
        self.consumer = consumer
        self.message_id = message_id
        self.answer = answer

    def __str__(self) -> str:
        return (
            f"consumer {self.consumer}: message {self.message_id!r} cannot be claimed now "
            f"({self.answer}); it was not handled, and must not be acknowledged"
        )


class RunByPipeline(NeedsOperator):
    """A pipeline on Spark runs the consumer, so no service may claim for it."""

    def __init__(self, consumer: str, pipeline: str) -> None:
        super().__init__(consumer, pipeline)
        self.consumer = consumer
        self.pipeline = pipeline

    def __str__(self) -> str:
        return (
            f"consumer {self.consumer} is run by Spark ({self.pipeline}), and nothing was claimed: "
            f"stop this service, or hand the consumer over with "
            f"`semel consumer hand-over {self.consumer}`"
        )


class Locked(Retryable):
    """Another transaction holds a row for longer than the lock timeout."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return f"{self.what} is held by another transaction; nothing was changed, it comes back"


class ClaimLost(Fenced):
    """The lease of a running handler ended, or another owner took it."""

    def __init__(self, consumer: str, message_id: str) -> None:
        super().__init__(consumer, message_id)
        self.consumer = consumer
        self.message_id = message_id

    def __str__(self) -> str:
        return (
            f"consumer {self.consumer}: the lease on message {self.message_id!r} was lost; "
            f"its handler was cancelled and its completion refused"
        )
