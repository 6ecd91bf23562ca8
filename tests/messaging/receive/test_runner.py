"""The loop of a service: what is committed to the broker, when, and what comes back."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from semel.codec import FromHeader
from semel.events import EVENTS, LABELS, Measurement, Metric
from semel.message import Message, Partition
from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
from semel.messaging.handler import consumer
from semel.messaging.outcome import HOLE
from semel.policy.vocabulary import Mode
from tests.messaging.served import QUICK, Service
from tests.messaging.worlds import Effect

MODES = [
    QUICK,
    replace(QUICK, concurrency=4),
    replace(QUICK, mode=Mode.BATCHED),
    replace(QUICK, mode=Mode.BATCHED, concurrency=3),
]
MODE_NAMES = ["single", "lanes", "batched", "batches"]


@pytest.mark.parametrize("settings", MODES, ids=MODE_NAMES)
def test_everything_is_handled_once_and_the_next_offset_is_committed(settings):
    async def scenario() -> None:
        service = Service()
        service.send(*range(5))
        service.send(3, 4)

        await service.work(settings)

        assert sorted(service.paid) == [f"m{n}" for n in range(5)]
        assert service.committed == {"payments/0": 7}
        lengths = Counter[str]()
        for first, last, outcome in await service.ranges():
            lengths[outcome] += last - first + 1
        assert lengths == {"success": 5, "duplicate_skipped": 2}

    asyncio.run(scenario())


@pytest.mark.parametrize("settings", MODES, ids=MODE_NAMES)
def test_a_message_that_fails_comes_back_and_nothing_is_lost_or_repeated(settings):
    async def scenario() -> None:
        service = Service()
        tries: dict[str, int] = {}

        def fail(message: Message) -> None:
            tries[message.id] = tries.get(message.id, 0) + 1
            if message.id == "m2" and tries["m2"] < 3:
                raise RetryableMessageError("down")

        service.fail = fail
        service.send(*range(6))

        await service.work(settings)

        assert sorted(service.paid) == [f"m{n}" for n in range(6)]
        assert service.committed == {"payments/0": 6}

    asyncio.run(scenario())


@pytest.mark.parametrize("settings", MODES, ids=MODE_NAMES)
def test_order_per_key_is_kept_through_retries(settings):
    async def scenario() -> None:
        service = Service()
        failed: set[str] = set()

        def fail(message: Message) -> None:
            if message.payload["n"] % 7 == 3 and message.id not in failed:
                failed.add(message.id)
                raise RetryableMessageError("down")

        service.fail = fail
        for number in range(40):
            service.send(number, key=f"k{number % 3}")

        await service.work(settings)

        numbers = [int(row[1:]) for row in service.paid]
        assert sorted(numbers) == list(range(40))
        for key in range(3):
            mine = [number for number in numbers if number % 3 == key]
            assert mine == sorted(mine)

    asyncio.run(scenario())


@pytest.mark.parametrize("settings", MODES, ids=MODE_NAMES)
def test_poison_and_broken_records_become_dead_letters_and_the_rest_goes_on(settings):
    async def scenario() -> None:
        service = Service()

        def fail(message: Message) -> None:
            if message.id == "m1":
                raise NonRetryableMessageError("broken")

        service.fail = fail
        service.send(0, 1)
        service.broker.put("payments", b"\xff not json", headers={"message-id": b"x"})
        service.broker.put("payments", b"{}")
        service.send(2)

        await service.work(settings)

        assert sorted(service.paid) == ["m0", "m2"]
        assert await service.ranges() == [
            (0, 0, "success"),
            (1, 1, "dlq"),
            (2, 3, "deserialization_failure"),
            (4, 4, "success"),
        ]
        assert service.committed == {"payments/0": 5}

    asyncio.run(scenario())


def test_holes_are_told_from_losses():
    async def scenario() -> None:
        service = Service()
        service.send(0)
        service.broker.skip(Partition("payments", 0), 2)
        service.send(1)

        await service.work()

        assert await service.ranges() == [(0, 0, "success"), (1, 2, HOLE), (3, 3, "success")]

    asyncio.run(scenario())


def test_a_clean_stop_finishes_commits_and_leaves_no_suspicion():
    async def scenario() -> None:
        service = Service()
        service.send(*range(3))
        began = asyncio.Event()

        def fail(message: Message) -> None:
            began.set()

        service.fail = fail
        runner = await service.runner()
        running = asyncio.create_task(runner.run())
        await asyncio.wait_for(began.wait(), 5)
        runner.stop()
        await asyncio.wait_for(running, 5)

        assert service.committed == {"payments/0": 3}
        async with service.database.begin() as unit:
            assert await unit.members.others("billing", "", [Partition("payments", 0)]) == []

    asyncio.run(scenario())


def test_two_members_share_the_partitions_and_every_message_is_handled_once():
    async def scenario() -> None:
        service = Service(partitions=4)
        for number in range(60):
            service.send(number, key=f"k{number}")
        service.waits = False
        runners = [await service.runner() for _ in range(2)]
        running = [asyncio.create_task(runner.run()) for runner in runners]
        async with asyncio.timeout(10):
            while len(service.paid) < 60:
                await asyncio.sleep(0.01)
        for runner in runners:
            runner.stop()
        await asyncio.gather(*running)

        assert sorted(service.paid) == sorted(f"m{n}" for n in range(60))
        assert sum(service.committed.values()) == 60

    asyncio.run(scenario())


def test_a_leased_handler_gets_its_lease_and_completes_with_its_effect():
    async def scenario() -> None:
        service = Service()

        @consumer("billing", id_from=FromHeader("message-id"))
        async def handle(message: Message, lease: Any) -> None:
            async with lease.completing() as session:
                session.add(Effect("paid", message.id))

        service.send(0, 1, 0)
        runner = await service.runner(replace(QUICK, mode=Mode.LEASED), handle)
        await runner.run_until_idle()

        assert service.paid == ["m0", "m1"]
        assert service.committed == {"payments/0": 3}

    asyncio.run(scenario())


def test_the_measurements_have_the_names_and_labels_that_dashboards_know():
    found: list[Measurement] = []

    async def scenario() -> None:
        service = Service()
        failed: set[str] = set()

        def fail(message: Message) -> None:
            if message.id == "m1" and message.id not in failed:
                failed.add(message.id)
                raise RetryableMessageError("down", "DATABASE_TIMEOUT")
            if message.id == "m2":
                raise NonRetryableMessageError("broken", "CONSTRAINT_VIOLATED")

        service.fail = fail
        service.send(0, 1, 2, 0)
        service.broker.put("payments", b"?", headers={"message-id": b"x"})
        await service.work(replace(QUICK, lag_seconds=0))

    unsubscribe = EVENTS.subscribe(found.append, Measurement)
    try:
        asyncio.run(scenario())
    finally:
        unsubscribe()

    by_metric: dict[Metric, list[Measurement]] = {}
    for measured in found:
        assert tuple(measured.labels) == LABELS[measured.metric]
        by_metric.setdefault(measured.metric, []).append(measured)
    assert {m.labels["outcome"] for m in by_metric[Metric.PROCESSED]} >= {
        "success",
        "duplicate_skipped",
        "retryable_failure",
        "dlq",
        "deserialization_failure",
    }
    assert by_metric[Metric.RETRIES][0].labels["reason"] == "DATABASE_TIMEOUT"
    assert {m.labels["reason"] for m in by_metric[Metric.DLQ]} == {
        "CONSTRAINT_VIOLATED",
        "DESERIALIZATION_FAILED",
    }
    of_consumers = {m for m in Metric if m.value.startswith("consumer.")} - {Metric.CIRCUIT}
    assert set(by_metric) == of_consumers | {Metric.FAILURES}
