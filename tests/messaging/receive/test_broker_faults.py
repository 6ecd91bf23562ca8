"""A broker that does not answer delays messages, and loses none."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from semel.codec import FromHeader
from semel.errors import Fenced, Retryable
from semel.memory.broker import BrokerFailure, Call, Failing, MemoryBroker
from semel.message import Message, Partition
from semel.messaging.consumer import consumer
from semel.messaging.failure import RetryableMessageError
from semel.messaging.receive.runner import Runner
from semel.messaging.settings import ConsumerSettings, RetryPolicy, RunnerSettings
from semel.policy.vocabulary import Mode
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
