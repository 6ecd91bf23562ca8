"""Which entries of an outbox may go now, and what the broker's answers mean for the rest.

    delivered        deleted
    failed for now   its key waits; the next sweep after a pause begins with it again
    failed for good  parked; its key's later entries wait until an operator has decided
    topic refused    the whole topic waits, with `refused_topics`

A key is let go only when a sweep begins, never within one: its earlier entries
are behind the cursor by then, and its later ones would overtake them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from semel.errors import Misuse
from semel.messaging.broker import Outgoing
from semel.messaging.failure import RETRYABLE_CLASSES, Classification, Classified
from semel.messaging.outbox import MESSAGE_ID_HEADER, Lane, OutboxEntry, lane_of
from semel.messaging.refused_topics import RefusedTopics
from semel.messaging.retry import (
    Exhausted,
    Hopeless,
    RetryIn,
    RetryPolicy,
    Verdict,
    backoff,
    is_retryable,
    listed_codes,
    verdict,
)


def outgoing_of(entry: OutboxEntry) -> Outgoing:
    """Return what the broker gets: the entry, with its id in a header."""
    headers = {MESSAGE_ID_HEADER: entry.message_id.encode()}
    if entry.headers:
        headers.update(entry.headers)
    key = None if entry.key is None else entry.key.encode()
    return Outgoing(entry.topic, entry.value, key, headers)


@dataclass(frozen=True, slots=True)
class Parking:
    """An entry that the broker will never take."""

    entry: OutboxEntry
    reason: str


@dataclass(slots=True)
class Settled:
    """What is to be written about one published batch."""

    delivered: list[OutboxEntry] = field(default_factory=list)
    """They are durable at the broker."""

    failed: list[OutboxEntry] = field(default_factory=list)
    """They are tried again."""

    parked: list[Parking] = field(default_factory=list)
    """The broker will never take them."""

    refused: dict[str, Classified] = field(default_factory=dict)
    """Topics that the broker refuses as a whole, and why."""


class Sending:
    """What one leader knows of its outbox's keys."""

    def __init__(self, retry: RetryPolicy, classification: Classification) -> None:
        self._retry = retry
        listed = listed_codes(retry, classification.codes)
        self._classification = classification.extended(codes=listed)
        self._held: dict[Lane, float] = {}
        """Until when a lane waits, on the clock of whoever calls."""

        self._parked: frozenset[tuple[str, str]] = frozenset()
        self._topics = RefusedTopics(retry)

    def begin_sweep(self, parked_keys: frozenset[tuple[str, str]], now: float) -> None:
        """Let go of lanes whose pause is over, and of those whose parked entry is gone."""
        self._held = {lane: until for lane, until in self._held.items() if until > now}
        self._parked = parked_keys
        self._topics.begin_sweep(now)

    def end_sweep(self) -> None:
        """Note that everything was seen since the sweep began."""
        self._topics.end_sweep()

    @property
    def next_due(self) -> float | None:
        """When the first waiting lane or topic may be tried again; None where none waits."""
        due = [*self._held.values()]
        if self._topics.next_due is not None:
            due.append(self._topics.next_due)
        return min(due, default=None)

    def sendable(self, entries: Sequence[OutboxEntry]) -> Sequence[OutboxEntry]:
        """Leave out what must not overtake an entry before it."""
        if not self._held and not self._parked and not self._topics:
            return entries
        return [e for e in entries if not self._waits(lane_of(e)) and self._topics.lets_go(e)]

    def settle(
        self, entries: Sequence[OutboxEntry], answers: Sequence[Exception | None], now: float
    ) -> Settled:
        """Say what the broker's answers mean; lanes with a failure wait from here on.

        Raises:
            Misuse: the publisher did not answer for every entry.
        """
        if len(answers) != len(entries):
            raise Misuse(
                f"the publisher answered for {len(answers)} of {len(entries)} messages; "
                f"it must answer for each, in order"
            )
        if not any(answers) and not self._topics:
            return Settled(list(entries))
        settled = Settled()
        failures: list[tuple[OutboxEntry, Classified]] = []
        for entry, error in zip(entries, answers, strict=True):
            if error is None:
                settled.delivered.append(entry)
            elif not self._waits(lane := lane_of(entry)):
                self._held[lane] = now
                failures.append((entry, self._classification.classify(error)))
        hopeless = [one for one in failures if not is_retryable(self._retry, one[1])]
        settled.refused = self._topics.note(settled.delivered, hopeless, now)
        for entry, failure in failures:
            self._settle_failure(entry, failure, settled, now)
        return settled

    def _settle_failure(
        self, entry: OutboxEntry, failure: Classified, settled: Settled, now: float
    ) -> None:
        attempts = entry.attempts + 1
        fate: Verdict = verdict(self._retry, failure, attempts)
        if isinstance(fate, Exhausted) and failure.failure_class in RETRYABLE_CLASSES:
            # The broker's own troubles pass; a limit would park whatever met an outage.
            fate = RetryIn(backoff(self._retry, attempts))
        if isinstance(fate, Hopeless) and entry.topic in settled.refused:
            # It is the topic that waits; the entry has only met it.
            due = self._topics.due(entry.topic)
            fate = RetryIn(due - now) if attempts < self._retry.max_attempts else Exhausted()
        if isinstance(fate, RetryIn):
            self._held[lane_of(entry)] = now + fate.seconds
            settled.failed.append(entry)
        else:
            settled.parked.append(Parking(entry, failure.reason))

    def _waits(self, lane: Lane) -> bool:
        return lane in self._held or lane in self._parked
