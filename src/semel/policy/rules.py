"""The rules of the lint: one table, and the functions that find violations."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from semel.codec import FromCoordinates
from semel.policy.guarantee import (
    ACK,
    STRATEGIES,
    AckTime,
    ConsumerGuarantee,
    Repetition,
    rows_repetition,
)
from semel.policy.model import Effective, Policy, PolicySource, consumer_path, topic_path
from semel.policy.reader import Path, nearest, path_words
from semel.policy.sections import ConsumerPolicy, Retry, SideEffect, duration_words
from semel.policy.vocabulary import (
    AntiPattern,
    BatchPolicy,
    CommitTiming,
    Duplicates,
    GapPolicy,
    GiveUp,
    Intent,
    Mode,
    Ordering,
    ReplayAllowed,
    RetryMode,
    Semantics,
    Severity,
    Strategy,
)


@dataclass(frozen=True, slots=True)
class Case:
    """One consumer on one topic, as the rules and the questions see it."""

    effective: Effective
    guarantee: ConsumerGuarantee
    policy: Policy
    """The whole file: one consumer may read what another one sends."""

    @property
    def source(self) -> PolicySource:
        """Where the policy was written."""
        return self.policy.source

    @property
    def own(self) -> ConsumerPolicy:
        """The consumer's own policy."""
        return self.effective.consumer

    @property
    def unprotected(self) -> tuple[SideEffect, ...]:
        """The side effects that a repetition repeats."""
        return tuple(e for e in self.effective.side_effects if not e.is_protected)

    def at(self, key: str) -> Path:
        """Return the path of a consumer's key."""
        return consumer_path(self.effective.consumer_name, key)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found, where, and the way out."""

    severity: Severity
    code: str
    sentence: str
    fix: str
    key: str
    line: int | None
    anti_pattern: AntiPattern | None = None


Nouns: TypeAlias = Mapping[str, Any]
"""What the sentence of a finding names besides consumer and topic."""

PATH = "path"
"""The noun that replaces a rule's key, where only the case knows it."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that the lint looks for."""

    code: str
    severity: Severity
    key: str
    """The consumer's key that decides."""

    found: Callable[[Case], Iterable[Nouns]]
    """One set of nouns for each finding; none where all is well."""

    says: str
    fix: str
    anti_pattern: AntiPattern | None = None
    if_critical: Severity | None = None
    """The severity for critical consumers, where it is another one."""

    def judge(self, case: Case) -> Iterator[Finding]:
        """Yield what the rule finds."""
        critical = self.if_critical if case.own.critical else None
        for found in self.found(case):
            nouns = {
                "consumer": case.effective.consumer_name,
                "topic": case.effective.topic_name or "its topic",
                **found,
            }
            path = nouns.get(PATH) or case.at(self.key)
            yield Finding(
                critical or self.severity,
                self.code,
                self.says.format(**nouns),
                self.fix.format(**nouns),
                path_words(path),
                case.source.line_of(path),
                self.anti_pattern,
            )


def once(test: Callable[[Case], Any]) -> Callable[[Case], Iterable[Nouns]]:
    """Make a rule's finder of a question with a yes and a no."""
    return lambda case: [{}] if test(case) else []


_ORDER: Final = [*Semantics]


def _weaker_than_wanted(case: Case) -> Iterator[Nouns]:
    wanted = case.effective.guarantee
    if wanted is None or wanted is Semantics.EXACTLY_ONCE:
        return
    for promise in case.guarantee.promises:
        if _ORDER.index(promise.semantics) < _ORDER.index(wanted):
            path = case.effective.decided_by["guarantee"]
            yield {"wanted": wanted, "promise": promise.sentence, PATH: path}


def _exactly_once_claimed(case: Case) -> Iterator[Nouns]:
    if case.effective.guarantee is not Semantics.EXACTLY_ONCE:
        return
    if any(p.semantics is not Semantics.EXACTLY_ONCE for p in case.guarantee.promises):
        path = case.effective.decided_by["guarantee"]
        yield {"real": case.guarantee.sentence, PATH: path}


