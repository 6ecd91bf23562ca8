"""The settings of one consumer and its runner, and how a policy file becomes settings.

    policy ──▶ lint ──▶ refused, with the finding
                  └──▶ (ConsumerSettings, RunnerSettings)

The lint also refuses what the engine would not do as the policy says
(`semel.policy.rules.CANNOT`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from semel.codec import Place
from semel.errors import Misuse
from semel.policy import vocabulary as words
from semel.policy.vocabulary import (
    BatchPolicy,
    Duplicates,
    GapPolicy,
    GiveUp,
    Mode,
    RetryMode,
    StalePolicy,
)

if TYPE_CHECKING:
    from semel.policy.model import Effective, Policy
    from semel.policy.rules import Finding


def _choose(settings: Any, **kinds: Iterable[StrEnum]) -> None:
    """Turn the named fields into enum members, on a frozen dataclass, too."""
    for name, members in kinds.items():
        value = getattr(settings, name)
        by_value = {member.value: member for member in members}
        if not isinstance(value, str) or value not in by_value:
            allowed = ", ".join(map(repr, by_value))
            raise Misuse(f"{_where(settings, name)} must be one of {allowed}, got {value!r}")
        object.__setattr__(settings, name, by_value[value])


def _count_from_one(settings: Any, *names: str) -> None:
    """Check that fields are whole numbers of at least 1."""
    for name in names:
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise Misuse(f"{_where(settings, name)} must be at least 1, got {value!r}")


def _lasting(settings: Any, *names: str) -> None:
    """Check that fields are seconds greater than 0."""
    _not_negative(settings, *names)
    for name in names:
        if not getattr(settings, name):
            raise Misuse(f"{_where(settings, name)} must be greater than 0, got 0")


def _not_negative(settings: Any, *names: str) -> None:
    """Check that fields are seconds of at least 0."""
    for name in names:
        value = getattr(settings, name)
        # Written as a negation, because every comparison with nan is false.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and value >= 0):
            raise Misuse(f"{_where(settings, name)} must be at least 0 seconds, got {value!r}")


def _where(settings: Any, name: str) -> str:
    return f"{type(settings).__name__}.{name}"


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Bounded attempts with exponential backoff (S3-25, by its own names)."""

    max_attempts: int = 5
    initial_delay_seconds: float = 1.0
    max_delay_seconds: float = 60.0
    jitter: bool = True
    retryable: frozenset[str] = frozenset()
    """Codes that are always retried, regardless of their class and the exception's."""

    non_retryable: frozenset[str] = frozenset()
    """Codes that are never retried, regardless of their class and the exception's."""

    mode: RetryMode = RetryMode.BLOCKING
    max_poison_attempts: int | None = None
    """The number of attempts after a failure of the class poison; None: `max_attempts`."""

    def __post_init__(self) -> None:
        _choose(self, mode=RetryMode)
        _count_from_one(self, "max_attempts")
        if self.max_poison_attempts is not None:
            _count_from_one(self, "max_poison_attempts")
        for name in ("retryable", "non_retryable"):
            if isinstance(codes := getattr(self, name), str):
                raise Misuse(f"RetryPolicy.{name} must be a set of codes, got {codes!r}")
            object.__setattr__(self, name, frozenset(codes))
        _not_negative(self, "initial_delay_seconds", "max_delay_seconds")
        if not 0 <= self.initial_delay_seconds <= self.max_delay_seconds:
            raise Misuse("initialDelayMs must be between 0 and maxDelayMs")
        if both := self.retryable & self.non_retryable:
            raise Misuse(f"{min(both)} is in retryable and in nonRetryable; keep it in one of them")


def backoff(
    policy: RetryPolicy,
    attempts: int,
    uniform: Callable[[float, float], float] = random.uniform,
) -> float:
    """Return the seconds to wait after *attempts* attempts.

    They double each time.  With jitter they lie between half and the whole, so that
    consumers that failed together do not retry together.
    """
    whole = policy.initial_delay_seconds * 2.0 ** min(attempts - 1, 60)
    whole = min(whole, policy.max_delay_seconds)
    return uniform(whole / 2, whole) if policy.jitter else whole


