"""Failures: their class and code, by exception type, and whether they are tried again.

    RetryableMessageError      the handler had no effect, try it later
    NonRetryableMessageError   it will always fail

Handlers raise these, or any other exception: `Classification` maps exception types
and codes to the seven classes, and a consumer extends it.  The first of these that
knows the failure decides whether it is retried:

    the policy's lists     retryable, nonRetryable
    the consumer           codes=, and the known codes that its rules= give
    the exception's class  one of the two above
    the code               by its class

Never the text of an exception: drivers translate and change it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Any, Final, TypeAlias

from semel.errors import Fenced, Misuse, Permanent, Retryable, SemelError, cut
from semel.messaging.redact import place_of, reason_of
from semel.messaging.settings import RetryPolicy, backoff

log = logging.getLogger("semel.messaging")


class FailureClass(StrEnum):
    """The seven kinds of failure (S3-23)."""

    TRANSIENT = "transient"
    """A deadlock, a lock, a handler's time limit: the next attempt may succeed."""

    POISON = "poison"
    """It fails every time, for a reason in the message or in the code."""

    DEPENDENCY_OUTAGE = "dependency_outage"
    """A system that the handler needs is down, or does not answer."""

    RATE_LIMIT = "rate_limit"
    """The other system asked for fewer calls."""

    BUSINESS_PRECONDITION = "business_precondition"
    """A precondition of the message is not met yet; it may be later."""

    SCHEMA = "schema"
    """The payload has a schema that this consumer does not know."""

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
"""The classes that are retried unless the policy says otherwise."""


OUTAGES: Final = frozenset({FailureClass.DEPENDENCY_OUTAGE, FailureClass.RATE_LIMIT})
"""The failures that are of another system, not of the message."""


