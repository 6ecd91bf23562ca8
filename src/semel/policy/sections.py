"""The parts of a consumer's policy, each a section of the file.

A field that is None says nothing; what holds then is settled by
`semel.policy.effective`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated

from semel.codec import FromCoordinates, FromHeader, FromPayload
from semel.policy.keys import Key
from semel.policy.kinds import Attempts, Choice, IdPlace, ListOf, Seconds, Text, Whole
from semel.policy.vocabulary import (
    Backoff,
    BatchPolicy,
    CommitTiming,
    DuplicateHandling,
    Intent,
    ReplayAllowed,
    RetryMode,
    StaleLease,
    Strategy,
)

_CODES = ListOf(
    Text("a code such as DATABASE_TIMEOUT", "DATABASE_TIMEOUT", r"^[A-Z][A-Z0-9]*(_[A-Z0-9]+)*$")
)


@dataclass(frozen=True, slots=True)
class Idempotency:
    """How repetitions are recognised, and what is done with them."""

    strategy: Annotated[
        Strategy, Key("How the consumer recognises that a message had its effect already.")
    ] = Strategy.PROCESSED_MESSAGE
    duplicate_handling: Annotated[
        DuplicateHandling, Key("What is done with a message that was handled before.")
    ] = DuplicateHandling.SKIP
    external_provider_idempotency: Annotated[
        bool | None,
        Key("Whether providers of side effects get, and recognise, an idempotency key."),
    ] = None


@dataclass(frozen=True, slots=True)
class OffsetCommit:
    """When the broker is told."""

    timing: Annotated[CommitTiming, Key("When the broker is told that a message is done.")] = (
        CommitTiming.AFTER_DB_TRANSACTION
    )


@dataclass(frozen=True, slots=True)
class Retry:
    """How often, how soon, and where a failed message is tried again."""

    max_attempts: Annotated[
        int,
        Key(
            "How often a message is tried, the first time included. 0, -1 and .inf are read as "
            "without end, which the lint refuses.",
            Attempts(),
        ),
    ] = 5
    backoff: Annotated[Backoff, Key("How the waits between attempts grow.")] = (
        Backoff.EXPONENTIAL_JITTER
    )
    initial_delay_ms: Annotated[
        int, Key("The first wait, in milliseconds.", Whole(0, example=1000))
    ] = 1000
    max_delay_ms: Annotated[
        int, Key("The longest wait, in milliseconds.", Whole(0, example=60000))
    ] = 60000
    jitter: Annotated[
        bool | None, Key("Whether waits are shortened at random.", default="as `backoff` says")
    ] = None
    retryable: Annotated[
        tuple[str, ...],
        Key("Codes that are retried, whatever their class and exception.", _CODES),
    ] = ()
    non_retryable: Annotated[
        tuple[str, ...],
        Key("Codes that are not retried, whatever their class and exception.", _CODES),
    ] = ()
    mode: Annotated[RetryMode, Key("Where a message waits for its next attempt.")] = (
        RetryMode.BLOCKING
    )

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield the keys that cannot both hold."""
        if self.initial_delay_ms > self.max_delay_ms:
            yield (
                "initialDelayMs",
                f"the first wait, {self.initial_delay_ms} ms, is longer than the longest, "
                f"{self.max_delay_ms} ms",
            )
        if self.jitter is False and self.backoff is Backoff.EXPONENTIAL_JITTER:
            yield "jitter", "backoff exponential-jitter has jitter; use backoff exponential"
        for code in sorted({*self.retryable} & {*self.non_retryable}):
            yield "nonRetryable", f"{code} is in retryable, too"


@dataclass(frozen=True, slots=True)
class Dlq:
    """The dead letters."""

    enabled: Annotated[
        bool, Key("Whether messages that cannot be handled become dead letters.")
    ] = True
    topic: Annotated[
        str | None,
        Key(
            "The topic that dead letters are published to, besides being kept. They go through "
            "the outbox named `outbox`, whose relay must run."
        ),
    ] = None
    owner: Annotated[str | None, Key("The team that looks after them.")] = None
    manual_review_required: Annotated[
        bool,
        Key(
            "Whether a person must have looked at a dead letter (`semel dlq show`) before it is "
            "sent back, parked or replayed."
        ),
    ] = False
    keep: Annotated[timedelta | None, Key("How long a dead letter may wait for its replay.")] = None


