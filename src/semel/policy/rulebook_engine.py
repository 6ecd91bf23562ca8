"""The rules about what semel's consumers do, whatever a policy wishes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from semel.policy.effective import Effective
from semel.policy.problems import nearest
from semel.policy.rules import PATH, Case, Nouns, Rule, Severity
from semel.policy.vocabulary import (
    BatchPolicy,
    CommitTiming,
    DuplicateHandling,
    Mode,
    OnExhausted,
    OnGap,
    Ordering,
    RetryMode,
    Strategy,
)


class Cannot(NamedTuple):
    """Something that a policy can say and no consumer of semel's does."""

    is_said: Callable[[Effective], bool]
    instead: str
    """What the engine does."""

    way_out: str


def _is_leased(e: Effective) -> bool:
    return e.consumer.mode is Mode.LEASED


def _parks(e: Effective) -> bool:
    by_gap = e.consumer.versioned and e.consumer.gaps is OnGap.PARK_KEY
    return e.on_exhausted is OnExhausted.PARK or by_gap


def _stores(e: Effective) -> bool:
    """Tell whether a batch stores what fails; what `retry.mode` does has a rule of its own."""
    return e.consumer.batch is not None and e.consumer.batch.policy is BatchPolicy.DEAD_LETTER


CANNOT: Final[Mapping[str, Cannot]] = {
    "retry.mode": Cannot(
        lambda e: e.consumer.retry.mode is RetryMode.RETRY_TOPIC,
        "messages wait for their next attempt in the broker or in the retry table, not in a topic",
        "use retry.mode: retry-table",
    ),
    "idempotency.strategy": Cannot(
        lambda e: e.consumer.idempotency.strategy is Strategy.NONE,
        "every message is claimed, and its repetitions are skipped",
        "use processed-message, which needs nothing of the handler",
    ),
    "offsetCommit.timing": Cannot(
        lambda e: (
            e.consumer.offset_commit.timing
            in (CommitTiming.BEFORE_PROCESSING, CommitTiming.IN_OUTPUT_TRANSACTION)
        ),
        "offsets are committed after the database's transaction",
        "use timing: after-db-transaction",
    ),
    "batch": Cannot(
        lambda e: e.consumer.batch is not None and _is_leased(e),
        "a batch is one transaction, and in mode leased every message has its own",
        "take batch out, or use mode: transactional",
    ),
    "batch.policy": Cannot(
        lambda e: (
            e.consumer.batch is not None
            and e.consumer.batch.policy in (BatchPolicy.STOP, BatchPolicy.FAIL_BATCH)
            and e.consumer.concurrency > 1
        ),
        "several batches run at once, and none knows of another's failure",
        "use concurrency: 1, or batch.policy: independent",
    ),
    "parking.perKey": Cannot(
        lambda e: e.ordering is Ordering.PER_KEY and not e.holds_keys and (_parks(e) or _stores(e)),
        "the later messages of a key would overtake one that is parked or waits in the retry table",
        "use parking.perKey: true, or ordering: none",
    ),
    "versioned": Cannot(
        lambda e: e.consumer.versioned and _is_leased(e),
        "versions are checked in the message's transaction, and mode leased has none",
        "use mode: transactional, or let the handler compare versions",
    ),
    "idempotency.duplicateHandling": Cannot(
        lambda e: (
            e.consumer.idempotency.duplicate_handling is DuplicateHandling.INVOKE and _is_leased(e)
        ),
        "in mode leased a message that was handled before has no lease to be handled under",
        "use duplicateHandling: skip and send through the outbox, or use mode: transactional",
    ),
}
"""By key: what is refused because it would not be carried out as it is written."""

KNOWN_CODES: Final = (
    "DATABASE_TIMEOUT",
    "DATABASE_CONFLICT",
    "TIMEOUT",
    "CONNECTION_LOST",
    "CRASHED",
    "DEPENDENCY_UNAVAILABLE",
    "RATE_LIMITED",
    "PRECONDITION_FAILED",
    "SEQUENCE_GAP",
    "SCHEMA_INVALID",
    "DESERIALIZATION_FAILED",
    "UNKNOWN_EVENT_TYPE",
    "MESSAGE_ID_MISSING",
    "AUTHORIZATION_FAILED",
    "CONSTRAINT_VIOLATED",
    "HANDLER_MISUSE",
    "PAYLOAD_CONFLICT",
    "REJECTED",
    "HANDLER_FAILED",
    "HANDLER_CANCELLED",
)
"""The failure codes that semel itself gives; handlers may raise others."""


def _not_carried_out(case: Case) -> Iterator[Nouns]:
    for key, cannot in CANNOT.items():
        if cannot.is_said(case.effective):
            yield {**cannot._asdict(), "key": key, PATH: case.at(key)}


def _codes(case: Case) -> Iterator[tuple[str, str, str]]:
    """Yield the codes that semel does not give: their key, themselves, and the nearest it does."""
    retry = case.own.retry
    lists = {"retry.retryable": retry.retryable, "retry.nonRetryable": retry.non_retryable}
    for key, codes in lists.items():
        for code in codes:
            if code not in KNOWN_CODES:
                yield key, code, nearest(code, KNOWN_CODES)


def _misspelt(case: Case) -> Iterator[Nouns]:
    for key, code, near in _codes(case):
        if near:
            yield {"code": code, "near": near, PATH: case.at(key)}


def _of_their_own(case: Case) -> Iterator[Nouns]:
    for key, code, near in _codes(case):
        if not near:
            yield {"code": code, PATH: case.at(key)}


ENGINE_RULES: Final = (
    Rule(
        "not-carried-out",
        Severity.REFUSED,
        "",
        _not_carried_out,
        "{key} cannot be carried out for {consumer}: {instead}",
        "{way_out}",
    ),
    Rule(
        "code-unknown",
        Severity.WARN,
        "retry.retryable",
        _misspelt,
        "{code} is no failure code of semel's: did you mean {near}?",
        "correct it, or see that a handler of {consumer} raises exactly this code",
    ),
    Rule(
        "code-of-your-own",
        Severity.NOTE,
        "retry.retryable",
        _of_their_own,
        "{code} is no failure code of semel's, so only a handler of {consumer} can give it",
        "see that one raises RetryableMessageError or NonRetryableMessageError with this code",
    ),
)
