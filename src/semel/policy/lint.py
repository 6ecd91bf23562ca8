"""The lint of a policy: the real guarantee, the twenty questions, and what is wrong.

    policy ──▶ effective ──▶ guarantee ──▶ rules ──▶ findings ──▶ questions

Pure: it reads the policy only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from semel.policy.guarantee import ConsumerGuarantee, guarantee_of
from semel.policy.model import Policy, topic_path
from semel.policy.questions import QUESTIONS, PolicyAnswer
from semel.policy.reader import path_words
from semel.policy.rules import RULES, Case, Finding, Rule
from semel.policy.spark import OF_SERVICES, RULES_ON_SPARK
from semel.policy.vocabulary import Engine, Severity


@dataclass(frozen=True, slots=True)
class Review:
    """What the lint says of one consumer on one topic."""

    consumer: str
    topic: str | None
    guarantee: ConsumerGuarantee
    findings: tuple[Finding, ...]
    """The worst first."""

    answers: tuple[PolicyAnswer, ...]

    @property
    def refused(self) -> bool:
        """Return whether the combination cannot keep what it promises."""
        return any(finding.severity is Severity.REFUSED for finding in self.findings)


@dataclass(frozen=True, slots=True)
class Linted:
    """What the lint says of a policy."""

    file: str
    reviews: tuple[Review, ...]
    findings: tuple[Finding, ...]
    """Those that belong to no consumer."""

    @property
    def every_finding(self) -> tuple[Finding, ...]:
        """All findings, those of consumers included."""
        return (*self.findings, *(f for review in self.reviews for f in review.findings))

    @property
    def refused(self) -> int:
        """How many findings refuse a combination."""
        return sum(finding.severity is Severity.REFUSED for finding in self.every_finding)

    @property
    def warnings(self) -> int:
        """How many findings warn."""
        return sum(finding.severity is Severity.WARN for finding in self.every_finding)

    @property
    def needs_attention(self) -> bool:
        """Something is refused or warned of; notes do not count."""
        return bool(self.refused or self.warnings)


def lint_policy(
    policy: Policy, consumer: str | None = None, engine: Engine = Engine.SERVICE
) -> Linted:
    """Lint a policy, or one consumer of it, on every topic that it reads.

    *engine* is what runs the consumers: some settings mean something else on Spark.

    Raises:
        PolicyNameUnknown: there is no such consumer.
    """
    names = list(policy.consumers) if consumer is None else [consumer]
    reviews = tuple(
        review(policy, name, topic, engine)
        for name in names
        for topic in policy.topics_of(name) or (None,)
    )
    findings = () if consumer is not None else _of_topics(policy)
    return Linted(policy.source.name, reviews, findings)


def review(
    policy: Policy, consumer: str, topic: str | None = None, engine: Engine = Engine.SERVICE
) -> Review:
    """Lint one consumer on one topic, as *engine* runs it.

    Raises:
        PolicyNameUnknown: there is no such consumer or topic, or it does not read it.
    """
    effective = policy.effective(consumer, topic)
    case = Case(effective, guarantee_of(effective, engine), policy)
    rules: Iterable[Rule] = RULES
    if engine is Engine.SPARK:
        rules = (*(rule for rule in RULES if rule.code not in OF_SERVICES), *RULES_ON_SPARK)
    found = [finding for rule in rules for finding in rule.judge(case)]
    findings = tuple(sorted(found, key=lambda f: [*Severity].index(f.severity), reverse=True))
    answers = tuple(
        question.answer(number, case, findings) for number, question in enumerate(QUESTIONS, 1)
    )
    return Review(consumer, topic, case.guarantee, findings, answers)


def _of_topics(policy: Policy) -> tuple[Finding, ...]:
    """Return the topics without a consumer; nothing else can be wrong with a topic alone."""
    read = {topic for consumer in policy.consumers for topic in policy.topics_of(consumer)}
    return tuple(
        Finding(
            Severity.NOTE,
            "topic-unread",
            f"no consumer of this file reads topic {topic}",
            "add its consumers, whose policies differ, or take it out",
            path_words(topic_path(topic)),
            policy.source.line_of(topic_path(topic)),
        )
        for topic in policy.topics
        if topic not in read
    )
