"""A policy, and what holds for one consumer on one topic.

    deliverySemantics:
      topics:      <name>: TopicPolicy
      consumers:   <name>: ConsumerPolicy

Policies are per consumer, not only per topic: different consumers of a topic
have different effects.  Where topic and consumer both set a value, the stricter one
wins (`OVERLAPS`); where neither does, defaults follow from other keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from functools import cache, cached_property
from operator import attrgetter
from pathlib import Path as FilePath
from typing import Annotated, Any, Final, TypeAlias

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
    lines_in,
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


Name: TypeAlias = Annotated[str, Field(min_length=1)]


def _by_name(what: str) -> Any:
    names: dict[str, Any] = {"propertyNames": {"minLength": 1}}
    return Field(default_factory=dict, title=f"{what} by name", json_schema_extra=names)


class Policy(Section):
    """The topics and consumers of one policy file."""

    topics: dict[Name, TopicPolicy] = _by_name("topics")
    """The topics."""

    consumers: dict[Name, ConsumerPolicy] = _by_name("consumers")
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
        found._source = PolicySource(name, dict(lines_in(document.values)))
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
        return Effective(consumer, topic, own, shared)


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
                document.wrong(at, document.line_of(at), what, f"one of {listed}", near)


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


@dataclass(frozen=True)
class Effective:
    """What holds for one consumer on one topic."""

    consumer_name: str
    topic_name: str | None
    consumer: ConsumerPolicy
    topic: TopicPolicy

    @cached_property
    def _said(self) -> Mapping[str, Any]:
        """By matter of `OVERLAPS`: the stricter of both; None where neither says anything."""
        return {
            matter: strictest(
                overlap, overlap.of_topic(self.topic), overlap.of_consumer(self.consumer)
            )
            for matter, overlap in OVERLAPS.items()
        }

    @cached_property
    def decided_by(self) -> Mapping[str, Path]:
        """By matter of `OVERLAPS`: the key that won, the consumer's where both say the same."""
        return {
            matter: consumer_path(self.consumer_name, overlap.consumer_key)
            if overlap.of_consumer(self.consumer) == self._said[matter]
            else topic_path(self.topic_name or "", overlap.topic_key)
            for matter, overlap in OVERLAPS.items()
            if self._said[matter] is not None
        }

    @property
    def guarantee(self) -> Semantics | None:
        """The weakest semantics that is wanted; None if the policy does not say."""
        wanted: Semantics | None = self._said["guarantee"]
        return wanted

    @property
    def ordering(self) -> Ordering:
        """The order that is kept."""
        return self._said["ordering"] or Ordering.NONE

    @property
    def replay(self) -> ReplayAllowed:
        """Whether messages may be sent to the consumer again."""
        is_safe = all(effect.is_protected for effect in self.side_effects)
        by_default = ReplayAllowed.YES if is_safe else ReplayAllowed.NOT_FOR_SIDE_EFFECT
        return self._said["replay"] or by_default

    @property
    def replay_window(self) -> timedelta | None:
        """How far back a replay may reach."""
        return self._said["replay_window"] or self.topic.retention

    @property
    def attempts(self) -> int | None:
        """How often a message is tried; None: no limit."""
        most = self.consumer.retry.max_attempts
        return None if most == UNBOUNDED else most

    @property
    def poison_attempts(self) -> int | None:
        """How often a poison message is tried; None: no limit."""
        limits = (self.consumer.poison.max_attempts_before_park, self.attempts)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def parks_poison(self) -> bool:
        """Whether a poison message is parked after its last attempt, wherever others go."""
        return self.consumer.poison.max_attempts_before_park is not None

    @property
    def jitter(self) -> bool:
        """Whether waits are shortened at random."""
        own = self.consumer.retry
        return own.backoff is BackoffShape.EXPONENTIAL_JITTER if own.jitter is None else own.jitter

    @property
    def on_exhausted(self) -> GiveUp:
        """Where a message goes that is not tried again."""
        by_default = GiveUp.DEAD_LETTER if self.consumer.dlq.enabled else GiveUp.PARK
        return self.consumer.on_exhausted or by_default

    @property
    def holds_keys(self) -> bool:
        """Whether the later messages of a key wait behind one that waits."""
        own, mode = self.consumer.parking.per_key, self.consumer.retry.mode
        holds = self.ordering is not Ordering.NONE and mode is not RetryMode.RETRY_TOPIC
        return holds if own is None else own

    @property
    def parking_owner(self) -> str | None:
        """The team that looks after parked messages."""
        return self.consumer.parking.owner or self.consumer.dlq.owner

    @property
    def lease(self) -> LeaseTerms:
        """The lease of a claim, in mode ``leased``."""
        return self.consumer.lease or LeaseTerms()

    @cached_property
    def side_effects(self) -> tuple[SideEffect, ...]:
        """All of them, those included that other keys imply; each says whether it has a key."""
        own = self.consumer
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

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        """The times within which a message can come again."""
        unsaid = f", as that of {self.topic_name} is not stated," if self.topic_name else ""
        usual = Window(f"the usual retention of a topic{unsaid}", USUAL_RETENTION)
        is_said = "replay_window" in self.decided_by and self.replay is not ReplayAllowed.NO
        stated = {
            f"the retention of {self.topic_name}": self.topic.retention,
            "the replay window": self.replay_window if is_said else None,
            "the age of dead letters": self.consumer.dlq.keep,
            "the age of parked messages": self.consumer.parking.keep,
        }
        found = [Window(what, length) for what, length in stated.items() if length is not None]
        return tuple(found if self.topic.retention is not None else [usual, *found])

    @property
    def needed_ttl(self) -> timedelta:
        """How long a claim must be kept to recognise every message that can come again."""
        return SAFETY * max(window.length for window in self.windows)

    @property
    def claims_ttl(self) -> timedelta:
        """How long a claim is kept."""
        return self.consumer.claims.ttl or self.needed_ttl

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


IMPLIED: Final[Mapping[Strategy, str]] = {
    Strategy.NOTIFICATION_ID: "notification",
    Strategy.PROVIDER_IDEMPOTENCY_KEY: "external call",
}
"""The side effect that a strategy speaks of."""
