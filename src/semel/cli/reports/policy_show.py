"""What holds for a consumer on a topic, key by key, and where each value comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from semel.policy import Effective, Policy
from semel.policy.model import OVERLAPS, Source, consumer_path, key_schema, topic_path
from semel.policy.reader import Path
from semel.policy.sections import UNBOUNDED, Section, duration_words
from semel.policy.vocabulary import GapPolicy


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
        path = topic_path(settled.topic_name, name)
        line = source.lines.get(path)
        value = value_words(getattr(settled.topic, name))
        yield SettledKey(f"topic {name}", value, _origin(path, line), line)


def _of_consumer(policy: Policy, settled: Effective) -> Iterator[SettledKey]:
    derived = _derived(policy, settled)
    for key, own in _leaves(settled.consumer.model_dump(mode="json", by_alias=True), ""):
        path = consumer_path(settled.consumer_name, key)
        if key in _BOTH:
            yield _of_both(_BOTH[key], key, path, policy.source, settled)
            continue
        line = policy.source.lines.get(path)
        value = value_words(derived.get(key) if own is None else own)
        if key == "retry.maxAttempts" and own == UNBOUNDED:
            value = "without end"
        yield SettledKey(key, value, _origin(path, line), line)


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


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
        "gaps": GapPolicy.RETRY if own.versioned else None,
        "sideEffects": settled.side_effects,
        "claims.ttl": settled.claims_ttl,
    }


def _of_both(matter: str, key: str, path: Path, source: Source, settled: Effective) -> SettledKey:
    """Say who won where topic and consumer may both speak."""
    value = value_words(getattr(settled, matter))
    by = settled.decided_by.get(matter)
    if by is None:
        return SettledKey(key, value, _origin(path, None), None)
    overlap, line = OVERLAPS[matter], source.lines.get(by)
    both = (overlap.of_topic(settled.topic), overlap.of_consumer(settled.consumer))
    who = "topic" if by[1] == "topics" else "consumer"
    against = f", {overlap.wins}" if None not in both and both[0] != both[1] else ""
    return SettledKey(key, value, f"{who}, line {line}{against}", line)


def value_words(value: Any) -> str:
    """Write a value as the file would have it; ``-`` where there is none."""
    match value:
        case None:
            return "-"
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}"
        case timedelta():
            return duration_words(value)
        case Section():
            said = value.model_dump(mode="json", by_alias=True, exclude_none=True)
            return value_words(said)
        case dict():
            return "{" + ", ".join(f"{key}: {value_words(one)}" for key, one in value.items()) + "}"
        case list() | tuple():
            return ", ".join(map(value_words, value)) or "none"
    return str(value)


def _origin(path: Path, line: int | None) -> str:
    if line is not None:
        return f"line {line}"
    words = key_schema(path).get("x-default", "").replace("`", "")
    return f"default: {words}" if words else "default"
