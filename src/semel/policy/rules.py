"""What a rule of the lint is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from semel.policy.effective import Effective, consumer_path, is_protected
from semel.policy.guarantee import Guarantee
from semel.policy.model import ConsumerPolicy, Policy, Source
from semel.policy.problems import Path, path_words
from semel.policy.sections import SideEffect


class Severity(StrEnum):
    """How much a finding matters, from the least to the most."""

    NOTE = "note"
    """Worth knowing; nothing has to be done."""

    WARN = "warn"
    """Something is weaker than it could be, or missing."""

    REFUSED = "refused"
    """The combination cannot keep what it promises."""


class AntiPattern(StrEnum):
    """The ten common ones (S3-60)."""

    ASSUMING_NO_DUPLICATES = "assuming no duplicates"
    COMMITTING_BEFORE_PROCESSING = "committing before processing critical messages"
    RETRYING_FOREVER = "retrying poison for ever"
    DLQ_WITHOUT_OWNER = "a DLQ with no owner"
    GLOBAL_ORDERING = "a global ordering requirement"
    SIDE_EFFECTS_WITHOUT_IDEMPOTENCY = "side effects without idempotency"
    IGNORING_UNREADABLE = "ignoring deserialization failures"
    EXACTLY_ONCE_CHECKBOX = "treating exactly-once as a broker's checkbox"
    NO_LAG_ALERT = "no lag alert"
    REPLAY_UNSAFE = "replay-unsafe consumers"


@dataclass(frozen=True, slots=True)
class Case:
    """One consumer on one topic, as the rules and the questions see it."""

    effective: Effective
    guarantee: Guarantee
    policy: Policy
    """The whole file: what one consumer sends, another one reads."""

    @property
    def source(self) -> Source:
        """Where the policy was written."""
        return self.policy.source

    @property
    def own(self) -> ConsumerPolicy:
        """The consumer's own policy."""
        return self.effective.consumer

    @property
    def unprotected(self) -> tuple[SideEffect, ...]:
        """The side effects that a repetition repeats."""
        return tuple(e for e in self.effective.side_effects if not is_protected(e))

    def at(self, key: str) -> Path:
        """Return the path of a consumer's key."""
        return consumer_path(self.effective.consumer_name, key)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found, where, and the way out."""

    severity: Severity
    code: str
    sentence: str
    fix: str
    key: str
    line: int | None
    anti_pattern: AntiPattern | None = None


Nouns: TypeAlias = Mapping[str, Any]
"""What the sentence of a finding names besides consumer and topic."""

PATH = "path"
"""The noun that replaces a rule's key, where only the case knows it."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that the lint looks for."""

    code: str
    severity: Severity
    key: str
    """The consumer's key that decides."""

    found: Callable[[Case], Iterable[Nouns]]
    """One set of nouns for each finding; none where all is well."""

    says: str
    fix: str
    anti_pattern: AntiPattern | None = None
    if_critical: Severity | None = None
    """The severity for critical consumers, where it is another one."""

    def judge(self, case: Case) -> Iterator[Finding]:
        """Yield what the rule finds."""
        critical = self.if_critical if case.own.critical else None
        for found in self.found(case):
            nouns = {
                "consumer": case.effective.consumer_name,
                "topic": case.effective.topic_name or "its topic",
                **found,
            }
            path = nouns.get(PATH) or case.at(self.key)
            yield Finding(
                critical or self.severity,
                self.code,
                self.says.format(**nouns),
                self.fix.format(**nouns),
                path_words(path),
                case.source.line_of(path),
                self.anti_pattern,
            )


def once(test: Callable[[Case], Any]) -> Callable[[Case], Iterable[Nouns]]:
    """Make a rule's finder of a question with a yes and a no."""
    return lambda case: [{}] if test(case) else []