def _unprotected(case: Case) -> Iterator[Nouns]:
    for number, effect in enumerate(case.effective.side_effects):
        if effect in case.unprotected:
            listed = case.own.side_effects is not None
            path = (*case.at("sideEffects"), number) if listed else case.at("idempotency")
            yield {"effect": effect.name, PATH: path}


def _replay_unsafe(case: Case) -> Iterator[Nouns]:
    if case.effective.replay is ReplayAllowed.YES:
        path = case.effective.decided_by.get("replay") or case.at("replay.allowed")
        for effect in case.unprotected:
            yield {"effect": effect.name, PATH: path}


def _ttl_too_short(case: Case) -> Iterator[Nouns]:
    e = case.effective
    claims = STRATEGIES[case.own.idempotency.strategy].claims
    if not claims or e.claims_ttl >= e.needed_ttl:
        return
    longest = max(e.windows, key=lambda window: window.length)
    yield {
        "ttl": duration_words(e.claims_ttl),
        "window": longest.what,
        "length": duration_words(longest.length),
        "needed": duration_words(e.needed_ttl),
    }


def _calls_in_batches(case: Case) -> Iterator[Nouns]:
    if case.own.batch is None or case.own.batch.size < 2:
        return
    for effect in case.effective.side_effects:
        if effect.intent is not Intent.OUTBOX:
            yield {"effect": effect.name}


def _ack(case: Case) -> AckTime:
    return ACK[case.own.offset_commit.timing]


def _by_coordinates(case: Case) -> bool:
    found = case.own.message_id
    return found is not None and isinstance(found.place, FromCoordinates)


def _lease_repeats_work(case: Case) -> bool:
    is_claimed = case.own.idempotency.strategy is not Strategy.NONE
    repetition, _ = rows_repetition(case.effective)
    return case.own.mode is Mode.LEASED and is_claimed and repetition is Repetition.APPLIED


# Their messages wait beside the partition, which goes on: only held keys keep their order.
PASSED_IN_RETRY: Final = frozenset({RetryMode.RETRY_TABLE, RetryMode.RETRY_TOPIC})
# A dead letter is left behind, not overtaken; `dead-letter-leaves-hole` says so.
PASSED_IN_BATCH: Final = frozenset({BatchPolicy.INDEPENDENT})

# More attempts do not help: after a thousand failures a person has to look.
MOST_ATTEMPTS: Final = 1_000
DAY_SECONDS: Final = 86_400
# A message beside its partition delays no other; a broker's usual retention is as long.
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
    return case.effective.on_exhausted is GiveUp.DEAD_LETTER or by_batch


def _global(case: Case) -> Iterator[Nouns]:
    if case.effective.ordering is Ordering.GLOBAL:
        yield {PATH: case.effective.decided_by["ordering"]}


def _without_key(case: Case) -> Iterator[Nouns]:
    topic = case.effective.topic_name
    if topic is not None and _ordered(case) and case.effective.topic.key is None:
        yield {PATH: topic_path(topic, "key")}


def _retry_breaks_order(case: Case) -> Iterator[Nouns]:
    mode = case.own.retry.mode
    if _ordered(case) and mode in PASSED_IN_RETRY and not case.effective.holds_keys:
        yield {"mode": mode}


def _batch_breaks_order(case: Case) -> bool:
    passed = case.own.batch is not None and case.own.batch.policy in PASSED_IN_BATCH
    return _ordered(case) and passed and not case.effective.holds_keys


def _waiting_seconds(retry: Retry, attempts: int) -> float:
    """Return how long all waits between attempts are together, if none is shortened at random."""
    waits, length, waited = attempts - 1, retry.initial_delay_ms, 0
    while waits > 0 and 0 < length < retry.max_delay_ms:
        waits, length, waited = waits - 1, length * 2, waited + length
    return (waited + waits * min(length, retry.max_delay_ms)) / 1000


def _blocks_too_long(case: Case) -> Iterator[Nouns]:
    slo, retry, attempts = case.own.lag_slo, case.own.retry, case.effective.attempts
    if slo is None or attempts is None or retry.mode is not RetryMode.BLOCKING:
        return
    blocked = _waiting_seconds(retry, attempts)
    if blocked > slo.max_lag_seconds:
        yield {"blocked": f"{blocked:g}", "slo": f"{slo.max_lag_seconds:g}"}


