"""One message's story and the open gaps, as plain values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from semel.messaging.records import FailedAttempt, Gap
from semel.operate.explain import Explanation, Moment, Story


@dataclass(frozen=True, slots=True)
class MomentReport:
    """Something that happened to a message."""

    at: float
    what: str
    """One word: seen, claim, failed, dead letter, waits, due, revision, act, child, …"""

    words: str


@dataclass(frozen=True, slots=True)
class FailedAttemptReport:
    """One try of a message that failed."""

    number: int
    """Counted from the start again when somebody sends the message back."""

    at: float
    error_code: str
    failure_class: str
    exception: str
    reason: str
    """Empty once the message's payload was erased."""

    worker: str
    """Host and process that wrote it."""


@dataclass(frozen=True, slots=True)
class StoryReport:
    """What one consumer knows of a message."""

    consumer: str
    standing: str
    """How it stands now, in a sentence."""

    state: str
    """Its claim's state; empty where it has no claim."""

    attempts: int
    key: str | None
    source: str
    """Topic, partition and offset; empty where they are not kept."""

    payload_hash: str
    moments: list[MomentReport]
    children: str
    """What is known of the messages that handling it sent, in a sentence."""

    failures: list[FailedAttemptReport]
    """Each attempt that failed, in order; of more than 50 the first 5 and the latest 45."""

    deliveries: str
    """What is known of its deliveries, in a sentence."""


@dataclass(frozen=True, slots=True)
class ExplainReport:
    """The answer to `semel explain`."""

    database: str
    message_id: str
    stored_as: str
    """The id as the tables have it: a hash where it is long."""

    other_names: list[str]
    """Ids that people gave to the message, or took from it."""

    stories: list[StoryReport]
    acts: list[MomentReport]
    """What people did with the message for all consumers."""

    @property
    def needs_attention(self) -> bool:
        """Tell whether nobody knows the message."""
        return not self.stories and not self.acts


@dataclass(frozen=True, slots=True)
class GapReport:
    """Versions of a key that did not come."""

    consumer: str
    key: str
    first_missing: int
    last_missing: int
    found: int
    """The version that came instead."""

    since: float


@dataclass(frozen=True, slots=True)
class GapList:
    """The answer to `semel gaps list`."""

    database: str
    gaps: list[GapReport]

    @property
    def needs_attention(self) -> bool:
        """Tell whether something did not come."""
        return bool(self.gaps)


@dataclass(frozen=True, slots=True)
class GapsClosed:
    """The answer to `semel gaps close`."""

    database: str
    gaps: list[GapReport]
    passed_over: bool
    """The missing versions are not waited for any more."""

    actor: str
    reason: str

    @property
    def needs_attention(self) -> bool:
        """What was done needs none."""
        return False


def explain_report(database: str, found: Explanation) -> ExplainReport:
    """Put an explanation into a JSON document."""
    return ExplainReport(
        database,
        found.message_id,
        found.stored_as,
        list(found.other_names),
        [_story(story) for story in found.stories],
        _moments(found.acts),
    )


def _story(story: Story) -> StoryReport:
    return StoryReport(
        story.consumer,
        story.standing,
        story.state,
        story.attempts,
        story.key,
        story.source,
        story.payload_hash,
        _moments(story.moments),
        story.children,
        [_failure(attempt) for attempt in story.failures],
        story.deliveries,
    )


def _failure(attempt: FailedAttempt) -> FailedAttemptReport:
    return FailedAttemptReport(
        attempt.number,
        attempt.at,
        attempt.error_code,
        attempt.failure_class,
        attempt.exception,
        attempt.reason,
        attempt.worker,
    )


def _moments(moments: Iterable[Moment]) -> list[MomentReport]:
    return [MomentReport(one.at, one.what, one.words) for one in moments]


def gap_reports(gaps: Iterable[Gap]) -> list[GapReport]:
    """Put gaps into a JSON document."""
    return [
        GapReport(gap.consumer, gap.key, gap.expected, gap.found - 1, gap.found, gap.since)
        for gap in gaps
    ]
