"""The rules about order, retries, dead letters, parking and lag."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Final

from semel.policy.effective import topic_path
from semel.policy.guarantee import STRATEGIES
from semel.policy.model import ConsumerPolicy, Policy
from semel.policy.rules import PATH, AntiPattern, Case, Nouns, Rule, Severity, once
from semel.policy.sections import Retry
from semel.policy.vocabulary import (
    BatchPolicy,
    Mode,
    OnExhausted,
    OnGap,
    Ordering,
    RetryMode,
    Strategy,
)

RETRY_KEEPS_ORDER: Final[Mapping[tuple[RetryMode, bool], bool]] = {
    # where it waits       its key's later messages wait behind it
    (RetryMode.BLOCKING, True): True,
    (RetryMode.BLOCKING, False): True,
    (RetryMode.RETRY_TABLE, True): True,
    (RetryMode.RETRY_TABLE, False): False,
    (RetryMode.RETRY_TOPIC, True): True,
    (RetryMode.RETRY_TOPIC, False): False,
}

BATCH_KEEPS_ORDER: Final[Mapping[tuple[BatchPolicy, bool], bool]] = {
    (BatchPolicy.STOP, True): True,
    (BatchPolicy.STOP, False): True,
    (BatchPolicy.INDEPENDENT, True): True,
    (BatchPolicy.INDEPENDENT, False): False,
    # A dead letter is left behind, not overtaken; `dead-letter-leaves-hole` says so.
    (BatchPolicy.DEAD_LETTER, True): True,
    (BatchPolicy.DEAD_LETTER, False): True,
    (BatchPolicy.FAIL_BATCH, True): True,
    (BatchPolicy.FAIL_BATCH, False): True,
}

# More help nobody: what a thousand attempts do not mend, a person has to look at.
MOST_ATTEMPTS: Final = 1_000
DAY_SECONDS: Final = 86_400
# A message beside its partition holds nobody up; a broker's usual retention is as long.
WEEK_SECONDS: Final = 7 * DAY_SECONDS

UNREADABLE_CODES: Final = frozenset(
    {"DESERIALIZATION_FAILED", "SCHEMA_INVALID", "UNKNOWN_EVENT_TYPE", "MESSAGE_ID_MISSING"}
)
"""Failures of reading: the same bytes fail the same way the next time."""


def _ordered(case: Case) -> bool:
    return case.effective.ordering is not Ordering.NONE


def _versions_kept(case: Case) -> bool:
    return case.own.versioned or case.own.idempotency.strategy in (
        Strategy.AGGREGATE_VERSION_UPSERT,
        Strategy.STATE_VERSION_CHECK,
    )


def _dead_letters_pass(case: Case) -> bool:
    by_batch = case.own.batch is not None and case.own.batch.policy is BatchPolicy.DEAD_LETTER
    return case.effective.on_exhausted is OnExhausted.DLQ or by_batch


def _global(case: Case) -> Iterator[Nouns]:
    if case.effective.ordering is Ordering.GLOBAL:
        yield {PATH: case.effective.decided_by["ordering"]}


def _without_key(case: Case) -> Iterator[Nouns]:
    topic = case.effective.topic_name
    if topic is not None and _ordered(case) and case.effective.topic.key is None:
        yield {PATH: topic_path(topic, "key")}


def _retry_breaks_order(case: Case) -> Iterator[Nouns]:
    mode = case.own.retry.mode
    if _ordered(case) and not RETRY_KEEPS_ORDER[mode, case.effective.holds_keys]:
        yield {"mode": mode}


def _batch_breaks_order(case: Case) -> bool:
    if case.own.batch is None or not _ordered(case):
        return False
    return not BATCH_KEEPS_ORDER[case.own.batch.policy, case.effective.holds_keys]


def blocked_seconds(case: Case) -> float:
    """Return how long one failing message can hold its partition up, in waits alone."""
    retry, attempts = case.own.retry, case.effective.attempts
    if retry.mode is not RetryMode.BLOCKING or attempts is None:
        return 0.0
    return _waiting_seconds(retry, attempts)


def _waiting_seconds(retry: Retry, attempts: int) -> float:
    """Return how long all waits between attempts are together, if none is shortened at random."""
    waits, length, waited = attempts - 1, retry.initial_delay_ms, 0
    while waits > 0 and 0 < length < retry.max_delay_ms:
        waits, length, waited = waits - 1, length * 2, waited + length
    return (waited + waits * min(length, retry.max_delay_ms)) / 1000


def _blocks_too_long(case: Case) -> Iterator[Nouns]:
    slo, blocked = case.own.lag_slo, blocked_seconds(case)
    if slo is not None and blocked > slo.max_lag_seconds:
        yield {"blocked": f"{blocked:g}", "slo": f"{slo.max_lag_seconds:g}"}


def _retries_too_long(case: Case) -> Iterator[Nouns]:
    retry, attempts = case.own.retry, case.effective.attempts
    if attempts is None:
        return
    waiting = _waiting_seconds(retry, attempts)
    blocks = retry.mode is RetryMode.BLOCKING
    if attempts > MOST_ATTEMPTS or waiting > (DAY_SECONDS if blocks else WEEK_SECONDS):
        yield {"attempts": f"{attempts:,}", "lasting": _lasting(waiting)}


def _lasting(seconds: float) -> str:
    if seconds >= 2 * DAY_SECONDS:
        return f"{seconds / DAY_SECONDS:,.0f} days"
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds:g} s"


def _retries_unreadable(case: Case) -> Iterator[Nouns]:
    for code in case.own.retry.retryable:
        if code in UNREADABLE_CODES:
            yield {"code": code}


def _parks(case: Case) -> bool:
    by_gap = case.own.versioned and case.own.gaps is OnGap.PARK_KEY
    return case.effective.on_exhausted is OnExhausted.PARK or by_gap


def _letters_come_back(case: Case) -> Iterator[Nouns]:
    start, target = case.effective.topic_name, _letter_topic(case.own)
    if start is None or target is None:
        return
    if target == start:
        yield {"target": target, "way": "which it reads"}
    elif by := _way(case.policy, target, start):
        yield {
            "target": target,
            "way": f"and from there to {start} again, as dead letters of {' and '.join(by)}",
        }


def _letter_topic(own: ConsumerPolicy) -> str | None:
    return own.dlq.topic if own.dlq.enabled else None


def _way(policy: Policy, start: str, end: str) -> tuple[str, ...]:
    """Name the consumers whose dead letters lead from one topic to another; none: nothing does."""
    ways: dict[str, tuple[str, ...]] = {start: ()}
    ahead = deque([start])
    while ahead:
        topic = ahead.popleft()
        for name, own in policy.consumers.items():
            target = _letter_topic(own)
            if target is None or target in ways or topic not in policy.topics_of(name):
                continue
            ways[target] = (*ways[topic], name)
            ahead.append(target)
    return ways.get(end, ())


def _without_effect(case: Case) -> Iterator[Nouns]:
    own, e = case.own, case.effective
    claims = STRATEGIES[own.idempotency.strategy].claims
    poison = own.poison.max_attempts_before_park
    idle = {
        "lease": (own.lease is not None and own.mode is Mode.TRANSACTIONAL, "mode is leased"),
        "gaps": (own.gaps is not None and not own.versioned, "versioned is true"),
        "parking.perKey": (bool(own.parking.per_key) and not _ordered(case), "an order is kept"),
        "claims.ttl": (own.claims.ttl is not None and not claims, "the strategy takes claims"),
        "dlq.topic": (own.dlq.topic is not None and not own.dlq.enabled, "dlq.enabled is true"),
        "poison.maxAttemptsBeforePark": (
            poison is not None and e.attempts is not None and poison > e.attempts,
            f"retry.maxAttempts, now {e.attempts}, is not smaller",
        ),
    }
    for key, (is_idle, unless) in idle.items():
        if is_idle:
            yield {"key": key, "unless": unless, PATH: case.at(key)}


FAILURE_RULES: Final = (
    Rule(
        "global-ordering",
        Severity.REFUSED,
        "ordering",
        _global,
        "one order over all of {topic} means one partition and one worker, and no consumer keeps "
        "it across partitions",
        "use ordering: per-key, and put what must stay in order under one key",
        AntiPattern.GLOBAL_ORDERING,
    ),
    Rule(
        "ordering-without-key",
        Severity.WARN,
        "ordering",
        _without_key,
        "{consumer} keeps order per key, and the key of {topic} is not stated",
        "name the field in the topic's key",
    ),
    Rule(
        "retry-breaks-order",
        Severity.REFUSED,
        "retry.mode",
        _retry_breaks_order,
        "{consumer} keeps order per key, and a message that waits in a {mode} is overtaken by the "
        "later ones of its key",
        "set parking.perKey: true, so that they wait behind it, or use retry.mode: blocking",
    ),
    Rule(
        "batch-breaks-order",
        Severity.REFUSED,
        "batch.policy",
        once(_batch_breaks_order),
        "{consumer} keeps order per key, and in an independent batch a failed message is overtaken "
        "by the later ones of its key",
        "use batch.policy: stop, or parking.perKey: true",
    ),
    Rule(
        "order-across-a-pause",
        Severity.NOTE,
        "versioned",
        once(lambda case: _ordered(case) and not _versions_kept(case)),
        "an owner that was paused can wake up late: across a paused owner only versions keep order",
        "let messages carry their aggregate's version and set versioned: true, where that matters",
    ),
    Rule(
        "dead-letter-leaves-hole",
        Severity.NOTE,
        "onExhausted",
        once(lambda case: _ordered(case) and _dead_letters_pass(case)),
        "a dead letter leaves a hole in its key's order: later messages are handled without it",
        "use onExhausted: park, where they must wait for it",
    ),
    Rule(
        "retries-forever",
        Severity.REFUSED,
        "retry.maxAttempts",
        once(lambda case: case.effective.attempts is None),
        "{consumer} retries without end: one poison message holds up everything behind it for ever",
        "set retry.maxAttempts to 1 or more",
        AntiPattern.RETRYING_FOREVER,
    ),
    Rule(
        "retries-exceed-lag-slo",
        Severity.WARN,
        "retry",
        _blocks_too_long,
        "one failing message can hold its partition up for {blocked} s, and the lag must not "
        "exceed {slo} s",
        "use retry.mode: retry-table, or fewer or shorter waits",
    ),
    Rule(
        "retries-too-long",
        Severity.WARN,
        "retry.maxAttempts",
        _retries_too_long,
        "{consumer} tries a failing message {attempts} times, with waits of {lasting} in all, "
        "before anybody hears of it",
        "use fewer attempts or shorter waits: what is set aside is kept, and can be sent back",
        AntiPattern.RETRYING_FOREVER,
    ),
    Rule(
        "retries-unreadable",
        Severity.WARN,
        "retry.retryable",
        _retries_unreadable,
        "{code} is retried, and the same bytes cannot be read the next time either",
        "take it out of retry.retryable: it goes to the dead letters at once",
        AntiPattern.IGNORING_UNREADABLE,
    ),
    Rule(
        "unreadable-unheard",
        Severity.WARN,
        "dlq.enabled",
        once(lambda case: not case.own.dlq.enabled),
        "dead letters are not enabled, and a message that cannot be read has nowhere to go where "
        "somebody hears of it",
        "set dlq.enabled: true, with an owner",
        AntiPattern.IGNORING_UNREADABLE,
        Severity.REFUSED,
    ),
    Rule(
        "dlq-without-owner",
        Severity.REFUSED,
        "dlq.owner",
        once(lambda case: case.own.dlq.enabled and not case.own.dlq.owner),
        "the dead letters of {consumer} belong to nobody: what arrives there is lost, only later",
        "name a team in dlq.owner",
        AntiPattern.DLQ_WITHOUT_OWNER,
    ),
    Rule(
        "dlq-topic-is-read",
        Severity.REFUSED,
        "dlq.topic",
        _letters_come_back,
        "the dead letters of {consumer} are published to {target}, {way}: each comes back as a "
        "message that fails",
        "give the dead letters a topic of their own",
    ),
    Rule(
        "parking-without-owner",
        Severity.WARN,
        "parking.owner",
        once(lambda case: _parks(case) and not case.effective.parking_owner),
        "{consumer} parks messages for a person, and no person is named",
        "name a team in parking.owner",
    ),
    Rule(
        "parked-without-review",
        Severity.WARN,
        "dlq.manualReviewRequired",
        once(
            lambda case: (
                case.own.dlq.manual_review_required
                and case.effective.on_exhausted is OnExhausted.PARK
            )
        ),
        "a review is required of dead letters, and {consumer} parks what it cannot handle: that "
        "is released or replayed without anybody having looked at it",
        "set onExhausted: dlq, or take dlq.manualReviewRequired out",
    ),
    Rule(
        "no-lag-alert",
        Severity.WARN,
        "lagSlo",
        once(lambda case: case.own.lag_slo is None),
        "nobody hears when {consumer} falls behind",
        "set lagSlo.maxLagSeconds",
        AntiPattern.NO_LAG_ALERT,
    ),
    Rule(
        "no-runbook",
        Severity.WARN,
        "runbook",
        once(
            lambda case: (
                not case.own.runbook and (case.own.critical or case.own.dlq.manual_review_required)
            )
        ),
        "a person has to act for {consumer}, and no runbook says how",
        "write one and name it in runbook",
    ),
    Rule(
        "without-effect",
        Severity.WARN,
        "",
        _without_effect,
        "{key} has no effect unless {unless}",
        "take it out, or see that it has",
    ),
)
