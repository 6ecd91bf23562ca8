"""How a lease ends: for its handler, and for the message that it held in the waiting room."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from semel.crashpoints import CrashPoint
from semel.errors import Retryable
from semel.message import Message
from semel.messaging.failure import RetryableMessageError
from semel.messaging.handle.claims import ClaimState
from semel.messaging.handle.lease import Lease, _renew
from semel.messaging.outcome import RetryLater, Skipped
from semel.messaging.settings import RetryPolicy
from semel.policy.vocabulary import RetryMode, StalePolicy
from semel.testing.clock import SimulatedClock
from semel.testing.crash import Crash, crash_at
from tests.messaging.leases import Place, message

STORED = RetryPolicy(jitter=False, mode=RetryMode.RETRY_TABLE)


async def fails_first(message: Message, lease: Lease) -> None:
    if message.attempt == 1:
        raise RetryableMessageError("down")


async def waiting(place: Place) -> Any:
    async with place.database.begin() as unit:
        return await unit.waiting.get("exports", "m1")


async def stored(**settings: Any) -> Place:
    """Return a place in which a message waits, and is due."""
    place = Place(fails_first, retry=STORED, **settings)
    await place.deliver(message())
    place.clock.advance(60)
    assert await waiting(place) is not None
    return place


def test_a_message_that_was_completed_while_it_waited_leaves_the_room():
    async def scenario() -> None:
        place = await stored()
        async with place.database.begin() as unit:
            await unit.claims.mark_completed("exports", "m1")

        assert await place.retry() == [("m1", Skipped("duplicate"))]
        assert await waiting(place) is None

    asyncio.run(scenario())


def test_a_message_whose_effect_is_found_leaves_the_room():
    async def happened(message: Message) -> bool:
        return True

    async def scenario() -> None:
        place = await stored(stale=StalePolicy.INSPECT, inspect=happened)
        with crash_at(CrashPoint.LEASED_CLAIM_AFTER), pytest.raises(Crash):
            await place.retry()
        place.clock.advance(60)

        [(_, outcome)] = await place.retry()

        assert isinstance(outcome, Skipped)
        assert await place.state() is ClaimState.COMPLETED
        assert await waiting(place) is None

    asyncio.run(scenario())


def test_a_handler_ends_when_its_renewal_is_refused_and_not_only_with_its_lease():
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        place = Place(lambda message, lease: asyncio.sleep(30), lease_seconds=3.0)
        handling = asyncio.create_task(place.deliver(message()))
        while not place.calls:
            await asyncio.sleep(0.01)
        began = loop.time()
        async with place.database.begin() as unit:
            await unit.claims.mark_completed("exports", "m1")

        assert isinstance(await handling, RetryLater)
        assert loop.time() < began + 2.5

    asyncio.run(scenario())


def test_a_lease_is_counted_from_before_it_was_asked_for():
    class Away:
        def begin(self) -> Any:
            raise Retryable("no answer")

    async def scenario() -> None:
        clock = SimulatedClock()
        asked_at = clock.monotonic()
        clock.advance(0.03)
        lease = Lease("exports", "m1", "me", 1, Away())  # type: ignore[arg-type]

        await asyncio.wait_for(_renew(lease, 0.03, asked_at, clock), 5)

    asyncio.run(scenario())
