"""A policy, and what holds for one consumer on one topic.

    deliverySemantics:
      topics:      <name>: TopicPolicy
      consumers:   <name>: ConsumerPolicy

Policies are per consumer, not only per topic: different consumers of a topic
have different effects.  Where topic and consumer both set a value, the stricter one
wins (`OVERLAPS`); where neither does, defaults follow from other keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import StrEnum
from functools import cache
from operator import attrgetter
from pathlib import Path as FilePath
from typing import Any, Final

from pydantic import Field, PrivateAttr, ValidationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from semel.policy.reader import (
    Document,
    Entries,
    Items,
    Path,
    PolicyInvalid,
    PolicyNameUnknown,
    Schema,
    expanded,
    nearest,
    schema_at,
    text_of_file,
)
from semel.policy.sections import (
    UNBOUNDED,
    ConsumerPolicy,
    LeaseTerms,
    Section,
    SideEffect,
    TopicPolicy,
)
from semel.policy.vocabulary import (
    BackoffShape,
    GiveUp,
    Ordering,
    ReplayAllowed,
    RetryMode,
    Semantics,
    Strategy,
)


@dataclass(frozen=True, slots=True)
class PolicySource:
    """Where a policy was written."""

    name: str = ""
    lines: Mapping[Path, int] = field(default_factory=dict)
    """By path: the line of every key that the file has."""

    def line_of(self, path: Path) -> int | None:
        """Return the line of a key, or of the nearest one around it that the file has."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path)


ROOT: Final = "deliverySemantics"


def consumer_path(consumer: str, key: str = "") -> Path:
    """Return the path of a consumer's key in the file."""
    return (ROOT, "consumers", consumer, *(key.split(".") if key else ()))


def topic_path(topic: str, key: str = "") -> Path:
    """Return the path of a topic's key in the file."""
    return (ROOT, "topics", topic, *(key.split(".") if key else ()))


def _by_name(what: str) -> Any:
    names: dict[str, Any] = {"propertyNames": {"minLength": 1}}
    return Field(default_factory=dict, title=f"{what} by name", json_schema_extra=names)


class Policy(Section):
    """The topics and consumers of one policy file."""

    topics: dict[str, TopicPolicy] = _by_name("topics")
    """The topics."""

    consumers: dict[str, ConsumerPolicy] = _by_name("consumers")
    """The consumers."""

    _source: PolicySource = PrivateAttr(default_factory=PolicySource)

    @property
    def source(self) -> PolicySource:
        """The file's name, and the line of every key."""
        return self._source

    def __eq__(self, other: object) -> bool:
        """Compare what two policies say; where they were written does not count."""
        if not isinstance(other, Policy):
            return NotImplemented
        return (self.topics, self.consumers) == (other.topics, other.consumers)

    @classmethod
    def load(cls, path: str | FilePath) -> Policy:
        """Read a policy file.

        Raises:
            PolicyInvalid: with every problem of the file, its line and its key.
        """
        return cls.parse(text_of_file(FilePath(path)), str(path))

    @classmethod
    def parse(cls, text: str, name: str = "policy") -> Policy:
        """Read a policy from its text; *name* stands in errors where a file's would.

        Raises:
            PolicyInvalid: with every problem of the text, its line and its key.
        """
        document = Document(text, _schema())
        if document.values is None:
            if not document.problems:
                document.wrong((), None, "the file is empty", f"the key {ROOT}")
            raise PolicyInvalid(name, document.problems)
        _check_topics(document)
        try:
            found = PolicyFile.model_validate(document.values).delivery_semantics
        except ValidationError as invalid:
            document.add_errors(invalid)
            # Raised without a context, so pydantic's own messages are not printed above ours.
            raise PolicyInvalid(name, document.problems) from None
        if document.problems:
            raise PolicyInvalid(name, document.problems)
        found._source = PolicySource(name, document.lines)
        return found

    def consumer(self, name: str) -> ConsumerPolicy:
        """Return one consumer's own policy.

        Raises:
            PolicyNameUnknown: there is none of that name.
        """
        if name not in self.consumers:
            raise PolicyNameUnknown("there is no consumer", name, list(self.consumers))
        return self.consumers[name]

    def topic(self, name: str | None) -> TopicPolicy:
        """Return one topic's own policy; None is a topic of which nothing is said.

        Raises:
            PolicyNameUnknown: there is none of that name.
        """
        if name is None:
            return TopicPolicy()
        if name not in self.topics:
            raise PolicyNameUnknown("there is no topic", name, list(self.topics))
        return self.topics[name]

    def topics_of(self, consumer: str) -> tuple[str, ...]:
        """Name the topics that a consumer reads.

        Raises:
            PolicyNameUnknown: there is no such consumer.
        """
        own = self.consumer(consumer).topics
        return tuple(self.topics) if own is None else own

    def effective(self, consumer: str, topic: str | None = None) -> Effective:
        """Return what holds for a consumer on a topic: the stricter of both, key by key.

        Without a topic: what the consumer's own policy says.

        Raises:
            PolicyNameUnknown: there is no such consumer or topic, or it does not read it.
        """
        own, shared, reads = self.consumer(consumer), self.topic(topic), self.topics_of(consumer)
        if topic is not None and topic not in reads:
            raise PolicyNameUnknown(f"consumer {consumer} does not read topic", topic, reads)
        return _effective(consumer, own, topic, shared)


