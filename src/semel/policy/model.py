"""A policy: what each topic promises, and how each consumer keeps it.

    deliverySemantics:
      topics:      <name>: TopicPolicy
      consumers:   <name>: ConsumerPolicy

Policies are per consumer, not only per topic: different consumers of a topic
have different effects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Annotated

from semel.policy.keys import Key, MapOf, Section
from semel.policy.kinds import ListOf, Text, Whole
from semel.policy.problems import Path, PolicyNameUnknown
from semel.policy.sections import (
    Batch,
    Claims,
    Dlq,
    Idempotency,
    LagSlo,
    LeaseTerms,
    MessageId,
    OffsetCommit,
    Parking,
    Poison,
    Proofs,
    Replay,
    Retry,
    SideEffect,
)
from semel.policy.vocabulary import Mode, OnExhausted, OnGap, Ordering, Semantics

if TYPE_CHECKING:
    from semel.policy.effective import Effective


@dataclass(frozen=True, slots=True)
class TopicPolicy:
    """What holds for all consumers of a topic."""

    default_guarantee: Annotated[
        Semantics | None, Key("The weakest semantics that its consumers may have.")
    ] = None
    key: Annotated[str | None, Key("The field that the messages are partitioned by.")] = None
    ordering: Annotated[Ordering | None, Key("Which order consumers keep.", default="none")] = None
    retention: Annotated[
        timedelta | None, Key("How long the broker keeps the messages, and can deliver them again.")
    ] = None
    replay_allowed: Annotated[
        bool | None, Key("Whether messages may be sent to consumers again, on purpose.")
    ] = None
    replay_window: Annotated[
        timedelta | None,
        Key("How far back a replay may reach, archives included.", default="`retention`"),
    ] = None


@dataclass(frozen=True, slots=True)
class ConsumerPolicy:
    """How one consumer handles its messages."""

    topics: Annotated[
        tuple[str, ...] | None,
        Key(
            "The topics it reads.",
            ListOf(Text("the name of a topic", "case-events")),
            default="all topics of the file",
        ),
    ] = None
    critical: Annotated[
        bool, Key("Whether losing or repeating an effect costs more than standing still.")
    ] = False
    guarantee: Annotated[
        Semantics | None, Key("The weakest semantics that its effects may have.")
    ] = None
    ordering: Annotated[
        Ordering | None, Key("Which order it needs.", default="the topic's `ordering`")
    ] = None
    message_id: Annotated[MessageId | None, Key("What makes two deliveries the same message.")] = (
        None
    )
    mode: Annotated[Mode, Key("How a claim and the handler's work belong together.")] = (
        Mode.TRANSACTIONAL
    )
    lease: Annotated[LeaseTerms | None, Key("The lease of a claim, in mode `leased`.")] = None
    idempotency: Annotated[
        Idempotency, Key("How repetitions are recognised, and what is done with them.")
    ] = field(default_factory=Idempotency)
    offset_commit: Annotated[OffsetCommit, Key("When the broker is told.")] = field(
        default_factory=OffsetCommit
    )
    retry: Annotated[Retry, Key("How often, how soon, and where a failure is tried again.")] = (
        field(default_factory=Retry)
    )
    on_exhausted: Annotated[
        OnExhausted | None,
        Key(
            "Where a message goes that is not tried again.",
            default="`dlq` where it is enabled, else `park`",
        ),
    ] = None
    dlq: Annotated[Dlq, Key("The dead letters.")] = field(default_factory=Dlq)
    poison: Annotated[Poison, Key("Messages that fail every time.")] = field(default_factory=Poison)
    parking: Annotated[Parking, Key("The parking lot.")] = field(default_factory=Parking)
    lag_slo: Annotated[LagSlo | None, Key("How far behind it may be.")] = None
    replay: Annotated[Replay, Key("Sending messages to it again, on purpose.")] = field(
        default_factory=Replay
    )
    versioned: Annotated[
        bool, Key("Whether messages carry their aggregate's version, and the sequence is checked.")
    ] = False
    gaps: Annotated[
        OnGap | None, Key("What happens when versions are missing.", default="`retry`")
    ] = None
    outbox: Annotated[
        bool, Key("Whether outgoing messages are written to the outbox, with the handler's rows.")
    ] = False
    side_effects: Annotated[
        tuple[SideEffect, ...] | None,
        Key(
            "Effects outside the handler's database; `[]` where there are none.",
            ListOf(Section(SideEffect)),
            default="one, where `idempotency` or `replay` speaks of it",
        ),
    ] = None
    claims: Annotated[Claims, Key("The records by which repetitions are recognised.")] = field(
        default_factory=Claims
    )
    keep_result: Annotated[
        bool, Key("Whether the handler's result is kept, for duplicates to be answered with.")
    ] = False
    batch: Annotated[
        Batch | None,
        Key("Handling several messages in one transaction.", default="one by one"),
    ] = None
    concurrency: Annotated[
        int, Key("How many messages are handled at once.", Whole(1, example=4))
    ] = 1
    tests: Annotated[Proofs, Key("The tests that prove it.")] = field(default_factory=Proofs)
    runbook: Annotated[
        str | None,
        Key("What to do when it stands still.", Text("a link or a path", "docs/runbook.md")),
    ] = None

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield the keys that cannot both hold."""
        if self.on_exhausted is OnExhausted.DLQ and not self.dlq.enabled:
            yield "onExhausted", "exhausted messages go to the dead letters, which are not enabled"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a policy was written."""

    name: str = ""
    lines: Mapping[Path, int] = field(default_factory=dict)
    """By path: the line of every key that the file has."""

    def line_of(self, path: Path) -> int | None:
        """Return the line of a key, or of the nearest one around it that the file has."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path)


ROOT = "deliverySemantics"


@dataclass(frozen=True, slots=True)
class Policy:
    """The topics and consumers of one policy file."""

    topics: Annotated[
        Mapping[str, TopicPolicy], Key("The topics.", MapOf(Section(TopicPolicy), "topics"))
    ] = field(default_factory=dict)
    consumers: Annotated[
        Mapping[str, ConsumerPolicy],
        Key("The consumers.", MapOf(Section(ConsumerPolicy), "consumers")),
    ] = field(default_factory=dict)
    source: Source = field(default_factory=Source, compare=False, repr=False)

    @classmethod
    def load(cls, path: str | FilePath) -> Policy:
        """Read a policy file.

        Raises:
            PolicyInvalid: with every problem of the file, its line and its key.
        """
        from semel.policy.reader import load_policy

        return load_policy(FilePath(path))

    @classmethod
    def parse(cls, text: str, name: str = "policy") -> Policy:
        """Read a policy from its text; *name* stands in errors where a file's would.

        Raises:
            PolicyInvalid: with every problem of the text, its line and its key.
        """
        from semel.policy.reader import parse_policy

        return parse_policy(text, name)

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
        from semel.policy.effective import settle

        return settle(self, consumer, topic)