class Order(StrEnum):
    """Which messages must be handled in the order in which they came."""

    KEY = "key"
    """Those of one key in one partition; a message without a key has no order."""

    PARTITION = "partition"
    """Those of one partition."""

    NONE = "none"
    """None of them."""


FIRST_VERSION: Final = 1
"""The first version of a key, unless a consumer's settings say otherwise."""


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """The behaviour of one consumer."""

    retry: RetryPolicy = field(default_factory=RetryPolicy)
    on_exhausted: GiveUp = GiveUp.DEAD_LETTER
    """Where a message goes after its last attempt."""

    on_hopeless: GiveUp = GiveUp.DEAD_LETTER
    """Where a message goes whose failure is not retryable."""

    on_poison: GiveUp | None = None
    """Where a message goes after its last attempt if that failed with class poison; None: as
    `on_exhausted` says."""

    dead_letter_owner: str = ""
    dead_letter_topic: str = ""
    """The topic to which dead letters are also published; empty: none."""

    unreadable_topic: str = ""
    """The topic to which records are published that cannot be read; empty: that of dead letters."""

    retry_topic: str = ""
    """For `RetryMode.RETRY_TOPIC`; empty: ``<topic>.<consumer>.retry``."""

    dead_letter_outbox: str = "outbox"
    """The outbox that publishes dead letters and retries; its relay must run."""

    review_dead_letters: bool = False
    """A dead letter can be replayed only after a person has reviewed it."""

    duplicates: Duplicates = Duplicates.SKIP
    order: Order = Order.KEY
    holds_keys: bool | None = None
    """A waiting message holds its key: later ones queue behind it (needs order per key).

    None: if order per key needs it; see `holds_waiting_keys`.
    """

    versioned: bool = False
    first_version: int = FIRST_VERSION
    """The first version of a key; if a later version arrives first, that is a gap."""

    gaps: GapPolicy = GapPolicy.RETRY
    keeps_results: bool = False
    lease_seconds: float = 60.0
    stale: StalePolicy = StalePolicy.RECLAIM
    stale_grace_seconds: float = 300.0
    """How long `StalePolicy.WAIT` waits after the end of a lease before it parks."""

    poison_attempts: int = 3
    """How many times the process may die while handling a message before it is parked."""

    batch: BatchPolicy = BatchPolicy.INDEPENDENT
    chunk: int = 20
    """The least number of messages per savepoint: one each would cost half of the gain.

    The number grows while no message fails, and returns to this with the next failure.
    """

    handler_seconds: float = 300.0
    """How long a handler may run before it is cancelled, which is a failed attempt.

    Not in mode leased, where its lease is renewed as long as it runs.
    """

    leased_handler_seconds: float | None = None
    """The same in mode leased; None: no limit, and a handler that hangs keeps its lease."""

    circuit_failures: int = 4
    """After how many failures in a row the consumer stands still, if an outage caused them.

    Fewer than `RetryPolicy.max_attempts` protect the first message, too.  0: never.
    """

    circuit_share: float = 0.5
    """Or after which share of its last 20 attempts (`circuit_failures`, if that is more)."""

    held_retry_seconds: float = 1.0
    """The delay before a message is redelivered that another worker holds."""

    conflict_tries: int = 4
    """How often a whole transaction is run again after a deadlock or serialization failure."""

    def __post_init__(self) -> None:
        _choose(
            self,
            on_exhausted=GiveUp,
            on_hopeless=GiveUp,
            duplicates=Duplicates,
            order=Order,
            gaps=GapPolicy,
            stale=StalePolicy,
            batch=BatchPolicy,
        )
        _count_from_one(self, "poison_attempts", "chunk", "conflict_tries")
        _lasting(self, "lease_seconds", "handler_seconds")
        if self.leased_handler_seconds is not None:
            _lasting(self, "leased_handler_seconds")
        _not_negative(self, "stale_grace_seconds", "held_retry_seconds")
        if self.circuit_failures != 0:
            _count_from_one(self, "circuit_failures")
        if not 0 < self.circuit_share <= 1:
            raise Misuse(
                f"ConsumerSettings.circuit_share must be above 0 and at most 1, "
                f"got {self.circuit_share!r}"
            )
        self._check_order()

    def _check_order(self) -> None:
        if self.holds_keys and self.order is Order.NONE:
            raise Misuse("holds_keys=True needs order=Order.KEY")
        if self.holds_keys is False and self.order is Order.KEY and self._lets_others_pass:
            raise Misuse(
                "holds_keys=False lets later messages of a key overtake one that waits in the "
                "retry table or is parked, against order=Order.KEY; leave it out, or use "
                "order=Order.NONE"
            )
        if self.order is Order.PARTITION and self.stores_retries:
            raise Misuse(
                "order=Order.PARTITION is lost where a failed message waits in the retry table: "
                "its partition goes on; use RetryMode.BLOCKING (and no BatchPolicy.DEAD_LETTER), "
                "or order=Order.KEY, which holds the key and not the partition"
            )

    @property
    def stores_retries(self) -> bool:
        """A failed message waits in the retry table, and its partition continues."""
        return self.retry.mode is not RetryMode.BLOCKING or self.batch is BatchPolicy.DEAD_LETTER

    @property
    def holds_waiting_keys(self) -> bool:
        """A message in the waiting table holds its key: later ones wait behind it.

        True for order per key if a policy stores messages there.  A dead letter is not in
        the waiting table and holds no key.
        """
        if self.order is not Order.KEY:
            return False
        return self._lets_others_pass if self.holds_keys is None else self.holds_keys

    @property
    def _lets_others_pass(self) -> bool:
        """The partition continues behind a message that waits."""
        parks_gaps = self.versioned and self.gaps is GapPolicy.PARK_KEY
        gives_up = GiveUp.PARK in (self.on_exhausted, self.on_hopeless, self.on_poison)
        return self.stores_retries or gives_up or parks_gaps


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """How a runner works, apart from what its consumer's policy says."""

    mode: Mode = Mode.TRANSACTIONAL
    max_records: int = 100
    """Records per fetch, and per batch."""

    max_in_flight: int = 1_000
    """Records beyond the committed offsets; at this number, the partition with most is paused.

    After a crash, this number per partition is handled one by one.
    """

    concurrency: int = 1
    """Lanes at once, or batches at once."""

    wait_seconds: float = 0.5
    """How long a fetch waits for the first record."""

    settle_seconds: float = 0.05
    """How long the offset of a handled message may wait for others, to be committed with them."""

    stop_seconds: float = 30.0
    """How long a stop waits for running handlers before it cancels them."""

    cancel_seconds: float = 5.0
    """How long a cancelled handler may take to clean up before the runner continues without it."""

    member_seconds: float = 60.0
    """How long this process's row stays after the process has ended."""

    lag_seconds: float = 10.0
    """How often the lag is measured."""

    def __post_init__(self) -> None:
        _choose(self, mode=Mode)
        _count_from_one(self, "max_records", "max_in_flight", "concurrency")
        _lasting(self, "member_seconds")
        _not_negative(
            self, "wait_seconds", "settle_seconds", "stop_seconds", "cancel_seconds", "lag_seconds"
        )

    def check_batch(self, policy: BatchPolicy) -> None:
        """Check that the runner can follow a batch policy.

        Raises:
            Misuse: the policy needs the whole batch in one transaction, and would be ignored.
        """
        whole = self.mode is Mode.BATCHED and self.concurrency == 1
        if policy in (BatchPolicy.STOP, BatchPolicy.FAIL_BATCH) and not whole:
            raise Misuse(
                f"batch policy {policy.value!r} needs one batch at a time, and the runner has "
                f"mode {self.mode.value!r} with concurrency {self.concurrency}; use "
                f"mode=Mode.BATCHED with concurrency=1, or BatchPolicy.INDEPENDENT"
            )