CODES: Final[Mapping[str, FailureClass]] = {
    "DATABASE_TIMEOUT": FailureClass.TRANSIENT,
    "DATABASE_CONFLICT": FailureClass.TRANSIENT,
    "CRASHED": FailureClass.TRANSIENT,
    "HANDLER_CANCELLED": FailureClass.TRANSIENT,
    "HANDLER_TIMEOUT": FailureClass.TRANSIENT,
    "TIMEOUT": FailureClass.DEPENDENCY_OUTAGE,
    "CONNECTION_LOST": FailureClass.DEPENDENCY_OUTAGE,
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
"""The codes that semel itself uses, and the class of each; policies may add others."""


UNKNOWN_CODE: Final = "HANDLER_FAILED"
"""The code of an exception that matches no rule."""


CONFLICT_CODE: Final = "DATABASE_CONFLICT"


class RetryableMessageError(Retryable):
    """Raised by a handler: this attempt failed, a later one may succeed.

    It is retried regardless of its *code*, unless the policy or the consumer names that code.
    """

    def __init__(
        self,
        reason: str = "",
        code: str = "DEPENDENCY_UNAVAILABLE",
        retry_after: float | None = None,
    ) -> None:
        super().__init__(reason, code)
        self.reason = reason
        self.code = code
        self.retry_after = retry_after
        """The seconds that the other system asked to wait."""

    def __str__(self) -> str:
        return self.reason or self.code


class NonRetryableMessageError(Permanent):
    """Raised by a handler: no attempt will succeed; the message becomes a dead letter.

    Regardless of its *code*, unless the policy or the consumer names that code.
    """

    def __init__(self, reason: str = "", code: str = "REJECTED") -> None:
        super().__init__(reason, code)
        self.reason = reason
        self.code = code

    def __str__(self) -> str:
        return self.reason or self.code


class SequenceGap(RetryableMessageError):
    """Versions are missing: the messages between have not arrived yet."""

    def __init__(self, key: str, expected: int, found: int) -> None:
        super().__init__(f"key {key!r}: expected version {expected}, got {found}", "SEQUENCE_GAP")
        self.key = key
        self.expected = expected
        self.found = found

    def __reduce__(self) -> tuple[type[SequenceGap], tuple[str, int, int]]:
        """Pickle with this class's arguments, not with the parent's."""
        return (SequenceGap, (self.key, self.expected, self.found))


SAYS: Final[Mapping[type, bool]] = {RetryableMessageError: True, NonRetryableMessageError: False}
"""By exception class: whether it asks for another attempt."""


@dataclass(frozen=True, slots=True)
class Classified:
    """A failure with its class and code, for the policy and the records."""

    failure_class: FailureClass
    code: str
    reason: str
    exception: str
    """The exception's class, with its module."""

    retryable: bool | None = None
    """Whether to try again, apart from the policy's lists; None: the class decides."""

    retry_after: float | None = None
    """The seconds that the other system asked to wait, if it did."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", cut(self.reason))

    @property
    def is_conflict(self) -> bool:
        """Run the whole transaction again at once: a deadlock or a serialization failure."""
        return self.code == CONFLICT_CODE and self.retryable is not False


Rule: TypeAlias = str | Callable[[BaseException], str | None]
"""A code, or a function that returns one, or None if it does not apply.

If the function raises, its exception is logged and the code is `UNKNOWN_CODE`.
"""


LONGEST_CODE: Final = 100


@dataclass(frozen=True, slots=True)
class Classification:
    """Exception types and codes, mapped to classes; the nearest type of an exception wins."""

    rules: Mapping[type[BaseException], Rule]
    codes: Mapping[str, FailureClass]
    added_rules: frozenset[type[BaseException]] = frozenset()
    """The types whose rules were added to the built-in ones."""

    added_codes: frozenset[str] = frozenset()
    """The codes that were added to the built-in ones: the exception's class does not decide."""

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
        """Return the class and code of *error*; an unknown error is poison, with few attempts.

        For an exception group one of its exceptions decides: a database conflict, then one
        that will always fail, then a known one, then the first.  An unknown error that was raised
        ``from`` an outage is that outage.
        """
        rule, code = self._code(error)
        if isinstance(error, BaseExceptionGroup) and rule is None:
            return min(map(self.classify, error.exceptions), key=_decides)
        after = retry_after_of(error)
        if rule is None and code == UNKNOWN_CODE:
            code, after = self._outage_below(error, after)
        failure_class, retryable = self._class(error, rule, code)
        kind = type(error)
        name = f"{kind.__module__}.{kind.__qualname__}"
        return Classified(failure_class, code, reason_of(error), name, retryable, after)

    def _outage_below(self, error: BaseException, after: float | None) -> tuple[str, float | None]:
        """Return the code of the outage that *error* was raised from, and the seconds to wait."""
        seen = {id(error)}
        while (cause := error.__cause__) is not None and id(cause) not in seen:
            seen.add(id(cause))
            error = cause
            inside = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else cause
            _, code = self._code(inside)
            if self.codes.get(code) in OUTAGES:
                return code, after or retry_after_of(inside)
        return UNKNOWN_CODE, after

    def _code(self, error: BaseException) -> tuple[type[BaseException] | None, str]:
        """Return the type whose rule gives a code, and the code."""
        for kind in type(error).__mro__:
            found = _found(self.rules.get(kind), error)
            if found is not None:
                return kind, found
        return None, _code_of_client(error) or UNKNOWN_CODE

    def _class(
        self, error: BaseException, rule: type[BaseException] | None, code: str
    ) -> tuple[FailureClass, bool | None]:
        """Return the class of a failure, and whether a rule says to retry it."""
        known = self.codes.get(code)
        # A rule that raised gives the unknown code, which says nothing about a retry.
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
        """Return whether only a database binding's rules know *error*: it is the driver's."""
        own = self.rules.keys() - CLASSIFICATION.rules.keys()
        return isinstance(error, tuple(own))


def _decides(failure: Classified) -> int:
    """Return the rank of a failure among others of one attempt; the lowest decides."""
    if failure.is_conflict:
        return 0
    if failure.code == UNKNOWN_CODE:
        return 3
    says = failure.retryable
    return 2 if says or (says is None and failure.failure_class in RETRYABLE_CLASSES) else 1


def _found(rule: Rule | None, error: BaseException) -> str | None:
    """Return the code that a rule gives, as text that every table can store."""
    try:
        found: object = rule(error) if callable(rule) else rule
        if found is None:
            return None
        # Formatting a StrEnum member gives its value; of another Enum, the member's name.
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


LONGEST_RETRY_AFTER: Final = 3600.0


def retry_after_of(error: BaseException) -> float | None:
    """Return the seconds that an exception asks to wait, at most an hour.

    By its attribute ``retry_after``, or the header of its ``response`` (httpx, requests, aiohttp).
    """
    try:
        found: Any = getattr(error, "retry_after", None)
        if found is None:
            found = getattr(getattr(error, "response", error), "headers", {}).get("Retry-After")
        if isinstance(found, str) and not found.strip().isdigit():
            found = parsedate_to_datetime(found).timestamp() - time.time()
        return None if found is None else min(max(float(found), 0.0), LONGEST_RETRY_AFTER)
    except Exception:  # noqa: BLE001  a strange header must not hide the failure
        return None


CLIENT_CODES: Final[Mapping[str, str]] = {
    "httpx.NetworkError": "CONNECTION_LOST",
    "httpx.RemoteProtocolError": "CONNECTION_LOST",
    "httpx.TimeoutException": "TIMEOUT",
    "requests.ConnectionError": "CONNECTION_LOST",
    "requests.Timeout": "TIMEOUT",
    "aiohttp.ClientConnectionError": "CONNECTION_LOST",
    "urllib.URLError": "CONNECTION_LOST",
    "urllib3.HTTPError": "CONNECTION_LOST",
    "socket.gaierror": "CONNECTION_LOST",
    "smtplib.SMTPServerDisconnected": "CONNECTION_LOST",
    "smtplib.SMTPConnectError": "CONNECTION_LOST",
    "botocore.ConnectionError": "CONNECTION_LOST",
    "botocore.HTTPClientError": "CONNECTION_LOST",
    "redis.ConnectionError": "CONNECTION_LOST",
    "redis.TimeoutError": "TIMEOUT",
    "psycopg.OperationalError": "CONNECTION_LOST",
    "psycopg2.OperationalError": "CONNECTION_LOST",
}
"""The codes of exceptions of clients, by package and class: they need not be installed.

Those of a database count only if no server has answered; its SQLSTATE decides otherwise.
"""

# The SQLSTATEs of no connection, of no room for one more, and of a server that stops or starts.
DOWN_STATES: Final = ("08", "53", "57P")

STATUS_CODES: Final[Mapping[object, str]] = {
    429: "RATE_LIMITED",
    **dict.fromkeys((502, 503, 504), "DEPENDENCY_UNAVAILABLE"),
}
"""The codes of answers of other services, by their HTTP status."""


def _code_of_client(error: BaseException) -> str | None:
    """Return the code of a client's exception: by the answer's status, or by its class."""
    try:
        answer: Any = getattr(error, "response", error)
        if isinstance(answer, dict):  # botocore's
            status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            status = getattr(answer, "status_code", None) or getattr(answer, "status", None)
        if isinstance(status, int):
            return STATUS_CODES.get(status)
        state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
        if isinstance(state, str):
            return "CONNECTION_LOST" if state.startswith(DOWN_STATES) else None
    except Exception:  # noqa: BLE001  a strange attribute must not hide the failure
        return None
    names = (f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__)
    return next((CLIENT_CODES[name] for name in names if name in CLIENT_CODES), None)


UNREACHABLE: Final = frozenset(
    {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}
)


def _code_of_os(error: BaseException) -> str | None:
    """Return the code of a host that cannot be reached."""
    if getattr(error, "errno", None) in UNREACHABLE:
        return "CONNECTION_LOST"
    # A host with several addresses, all of which failed: asyncio raises a bare OSError.
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    is_asyncios = where.partition(".")[0] in ("asyncio", "uvloop")
    return "CONNECTION_LOST" if type(error) is OSError and is_asyncios else None


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
        OSError: _code_of_os,
        Misuse: "HANDLER_MISUSE",
        Permanent: "REJECTED",
        Fenced: "DATABASE_CONFLICT",
        Retryable: "DEPENDENCY_UNAVAILABLE",
        SemelError: UNKNOWN_CODE,
    },
    CODES,
)
"""The built-in rules; a database's binding adds those of its driver."""


@dataclass(frozen=True, slots=True)
class RetryIn:
    """Try it again after some seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Exhausted:
    """Every attempt that the policy allows was made."""


@dataclass(frozen=True, slots=True)
class Hopeless:
    """Another attempt would fail the same way."""


Verdict: TypeAlias = RetryIn | Exhausted | Hopeless


def is_retryable(policy: RetryPolicy, failure: Classified) -> bool:
    """Return whether to try again: by the policy's lists, then the rules, then the class.

    An unknown exception is tried again, too: it is more often a bug that a release fixes, or
    a new error of a dependency, than a poison message.  The number of attempts is bounded.
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
    """Return the codes that the policy lists, with a class for those that are unknown."""
    listed = dict.fromkeys(policy.retryable, FailureClass.TRANSIENT)
    listed |= dict.fromkeys(policy.non_retryable, FailureClass.POISON)
    return {code: known.get(code, to_match) for code, to_match in listed.items()}


def attempts_for(policy: RetryPolicy, failure: Classified) -> int:
    """Return how many attempts a message gets that fails like this."""
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
    return RetryIn(max(backoff(policy, attempts, uniform), failure.retry_after or 0.0))
