"""A broker that does not answer delays messages, and loses none."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from semel.codec import FromHeader
from semel.errors import Fenced, Retryable
from semel.memory.broker import BrokerFailure, Call, Failing, MemoryBroker
from semel.message import Message, Partition
from semel.messaging.failure import RetryableMessageError
from semel.messaging.handler import consumer
from semel.messaging.receive.broker import MemberEnded
from semel.messaging.receive.runner import Runner
from semel.messaging.settings import ConsumerSettings, RetryPolicy, RunnerSettings
from semel.policy.vocabulary import Mode
from semel.sql.database import SqlDatabase
from semel.sql.faults import DatabaseUnavailable
from tests.messaging.worlds import Effect, effects, memory_database

QUICK = RunnerSettings(wait_seconds=0.01, stop_seconds=1.0, max_records=2, lag_seconds=0.0)
POLICY = ConsumerSettings(
    retry=RetryPolicy(initial_delay_seconds=0.01, max_delay_seconds=0.02, jitter=False),
    held_retry_seconds=0.01,
)
MESSAGES = 8


async def handled(*failures: BrokerFailure, mode: Mode = Mode.TRANSACTIONAL) -> list[str]:
    """Work off a topic while calls fail; return what was handled."""
    broker = MemoryBroker({"payments": 2})
    database = memory_database()

    @consumer("billing", policy=POLICY, id_from=FromHeader("message-id"))
    async def handle(message: Message, session: AsyncSession) -> None:
        session.add(Effect("paid", message.id))
        if message.id == "m3" and message.attempt == 1:
            raise RetryableMessageError("down")

    for number in range(MESSAGES):
        headers = {"message-id": f"m{number}".encode()}
        broker.put("payments", b"{}", headers=headers, partition=number % 2)
    subscription = await broker.subscribe("billing", ["payments"])
    await broker.settled("billing")
    runner = Runner(handle, subscription, database, replace(QUICK, mode=mode))
    broker.fail(*failures)
    running = asyncio.create_task(runner.run())
    async with asyncio.timeout(10):
        while broker.lag("billing", "payments"):
            assert not running.done(), running.result()
            await asyncio.sleep(0.01)
    runner.stop()
    await asyncio.wait_for(running, 5)
    assert broker.committed("billing") == {Partition("payments", n): 4 for n in range(2)}
    await broker.close()
    return sorted(effects(database, "paid"))


def test_a_member_whose_client_has_failed_permanently_ends_its_runner():
    with pytest.raises(MemberEnded):
        asyncio.run(handled(BrokerFailure(Call.FETCH, error=MemberEnded("fatal"), times=None)))


ALL = sorted(f"m{n}" for n in range(MESSAGES))


@pytest.mark.parametrize("mode", [Mode.TRANSACTIONAL, Mode.BATCHED])
@pytest.mark.parametrize("after", range(6))
@pytest.mark.parametrize("times", [1, 2, 3])
def test_questions_that_are_not_answered_lose_nothing(after, times, mode):
    failure = BrokerFailure(Call.LOOK_UP, times=times, after=after)

    assert asyncio.run(handled(failure, mode=mode)) == ALL


@pytest.mark.parametrize("failing", Failing)
@pytest.mark.parametrize("after", range(3))
def test_commits_that_fail_lose_nothing(failing, after):
    failure = BrokerFailure(Call.COMMIT, failing, times=1, after=after)

    assert asyncio.run(handled(failure)) == ALL


def test_fetches_that_fail_lose_nothing():
    assert asyncio.run(handled(BrokerFailure(Call.FETCH, times=3, after=1))) == ALL


@pytest.mark.parametrize("times", [0, 1])
@pytest.mark.parametrize("after", range(4))
def test_a_commit_that_is_fenced_for_partitions_that_stay_loses_nothing(after, times):
    """As with a rebalance that takes some partitions only: what stays goes on where it was."""
    fenced = BrokerFailure(Call.COMMIT, error=Fenced("a partition went"), after=after)
    unanswered = BrokerFailure(Call.LOOK_UP, error=Retryable("no answer"), times=times, after=3)

    assert asyncio.run(handled(fenced, unanswered)) == ALL


async def service(broker: MemoryBroker, database: SqlDatabase, messages: int = 1) -> Runner:
    @consumer("billing", policy=POLICY, id_from=FromHeader("message-id"))
    async def handle(message: Message, session: AsyncSession) -> None:
        session.add(Effect("paid", message.id))

    for number in range(messages):
        broker.put("payments", b"{}", headers={"message-id": f"m{number}".encode()})
    subscription = await broker.subscribe("billing", ["payments"])
    await broker.settled("billing")
    return Runner(handle, subscription, database, QUICK)


@pytest.mark.parametrize("times", [1, 3])
def test_a_refused_commit_is_repeated_before_a_job_ends(times):
    async def scenario() -> None:
        broker = MemoryBroker({"payments": 1})
        runner = await service(broker, memory_database(), 3)
        broker.fail(BrokerFailure(Call.COMMIT, times=times))

        await runner.run_until_idle()

        assert broker.lag("billing", "payments") == 0

    asyncio.run(scenario())


def test_a_refused_commit_is_repeated_while_nothing_comes_and_when_the_service_stops():
    async def scenario(*, stops: bool) -> None:
        broker, database = MemoryBroker({"payments": 1}), memory_database()
        runner = await service(broker, database, 3)
        refusing = BrokerFailure(Call.COMMIT, times=None)
        broker.fail(refusing)
        running = asyncio.create_task(runner.run())
        async with asyncio.timeout(10):
            while len(effects(database, "paid")) < 3:
                await asyncio.sleep(0.01)
            if stops:
                runner.stop()
                await asyncio.sleep(0.03)
            refusing.times = 0
            while not stops and broker.lag("billing", "payments"):
                await asyncio.sleep(0.01)
            runner.stop()
            await running
        assert broker.lag("billing", "payments") == 0

    asyncio.run(scenario(stops=False))
    asyncio.run(scenario(stops=True))


def test_a_stop_during_an_outage_of_the_database_returns_and_does_not_raise(monkeypatch):
    async def scenario() -> None:
        broker, database = MemoryBroker({"payments": 1}), memory_database()
        runner = await service(broker, database)
        runner.settings = replace(QUICK, stop_seconds=0.2, cancel_seconds=0.1)
        running = asyncio.create_task(runner.run())
        async with asyncio.timeout(10):
            while not effects(database, "paid"):
                await asyncio.sleep(0.01)

            @asynccontextmanager
            async def away():
                raise DatabaseUnavailable("the server is down")
                yield

            monkeypatch.setattr(database, "begin", away)
            broker.put("payments", b"{}", headers={"message-id": b"m9"})
            await asyncio.sleep(0.05)
            runner.stop()
            await asyncio.wait_for(running, 3)
        monkeypatch.undo()
        assert broker.lag("billing", "payments") >= 1, "what was not handled comes back"

    asyncio.run(scenario())