DAY_SECONDS: Final = 86_400.0

WEEK_SECONDS: Final = 7 * DAY_SECONDS

DEFAULT_WINDOW_SECONDS: Final = WEEK_SECONDS
"""How far back a replay may reach by default: as long as `Retention` keeps claims."""


@dataclass(frozen=True, slots=True)
class ReplayRule:
    """The rule for replaying messages of one topic."""

    refusal: str | None = None
    """Why they must not be replayed; None if they may be."""

    window_seconds: float | None = None
    """How old a record without a claim may be; None if not set."""

    @property
    def reaches_seconds(self) -> float:
        """The window in seconds; there is always a limit."""
        given = self.window_seconds
        return DEFAULT_WINDOW_SECONDS if given is None else given


def strictest(rules: Iterable[ReplayRule]) -> ReplayRule:
    """Return the one rule that satisfies all of them: any refusal, and the shortest window."""
    known = list(rules)
    refusals = [rule.refusal for rule in known if rule.refusal is not None]
    windows = [rule.window_seconds for rule in known if rule.window_seconds is not None]
    return ReplayRule(refusals[0] if refusals else None, min(windows, default=None))


@dataclass(frozen=True, slots=True)
class ReplayRules:
    """The replay rules of a consumer, by topic."""

    by_topic: Mapping[str, ReplayRule] = field(default_factory=dict)
    own: ReplayRule = field(default_factory=ReplayRule)
    """The rule of the consumer's own part, for every topic."""

    @classmethod
    def of_policy(cls, policy: Policy, consumer: str) -> ReplayRules:
        """Read the rules of a policy for a consumer and each of its topics.

        Raises:
            PolicyNameUnknown: there is no such consumer.
        """
        topics = policy.topics_of(consumer)
        by_topic = {topic: _rule(policy.effective(consumer, topic)) for topic in topics}
        return cls(by_topic, _rule(policy.effective(consumer)))

    def of(self, *topics: str | None) -> ReplayRule:
        """Return the strictest rule for a message of these topics.

        For an unknown topic the strictest rule of all topics holds.
        """
        if topics and all(topic in self.by_topic for topic in topics):
            return strictest(self.by_topic[topic] for topic in topics if topic is not None)
        return strictest([self.own, *self.by_topic.values()])

    @property
    def refusal(self) -> str | None:
        """Return why no message may be replayed; None if some topic allows it."""
        if not self.by_topic:
            return self.own.refusal
        refusals = [rule.refusal for rule in self.by_topic.values()]
        return None if None in refusals else refusals[0]

    @classmethod
    def of_refusals(cls, text: str) -> ReplayRules:
        """Read what `refusals` wrote."""
        found = json.loads(text or "{}")
        own = ReplayRule(found.pop("", None))
        return cls({topic: ReplayRule(refusal) for topic, refusal in found.items()}, own)

    @property
    def refusals(self) -> str:
        """Why messages must not be replayed, by topic, as JSON; empty if they may be."""
        said = {topic: rule.refusal for topic, rule in {**self.by_topic, "": self.own}.items()}
        return json.dumps(said) if any(said.values()) else ""

    def joined(self, other: ReplayRules) -> ReplayRules:
        """Return the rules that satisfy both."""
        topics = {*self.by_topic, *other.by_topic}
        return ReplayRules(
            {topic: strictest([self.of(topic), other.of(topic)]) for topic in sorted(topics)},
            strictest([self.own, other.own]),
        )


