"""What policies say about replays to one consumer, topic by topic: the strictest holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from semel.messaging.retention import WEEK_SECONDS
from semel.policy import Effective, Policy

DEFAULT_WINDOW_SECONDS: Final = WEEK_SECONDS
"""How far back a replay reaches where nobody says: what `Retention` keeps claims for."""


@dataclass(frozen=True, slots=True)
class ReplayRule:
    """What holds for the messages of one topic."""

    refusal: str | None = None
    """Why they must not be replayed; None where they may be."""

    window_seconds: float | None = None
    """How old a record without a claim may be; None where nobody says."""

    @property
    def reaches_seconds(self) -> float:
        """The window, which is never without end."""
        given = self.window_seconds
        return DEFAULT_WINDOW_SECONDS if given is None else given


def strictest(rules: Iterable[ReplayRule]) -> ReplayRule:
    """Return the one rule that keeps all of them: any refusal, and the shortest window."""
    known = list(rules)
    refusals = [rule.refusal for rule in known if rule.refusal is not None]
    windows = [rule.window_seconds for rule in known if rule.window_seconds is not None]
    return ReplayRule(refusals[0] if refusals else None, min(windows, default=None))


@dataclass(frozen=True, slots=True)
class ReplayRules:
    """What holds for every topic of a consumer."""

    by_topic: Mapping[str, ReplayRule] = field(default_factory=dict)
    own: ReplayRule = field(default_factory=ReplayRule)
    """What the consumer's own part says, whatever the topic."""

    @classmethod
    def of_policy(cls, policy: Policy, consumer: str) -> ReplayRules:
        """Read what a policy says about a consumer and each of its topics.

        Raises:
            PolicyNameUnknown: there is no such consumer.
        """
        topics = policy.topics_of(consumer)
        by_topic = {topic: _rule(policy.effective(consumer, topic)) for topic in topics}
        return cls(by_topic, _rule(policy.effective(consumer)))

    def of(self, *topics: str | None) -> ReplayRule:
        """Return what holds for a message of these topics.

        Where a topic is not known, or the policy does not know it, everything holds that holds
        for any.
        """
        if topics and all(topic in self.by_topic for topic in topics):
            return strictest(self.by_topic[topic] for topic in topics if topic is not None)
        return strictest([self.own, *self.by_topic.values()])

    @property
    def refusal(self) -> str | None:
        """Say why nothing at all may be replayed; None where some topic's messages may be."""
        if not self.by_topic:
            return self.own.refusal
        refusals = [rule.refusal for rule in self.by_topic.values()]
        return None if None in refusals else refusals[0]

    def joined(self, other: ReplayRules) -> ReplayRules:
        """Return what holds where both hold."""
        topics = {*self.by_topic, *other.by_topic}
        return ReplayRules(
            {topic: strictest([self.of(topic), other.of(topic)]) for topic in sorted(topics)},
            strictest([self.own, other.own]),
        )


def _rule(effective: Effective) -> ReplayRule:
    window = effective.replay_window
    return ReplayRule(effective.replay_refusal, None if window is None else window.total_seconds())
