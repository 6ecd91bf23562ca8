"""Topics that the broker refuses as a whole: they wait, and a few messages go ahead.

    refused      authorization failed, or none of many keys was taken
    waiting      nothing of the topic is sent until its pause is over
    trying       then the first messages of a few keys; one that is taken ends it
    refused      again: a longer pause, and whoever has used up its attempts is parked
    forgotten    nothing of the topic is left that could be tried

Without this, a permission that is missing for a minute parks the whole outbox.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from semel.messaging.failure import Classified, FailureClass
from semel.messaging.outbox import Lane, OutboxEntry, lane_of
from semel.messaging.retry import RetryPolicy, backoff

# So many keys that are refused together, with none of their topic taken, are no coincidence.
MANY_KEYS: Final = 5

# Enough for one message that is good to be among a few that are not.
KEYS_AHEAD: Final = 10


@dataclass(slots=True)
class _Refused:
    until: float = 0.0
    times: int = 0
    """How often it was refused in a row."""

    is_over: bool = False
    """Something was taken: the next sweep sends everything."""

    is_tried: bool = False
    """Its pause was over when the sweep began."""

    is_seen: bool = False
    """The sweep met an entry that waits for the topic alone."""

    ahead: int = 0
    """How many more keys may go ahead in this sweep."""

    gone: set[Lane] = field(default_factory=set)


class RefusedTopics:
    """What one leader knows of the topics that it may not write to."""

    def __init__(self, retry: RetryPolicy) -> None:
        self._retry = retry
        self._topics: dict[str, _Refused] = {}

    def __bool__(self) -> bool:
        return bool(self._topics)

    @property
    def next_due(self) -> float | None:
        """When the first waiting topic may be tried again; None where none waits."""
        return min((one.until for one in self._topics.values()), default=None)

    def due(self, topic: str) -> float:
        """Say when a waiting topic may be tried again."""
        return self._topics[topic].until

    def begin_sweep(self, now: float) -> None:
        """Let a few keys go ahead where the pause is over; forget what is over as a whole."""
        self._topics = {name: one for name, one in self._topics.items() if not one.is_over}
        for one in self._topics.values():
            one.is_tried = one.until <= now
            one.is_seen = False
            one.ahead = KEYS_AHEAD if one.is_tried else 0
            one.gone.clear()

    def end_sweep(self) -> None:
        """Forget topics that could be tried and had nothing to try: parked, dropped, erased.

        Nothing would ever end their refusal, and the relay would look for them without a pause.
        """
        self._topics = {
            name: one
            for name, one in self._topics.items()
            if one.is_seen or one.is_over or not one.is_tried
        }

    def lets_go(self, entry: OutboxEntry) -> bool:
        """Tell whether *entry* may be sent, and count it if it goes ahead of others."""
        one = self._topics.get(entry.topic)
        if one is None:
            return True
        one.is_seen = True
        lane = lane_of(entry)
        if one.ahead == 0 or lane in one.gone:
            return False
        one.ahead -= 1
        one.gone.add(lane)
        return True

    def note(
        self,
        delivered: Sequence[OutboxEntry],
        hopeless: Sequence[tuple[OutboxEntry, Classified]],
        now: float,
    ) -> dict[str, Classified]:
        """Look at what became of a batch; return the topics that were refused as a whole."""
        if not hopeless and not self._topics:
            return {}
        taken = {entry.topic for entry in delivered}
        refused: dict[str, Classified] = {}
        for topic in {entry.topic for entry, _ in hopeless}:
            failures = [failure for entry, failure in hopeless if entry.topic == topic]
            found = self._of_the_topic(topic, failures, taken)
            if found is not None:
                refused[topic] = found
                one = self._topics.setdefault(topic, _Refused())
                one.times += 1
                one.is_over = False
                one.ahead = 0
                one.until = now + backoff(self._retry, one.times)
        for topic in taken & self._topics.keys() - refused.keys():
            self._topics[topic].is_over = True
            self._topics[topic].until = now
        return refused

    def _of_the_topic(
        self, topic: str, failures: Sequence[Classified], taken: Collection[str]
    ) -> Classified | None:
        for failure in failures:
            if failure.failure_class is FailureClass.AUTHORIZATION:
                return failure
        if topic in taken or (topic not in self._topics and len(failures) < MANY_KEYS):
            return None
        return failures[0]