@dataclass(frozen=True, slots=True)
class Poison:
    """Messages that fail every time."""

    max_attempts_before_park: Annotated[
        int | None,
        Key(
            "After how many attempts a poison message is set aside.",
            Whole(1, example=5),
            default="`retry.maxAttempts`",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class LagSlo:
    """How far behind the consumer may be."""

    max_lag_seconds: Annotated[
        float, Key("How many seconds behind raise an alert; the metric counts records.", Seconds())
    ]


@dataclass(frozen=True, slots=True)
class Replay:
    """Sending messages to the consumer again, on purpose."""

    allowed: Annotated[
        ReplayAllowed | None,
        Key(
            "Whether an operator may do it.",
            Choice(
                {
                    True: ReplayAllowed.YES,
                    False: ReplayAllowed.NO,
                    "false-for-side-effect": ReplayAllowed.NOT_FOR_SIDE_EFFECT,
                }
            ),
            default="`true`; `false-for-side-effect` where one has neither key nor intent",
        ),
    ] = None
    window: Annotated[
        timedelta | None,
        Key("How far back a replay may reach.", default="the topic's `replayWindow`"),
    ] = None


@dataclass(frozen=True, slots=True)
class MessageId:
    """What makes two deliveries the same message."""

    place: Annotated[
        FromHeader | FromPayload | FromCoordinates,
        Key("Where the id comes from.", IdPlace(), name="from"),
    ]


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """The lease of a claim in mode ``leased``."""

    seconds: Annotated[
        float, Key("How long a lease lasts unless it is renewed.", Seconds(), default="60")
    ] = 60.0
    stale: Annotated[StaleLease, Key("What becomes of a lease that ran out.")] = StaleLease.RECLAIM


@dataclass(frozen=True, slots=True)
class Parking:
    """The parking lot."""

    per_key: Annotated[
        bool | None,
        Key(
            "Whether the later messages of a key wait behind one that waits.",
            default="`true` with order per key; with `retry-topic` it must be said",
        ),
    ] = None
    owner: Annotated[str | None, Key("The team that looks after it.", default="`dlq.owner`")] = None
    keep: Annotated[timedelta | None, Key("How long a message may be parked.")] = None


@dataclass(frozen=True, slots=True)
class SideEffect:
    """One effect outside the handler's database."""

    name: Annotated[str, Key("What it is.", Text(example="email"))]
    idempotency_key: Annotated[
        bool | None,
        Key(
            "Whether its provider gets, and recognises, an idempotency key.",
            default="`idempotency.externalProviderIdempotency`",
        ),
    ] = None
    intent: Annotated[
        Intent | None, Key("Where the wish for it becomes durable, to be carried out later.")
    ] = None


@dataclass(frozen=True, slots=True)
class Claims:
    """The records by which repetitions are recognised."""

    ttl: Annotated[
        timedelta | None,
        Key(
            "How long a finished claim is kept.",
            default="twice the longest window in which a message can come again",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Handling several messages in one transaction."""

    size: Annotated[int, Key("How many at most.", Whole(1, example=100))] = 100
    policy: Annotated[BatchPolicy, Key("What one failed message does to its batch.")] = (
        BatchPolicy.INDEPENDENT
    )


@dataclass(frozen=True, slots=True)
class Proofs:
    """The tests that prove the policy."""

    duplicates: Annotated[
        str | None,
        Key("The test that delivers twice.", Text(example="tests/test_mailer.py::test_twice")),
    ] = None
    crash_window: Annotated[
        str | None,
        Key(
            "The test that crashes between effect and ack.",
            Text(example="tests/test_mailer.py::test_crash"),
        ),
    ] = None
