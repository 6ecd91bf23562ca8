"""What holds for one consumer on one topic.

Where topic and consumer both speak, the stricter one wins (`OVERLAPS`); where
nobody speaks, defaults follow from other keys.  Pure: a policy in, a policy
out, nothing read and no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final

from semel.policy.kinds import UNBOUNDED
from semel.policy.model import ROOT, ConsumerPolicy, Policy, TopicPolicy
from semel.policy.problems import Path, PolicyNameUnknown
from semel.policy.sections import SideEffect
from semel.policy.vocabulary import (
    Backoff,
    OnExhausted,
    Ordering,
    ReplayAllowed,
    RetryMode,
    Semantics,
    Strategy,
)


@dataclass(frozen=True, slots=True)
class Overlap:
    """A matter on which a topic and a consumer may both speak."""

    topic_key: str
    consumer_key: str
    of_topic: Callable[[TopicPolicy], Any]
    """What the topic says; None where it says nothing."""

    of_consumer: Callable[[ConsumerPolicy], Any]
    strictness: Callable[[Any], Any]
    """The stricter of two values is the one with the greater strictness."""

    wins: str
    """The rule, in words."""


def _rank(value: StrEnum) -> int:
    """Return the place in an enum that is written from the weakest to the strictest."""
    return [*type(value)].index(value)


_REPLAY: Final[Mapping[bool | None, ReplayAllowed | None]] = {
    None: None,
    True: ReplayAllowed.YES,
    False: ReplayAllowed.NO,
}


OVERLAPS: Final[Mapping[str, Overlap]] = {
    "guarantee": Overlap(
        "defaultGuarantee",
        "guarantee",
        lambda topic: topic.default_guarantee,
        lambda consumer: consumer.guarantee,
        _rank,
        "the stronger one",
    ),
    "ordering": Overlap(
        "ordering",
        "ordering",
        lambda topic: topic.ordering,
        lambda consumer: consumer.ordering,
        _rank,
        "the stronger one",
    ),
    "replay": Overlap(
        "replayAllowed",
        "replay.allowed",
        lambda topic: _REPLAY[topic.replay_allowed],
        lambda consumer: consumer.replay.allowed,
        _rank,
        "the one that allows less",
    ),
    "replay_window": Overlap(
        "replayWindow",
        "replay.window",
        lambda topic: topic.replay_window,
        lambda consumer: consumer.replay.window,
        lambda window: -window,
        "the shorter one",
    ),
}
"""Every matter on which both may speak, and who wins."""


def strictest(overlap: Overlap, *said: Any) -> Any:
    """Return the strictest of what was said; None where nobody said anything."""
    spoken = [value for value in said if value is not None]
    return max(spoken, key=overlap.strictness) if spoken else None


# Kafka deletes whole segments: with its defaults (segment.ms is seven days) a record can be
# read for twice its retention.  S4-12 has the same factor.
SAFETY: Final = 2

USUAL_RETENTION: Final = timedelta(days=7)
"""What is taken for a topic's retention that is not stated: a broker's usual week."""


@dataclass(frozen=True, slots=True)
class Window:
    """A time within which a message can come again."""

    what: str
    length: timedelta
    path: Path


@dataclass(frozen=True, slots=True)
class Effective:
    """What holds for one consumer on one topic."""

    consumer_name: str
    topic_name: str | None
    consumer: ConsumerPolicy
    topic: TopicPolicy
    guarantee: Semantics | None
    """The weakest semantics that is wanted; None where nobody wants any."""

    ordering: Ordering
    replay: ReplayAllowed
    replay_window: timedelta | None
    attempts: int | None
    """How often a message is tried; None: without end."""

    poison_attempts: int | None
    """How often a poison message is tried; None: without end."""

    jitter: bool
    on_exhausted: OnExhausted
    holds_keys: bool
    """The later messages of a key wait behind one that waits."""

    parking_owner: str | None
    side_effects: tuple[SideEffect, ...]
    """All of them, those included that other keys imply; each says whether it has a key."""

    windows: tuple[Window, ...]
    claims_ttl: timedelta
    decided_by: Mapping[str, Path] = field(default_factory=dict)
    """By matter of `OVERLAPS`: the key that won; absent where it is the default."""

    @property
    def needed_ttl(self) -> timedelta:
        """How long a claim must be kept to recognise whatever can come again."""
        return SAFETY * max(window.length for window in self.windows)

    @property
    def replay_refusal(self) -> str | None:
        """Say why messages must not be replayed to this consumer; None where they may be."""
        if self.replay is ReplayAllowed.NO:
            return f"consumer {self.consumer_name}: replay is not allowed"
        if self.replay is ReplayAllowed.NOT_FOR_SIDE_EFFECT and self.side_effects:
            named = ", ".join(effect.name for effect in self.side_effects)
            return (
                f"consumer {self.consumer_name}: replay is not allowed for side effects, "
                f"and it has: {named}"
            )
        return None


def consumer_path(consumer: str, key: str = "") -> Path:
    """Return the path of a consumer's key in the file."""
    return (ROOT, "consumers", consumer, *(key.split(".") if key else ()))


def topic_path(topic: str, key: str = "") -> Path:
    """Return the path of a topic's key in the file."""
    return (ROOT, "topics", topic, *(key.split(".") if key else ()))


