"""The lag, measured beside the work and over everything that is assigned."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from semel.events import EVENTS, Measurement, Metric
from semel.memory.broker import BrokerFailure, Call
from semel.messaging.handler import consumer
from tests.messaging.served import QUICK, Service

OFTEN = replace(QUICK, lag_seconds=0.05, wait_seconds=0.05, cancel_seconds=0.2, stop_seconds=0.2)
DEADLINE_SECONDS = 10


@contextmanager
def lags(metric: Metric = Metric.LAG) -> Iterator[list[tuple[str, float]]]:
    """Collect partitions with their lag, as they are measured."""
    found: list[tuple[str, float]] = []

    def hear(measured: Measurement) -> None:
        if measured.metric is metric:
            assert measured.labels["topic"] == "payments"
            assert measured.labels["consumer_group"] == "billing"
            found.append((measured.labels["partition"], measured.value))

    stop = EVENTS.subscribe(hear, Measurement)
    try:
        yield found
    finally:
        stop()


async def until(found: list[tuple[str, float]], *wanted: tuple[str, float]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not set(wanted) <= set(found):
            await asyncio.sleep(0.01)


def test_the_lag_is_measured_while_a_handler_hangs():
    async def scenario() -> None:
        service, began = Service(), asyncio.Event()

        @consumer("billing", policy=service.consumer.settings)
        async def hangs(message, session) -> None:
            began.set()
            await asyncio.Event().wait()

        service.send(0, 1)
        runner = await service.runner(OFTEN, hangs)
        with lags() as found:
            running = asyncio.create_task(runner.run())
            await began.wait()
            await until(found, ("0", 2.0))
            service.send(2, 3, 4)
            await until(found, ("0", 5.0))
            runner.stop()
            await running

    asyncio.run(scenario())


def test_the_lag_in_seconds_is_the_age_of_the_oldest_record_that_is_not_handled():
    async def scenario() -> None:
        service, began, go_on = Service(), asyncio.Event(), asyncio.Event()

        @consumer("billing", policy=service.consumer.settings)
        async def hangs(message, session) -> None:
            began.set()
            await go_on.wait()

        runner = await service.runner(OFTEN, hangs)
        with lags(Metric.LAG_SECONDS) as found:
            running = asyncio.create_task(runner.run())
            await until(found, ("0", 0.0))
            service.send(0)
            sent_at = time.time()
            await began.wait()
            service.send(1)
            async with asyncio.timeout(DEADLINE_SECONDS):
                while not any(seconds > 0.5 for _, seconds in found):
                    await asyncio.sleep(0.01)
            assert max(seconds for _, seconds in found) <= time.time() - sent_at + 0.1
            found.clear()
            go_on.set()
            await until(found, ("0", 0.0))
            runner.stop()
            await running

    asyncio.run(scenario())


def test_a_partition_that_delivers_nothing_has_a_lag_too():
    async def scenario() -> None:
        service = Service(partitions=3)
        service.send(0, 1, partition=1)
        runner = await service.runner(OFTEN)
        with lags() as found:
            running = asyncio.create_task(runner.run())
            await until(found, ("0", 0.0), ("1", 0.0), ("2", 0.0))
            runner.stop()
            await running

    asyncio.run(scenario())


def test_a_broker_that_cannot_say_its_end_disturbs_nothing(caplog):
    async def scenario() -> None:
        service = Service()
        runner = await service.runner(OFTEN)
        with lags() as found, caplog.at_level(logging.WARNING, logger="semel.messaging"):
            running = asyncio.create_task(runner.run())
            await until(found, ("0", 0.0))
            service.broker.fail(BrokerFailure(Call.LOOK_UP, times=2))
            async with asyncio.timeout(DEADLINE_SECONDS):
                while "lag could not be measured" not in caplog.text:
                    await asyncio.sleep(0.01)
            service.broker.heal()
            found.clear()
            service.send(0)
            async with asyncio.timeout(DEADLINE_SECONDS):
                while not service.committed.get("payments/0"):
                    await asyncio.sleep(0.01)
            await until(found, ("0", 0.0))
            runner.stop()
            await running
        assert "runner waits" not in caplog.text
        assert service.paid == ["m0"]

    asyncio.run(scenario())


def test_nothing_is_measured_behind_the_end_of_the_runner():
    async def scenario() -> None:
        service = Service()
        runner = await service.runner(OFTEN)
        with lags() as found:
            running = asyncio.create_task(runner.run())
            await until(found, ("0", 0.0))
            runner.stop()
            await running
            found.clear()
            await asyncio.sleep(4 * OFTEN.lag_seconds)
            assert not found
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


def test_the_broker_is_not_asked_at_intervals_where_nobody_listens():
    async def scenario() -> None:
        service, asked = Service(), list[str]()
        runner = await service.runner(OFTEN)
        measure = runner.subscription.end

        async def end(partition):
            asked.append(str(partition))
            return await measure(partition)

        runner.subscription.end = end
        running = asyncio.create_task(runner.run())
        await asyncio.sleep(4 * OFTEN.lag_seconds)
        assert len(asked) <= 1, "once, for the list of consumers"
        asked.clear()
        with lags() as found:
            await until(found, ("0", 0.0))
        assert asked
        runner.stop()
        await running

    asyncio.run(scenario())
