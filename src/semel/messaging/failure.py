"""What a failure is, by type and code, and whether it is tried again.

What a failure is: its class and its code, by type, never by the words of a message.

    RetryableMessageError       nothing happened, try it later
    NonRetryableMessageError    it will fail every time

Handlers raise these, or anything at all: `Classification` maps exception types
and codes to the seven classes, and a consumer extends it.  Whether a failure is
worth another attempt is the word of, in this order:

    the policy's lists     retryable, nonRetryable
    the consumer           codes=, and the known codes that its rules= give
    the exception's class  one of the two above
    the code               by its class

How often, and how long until the next time: a verdict without a clock and without I/O.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

from semel.errors import Fenced, Misuse, Permanent, Retryable, SemelError
from semel.messaging.redact import place_of, reason_of
from semel.messaging.settings import RetryPolicy, backoff

log = logging.getLogger("semel.messaging")


class FailureClass(StrEnum):
    """The seven kinds of failure (S3-23)."""

    TRANSIENT = "transient"
    """A timeout, a lost connection, a deadlock: gone the next time."""

    POISON = "poison"
    """It fails every time, for a reason in the message or in the code."""

    DEPENDENCY_OUTAGE = "dependency_outage"
    """Something that the handler needs is down."""

    RATE_LIMIT = "rate_limit"
    """Somebody asked for fewer calls."""

    BUSINESS_PRECONDITION = "business_precondition"
    """The world is not yet as the message expects it; it may become so."""

    SCHEMA = "schema"
    """The payload is of a shape that this consumer does not know."""

    AUTHORIZATION = "authorization"
    """The handler may not do it."""


RETRYABLE_CLASSES: Final = frozenset(
    {
        FailureClass.TRANSIENT,
        FailureClass.DEPENDENCY_OUTAGE,
        FailureClass.RATE_LIMIT,
        FailureClass.BUSINESS_PRECONDITION,
    }
)
"""What is worth another attempt unless the policy says otherwise."""


CODES: Final[Mapping[str, FailureClass]] = {
    "DATABASE_TIMEOUT": FailureClass.TRANSIENT,
    "DATABASE_CONFLICT": FailureClass.TRANSIENT,
    "TIMEOUT": FailureClass.TRANSIENT,
    "CONNECTION_LOST": FailureClass.TRANSIENT,
    "CRASHED": FailureClass.TRANSIENT,
    "HANDLER_CANCELLED": FailureClass.TRANSIENT,
    "DEPENDENCY_UNAVAILABLE": FailureClass.DEPENDENCY_OUTAGE,
    "RATE_LIMITED": FailureClass.RATE_LIMIT,
    "PRECONDITION_FAILED": FailureClass.BUSINESS_PRECONDITION,
    "SEQUENCE_GAP": FailureClass.BUSINESS_PRECONDITION,
    "SCHEMA_INVALID": FailureClass.SCHEMA,
    "DESERIALIZATION_FAILED": FailureClass.SCHEMA,
    "UNKNOWN_EVENT_TYPE": FailureClass.SCHEMA,
    "MESSAGE_ID_MISSING": FailureClass.SCHEMA,
    "AUTHORIZATION_FAILED": FailureClass.AUTHORIZATION,
    "CONSTRAINT_VIOLATED": FailureClass.POISON,
    "HANDLER_MISUSE": FailureClass.POISON,
    "PAYLOAD_CONFLICT": FailureClass.POISON,
    "REJECTED": FailureClass.POISON,
    "HANDLER_FAILED": FailureClass.POISON,
}
"""The codes that semel itself gives, and the class of each; policies may name others."""


UNKNOWN_CODE: Final = "HANDLER_FAILED"
"""The code of an exception that no rule knows."""


CONFLICT_CODE: Final = "DATABASE_CONFLICT"


class RetryableMessageError(Retryable):
    """Raised by a handler: this attempt failed, a later one may succeed.

    It is retried whatever its *code*, unless the policy or the consumer names that code.
    """

    def __init__(self, reason: str = "", code: str = "DEPENDENCY_UNAVAILABLE") -> None:
        super().__init__(reason, code)
        self.reason = reason
        self.code = code

    def __str__(self) -> str:
        return self.reason or self.code


class NonRetryableMessageError(Permanent):
    """Raised by a handler: no attempt will succeed; the message goes to the dead letters.

    It does so whatever its *code*, unless the policy or the consumer names that code.
    """

    def __init__(self, reason: str = "", code: str = "REJECTED") -> None:
        super().__init__(reason, code)
        self.reason = reason
        self.code = code

    def __str__(self) -> str:
        return self.reason or self.code


class SequenceGap(RetryableMessageError):
    """A version was skipped: the messages between have not come (yet)."""

    def __init__(self, key: str, expected: int, found: int) -> None:
        super().__init__(f"key {key!r}: version {found} came, {expected} is next", "SEQUENCE_GAP")
        self.key = key
        self.expected = expected
        self.found = found

    def __reduce__(self) -> tuple[type[SequenceGap], tuple[str, int, int]]:
        """Pickle by the own arguments, not by the parent's."""
        return (SequenceGap, (self.key, self.expected, self.found))


SAYS: Final[Mapping[type, bool]] = {RetryableMessageError: True, NonRetryableMessageError: False}
"""Whether an exception is worth another attempt, by its own word."""


