"""What holds for a consumer on a topic, key by key, and where each value comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from semel.policy import ConsumerPolicy, Effective, Policy, TopicPolicy
from semel.policy.effective import OVERLAPS, consumer_path, topic_path
from semel.policy.keys import Section, Spec, keys_of
from semel.policy.model import Source
from semel.policy.vocabulary import OnGap


@dataclass(frozen=True, slots=True)
class SettledKey:
    """One key, the value that holds, and where it comes from."""

    key: str
    value: str
    """As the file would have it; ``-`` where nothing holds."""

    origin: str
    line: int | None
    """The line that decided; null for defaults."""


@dataclass(frozen=True, slots=True)
class EffectivePolicy:
    """One consumer on one topic."""

    consumer: str
    topic: str | None
    keys: list[SettledKey]


@dataclass(frozen=True, slots=True)
class PolicyShowReport:
    """The answer to `semel policy show`."""

    file: str
    policies: list[EffectivePolicy]

    @property
    def needs_attention(self) -> bool:
        """Tell that this only shows."""
        return False


def show_report(policy: Policy, consumer: str | None, topic: str | None) -> PolicyShowReport:
    """Settle every key for each consumer and topic that is asked for."""
    names = list(policy.consumers) if consumer is None else [consumer]
    if topic is not None:
        policy.topic(topic)
        names = names if consumer else [name for name in names if topic in policy.topics_of(name)]
    pairs = [
        (name, one)
        for name in names
        for one in ([topic] if topic is not None else policy.topics_of(name) or [None])
    ]
    return PolicyShowReport(
        policy.source.name, [_effective(policy, name, one) for name, one in pairs]
    )


def _effective(policy: Policy, consumer: str, topic: str | None) -> EffectivePolicy:
    settled = policy.effective(consumer, topic)
    keys = [*_of_topic(settled, policy.source), *_of_consumer(policy, settled)]
    return EffectivePolicy(consumer, topic, keys)


_BOTH: Final = {overlap.consumer_key: matter for matter, overlap in OVERLAPS.items()}
_TOPIC_ALONE: Final = ("key", "retention")


def _of_topic(settled: Effective, source: Source) -> Iterator[SettledKey]:
    if settled.topic_name is None:
        return
    for name in _TOPIC_ALONE:
        spec = keys_of(TopicPolicy)[name]
        value = getattr(settled.topic, spec.attribute)
        line = source.lines.get(topic_path(settled.topic_name, name))
        yield SettledKey(f"topic {name}", _words(spec, value), _origin(spec, line), line)


def _of_consumer(policy: Policy, settled: Effective) -> Iterator[SettledKey]:
    derived = _derived(policy, settled)
    for key, spec, own in _leaves(ConsumerPolicy, settled.consumer, ""):
        if key in _BOTH:
            yield _of_both(_BOTH[key], key, spec, policy.source, settled)
            continue
        line = policy.source.lines.get(consumer_path(settled.consumer_name, key))
        value = derived.get(key, own) if own is None else own
        yield SettledKey(key, _words(spec, value), _origin(spec, line), line)


def _leaves(section: type, value: Any, prefix: str) -> Iterator[tuple[str, Spec, Any]]:
    for name, spec in keys_of(section).items():
        own = getattr(value, spec.attribute)
        if isinstance(spec.kind, Section) and own is not None:
            yield from _leaves(spec.kind.of, own, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", spec, own


def _derived(policy: Policy, settled: Effective) -> Mapping[str, Any]:
    """Return what holds where the consumer says nothing, by key."""
    own = settled.consumer
    return {
        "topics": policy.topics_of(settled.consumer_name),
        "retry.jitter": settled.jitter,
        "onExhausted": settled.on_exhausted,
        "poison.maxAttemptsBeforePark": settled.poison_attempts,
        "parking.perKey": settled.holds_keys,
        "parking.owner": settled.parking_owner,
        "gaps": OnGap.RETRY if own.versioned else None,
        "sideEffects": settled.side_effects,
        "claims.ttl": settled.claims_ttl,
    }


def _of_both(matter: str, key: str, spec: Spec, source: Source, settled: Effective) -> SettledKey:
    """Say who won where topic and consumer may both speak."""
    value = getattr(settled, matter)
    by = settled.decided_by.get(matter)
    if by is None:
        return SettledKey(key, _words(spec, value), _origin(spec, None), None)
    overlap, line = OVERLAPS[matter], source.lines.get(by)
    both = (overlap.of_topic(settled.topic), overlap.of_consumer(settled.consumer))
    who = "topic" if by[1] == "topics" else "consumer"
    against = f", {overlap.wins}" if None not in both and both[0] != both[1] else ""
    return SettledKey(key, _words(spec, value), f"{who}, line {line}{against}", line)


def _words(spec: Spec, value: Any) -> str:
    return "-" if value is None else spec.kind.words(value)


def _origin(spec: Spec, line: int | None) -> str:
    if line is not None:
        return f"line {line}"
    words = spec.default_words.replace("`", "")
    return f"default: {words}" if words else "default"