def _rule(effective: Effective) -> ReplayRule:
    window = effective.replay_window
    return ReplayRule(effective.replay_refusal, None if window is None else window.total_seconds())


ORDERS: Final[Mapping[words.Ordering, Order]] = {
    words.Ordering.NONE: Order.NONE,
    words.Ordering.PER_KEY: Order.KEY,
    words.Ordering.GLOBAL: Order.PARTITION,
}
"""The policy never has GLOBAL here: the lint refuses it."""


def settings_of(
    policy: Policy,
    consumer: str,
    topics: Sequence[str] | None = None,
    *,
    engine: words.Engine = words.Engine.SERVICE,
) -> tuple[ConsumerSettings, RunnerSettings]:
    """Turn a policy into the settings of the consumer and of its runner.

    With several topics the strictest order holds for all.  The default for *topics* is those
    that the policy lists for the consumer.

    Raises:
        Misuse: the lint refuses the policy; the text names key and line.
        PolicyNameUnknown: there is no such consumer, or it does not read one of the topics.
    """
    read: Sequence[str | None] = policy.topics_of(consumer) if topics is None else topics
    holding = [policy.effective(consumer, topic) for topic in read or (None,)]
    _refuse(policy, consumer, holding, engine)
    strictest = max(holding, key=lambda e: [*words.Ordering].index(e.ordering))
    settings, runner = _consumer_settings(strictest), _runner_settings(strictest)
    runner.check_batch(settings.batch)
    return settings, runner


