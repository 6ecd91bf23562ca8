"""From the policy file to the engine: what holds for a consumer, as its settings.

    policy ──▶ lint ──▶ refused, with the finding
                  └──▶ (ConsumerSettings, RunnerSettings)

The lint refuses what the engine would carry out otherwise than it says, too
(`semel.policy.rulebook_engine.CANNOT`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from semel.codec import Place
from semel.errors import Misuse
from semel.messaging.claims import StalePolicy
from semel.messaging.lanes import Order
from semel.messaging.retention import Retention
from semel.messaging.retry import GiveUp, RetryMode, RetryPolicy
from semel.messaging.runner import Mode, RunnerSettings
from semel.messaging.sequence import GapPolicy
from semel.messaging.settings import BatchPolicy, ConsumerSettings, Duplicates
from semel.policy import Effective, Finding, Policy, Severity, review
from semel.policy import vocabulary as words
from semel.policy.effective import SAFETY, USUAL_RETENTION
from semel.policy.sections import LeaseTerms

ORDERS: Final[Mapping[words.Ordering, Order]] = {
    words.Ordering.NONE: Order.NONE,
    words.Ordering.PER_KEY: Order.KEY,
    words.Ordering.GLOBAL: Order.PARTITION,
}
RETRY_MODES: Final[Mapping[words.RetryMode, RetryMode]] = {
    words.RetryMode.BLOCKING: RetryMode.BLOCKING,
    words.RetryMode.RETRY_TABLE: RetryMode.RETRY_TABLE,
}
GIVE_UP: Final[Mapping[words.OnExhausted, GiveUp]] = {
    words.OnExhausted.DLQ: GiveUp.DEAD_LETTER,
    words.OnExhausted.PARK: GiveUp.PARK,
}
GAPS: Final[Mapping[words.OnGap, GapPolicy]] = {gap: GapPolicy(gap.value) for gap in words.OnGap}
STALE: Final[Mapping[words.StaleLease, StalePolicy]] = {
    stale: StalePolicy(stale.value) for stale in words.StaleLease
}
BATCHES: Final[Mapping[words.BatchPolicy, BatchPolicy]] = {
    batch: BatchPolicy(batch.value) for batch in words.BatchPolicy
}
DUPLICATES: Final[Mapping[words.DuplicateHandling, Duplicates]] = {
    handling: Duplicates(handling.value) for handling in words.DuplicateHandling
}


def settings_of(
    policy: Policy, consumer: str, topics: Sequence[str] | None = None
) -> tuple[ConsumerSettings, RunnerSettings]:
    """Return the settings that a policy means, for the consumer and for its runner.

    Of several topics the strictest order holds for all of them.  Without *topics*: those that
    the policy says the consumer reads.

    Raises:
        Misuse: the lint refuses the policy; the sentence names key and line.
        PolicyNameUnknown: there is no such consumer, or it does not read one of the topics.
    """
    read: Sequence[str | None] = policy.topics_of(consumer) if topics is None else topics
    holding = [policy.effective(consumer, topic) for topic in read or (None,)]
    _refuse(policy, consumer, holding)
    strictest = max(holding, key=lambda e: [*words.Ordering].index(e.ordering))
    settings, runner = _consumer_settings(strictest), _runner_settings(strictest)
    runner.check_batch(settings.batch)
    return settings, runner


def retention_of(policy: Policy, consumer: str) -> Retention:
    """Return how long a consumer's claims are kept: the longest that one of its topics needs.

    What the policy does not say of a topic's retention is taken for the broker's usual week.

    Raises:
        Misuse: one of the windows outlasts ``claims.ttl``.
        PolicyNameUnknown: there is no such consumer.
    """
    holding = [policy.effective(consumer, topic) for topic in policy.topics_of(consumer) or (None,)]
    own = policy.consumer(consumer)
    usual = USUAL_RETENTION.total_seconds()
    windows = {
        "topic_retention_seconds": [_seconds(e.topic.retention, usual) for e in holding],
        "replay_window_seconds": [
            0.0 if e.replay is words.ReplayAllowed.NO else _seconds(e.replay_window)
            for e in holding
        ],
        "dead_letter_age_seconds": [_seconds(own.dlq.keep)],
        "parking_age_seconds": [_seconds(own.parking.keep)],
    }
    longest: dict[str, Any] = {name: max(lengths) for name, lengths in windows.items()}
    needed = SAFETY * max(longest.values())
    return Retention(ttl_seconds=_seconds(own.claims.ttl, needed), safety=SAFETY, **longest)


def _seconds(length: timedelta | None, unsaid: float = 0.0) -> float:
    return unsaid if length is None else length.total_seconds()


def id_place_of(policy: Policy, consumer: str) -> Place | None:
    """Return where the policy says that ids come from; None where it does not say.

    Raises:
        PolicyNameUnknown: there is no such consumer.
    """
    found = policy.consumer(consumer).message_id
    return None if found is None else found.place


def _consumer_settings(e: Effective) -> ConsumerSettings:
    own = e.consumer
    lease = own.lease or LeaseTerms()
    give_up = GIVE_UP[e.on_exhausted]
    return ConsumerSettings(
        retry=RetryPolicy(
            # The lint refuses attempts without end.
            max_attempts=e.attempts or 1,
            initial_delay_seconds=own.retry.initial_delay_ms / 1000,
            max_delay_seconds=own.retry.max_delay_ms / 1000,
            jitter=e.jitter,
            retryable=frozenset(own.retry.retryable),
            non_retryable=frozenset(own.retry.non_retryable),
            mode=RETRY_MODES[own.retry.mode],
            max_poison_attempts=e.poison_attempts,
        ),
        on_exhausted=give_up,
        on_hopeless=give_up,
        dead_letter_owner=own.dlq.owner or "",
        dead_letter_topic=own.dlq.topic or "" if own.dlq.enabled else "",
        review_dead_letters=own.dlq.manual_review_required,
        duplicates=DUPLICATES[own.idempotency.duplicate_handling],
        order=ORDERS[e.ordering],
        holds_keys=e.holds_keys and e.ordering is not words.Ordering.NONE,
        versioned=own.versioned,
        gaps=GapPolicy.RETRY if own.gaps is None else GAPS[own.gaps],
        keeps_results=own.keep_result,
        lease_seconds=lease.seconds,
        stale=STALE[lease.stale],
        poison_attempts=e.poison_attempts or 1,
        batch=BatchPolicy.INDEPENDENT if own.batch is None else BATCHES[own.batch.policy],
    )


def _runner_settings(e: Effective) -> RunnerSettings:
    own = e.consumer
    if own.batch is not None:
        return RunnerSettings(
            mode=Mode.BATCHED, max_records=own.batch.size, concurrency=own.concurrency
        )
    mode = Mode.LEASED if _is_leased(e) else Mode.TRANSACTIONAL
    return RunnerSettings(mode=mode, concurrency=own.concurrency)


def _is_leased(e: Effective) -> bool:
    return e.consumer.mode is words.Mode.LEASED


def _refuse(policy: Policy, consumer: str, holding: Sequence[Effective]) -> None:
    for e in holding:
        for finding in review(policy, consumer, e.topic_name).findings:
            if finding.severity is Severity.REFUSED:
                raise Misuse(f"{_where(policy, finding)}: {finding.sentence}; {finding.fix}")


def _where(policy: Policy, finding: Finding) -> str:
    name = policy.source.name or "policy"
    line = "" if finding.line is None else f", line {finding.line}"
    return f"{name}{line}: {finding.key} ({finding.code})"