def _opens_too_late(case: Case) -> Iterator[Nouns]:
    circuit, attempts = case.own.circuit, case.effective.attempts
    if circuit.enabled and attempts is not None and attempts <= circuit.failures:
        yield {"failures": circuit.failures, "attempts": attempts}


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


def _letters_come_back(case: Case) -> Iterator[Nouns]:
    start, target = case.effective.topic_name, _letter_topic(case.own)
    unread = case.own.dlq.unreadable_topic
    if unread is not None and unread == start:
        yield {"target": unread, "way": "which it reads", PATH: case.at("dlq.unreadableTopic")}
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
        "retry.topic": (
            own.retry.topic is not None and own.retry.mode is not RetryMode.RETRY_TOPIC,
            "retry.mode is retry-topic",
        ),
        "dlq.topic": (own.dlq.topic is not None and not own.dlq.enabled, "dlq.enabled is true"),
        "dlq.unreadableTopic": (
            own.dlq.unreadable_topic is not None and not own.dlq.enabled,
            "dlq.enabled is true",
        ),
        "poison.maxAttemptsBeforePark": (
            poison is not None and e.attempts is not None and poison > e.attempts,
            f"retry.maxAttempts, now {e.attempts}, is not smaller",
        ),
    }
    for key, (is_idle, unless) in idle.items():
        if is_idle:
            yield {"key": key, "unless": unless, PATH: case.at(key)}


class Cannot(NamedTuple):
    """A setting that a policy can have and that semel's consumers do not support."""

    is_said: Callable[[Effective], bool]
    instead: str
    """What the engine does."""

    way_out: str


def _is_leased(e: Effective) -> bool:
    return e.consumer.mode is Mode.LEASED


def _parks(e: Effective) -> bool:
    by_gap = e.consumer.versioned and e.consumer.gaps is GapPolicy.PARK_KEY
    return e.on_exhausted is GiveUp.PARK or e.parks_poison or by_gap


def _stores(e: Effective) -> bool:
    """Return whether a batch stores what fails; `retry.mode` has a rule of its own."""
    return e.consumer.batch is not None and e.consumer.batch.policy is BatchPolicy.DEAD_LETTER


# fmt: off
CANNOT: Final[Mapping[str, Cannot]] = {
    "idempotency.strategy": Cannot(lambda e: e.consumer.idempotency.strategy is Strategy.NONE,
        "every message is claimed, and its repetitions are skipped",
        "use processed-message, which needs nothing of the handler"),
    "offsetCommit.timing": Cannot(
        lambda e: (
            e.consumer.offset_commit.timing
            in (CommitTiming.BEFORE_PROCESSING, CommitTiming.IN_OUTPUT_TRANSACTION)
        ),
        "offsets are committed after the database's transaction",
        "use timing: after-db-transaction"),
    "batch": Cannot(lambda e: e.consumer.batch is not None and _is_leased(e),
        "a batch is one transaction, and in mode leased every message has its own",
        "take batch out, or use mode: transactional"),
    "batch.policy": Cannot(
        lambda e: (
            e.consumer.batch is not None
            and e.consumer.batch.policy in (BatchPolicy.STOP, BatchPolicy.FAIL_BATCH)
            and e.consumer.concurrency > 1
        ),
        "several batches run at once, and none knows of another's failure",
        "use concurrency: 1, or batch.policy: independent"),
    "parking.perKey": Cannot(
        lambda e: e.ordering is Ordering.PER_KEY and not e.holds_keys and (_parks(e) or _stores(e)),
        "the later messages of a key would overtake one that is parked or waits in the retry table",
        "use parking.perKey: true, or ordering: none"),
    "versioned": Cannot(lambda e: e.consumer.versioned and _is_leased(e),
        "versions are checked in the message's transaction, and mode leased has none",
        "use mode: transactional, or let the handler compare versions"),
    "idempotency.duplicateHandling": Cannot(
        lambda e: e.consumer.idempotency.duplicate_handling is Duplicates.INVOKE and _is_leased(e),
        "in mode leased a message that was handled before has no lease to be handled under",
        "use duplicateHandling: skip and send through the outbox, or use mode: transactional"),
}
# fmt: on
"""By key: what is refused because it would not be carried out as it is written."""

