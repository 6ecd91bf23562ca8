"""A runner that dies at any window, or of a message, loses and repeats nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from semel.crashpoints import CrashPoint
from semel.message import Message
from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
from semel.messaging.records import WaitingFilter
from semel.policy.vocabulary import Mode
from semel.testing.crash import Crash, crash_at
from tests.messaging.processes import next_process
from tests.messaging.served import QUICK, Service
from tests.points import MESSAGING_POINTS

WINDOWS = sorted(
    p
    for p in MESSAGING_POINTS
    if p.step
    in ("claim", "handle", "message_commit", "failure", "outcomes", "settle", "member_enter")
)


def test_a_rebalance_redelivers_what_was_not_committed_and_it_is_skipped():
    """A reads and processes without a commit; B gets the partition and reads the same."""

    async def scenario() -> None:
        service = Service()
        service.send(*range(3))
        first = await service.runner()
        with crash_at(CrashPoint.SETTLE_BEFORE), pytest.raises(Crash):
            await first.run_until_idle()
        service.broker.kill(first.subscription)
        service.broker.rebalance("billing")

        await service.work()

        assert service.paid == ["m0", "m1", "m2"]
        assert service.committed == {"payments/0": 3}
        assert (0, 2, "duplicate_skipped") in await service.ranges()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "settings", [QUICK, replace(QUICK, mode=Mode.BATCHED)], ids=["single", "batched"]
)
@pytest.mark.parametrize("occurrence", [1, 2])
@pytest.mark.parametrize("point", WINDOWS)
def test_a_crash_at_any_window_loses_and_repeats_nothing(point, occurrence, settings):
    async def scenario() -> None:
        service = Service()
        failed: set[str] = set()

        def fail(message: Message) -> None:
            if message.id == "m1" and message.id not in failed:
                failed.add(message.id)
                raise RetryableMessageError("down")
            if message.id == "m2":
                raise NonRetryableMessageError("broken")

        service.fail = fail
        service.send(*range(4))
        runner = await service.runner(settings)
        try:
            with crash_at(point, occurrence=occurrence):
                await runner.run_until_idle()
        except Crash:
            pass
        service.broker.kill(runner.subscription)
        service.broker.rebalance("billing")

        await service.work(settings)

        assert sorted(service.paid) == ["m0", "m1", "m3"]
        assert service.committed == {"payments/0": 4}
        covered = {o for first, last, _ in await service.ranges() for o in range(first, last + 1)}
        assert covered == {0, 1, 2, 3}

    asyncio.run(scenario())


def test_a_message_that_kills_its_process_is_found_out_alone_and_parked():
    async def scenario() -> None:
        service = Service()

        def kill(message: Message) -> None:
            if message.id == "m7":
                raise Crash

        service.fail = kill
        service.send(*range(12))
        deaths = 0
        while True:
            runner = await service.runner(replace(QUICK, concurrency=4))
            try:
                await runner.run_until_idle()
                break
            except Crash:
                next_process()
                deaths += 1
                assert deaths < 10
                service.broker.kill(runner.subscription)
                service.broker.rebalance("billing")

        assert deaths == 4
        assert sorted(service.paid) == sorted(f"m{n}" for n in range(12) if n != 7)
        async with service.database.begin() as unit:
            [parked] = await unit.waiting.find(WaitingFilter(), 10)
        assert parked.message_id == "m7"
        assert service.committed == {"payments/0": 12}

    asyncio.run(scenario())
