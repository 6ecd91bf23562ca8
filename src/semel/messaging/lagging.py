"""The measuring of the lag, beside the work: a handler that hangs must not hide it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Final

from semel.measures import MEASURES
from semel.message import Partition
from semel.messaging.cancelling import end, rung
from semel.messaging.reasons import reason_of

log = logging.getLogger("semel.messaging")

# However often somebody wants it measured, the broker has other things to answer.
LEAST_SECONDS: Final = 0.05


class LagWatch:
    """Measures the lag from time to time, and at once where other partitions are assigned."""

    def __init__(
        self, consumer: str, measure: Callable[[], Awaitable[None]], seconds: float
    ) -> None:
        self._consumer = consumer
        self._measure = measure
        self._seconds = max(seconds, LEAST_SECONDS)
        self._assigned: frozenset[Partition] = frozenset()
        self._bell = asyncio.Event()

    def assigned(self, partitions: Collection[Partition]) -> None:
        """Hear which partitions are ours now."""
        if self._assigned != partitions:
            self._assigned = frozenset(partitions)
            self._bell.set()

    @asynccontextmanager
    async def beside(self) -> AsyncIterator[None]:
        """Measure as long as the body runs; a failure to do so is logged, and nothing else."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            await end([task])

    async def _run(self) -> None:
        while True:
            await rung(self._bell, self._seconds)
            self._bell.clear()
            # The broker is only asked where somebody listens.
            if MEASURES.are_heard:
                await self._once()

    async def _once(self) -> None:
        try:
            await self._measure()
        except Exception as error:  # noqa: BLE001  the next measurement may succeed
            log.warning(
                "lag could not be measured",
                extra={"consumer": self._consumer, "why": reason_of(error)},
            )
