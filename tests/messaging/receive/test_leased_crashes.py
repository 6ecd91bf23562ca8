"""Leased messages out of the waiting room, and crashes at every window."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from semel.crashpoints import CrashPoint
from semel.errors import Misuse
from semel.memory.broker import MemoryBroker
from semel.message import Message
from semel.messaging.failed.retries import RetryWorker
from semel.messaging.failure import RetryableMessageError
from semel.messaging.handle.claims import ClaimState
from semel.messaging.handle.lease import Lease
from semel.messaging.outcome import (
    Handled,
    ParkedAway,
    RetryLater,
    RetryStored,
    Skipped,
)
from semel.messaging.receive.runner import Runner
from semel.messaging.settings import Order, RunnerSettings
from semel.policy.vocabulary import Duplicates, Mode, RetryMode
from semel.testing.crash import Crash, crash_at
from tests.messaging.leases import POLICY, Place, message
from tests.messaging.worlds import Effect, effects

IN_TABLE = replace(POLICY, mode=RetryMode.RETRY_TABLE)


def test_a_stored_retry_is_handled_under_a_lease_too_and_leaves_the_waiting_room():
    async def scenario() -> None:
        async def work(message: Message, lease: Lease) -> None:
            if message.attempt == 1:
                raise RetryableMessageError("down")
            async with lease.completing() as session:
                session.add(Effect("exported", message.id))

        place = Place(work, retry=IN_TABLE)

        assert isinstance(await place.deliver(message()), RetryStored)
        place.clock.advance(2)
        done = await place.retry()

        assert [type(outcome) for _, outcome in done] == [Handled]
        assert effects(place.database, "exported") == ["m1"]
        async with place.database.begin() as unit:
            assert await unit.waiting.get("exports", "m1") is None
        assert await place.retry() == []

    asyncio.run(scenario())


def test_messages_of_a_held_key_queue_up_and_follow_in_order():
    async def scenario() -> None:
        done: list[str] = []

        async def work(message: Message, lease: Lease) -> None:
            if message.id == "m1" and message.attempt == 1:
                raise RetryableMessageError("down")
            done.append(message.id)

        place = Place(work, retry=IN_TABLE, order=Order.KEY, holds_keys=True)
        await place.deliver(message(1, "k"))

        behind = [await place.deliver(message(n, "k")) for n in (2, 3)]
        place.clock.advance(2)
        while await place.retry():
            pass

        assert [type(outcome) for outcome in behind] == [ParkedAway, ParkedAway]
        assert done == ["m1", "m2", "m3"]

    asyncio.run(scenario())


def test_a_retry_worker_does_not_spin_while_another_one_is_at_the_message():
    async def scenario() -> None:
        place = Place(retry=IN_TABLE)
        tries = 0

        async def held(message: Message, waiting: Any) -> RetryLater:
            nonlocal tries
            tries += 1
            return RetryLater(1.0)

        async def fails(message: Message, lease: Lease) -> None:
            raise RetryableMessageError("down")

        place.work = fails
        await place.deliver(message())
        place.clock.advance(2)
        worker = RetryWorker(place.consumer, place.database, 60.0, held)
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(10):
            while not tries:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        worker.stop()
        await asyncio.wait_for(running, 5)

        assert tries == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "point",
    [
        CrashPoint.CLAIM_BEFORE,
        CrashPoint.LEASED_CLAIM_AFTER,
        CrashPoint.HANDLE_AFTER,
        CrashPoint.LEASED_COMPLETE_BEFORE,
        CrashPoint.LEASED_COMPLETE_AFTER,
    ],
)
def test_a_crash_at_any_window_repeats_at_most_what_was_not_completed(point):
    async def scenario() -> None:
        place = Place()
        with crash_at(point), pytest.raises(Crash):
            await place.deliver(message())
        done_before = await place.state() is ClaimState.COMPLETED
        place.clock.advance(31)

        outcome = await place.deliver(message(), "b")

        assert done_before == (point is CrashPoint.LEASED_COMPLETE_AFTER)
        assert isinstance(outcome, Skipped if done_before else Handled)
        assert await place.state() is ClaimState.COMPLETED

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "point",
    [
        CrashPoint.CLAIM_BEFORE,
        CrashPoint.LEASED_CLAIM_AFTER,
        CrashPoint.LEASED_COMPLETE_BEFORE,
        CrashPoint.LEASED_COMPLETE_AFTER,
        CrashPoint.HANDLE_AFTER,
    ],
)
def test_an_effect_inside_completing_happens_once_whatever_crashes(point):
    async def scenario() -> None:
        async def work(message: Message, lease: Lease) -> None:
            async with lease.completing() as session:
                session.add(Effect("exported", message.id))

        place = Place(work)
        with crash_at(point), pytest.raises(Crash):
            await place.deliver(message())
        place.clock.advance(31)
        await place.deliver(message(), "b")

        assert effects(place.database, "exported") == ["m1"]
        assert await place.state() is ClaimState.COMPLETED

    asyncio.run(scenario())


def test_a_crash_while_a_failure_is_written_leaves_the_lease_to_the_stale_policy():
    async def scenario() -> None:
        async def work(message: Message, lease: Lease) -> None:
            if message.attempt == 1:
                raise RetryableMessageError("down")

        place = Place(work)
        with crash_at(CrashPoint.FAILURE_BEFORE), pytest.raises(Crash):
            await place.deliver(message())

        assert await place.state() is ClaimState.IN_PROGRESS
        place.clock.advance(31)
        assert isinstance(await place.deliver(message(), "b"), Handled)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"versioned": True}, "versions are not checked"),
        ({"duplicates": Duplicates.INVOKE}, "no lease"),
    ],
)
def test_a_runner_refuses_what_leased_mode_cannot_do(settings, why):
    async def scenario() -> None:
        broker = MemoryBroker({"exports": 1})
        place = Place(**settings)
        subscription = await broker.subscribe("exports", ["exports"])

        with pytest.raises(Misuse, match=why):
            Runner(place.consumer, subscription, place.database, RunnerSettings(mode=Mode.LEASED))
        await broker.close()

    asyncio.run(scenario())
