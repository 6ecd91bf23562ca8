"""How often, and how long until the next time: a verdict without a clock and without I/O."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from semel.errors import Misuse
from semel.messaging.checked import choose, count_from_one, not_negative
from semel.messaging.failure import RETRYABLE_CLASSES, UNKNOWN_CODE, Classified, FailureClass


class RetryMode(StrEnum):
    """Where a message waits for its next attempt."""

    BLOCKING = "blocking"
    """In the broker: its partition stands still until it is due.  Keeps every order."""

    RETRY_TABLE = "retry-table"
    """In our own table; with order per key, the key's later messages wait behind it."""


class GiveUp(StrEnum):
    """Where a message goes that is not tried again."""

    DEAD_LETTER = "dlq"
    PARK = "park"


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Bounded attempts with exponential backoff (S3-25, by its own names)."""

    max_attempts: int = 5
    initial_delay_seconds: float = 1.0
    max_delay_seconds: float = 60.0
    jitter: bool = True
    retryable: frozenset[str] = frozenset()
    """Codes that are retried, whatever their class and the exception's."""

    non_retryable: frozenset[str] = frozenset()
    """Codes that are not, whatever their class and the exception's."""

    mode: RetryMode = RetryMode.BLOCKING
    max_poison_attempts: int | None = None
    """How often a message is tried whose failure is of the class poison; None: as any other."""

    def __post_init__(self) -> None:
        choose(self, mode=RetryMode)
        count_from_one(self, "max_attempts")
        if self.max_poison_attempts is not None:
            count_from_one(self, "max_poison_attempts")
        for name in ("retryable", "non_retryable"):
            if isinstance(codes := getattr(self, name), str):
                raise Misuse(f"RetryPolicy.{name} is {codes!r}; it is a set of codes")
            object.__setattr__(self, name, frozenset(codes))
        not_negative(self, "initial_delay_seconds", "max_delay_seconds")
        if not 0 <= self.initial_delay_seconds <= self.max_delay_seconds:
            raise Misuse("initialDelayMs must be between 0 and maxDelayMs")
        if both := self.retryable & self.non_retryable:
            raise Misuse(f"{min(both)} is in retryable and in nonRetryable")


@dataclass(frozen=True, slots=True)
class RetryIn:
    """Try it again after a while."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Exhausted:
    """Every attempt that the policy allows was made."""


@dataclass(frozen=True, slots=True)
class Hopeless:
    """Another attempt would fail the same way."""


Verdict: TypeAlias = RetryIn | Exhausted | Hopeless


def is_retryable(policy: RetryPolicy, failure: Classified) -> bool:
    """Tell whether *failure* is worth another attempt: by the lists, by who said so, by class.

    An exception that nobody knows is tried again, too: it is more often a bug that a release
    mends, or a dependency that said something new, than a poison message; the number of
    attempts is bounded all the same.
    """
    if failure.code in policy.non_retryable:
        return False
    if failure.code in policy.retryable:
        return True
    if failure.retryable is not None:
        return failure.retryable
    return failure.code == UNKNOWN_CODE or failure.failure_class in RETRYABLE_CLASSES


def listed_codes(
    policy: RetryPolicy, known: Mapping[str, FailureClass]
) -> Mapping[str, FailureClass]:
    """Return the codes that the policy lists; those that nobody knows are of a class to match."""
    listed = dict.fromkeys(policy.retryable, FailureClass.TRANSIENT)
    listed |= dict.fromkeys(policy.non_retryable, FailureClass.POISON)
    return {code: known.get(code, to_match) for code, to_match in listed.items()}


def attempts_for(policy: RetryPolicy, failure: Classified) -> int:
    """Return how often a message is tried that fails like this."""
    if policy.max_poison_attempts is None or failure.failure_class is not FailureClass.POISON:
        return policy.max_attempts
    return min(policy.max_attempts, policy.max_poison_attempts)


def verdict(
    policy: RetryPolicy,
    failure: Classified,
    attempts: int,
    uniform: Callable[[float, float], float] = random.uniform,
) -> Verdict:
    """Decide after *attempts* attempts, the failed one included."""
    if not is_retryable(policy, failure):
        return Hopeless()
    if attempts >= attempts_for(policy, failure):
        return Exhausted()
    return RetryIn(backoff(policy, attempts, uniform))


def backoff(
    policy: RetryPolicy,
    attempts: int,
    uniform: Callable[[float, float], float] = random.uniform,
) -> float:
    """Return the seconds to wait after *attempts* attempts.

    Doubles each time; with jitter, anything between half and the whole of it, so that
    consumers which failed together do not come back together.
    """
    whole = policy.initial_delay_seconds * 2.0 ** min(attempts - 1, 60)
    whole = min(whole, policy.max_delay_seconds)
    return uniform(whole / 2, whole) if policy.jitter else whole
