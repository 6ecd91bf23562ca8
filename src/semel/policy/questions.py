"""The twenty questions to ask before a consumer ships (S3-61), and how a policy answers them.

A question is answered from the policy alone.  Findings of the lint decide how
good the answer is; what the policy does not say is unknown, not fine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from semel.policy.guarantee import (
    ACK,
    STRATEGIES,
    AckTime,
    Repetition,
    listing,
    rows_repetition,
    unchecked,
)
from semel.policy.model import OVERLAPS, topic_path
from semel.policy.reader import Path, path_words
from semel.policy.rules import Case, Finding
from semel.policy.sections import duration_words, place_words
from semel.policy.vocabulary import GiveUp, Ordering, PolicyStatus, Semantics, Severity


@dataclass(frozen=True, slots=True)
class PolicyAnswer:
    """One question, answered for one consumer on one topic."""

    number: int
    question: str
    status: PolicyStatus
    text: str
    key: str
    """The key that decides it."""

    line: int | None


@dataclass(frozen=True, slots=True)
class Question:
    """One question, and what its answer is made of."""

    text: str
    key: str
    """The consumer's key that decides; after ``topic:`` the topic's, or a matter of both."""

    says: Callable[[Case], str | None]
    """The answer in words; None where the policy does not say."""

    codes: tuple[str, ...] = ()
    """The findings that make the answer worse."""

    def answer(self, number: int, case: Case, findings: Sequence[Finding]) -> PolicyAnswer:
        """Answer for one case, whose findings are known."""
        said = self.says(case)
        bad = [f for f in findings if f.code in self.codes and f.severity is not Severity.NOTE]
        path = self._path(case)
        words = [*([said] if said else []), *(finding.sentence for finding in bad)]
        return PolicyAnswer(
            number,
            self.text,
            _status(said, bad),
            "; ".join(words) or "the policy does not say",
            path_words(path),
            case.source.line_of(path),
        )

    def _path(self, case: Case) -> Path:
        matter, topic = self.key.removeprefix("topic:"), case.effective.topic_name
        if matter == self.key:
            return case.at(self.key)
        if matter in case.effective.decided_by:
            return case.effective.decided_by[matter]
        overlap = OVERLAPS.get(matter)
        if topic is not None:
            return topic_path(topic, overlap.topic_key if overlap else matter)
        return case.at(overlap.consumer_key if overlap else "topics")


def _status(said: str | None, bad: Sequence[Finding]) -> PolicyStatus:
    if any(finding.severity is Severity.REFUSED for finding in bad):
        return PolicyStatus.REFUSED
    if bad:
        return PolicyStatus.WARN
    return PolicyStatus.UNKNOWN if said is None else PolicyStatus.OK


def _semantics(case: Case) -> str:
    delivery = Semantics.AT_LEAST_ONCE
    if ACK[case.own.offset_commit.timing] is AckTime.BEFORE:
        delivery = Semantics.AT_MOST_ONCE
    return f"{delivery} delivery; {case.guarantee.sentence}"


def _message_id(case: Case) -> str | None:
    found = case.own.message_id
    return place_words(found.place) if found else None


def _idempotent(case: Case) -> str:
    strategy = case.own.idempotency.strategy
    if not STRATEGIES[strategy].claims:
        return "no"
    kept = duration_words(case.effective.claims_ttl)
    how = f"{strategy}; duplicates: {case.own.idempotency.duplicate_handling}; claims kept {kept}"
    return f"yes, by {how}"


def _side_effects(case: Case) -> str | None:
    if case.effective.side_effects:
        return listing([effect.name for effect in case.effective.side_effects])
    return None if case.own.side_effects is None else "none"


def _by_effect(intent: str, keyed: str, bare: str) -> Callable[[Case], str | None]:
    """Make an answer about each side effect, by how it is protected."""

    def says(case: Case) -> str | None:
        if not case.effective.side_effects:
            return None if case.own.side_effects is None else "there are none"
        return "; ".join(
            f"{e.name}: {intent if e.intent else keyed if e.idempotency_key else bare}"
            for e in case.effective.side_effects
        )

    return says


def _crash_before_ack(case: Case) -> str:
    if ACK[case.own.offset_commit.timing] is AckTime.BEFORE:
        return "no such moment: the ack comes first, and a crash after it loses the message"
    if ACK[case.own.offset_commit.timing] is AckTime.WITHIN:
        return "the broker aborts the transaction, and the message comes again"
    if rows_repetition(case.effective)[0] is Repetition.RECOGNISED:
        return "the message comes again, its repetition is recognised, and only the ack is made up"
    return "the message comes again, and is handled again"


def _ordering(case: Case) -> str | None:
    e = case.effective
    if "ordering" not in e.decided_by:
        return None
    if e.ordering is Ordering.NONE:
        return "none"
    behind = "; later messages of a key wait behind one that waits" if e.holds_keys else ""
    return f"{e.ordering}; retries: {case.own.retry.mode}{behind}"


def _poison(case: Case) -> str:
    e = case.effective
    tries, parks = e.poison_attempts, e.parks_poison or e.on_exhausted is GiveUp.PARK
    where = "into the parking lot" if parks else "to the dead letters"
    return "never set aside" if tries is None else f"after {tries} attempts: {where}"


def _bounded(case: Case) -> str:
    retry, attempts = case.own.retry, case.effective.attempts
    waits = f"{retry.backoff} from {retry.initial_delay_ms} ms to {retry.max_delay_ms} ms"
    return "no" if attempts is None else f"yes: {attempts} attempts, {waits}"


def _owned(case: Case) -> str | None:
    return f"by {case.own.dlq.owner}" if case.own.dlq.enabled and case.own.dlq.owner else None


def _replay_safe(case: Case) -> str:
    if refusal := case.effective.replay_refusal:
        return refusal
    first = case.guarantee.promises[0]
    if not first.under:
        return f"allowed; {first.caveat}"
    condition = unchecked(case.effective)
    return f"allowed; recognised: {first.under[-1]}{f', {condition}' if condition else ''}"


def _unreadable(case: Case) -> str | None:
    return "to the dead letters, with their bytes, at once" if case.own.dlq.enabled else None


def _lag(case: Case) -> str | None:
    slo = case.own.lag_slo
    return f"above {slo.max_lag_seconds:g} s" if slo else None


# fmt: off
QUESTIONS: Final = (
    Question("What delivery semantics are assumed?", "topic:guarantee", _semantics,
        ("weaker-than-wanted", "exactly-once-without-scope", "not-carried-out")),
    Question("Can a message be duplicated?", "idempotency.strategy",
        lambda c: "yes: by redelivery, rebalances, a producer's retry, or a replay"),
    Question("What is the message id?", "messageId.from", _message_id,
        ("id-by-coordinates",)),
    Question("Is the consumer idempotent?", "idempotency.strategy", _idempotent,
        ("assumes-no-duplicates", "lease-repeats-work", "claims-ttl-too-short",
         "retention-unknown")),
    Question("What side effects happen?", "sideEffects", _side_effects),
    Question("Are external side effects deduplicated?", "sideEffects",
        _by_effect("intent in the outbox", "key", "no"),
        ("side-effect-unprotected", "batch-repeats-calls")),
    Question("When is the offset committed?", "offsetCommit.timing",
        lambda c: str(c.own.offset_commit.timing),
        ("commits-before-processing", "may-lose-messages")),
    Question("What happens if a crash occurs before the ack?",
        "offsetCommit.timing", _crash_before_ack,
        ("commits-before-processing", "lease-repeats-work", "assumes-no-duplicates")),
    Question("What happens if a crash occurs after a side effect?", "sideEffects",
        _by_effect("only the intent is written, with the rows", "called again with the same key",
            "repeated"),
        ("side-effect-unprotected",)),
    Question("Is ordering required?", "topic:ordering", _ordering,
        ("global-ordering", "retry-breaks-order", "batch-breaks-order", "order-across-a-pause",
         "dead-letter-leaves-hole")),
    Question("What is the partition key?", "topic:key", lambda c: c.effective.topic.key,
        ("ordering-without-key",)),
    Question("What happens on a poison message?", "poison.maxAttemptsBeforePark", _poison,
        ("retries-forever", "without-effect", "parking-without-owner")),
    Question("Is retry bounded?", "retry.maxAttempts", _bounded,
        ("retries-forever", "retries-too-long", "retries-exceed-lag-slo", "code-unknown",
         "code-of-your-own", "outage-spends-attempts")),
    Question("Is the DLQ owned?", "dlq.owner", _owned,
        ("dlq-without-owner", "dlq-topic-is-read", "unreadable-unheard", "parked-without-review")),
    Question("Is replay safe?", "topic:replay", _replay_safe,
        ("replay-unsafe", "claims-ttl-too-short")),
    Question("Are schema and deserialization failures handled?", "dlq.enabled", _unreadable,
        ("unreadable-unheard", "retries-unreadable")),
    Question("Is lag monitored?", "lagSlo.maxLagSeconds", _lag,
        ("no-lag-alert",)),
    Question("Are duplicate tests written?", "tests.duplicates", lambda c: c.own.tests.duplicates,
        ("duplicates-untested",)),
    Question("Is crash-window behaviour tested?",
        "tests.crashWindow", lambda c: c.own.tests.crash_window,
        ("crash-window-untested",)),
    Question("Is a runbook ready?", "runbook", lambda c: c.own.runbook,
        ("no-runbook",)),
)
# fmt: on
"""In the order of the checklist; the first is number 1."""
