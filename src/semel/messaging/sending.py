"""Which entries of an outbox may go now, and what the broker's answers mean for the rest.

    delivered        deleted
    failed for now   its key waits; the next sweep after a pause begins with it again
    failed for good  parked; its key's later entries wait until an operator has decided

A key is let go only when a sweep begins, never within one: its earlier entries
are behind the cursor by then, and its later ones would overtake them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from semel.errors import Misuse
from semel.messaging.broker import Outgoing
from semel.messaging.failure import RETRYABLE_CLASSES, Classification
from semel.messaging.outbox import MESSAGE_ID_HEADER, OutboxEntry
from semel.messaging.retry import Exhausted, RetryIn, RetryPolicy, Verdict, backoff, verdict

Lane: TypeAlias = tuple[str, str] | int
"""What keeps its order: a key of a topic; an entry without a key is alone, by its place."""


def lane_of(entry: OutboxEntry) -> Lane:
    """Say with which entries this one keeps an order."""
    return entry.place if entry.key is None else (entry.topic, entry.key)


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


class Sending:
    """What one leader knows of its outbox's keys."""

    def __init__(self, retry: RetryPolicy, classification: Classification) -> None:
        self._retry = retry
        self._classification = classification
        self._held: dict[Lane, float] = {}
        """Until when a lane waits, on the clock of whoever calls."""

        self._parked: frozenset[tuple[str, str]] = frozenset()

    def begin_sweep(self, parked_keys: frozenset[tuple[str, str]], now: float) -> None:
        """Let go of lanes whose pause is over, and of those whose parked entry is gone."""
        self._held = {lane: until for lane, until in self._held.items() if until > now}
        self._parked = parked_keys

    @property
    def next_due(self) -> float | None:
        """When the first waiting lane may be tried again; None where none waits."""
        return min(self._held.values(), default=None)

    def sendable(self, entries: Sequence[OutboxEntry]) -> Sequence[OutboxEntry]:
        """Leave out what must not overtake an entry before it."""
        if not self._held and not self._parked:
            return entries
        return [e for e in entries if not self._waits(lane_of(e))]

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
        if not any(answers):
            return Settled(list(entries))
        settled = Settled()
        for entry, error in zip(entries, answers, strict=True):
            if error is None:
                settled.delivered.append(entry)
            elif not self._waits(lane := lane_of(entry)):
                self._held[lane] = now
                self._settle_failure(entry, error, settled, now)
        return settled

    def _settle_failure(
        self, entry: OutboxEntry, error: Exception, settled: Settled, now: float
    ) -> None:
        failure = self._classification.classify(error)
        fate: Verdict = verdict(self._retry, failure, entry.attempts + 1)
        if isinstance(fate, Exhausted) and failure.failure_class in RETRYABLE_CLASSES:
            # The broker's own troubles pass; a limit would park whatever met an outage.
            fate = RetryIn(backoff(self._retry, entry.attempts + 1))
        if isinstance(fate, RetryIn):
            self._held[lane_of(entry)] = now + fate.seconds
            settled.failed.append(entry)
        else:
            settled.parked.append(Parking(entry, failure.reason))

    def _waits(self, lane: Lane) -> bool:
        return lane in self._held or lane in self._parked