def _seconds(length: timedelta | None, unsaid: float = 0.0) -> float:
    return unsaid if length is None else length.total_seconds()


def id_place_of(policy: Policy, consumer: str) -> Place | None:
    """Return the policy's place of the message id; None if it has none.

    Raises:
        PolicyNameUnknown: there is no such consumer.
    """
    found = policy.consumer(consumer).message_id
    return None if found is None else found.place


def _consumer_settings(e: Effective) -> ConsumerSettings:
    own = e.consumer
    lease = e.lease
    return ConsumerSettings(
        retry=RetryPolicy(
            # Never None here: the lint refuses an unlimited number of attempts.
            max_attempts=e.attempts or 1,
            initial_delay_seconds=own.retry.initial_delay_ms / 1000,
            max_delay_seconds=own.retry.max_delay_ms / 1000,
            jitter=e.jitter,
            retryable=frozenset(own.retry.retryable),
            non_retryable=frozenset(own.retry.non_retryable),
            mode=own.retry.mode,
            max_poison_attempts=e.poison_attempts,
        ),
        on_exhausted=e.on_exhausted,
        on_hopeless=e.on_exhausted,
        on_poison=GiveUp.PARK if e.parks_poison else None,
        dead_letter_owner=own.dlq.owner or "",
        dead_letter_topic=own.dlq.topic or "" if own.dlq.enabled else "",
        unreadable_topic=own.dlq.unreadable_topic or "" if own.dlq.enabled else "",
        retry_topic=own.retry.topic or "",
        review_dead_letters=own.dlq.manual_review_required,
        duplicates=own.idempotency.duplicate_handling,
        order=ORDERS[e.ordering],
        holds_keys=e.holds_keys and e.ordering is not words.Ordering.NONE,
        versioned=own.versioned,
        gaps=own.gaps or words.GapPolicy.RETRY,
        keeps_results=own.keep_result,
        lease_seconds=lease.seconds,
        stale=lease.stale,
        poison_attempts=e.poison_attempts or 1,
        handler_seconds=own.handler_seconds,
        # The default is for the other modes.
        leased_handler_seconds=own.handler_seconds
        if "handler_seconds" in own.model_fields_set
        else None,
        circuit_failures=own.circuit.failures if own.circuit.enabled else 0,
        circuit_share=own.circuit.share,
        batch=words.BatchPolicy.INDEPENDENT if own.batch is None else own.batch.policy,
    )


def _runner_settings(e: Effective) -> RunnerSettings:
    own = e.consumer
    if own.batch is not None:
        return RunnerSettings(
            mode=words.Mode.BATCHED, max_records=own.batch.size, concurrency=own.concurrency
        )
    return RunnerSettings(mode=own.mode, concurrency=own.concurrency)


def _refuse(
    policy: Policy, consumer: str, holding: Sequence[Effective], engine: words.Engine
) -> None:
    from semel.policy.lint import review

    for e in holding:
        for finding in review(policy, consumer, e.topic_name, engine).findings:
            if finding.severity is words.Severity.REFUSED:
                raise Misuse(f"{_in_policy(policy, finding)}: {finding.sentence}; {finding.fix}")


def _in_policy(policy: Policy, finding: Finding) -> str:
    name = policy.source.name or "policy"
    line = "" if finding.line is None else f", line {finding.line}"
    return f"{name}{line}: {finding.key} ({finding.code})"
