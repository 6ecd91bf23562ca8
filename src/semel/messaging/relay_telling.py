"""What dashboards and operators hear of a relay: how full its outbox is, and what became of it."""

from __future__ import annotations

import logging
from collections import Counter
from operator import attrgetter
from typing import Final

from semel.clock import Clock
from semel.errors import InDoubt, Retryable
from semel.measures import Measures, Metric
from semel.messaging.database import Database
from semel.messaging.sending import Settled

log = logging.getLogger("semel.messaging")

MEASURE_SECONDS: Final = 15.0

_TOPIC: Final = attrgetter("topic")


class RelayTelling:
    """One relay's word to whoever watches it."""

    def __init__(self, database: Database, outbox: str, measures: Measures, clock: Clock) -> None:
        self._database = database
        self._outbox = outbox
        self._measures = measures
        self._clock = clock
        self._measured = -MEASURE_SECONDS

    async def measure(self) -> None:
        """Say how full the outbox is, once in a while."""
        now = self._clock.monotonic()
        if now < self._measured + MEASURE_SECONDS:
            return
        self._measured = now
        try:
            async with self._database.begin() as unit:
                numbers = await unit.outbox.numbers(self._outbox)
        except (Retryable, InDoubt):
            return  # the next time
        count = self._measures.count
        count(Metric.OUTBOX_PENDING, self._outbox, value=numbers.pending)
        count(Metric.OUTBOX_OLDEST_SECONDS, self._outbox, value=numbers.oldest_seconds)

    def tell(self, settled: Settled) -> None:
        """Count what became of a batch, and log what an operator must know."""
        became = {
            "ok": settled.delivered,
            "retried": settled.failed,
            "parked": [parking.entry for parking in settled.parked],
        }
        for status, entries in became.items():
            for topic, number in Counter(map(_TOPIC, entries)).items():
                labels = (self._outbox, topic, status)
                self._measures.count(Metric.OUTBOX_PUBLISHED, *labels, value=number)
        for topic, failure in settled.refused.items():
            nouns = {"outbox": self._outbox, "topic": topic}
            log.error("topic refused, trying again", extra={**nouns, "reason": failure.reason})
        for parking in settled.parked:
            nouns = {"outbox": self._outbox, "id": parking.entry.message_id}
            log.error("message parked", extra={**nouns, "reason": parking.reason})
