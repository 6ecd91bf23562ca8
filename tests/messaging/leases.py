"""A leased consumer, a database in memory whose clock the test owns, and owners that die."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from semel.codec import FromHeader
from semel.crashpoints import CrashPoint
from semel.message import Coordinates, Message
from semel.messaging.failed.retries import retry_due
from semel.messaging.handle.claims import ClaimState
from semel.messaging.handle.lease import Lease, handle_leased
from semel.messaging.handler import Consumer, consumer
from semel.messaging.settings import ConsumerSettings, RetryPolicy
from semel.testing.clock import SimulatedClock
from semel.testing.crash import Crash, crash_at
from tests.messaging.worlds import memory_database

POLICY = RetryPolicy(max_attempts=3, jitter=False)
Work = Callable[[Message, Lease], Awaitable[Any]]


def message(number: int = 1, key: str | None = None) -> Message:
    return Message(
        f"m{number}",
        {"n": number},
        f'{{"n": {number}}}'.encode(),
        key,
        headers={"message-id": f"m{number}".encode()},
        source=Coordinates("exports", 0, number),
    )


def leased(work: Work, **settings: Any) -> Consumer:
    options = {"inspect": settings.pop("inspect", None)}
    chosen = ConsumerSettings(
        **{"retry": POLICY, "lease_seconds": 30.0, "held_retry_seconds": 0.01, **settings}
    )
    return consumer("exports", policy=chosen, id_from=FromHeader("message-id"), **options)(work)


class Place:
    """A database in memory whose clock the test owns, and what the handler did."""

    def __init__(self, work: Work | None = None, **settings: Any) -> None:
        self.clock = SimulatedClock()
        self.database = memory_database(self.clock, lock_seconds=0.3)
        self.calls: list[int] = []
        self.work = work
        self.consumer = leased(self._handle, **settings)

    async def _handle(self, message: Message, lease: Lease) -> Any:
        self.calls.append(message.attempt)
        return None if self.work is None else await self.work(message, lease)

    async def deliver(self, message: Message, owner: str = "a", waiting: Any = None) -> Any:
        return await handle_leased(
            self.consumer, self.database, message, owner, self.clock, waiting
        )

    async def retry(self) -> list[tuple[str, Any]]:
        return await retry_due(
            self.consumer,
            self.database,
            handle=lambda message, waiting: self.deliver(message, "a", waiting),
        )

    async def die(self, message: Message, owner: str = "a") -> None:
        """Take the lease and end there, as a killed process does."""
        with crash_at(CrashPoint.LEASED_CLAIM_AFTER), pytest.raises(Crash):
            await self.deliver(message, owner)

    async def row(self, number: int = 1) -> Any:
        async with self.database.begin() as unit:
            return await unit.claims.look_up("exports", f"m{number}")

    async def state(self, number: int = 1) -> ClaimState | None:
        found = await self.row(number)
        return None if found is None else found.state
