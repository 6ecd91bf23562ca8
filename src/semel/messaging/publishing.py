"""One relay's way to its broker, which ends in time whatever the publisher does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from semel.clock import Clock
from semel.errors import Fenced, Misuse, Retryable
from semel.messaging.broker import Outgoing, Publisher
from semel.messaging.outbox import Lane, OutboxEntry, lane_of
from semel.messaging.sending import outgoing_of

# A publisher that is cancelled gets so long to clean up; then it is left behind.
CLEAN_UP_SECONDS: Final = 1.0


class NoAnswer(Retryable):
    """The publisher did not answer in time: nothing is known of what it was given."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds

    def __str__(self) -> str:
        return (
            f"the publisher did not answer within {self.seconds:g} s; "
            f"what it was given is published again, under the same ids"
        )


class Publishing:
    """Asks a publisher, for so long at most; a stop makes it shorter."""

    def __init__(
        self, publisher: Publisher, publish_seconds: float, stop_seconds: float, clock: Clock
    ) -> None:
        if publish_seconds <= 0 or stop_seconds < 0:
            raise Misuse("a relay needs some time to publish, and for its end not less than none")
        self._publisher = publisher
        self._publish_seconds = publish_seconds
        self._stop_seconds = stop_seconds
        self._clock = clock
        self._stop_by = 0.0
        self.stopped = asyncio.Event()
        """Set when the relay is to end."""

    def stop_soon(self) -> None:
        """Let the batch in hand end within the deadline; the event is the caller's to set."""
        self._stop_by = self._clock.monotonic() + self._stop_seconds

    async def together(self, batch: Sequence[Outgoing]) -> Sequence[Exception | None]:
        """Publish a batch.

        Raises:
            NoAnswer: the time is over.
        """
        asking = asyncio.ensure_future(self._publisher.publish(batch))
        began = self._clock.monotonic()
        try:
            await self._wait(asking)
            if asking.done() and not asking.cancelled():
                return asking.result()
        finally:
            await _abandon(asking)
        raise NoAnswer(self._clock.monotonic() - began)

    async def singly(self, entries: Sequence[OutboxEntry]) -> list[Exception | None]:
        """Publish entries one by one, each key until its first failure; all, while one answers.

        A publisher that raises `Retryable` knows nothing of the broker any more: the rest of
        the batch would wait for the same silence, message after message.
        """
        answers: list[Exception | None] = []
        failed: dict[Lane, Exception] = {}
        silence: Retryable | None = None
        for entry in entries:
            lane = lane_of(entry)
            if lane not in failed:
                answer: Exception | None = silence
                if silence is None:
                    try:
                        [answer] = await self.together([outgoing_of(entry)])
                    except (Fenced, Misuse):
                        raise
                    except Retryable as error:
                        answer = silence = error
                    except Exception as error:  # noqa: BLE001  the answer for this one message
                        answer = error
                if answer is not None:
                    failed[lane] = answer
            answers.append(failed.get(lane))
        return answers

    async def _wait(self, asking: asyncio.Future[Sequence[Exception | None]]) -> None:
        stopping = asyncio.ensure_future(self.stopped.wait())
        try:
            either: set[asyncio.Future[Any]] = {asking, stopping}
            await asyncio.wait(
                either, timeout=self._publish_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if not asking.done() and self.stopped.is_set():
                left = min(self._stop_by - self._clock.monotonic(), self._publish_seconds)
                await asyncio.wait({asking}, timeout=max(0.0, left))
        finally:
            stopping.cancel()


async def _abandon(asking: asyncio.Future[Sequence[Exception | None]]) -> None:
    if not asking.done():
        asking.cancel()
        asking.add_done_callback(lambda one: one.cancelled() or one.exception())
        await asyncio.wait({asking}, timeout=CLEAN_UP_SECONDS)