# fmt: off
KNOWN_CODES: Final = (
    "DATABASE_TIMEOUT", "DATABASE_CONFLICT", "TIMEOUT", "CONNECTION_LOST", "CRASHED",
    "DEPENDENCY_UNAVAILABLE", "RATE_LIMITED", "PRECONDITION_FAILED", "SEQUENCE_GAP",
    "SCHEMA_INVALID", "DESERIALIZATION_FAILED", "UNKNOWN_EVENT_TYPE", "MESSAGE_ID_MISSING",
    "AUTHORIZATION_FAILED", "CONSTRAINT_VIOLATED", "HANDLER_MISUSE", "PAYLOAD_CONFLICT",
    "REJECTED", "HANDLER_FAILED", "HANDLER_CANCELLED",
        "HANDLER_TIMEOUT",
)
# fmt: on
"""The failure codes that semel itself gives; handlers may raise others."""


def _not_carried_out(case: Case) -> Iterator[Nouns]:
    for key, cannot in CANNOT.items():
        if cannot.is_said(case.effective):
            yield {**cannot._asdict(), "key": key, PATH: case.at(key)}


def _codes(case: Case) -> Iterator[Nouns]:
    """Yield the codes that semel does not give, each with the nearest that it does."""
    retry = case.own.retry
    lists = {"retry.retryable": retry.retryable, "retry.nonRetryable": retry.non_retryable}
    for key, codes in lists.items():
        for code in codes:
            if code not in KNOWN_CODES:
                yield {"code": code, "near": nearest(code, KNOWN_CODES), PATH: case.at(key)}


def _misspelt(case: Case) -> Iterator[Nouns]:
    return (nouns for nouns in _codes(case) if nouns["near"])


def _of_their_own(case: Case) -> Iterator[Nouns]:
    return (nouns for nouns in _codes(case) if not nouns["near"])


NOTE, WARN, REFUSED = Severity.NOTE, Severity.WARN, Severity.REFUSED