class PolicyFile(Section):
    """The whole file."""

    delivery_semantics: Policy
    """What topics promise and consumers keep."""


def _check_topics(document: Document) -> None:
    """Report topics that a consumer reads and the file does not have."""
    known, consumers = _entries(document, "topics"), _entries(document, "consumers")
    for consumer, own in consumers.items():
        topics = own.get("topics") if isinstance(own, Entries) else None
        for number, topic in enumerate(topics if isinstance(topics, Items) else ()):
            if isinstance(topic, str) and topic.strip() and topic not in known:
                at = (*consumer_path(consumer, "topics"), number)
                listed = ", ".join(map(str, known)) or "the topics of this file, which has none"
                near = nearest(topic, map(str, known))
                what = f"there is no topic {topic!r}"
                document.wrong(at, document.lines.get(at), what, f"one of {listed}", near)


def _entries(document: Document, name: str) -> Mapping[Any, Any]:
    found = document.values
    for key in (ROOT, name):
        found = found.get(key) if isinstance(found, Entries) else None
    return found if isinstance(found, Entries) else {}


class _SchemaOfFile(GenerateJsonSchema):
    """pydantic's JSON Schema, without what a YAML file cannot contain and titles of keys."""

    def nullable_schema(self, schema: Any) -> JsonSchemaValue:
        """Leave null out: a key without a value is refused."""
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        """Leave out the defaults of whole sections, and those that say nothing."""
        if schema.get("default") is None or isinstance(schema["default"], Section):
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)

    def tuple_schema(self, schema: Any) -> JsonSchemaValue:
        """No item of a list may stand in it twice."""
        return super().tuple_schema(schema) | {"uniqueItems": True}

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Leave out titles that only repeat the key."""
        return False


DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"


@cache
def _file_schema() -> dict[str, Any]:
    made = PolicyFile.model_json_schema(schema_generator=_SchemaOfFile)
    return {"$schema": DRAFT, **made, "title": "semel policy"}


@cache
def _schema() -> Schema:
    made = _file_schema()
    found: Schema = expanded(made, made["$defs"])
    return found


def policy_schema() -> dict[str, Any]:
    """Return the JSON Schema of a policy file; it has exactly the keys that are read.

    It cannot say which keys contradict each other, that a topic does not exist, or that a key
    stands twice; the reader reports these.
    """
    return deepcopy(_file_schema())


def key_schema(path: Path) -> Schema:
    """Return the part of the schema that describes the key at *path*."""
    return schema_at(_schema(), path)


@dataclass(frozen=True, slots=True)
class Overlap:
    """A setting that a topic and a consumer may both have."""

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

# fmt: off
OVERLAPS: Final[Mapping[str, Overlap]] = {
    "guarantee": Overlap("defaultGuarantee", "guarantee",
        attrgetter("default_guarantee"), attrgetter("guarantee"), _rank, "the stronger one"),
    "ordering": Overlap("ordering", "ordering",
        attrgetter("ordering"), attrgetter("ordering"), _rank, "the stronger one"),
    "replay": Overlap("replayAllowed", "replay.allowed",
        lambda topic: _REPLAY[topic.replay_allowed], attrgetter("replay.allowed"),
        _rank, "the one that allows less"),
    "replay_window": Overlap("replayWindow", "replay.window",
        attrgetter("replay_window"), attrgetter("replay.window"),
        lambda window: -window, "the shorter one"),
}
# fmt: on
"""Every setting that both may have, and whose value holds."""


def strictest(overlap: Overlap, *said: Any) -> Any:
    """Return the strictest of the given values; None if there are none."""
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


@dataclass(frozen=True, slots=True)
class Effective:
    """What holds for one consumer on one topic."""

    consumer_name: str
    topic_name: str | None
    consumer: ConsumerPolicy
    topic: TopicPolicy
    guarantee: Semantics | None
    """The weakest semantics that is wanted; None if the policy does not say."""

    ordering: Ordering
    replay: ReplayAllowed
    replay_window: timedelta | None
    attempts: int | None
    """How often a message is tried; None: no limit."""

    poison_attempts: int | None
    """How often a poison message is tried; None: no limit."""

    jitter: bool
    on_exhausted: GiveUp
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
    def lease(self) -> LeaseTerms:
        """The lease of a claim, in mode ``leased``."""
        return self.consumer.lease or LeaseTerms()

    @property
    def needed_ttl(self) -> timedelta:
        """How long a claim must be kept to recognise every message that can come again."""
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


def _effective(
    consumer: str, own: ConsumerPolicy, topic: str | None, shared: TopicPolicy
) -> Effective:
    said = {
        matter: strictest(overlap, overlap.of_topic(shared), overlap.of_consumer(own))
        for matter, overlap in OVERLAPS.items()
    }
    effects, retry, per_key = _side_effects(own), own.retry, own.parking.per_key
    is_safe = all(effect.is_protected for effect in effects)
    ordering = said["ordering"] or Ordering.NONE
    holds = ordering is not Ordering.NONE and retry.mode is not RetryMode.RETRY_TOPIC
    attempts = None if retry.max_attempts == UNBOUNDED else retry.max_attempts
    limits = [n for n in (own.poison.max_attempts_before_park, attempts) if n is not None]
    has_jitter = retry.backoff is BackoffShape.EXPONENTIAL_JITTER
    made = Effective(
        consumer_name=consumer,
        topic_name=topic,
        consumer=own,
        topic=shared,
        guarantee=said["guarantee"],
        ordering=ordering,
        replay=said["replay"]
        or (ReplayAllowed.YES if is_safe else ReplayAllowed.NOT_FOR_SIDE_EFFECT),
        replay_window=said["replay_window"] or shared.retention,
        attempts=attempts,
        poison_attempts=min(limits, default=None),
        jitter=has_jitter if retry.jitter is None else retry.jitter,
        on_exhausted=own.on_exhausted or (GiveUp.DEAD_LETTER if own.dlq.enabled else GiveUp.PARK),
        holds_keys=holds if per_key is None else per_key,
        parking_owner=own.parking.owner or own.dlq.owner,
        side_effects=effects,
        windows=(),
        claims_ttl=timedelta(),
        decided_by=dict(_decided(said, consumer, own, topic, shared)),
    )
    made = replace(made, windows=tuple(_windows(made)))
    return replace(made, claims_ttl=own.claims.ttl or made.needed_ttl)


def _decided(
    said: Mapping[str, Any],
    consumer: str,
    own: ConsumerPolicy,
    topic: str | None,
    shared: TopicPolicy,
) -> Iterator[tuple[str, Path]]:
    """Name, by matter, the key that won; the consumer's where both say the same."""
    for matter, overlap in OVERLAPS.items():
        if said[matter] is None:
            continue
        if overlap.of_consumer(own) == said[matter]:
            yield matter, consumer_path(consumer, overlap.consumer_key)
        elif topic is not None and overlap.of_topic(shared) == said[matter]:
            yield matter, topic_path(topic, overlap.topic_key)