@dataclass(frozen=True, slots=True)
class Classified:
    """A failure, as the policy and the records see it."""

    failure_class: FailureClass
    code: str
    reason: str
    exception: str
    """The exception's class, with its module."""

    retryable: bool | None = None
    """Whether it is worth another attempt, the policy's lists aside; None: as its class says."""

    @property
    def is_conflict(self) -> bool:
        """The whole transaction is run again at once: a deadlock, a serialization failure."""
        return self.code == CONFLICT_CODE and self.retryable is not False


Rule: TypeAlias = str | Callable[[BaseException], str | None]
"""A code, or a function that finds one; None where it has no opinion.

A function that raises has none either: its exception is logged, and the code is
`UNKNOWN_CODE`.
"""


LONGEST_CODE: Final = 100


@dataclass(frozen=True, slots=True)
class Classification:
    """Exception types and codes, mapped to classes; the nearest type of an exception wins."""

    rules: Mapping[type[BaseException], Rule]
    codes: Mapping[str, FailureClass]
    added_rules: frozenset[type[BaseException]] = frozenset()
    """The types whose rules are not everybody's."""

    added_codes: frozenset[str] = frozenset()
    """The codes that were named beside everybody's: an exception's class says nothing of them."""

    def extended(
        self,
        rules: Mapping[type[BaseException], Rule] | None = None,
        codes: Mapping[str, FailureClass] | None = None,
    ) -> Classification:
        """Return a copy in which the given rules and codes come first."""
        rules, codes = rules or {}, codes or {}
        return Classification(
            {**self.rules, **rules},
            {**self.codes, **codes},
            self.added_rules | rules.keys(),
            self.added_codes | codes.keys(),
        )

    def classify(self, error: BaseException) -> Classified:
        """Say what *error* is; what nobody knows is poison, and poison is tried a few times.

        A group, as a TaskGroup raises it, is what decides among its exceptions: a conflict of
        the database, then what will fail every time, then what is known, then the first.
        """
        rule, code = self._code(error)
        if isinstance(error, BaseExceptionGroup) and rule is None:
            return min(map(self.classify, error.exceptions), key=_decides)
        failure_class, retryable = self._class(error, rule, code)
        kind = type(error)
        name = f"{kind.__module__}.{kind.__qualname__}"
        return Classified(failure_class, code, reason_of(error), name, retryable)

    def _code(self, error: BaseException) -> tuple[type[BaseException] | None, str]:
        """Return the type whose rule gives a code, and the code."""
        for kind in type(error).__mro__:
            found = _found(self.rules.get(kind), error)
            if found is not None:
                return kind, found
        return None, UNKNOWN_CODE

    def _class(
        self, error: BaseException, rule: type[BaseException] | None, code: str
    ) -> tuple[FailureClass, bool | None]:
        """Return the class of a failure, and whether somebody says that it is worth a retry."""
        known = self.codes.get(code)
        # The unknown code is what a rule gives that failed: nobody's word.
        by_rule = rule in self.added_rules and code != UNKNOWN_CODE
        if known is not None and (by_rule or code in self.added_codes):
            return known, known in RETRYABLE_CLASSES
        says = next((SAYS[kind] for kind in type(error).__mro__ if kind in SAYS), None)
        if says is None:
            return known or FailureClass.POISON, None
        if known is None or (known in RETRYABLE_CLASSES) is not says:
            return FailureClass.TRANSIENT if says else FailureClass.POISON, says
        return known, says

    def is_of_database(self, error: BaseException) -> bool:
        """Tell whether *error* is of a kind that only a database's binding adds: its driver's."""
        own = self.rules.keys() - CLASSIFICATION.rules.keys()
        return isinstance(error, tuple(own))


def _decides(failure: Classified) -> int:
    """Return the rank of a failure among others of one attempt, the weightiest first."""
    if failure.is_conflict:
        return 0
    if failure.code == UNKNOWN_CODE:
        return 3
    says = failure.retryable
    return 2 if says or (says is None and failure.failure_class in RETRYABLE_CLASSES) else 1


def _found(rule: Rule | None, error: BaseException) -> str | None:
    """Return what a rule says, as text that every table can keep."""
    try:
        found: object = rule(error) if callable(rule) else rule
        if found is None:
            return None
        # Of an enumeration of texts the text, and not the name of its member.
        code = str.__str__(found) if isinstance(found, str) else str(found)
    except Exception as second:  # noqa: BLE001  it must not keep a failure from being counted
        log.error(  # noqa: TRY400  a traceback shows the parameters of statements
            "a rule failed",
            extra={
                "exception": type(error).__qualname__,
                "reason": reason_of(second),
                "at": place_of(second),
            },
        )
        return UNKNOWN_CODE
    return "".join(filter(str.isprintable, code))[:LONGEST_CODE] or UNKNOWN_CODE


def _own_code(error: BaseException) -> str | None:
    found = getattr(error, "code", None)
    return found if isinstance(found, str) else None


CLASSIFICATION: Final = Classification(
    {
        RetryableMessageError: _own_code,
        NonRetryableMessageError: _own_code,
        asyncio.TimeoutError: "TIMEOUT",
        ConnectionError: "CONNECTION_LOST",
        PermissionError: "AUTHORIZATION_FAILED",
        Misuse: "HANDLER_MISUSE",
        Permanent: "REJECTED",
        Fenced: "DATABASE_CONFLICT",
        Retryable: "DEPENDENCY_UNAVAILABLE",
        SemelError: UNKNOWN_CODE,
    },
    CODES,
)
"""What is known of everybody's exceptions; a database's own are its binding's to add."""


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