# fmt: off
RULES: Final = (
    Rule("weaker-than-wanted", REFUSED, "guarantee", _weaker_than_wanted,
        "{wanted} is wanted, and what {consumer} has is {promise}",
        "strengthen it as the other findings say, or want less"),
    Rule("exactly-once-without-scope", REFUSED, "guarantee", _exactly_once_claimed,
        "'exactly-once' is wanted without a scope, and no broker can give it: the real guarantee "
        "of {consumer} is {real}",
        "want effectively-once, or commit offsets in the output's transaction and have no other "
        "effects", AntiPattern.EXACTLY_ONCE_CHECKBOX),
    Rule("assumes-no-duplicates", WARN, "idempotency.strategy",
        once(lambda c: c.own.idempotency.strategy is Strategy.NONE),
        "{consumer} does not recognise duplicates, and they are normal: redelivery, rebalances "
        "and replays make them",
        "choose a strategy; processed-message needs nothing of the handler",
        AntiPattern.ASSUMING_NO_DUPLICATES, REFUSED),
    Rule("id-by-coordinates", NOTE, "messageId.from", once(_by_coordinates),
        "the id is the record's place in {topic}: a message that is published again, or copied to "
        "another topic, counts as a new one",
        "let the producer give an id, and name its header or field"),
    Rule("lease-repeats-work", WARN, "lease.stale", once(_lease_repeats_work),
        "in mode leased the claim and the rows of {consumer} are two transactions: "
        "after a crash between them it is unknown whether the work is done",
        "use mode transactional, a strategy that the rows themselves enforce, or stale: inspect"),
    Rule("claims-ttl-too-short", REFUSED, "claims.ttl", _ttl_too_short,
        "claims are kept for {ttl}, and {window} is {length}: a message that comes again at the "
        "edge of it is handled twice", "keep them for {needed} or longer, or leave claims.ttl out"),
    Rule("retention-unknown", NOTE, "claims.ttl",
        once(lambda c: c.effective.topic.retention is None and c.own.claims.ttl),
        "the retention of {topic} is not stated, so claims.ttl is compared with the usual week",
        "state the topic's retention"),
    Rule("side-effect-unprotected", REFUSED, "sideEffects", _unprotected,
        "side effect '{effect}' has neither an idempotency key nor a durable intent: it is "
        "at-least-once, and a crash, a retry or a redelivery repeats it",
        "give its provider a key (idempotencyKey: true), or write the intent (intent: outbox)",
        AntiPattern.SIDE_EFFECTS_WITHOUT_IDEMPOTENCY),
    Rule("batch-repeats-calls", NOTE, "batch", _calls_in_batches,
        "the handler is called again after a part of its batch failed, and side effect '{effect}' "
        "with it, without any crash",
        "write the intent (intent: outbox), which is undone with the part"),
    Rule("commits-before-processing", REFUSED, "offsetCommit.timing",
        once(lambda c: c.own.critical and _ack(c) is AckTime.BEFORE),
        "{consumer} is critical and commits the offset before the work: a crash loses the message",
        "use timing: after-db-transaction", AntiPattern.COMMITTING_BEFORE_PROCESSING),
    Rule("may-lose-messages", NOTE, "offsetCommit.timing",
        once(lambda c: not c.own.critical and _ack(c) is AckTime.BEFORE),
        "{consumer} commits the offset before the work: at-most-once, for what may be lost",
        "use timing: after-db-transaction where it may not"),
    Rule("replay-unsafe", REFUSED, "replay.allowed", _replay_unsafe,
        "replay is allowed, and would repeat side effect '{effect}'",
        "protect it, or set replay.allowed: false-for-side-effect", AntiPattern.REPLAY_UNSAFE),
    Rule("duplicates-untested", WARN, "tests.duplicates",
        once(lambda c: c.own.critical and not c.own.tests.duplicates),
        "{consumer} is critical, and no test is named that delivers a message twice",
        "write one and name it in tests.duplicates"),
    Rule("crash-window-untested", WARN, "tests.crashWindow",
        once(lambda c: c.own.critical and not c.own.tests.crash_window),
        "{consumer} is critical, and no test is named that crashes between effect and ack",
        "write one and name it in tests.crashWindow"),
    Rule("global-ordering", REFUSED, "ordering", _global,
        "one order over all of {topic} means one partition and one worker, and no consumer keeps "
        "it across partitions",
        "use ordering: per-key, and put what must stay in order under one key",
        AntiPattern.GLOBAL_ORDERING),
    Rule("ordering-without-key", WARN, "ordering", _without_key,
        "{consumer} keeps order per key, and the key of {topic} is not stated",
        "name the field in the topic's key"),
    Rule("retry-breaks-order", REFUSED, "retry.mode", _retry_breaks_order,
        "{consumer} keeps order per key, and a message that waits in a {mode} is overtaken by the "
        "later ones of its key",
        "set parking.perKey: true, so that they wait behind it, or use retry.mode: blocking"),
    Rule("batch-breaks-order", REFUSED, "batch.policy", once(_batch_breaks_order),
        "{consumer} keeps order per key, and in an independent batch a failed message is overtaken "
        "by the later ones of its key", "use batch.policy: stop, or parking.perKey: true"),
    Rule("order-across-a-pause", NOTE, "versioned",
        once(lambda c: _ordered(c) and not _versions_kept(c)),
        "an owner that was paused can wake up late: across a paused owner only versions keep order",
        "let messages carry their aggregate's version and set versioned: true, where that matters"),
    Rule("dead-letter-leaves-hole", NOTE, "onExhausted",
        once(lambda c: _ordered(c) and _dead_letters_pass(c)),
        "a dead letter leaves a hole in its key's order: later messages are handled without it",
        "use onExhausted: park, where they must wait for it"),
    Rule("retries-forever", REFUSED, "retry.maxAttempts",
        once(lambda c: c.effective.attempts is None),
        "{consumer} retries without a limit: "
        "one poison message holds up everything behind it for ever",
        "set retry.maxAttempts to 1 or more", AntiPattern.RETRYING_FOREVER),
    Rule("retries-exceed-lag-slo", WARN, "retry", _blocks_too_long,
        "one failing message can hold its partition up for {blocked} s, and the lag must not "
        "exceed {slo} s", "use retry.mode: retry-table, or fewer or shorter waits"),
    Rule("outage-spends-attempts", NOTE, "circuit.failures", _opens_too_late,
        "the circuit of {consumer} opens after {failures} failures in a row, and a message has "
        "{attempts} attempts: an outage may give up the first message",
        "use more attempts than circuit.failures"),
    Rule("retries-too-long", WARN, "retry.maxAttempts", _retries_too_long,
        "{consumer} tries a failing message {attempts} times, with waits of {lasting} in all, "
        "before a person can see it",
        "use fewer attempts or shorter waits: "
        "dead letters and parked messages are kept, and can be sent back",
        AntiPattern.RETRYING_FOREVER),
    Rule("retries-unreadable", WARN, "retry.retryable", _retries_unreadable,
        "{code} is retried, and the same bytes cannot be read the next time either",
        "take it out of retry.retryable: it goes to the dead letters at once",
        AntiPattern.IGNORING_UNREADABLE),
    Rule("unreadable-unheard", WARN, "dlq.enabled", once(lambda c: not c.own.dlq.enabled),
        "dead letters are not enabled, and a message that cannot be read "
        "has no place where a person can find it",
        "set dlq.enabled: true, with an owner", AntiPattern.IGNORING_UNREADABLE, REFUSED),
    Rule("dlq-without-owner", WARN, "dlq.owner",
        once(lambda c: c.own.dlq.enabled and not c.own.dlq.owner),
        "the dead letters of {consumer} have no owner: what arrives there is lost, only later",
        "name a team in dlq.owner", AntiPattern.DLQ_WITHOUT_OWNER, REFUSED),
    Rule("dlq-topic-is-read", REFUSED, "dlq.topic", _letters_come_back,
        "the dead letters of {consumer} are published to {target}, {way}: each comes back as a "
        "message that fails", "give the dead letters a topic of their own"),
    Rule("parking-without-owner", WARN, "parking.owner",
        once(lambda c: _parks(c.effective) and not c.effective.parking_owner),
        "{consumer} parks messages for a person, and no person is named",
        "name a team in parking.owner"),
    Rule("parked-without-review", WARN, "dlq.manualReviewRequired", once(
            lambda c: c.own.dlq.manual_review_required and c.effective.on_exhausted is GiveUp.PARK),
        "a review is required of dead letters, and {consumer} parks what it cannot handle: "
        "those messages are released or replayed without a review",
        "set onExhausted: dlq, or take dlq.manualReviewRequired out"),
    Rule("no-lag-alert", WARN, "lagSlo", once(lambda c: c.own.lag_slo is None),
        "there is no alert when {consumer} falls behind",
        "set lagSlo.maxLagSeconds", AntiPattern.NO_LAG_ALERT),
    Rule("no-runbook", WARN, "runbook", once(
            lambda c: not c.own.runbook and (c.own.critical or c.own.dlq.manual_review_required)),
        "a person has to act for {consumer}, and no runbook says how",
        "write one and name it in runbook"),
    Rule("without-effect", WARN, "", _without_effect,
        "{key} has no effect unless {unless}", "take it out, or change that"),
    Rule("not-carried-out", REFUSED, "", _not_carried_out,
        "{key} cannot be carried out for {consumer}: {instead}", "{way_out}"),
    Rule("code-unknown", WARN, "retry.retryable", _misspelt,
        "{code} is not a failure code of semel: did you mean {near}?",
        "correct it, or let a handler of {consumer} raise exactly this code"),
    Rule("code-of-your-own", NOTE, "retry.retryable", _of_their_own,
        "{code} is not a failure code of semel, so only a handler of {consumer} can give it",
        "let one raise RetryableMessageError or NonRetryableMessageError with this code"),
)
# fmt: on
"""Everything that the lint looks for: code, severity, key, finder, sentence, way out."""