def settle(policy: Policy, consumer: str, topic: str | None) -> Effective:
    """Settle every matter for one consumer on one topic.

    Raises:
        PolicyNameUnknown: there is no such consumer or topic, or it does not read it.
    """
    own, shared = policy.consumer(consumer), policy.topic(topic)
    if topic is not None and topic not in policy.topics_of(consumer):
        reads = policy.topics_of(consumer)
        raise PolicyNameUnknown(f"consumer {consumer} does not read topic", topic, reads)
    said = {
        matter: strictest(overlap, overlap.of_topic(shared), overlap.of_consumer(own))
        for matter, overlap in OVERLAPS.items()
    }
    effects = side_effects_of(own)
    ordering = said["ordering"] or Ordering.NONE
    replay = said["replay"] or _default_replay(effects)
    window = said["replay_window"] or shared.retention
    attempts = None if own.retry.max_attempts == UNBOUNDED else own.retry.max_attempts
    made = Effective(
        consumer_name=consumer,
        topic_name=topic,
        consumer=own,
        topic=shared,
        guarantee=said["guarantee"],
        ordering=ordering,
        replay=replay,
        replay_window=window,
        attempts=attempts,
        poison_attempts=_fewer(own.poison.max_attempts_before_park, attempts),
        jitter=_jitter(own),
        on_exhausted=own.on_exhausted or (OnExhausted.DLQ if own.dlq.enabled else OnExhausted.PARK),
        holds_keys=_holds_keys(own, ordering),
        parking_owner=own.parking.owner or own.dlq.owner,
        side_effects=effects,
        windows=(),
        claims_ttl=timedelta(),
        decided_by=_decided(said, consumer, own, topic, shared),
    )
    made = replace(made, windows=_windows(made))
    return replace(made, claims_ttl=own.claims.ttl or made.needed_ttl)


def _decided(
    said: Mapping[str, Any],
    consumer: str,
    own: ConsumerPolicy,
    topic: str | None,
    shared: TopicPolicy,
) -> dict[str, Path]:
    """Name, by matter, the key that won; the consumer's where both say the same."""
    decided = {}
    for matter, overlap in OVERLAPS.items():
        if said[matter] is None:
            continue
        if overlap.of_consumer(own) == said[matter]:
            decided[matter] = consumer_path(consumer, overlap.consumer_key)
        elif topic is not None and overlap.of_topic(shared) == said[matter]:
            decided[matter] = topic_path(topic, overlap.topic_key)
    return decided


IMPLIED: Final[Mapping[Strategy, str]] = {
    Strategy.NOTIFICATION_ID: "notification",
    Strategy.PROVIDER_IDEMPOTENCY_KEY: "external call",
}
"""The side effect that a strategy speaks of."""


def side_effects_of(own: ConsumerPolicy) -> tuple[SideEffect, ...]:
    """Return a consumer's side effects, those included that other keys imply."""
    keyed = own.idempotency.external_provider_idempotency
    if keyed is None:
        keyed = own.idempotency.strategy is Strategy.PROVIDER_IDEMPOTENCY_KEY
    listed = own.side_effects
    if listed is None:
        listed = (SideEffect(name=name),) if (name := _implied(own)) else ()
    return tuple(
        replace(effect, idempotency_key=keyed) if effect.idempotency_key is None else effect
        for effect in listed
    )


def _implied(own: ConsumerPolicy) -> str:
    spoken_of = (
        own.idempotency.external_provider_idempotency is not None
        or own.replay.allowed is ReplayAllowed.NOT_FOR_SIDE_EFFECT
    )
    return IMPLIED.get(own.idempotency.strategy, "external call" if spoken_of else "")


def is_protected(effect: SideEffect) -> bool:
    """Tell whether a repetition of a side effect is recognised, or its wish durable."""
    return bool(effect.idempotency_key) or effect.intent is not None


def _default_replay(effects: tuple[SideEffect, ...]) -> ReplayAllowed:
    if all(is_protected(effect) for effect in effects):
        return ReplayAllowed.YES
    return ReplayAllowed.NOT_FOR_SIDE_EFFECT


def _fewer(one: int | None, other: int | None) -> int | None:
    return min((number for number in (one, other) if number is not None), default=None)


def _jitter(own: ConsumerPolicy) -> bool:
    if own.retry.jitter is not None:
        return own.retry.jitter
    return own.retry.backoff is Backoff.EXPONENTIAL_JITTER


def _holds_keys(own: ConsumerPolicy, ordering: Ordering) -> bool:
    if own.parking.per_key is not None:
        return own.parking.per_key
    return ordering is not Ordering.NONE and own.retry.mode is not RetryMode.RETRY_TOPIC


def _windows(made: Effective) -> tuple[Window, ...]:
    own, name = made.consumer, made.consumer_name
    found = [_retention(made)]
    if made.replay_window is not None and made.replay is not ReplayAllowed.NO:
        by = made.decided_by.get("replay_window")
        if by is not None:
            found.append(Window("the replay window", made.replay_window, by))
    if own.dlq.keep is not None:
        found.append(
            Window("the age of dead letters", own.dlq.keep, consumer_path(name, "dlq.keep"))
        )
    if own.parking.keep is not None:
        path = consumer_path(name, "parking.keep")
        found.append(Window("the age of parked messages", own.parking.keep, path))
    return tuple(found)


def _retention(made: Effective) -> Window:
    topic, length = made.topic_name, made.topic.retention
    if topic is None:
        path = consumer_path(made.consumer_name, "topics")
        return Window("the usual retention of a topic", USUAL_RETENTION, path)
    path = topic_path(topic, "retention")
    if length is None:
        what = f"the usual retention of a topic, as that of {topic} is not stated,"
        return Window(what, USUAL_RETENTION, path)
    return Window(f"the retention of {topic}", length, path)
