"""The value of every key for a consumer on a topic, and where the value comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from semel.policy.model import (
    OVERLAPS,
    Effective,
    Policy,
    PolicySource,
    consumer_path,
    key_schema,
    topic_path,
)
from semel.policy.reader import Path
from semel.policy.sections import UNBOUNDED, Section, duration_words
from semel.policy.vocabulary import GapPolicy


@dataclass(frozen=True, slots=True)
class EffectiveKey:
    """One key, its value, and where the value comes from."""

    key: str
    value: str
    """As the file would have it; ``-`` where there is none."""

    origin: str
    line: int | None
    """The line that decided; null for defaults."""


@dataclass(frozen=True, slots=True)
class EffectivePolicy:
    """One consumer on one topic."""

    consumer: str
    topic: str | None
    keys: list[EffectiveKey]


@dataclass(frozen=True, slots=True)
class EffectivePolicies:
    """The answer of `effective_policies`."""

    file: str
    policies: list[EffectivePolicy]


def effective_policies(
    policy: Policy, consumer: str | None = None, topic: str | None = None
) -> EffectivePolicies:
    """Work out every key, for all consumers and their topics or only for those named.

    Raises:
        PolicyNameUnknown: there is no such consumer or topic, or it does not read it.
    """
    names = list(policy.consumers) if consumer is None else [consumer]
    if topic is not None:
        policy.topic(topic)
        names = names if consumer else [name for name in names if topic in policy.topics_of(name)]
    found = []
    for name in names:
        for one in [topic] if topic is not None else policy.topics_of(name) or [None]:
            effective = policy.effective(name, one)
            keys = [*_of_topic(effective, policy.source), *_of_consumer(policy, effective)]
            found.append(EffectivePolicy(name, one, keys))
    return EffectivePolicies(policy.source.name, found)


_BOTH: Final = {overlap.consumer_key: matter for matter, overlap in OVERLAPS.items()}
_TOPIC_ALONE: Final = ("key", "retention")


def _of_topic(effective: Effective, source: PolicySource) -> Iterator[EffectiveKey]:
    if effective.topic_name is None:
        return
    for name in _TOPIC_ALONE:
        path = topic_path(effective.topic_name, name)
        line = source.lines.get(path)
        value = value_words(getattr(effective.topic, name))
        yield EffectiveKey(f"topic {name}", value, _origin(path, line), line)


def _of_consumer(policy: Policy, effective: Effective) -> Iterator[EffectiveKey]:
    derived = _derived(policy, effective)
    for key, own in _leaves(effective.consumer.model_dump(mode="json", by_alias=True), ""):
        path = consumer_path(effective.consumer_name, key)
        if key in _BOTH:
            yield _of_both(_BOTH[key], key, path, policy.source, effective)
            continue
        line = policy.source.lines.get(path)
        value = value_words(derived.get(key) if own is None else own)
        if key == "retry.maxAttempts" and own == UNBOUNDED:
            value = "no limit"
        yield EffectiveKey(key, value, _origin(path, line), line)


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _derived(policy: Policy, effective: Effective) -> Mapping[str, Any]:
    """Return what holds where the consumer says nothing, by key."""
    own = effective.consumer
    return {
        "topics": policy.topics_of(effective.consumer_name),
        "retry.jitter": effective.jitter,
        "onExhausted": effective.on_exhausted,
        "poison.maxAttemptsBeforePark": effective.poison_attempts,
        "parking.perKey": effective.holds_keys,
        "parking.owner": effective.parking_owner,
        "gaps": GapPolicy.RETRY if own.versioned else None,
        "sideEffects": effective.side_effects,
        "claims.ttl": effective.claims_ttl,
    }


def _of_both(
    matter: str, key: str, path: Path, source: PolicySource, effective: Effective
) -> EffectiveKey:
    """Return whose value holds where topic and consumer may both set one."""
    value = value_words(getattr(effective, matter))
    by = effective.decided_by.get(matter)
    if by is None:
        return EffectiveKey(key, value, _origin(path, None), None)
    overlap, line = OVERLAPS[matter], source.lines.get(by)
    both = (overlap.of_topic(effective.topic), overlap.of_consumer(effective.consumer))
    who = "topic" if by[1] == "topics" else "consumer"
    against = f", {overlap.wins}" if None not in both and both[0] != both[1] else ""
    return EffectiveKey(key, value, f"{who}, line {line}{against}", line)


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