IMPLIED: Final[Mapping[Strategy, str]] = {
    Strategy.NOTIFICATION_ID: "notification",
    Strategy.PROVIDER_IDEMPOTENCY_KEY: "external call",
}
"""The side effect that a strategy speaks of."""


def _side_effects(own: ConsumerPolicy) -> tuple[SideEffect, ...]:
    """Return a consumer's side effects, those included that other keys imply."""
    strategy, keyed = own.idempotency.strategy, own.idempotency.external_provider_idempotency
    listed = own.side_effects
    if listed is None:
        is_said = keyed is not None or own.replay.allowed is ReplayAllowed.NOT_FOR_SIDE_EFFECT
        implied = IMPLIED.get(strategy, "external call" if is_said else "")
        listed = (SideEffect(name=implied),) if implied else ()
    by_default = strategy is Strategy.PROVIDER_IDEMPOTENCY_KEY if keyed is None else keyed
    return tuple(
        effect.model_copy(update={"idempotency_key": by_default})
        if effect.idempotency_key is None
        else effect
        for effect in listed
    )


def _windows(made: Effective) -> Iterator[Window]:
    own, topic, length = made.consumer, made.topic_name, made.topic.retention
    if length is not None:
        yield Window(f"the retention of {topic}", length)
    else:
        unsaid = f", as that of {topic} is not stated," if topic is not None else ""
        yield Window(f"the usual retention of a topic{unsaid}", USUAL_RETENTION)
    is_said = "replay_window" in made.decided_by and made.replay is not ReplayAllowed.NO
    if made.replay_window is not None and is_said:
        yield Window("the replay window", made.replay_window)
    if own.dlq.keep is not None:
        yield Window("the age of dead letters", own.dlq.keep)
    if own.parking.keep is not None:
        yield Window("the age of parked messages", own.parking.keep)
