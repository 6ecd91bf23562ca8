"""Fetching goes on behind a slow message, which holds its own lane and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from semel.codec import FromPayload
from semel.memory.broker import MemoryBroker
from semel.message import Message, Partition
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.lease import handle_leased
from semel.messaging.handler import consumer
from semel.messaging.outcome import DeadLettered
from semel.messaging.receive.runner import Runner
from semel.messaging.records import DeadLetterFilter
from semel.messaging.settings import ConsumerSettings, RetryPolicy, RunnerSettings
from semel.policy.vocabulary import Duplicates, GapPolicy, Mode
from tests.messaging.worlds import memory_database

TOPIC, GROUP = "payments", "billing"
PLACE = Partition(TOPIC, 0)


class Scene:
    """A service whose message s waits until it may end."""

    def __init__(self, messages: int, **settings: Any) -> None:
        self.handled: list[str] = []
        self.may_end = asyncio.Event()
        self.broker = MemoryBroker({TOPIC: 1})
        self.database = memory_database()
        self._settings = RunnerSettings(wait_seconds=0.05, **settings)
        for name in ["s", *(f"q{number}" for number in range(messages - 1))]:
            self.broker.put(TOPIC, f'{{"id": "{name}"}}'.encode(), key=name.encode())

        @consumer(GROUP, id_from=FromPayload("id"))
        async def handle(message: Message) -> None:
            if message.id in ("s", "s2"):
                await self.may_end.wait()
            self.handled.append(message.id)

        self.consumer = handle

    async def serve(self, until: int) -> int:
        """Run until so many are handled; return the committed offset then, and finish."""
        subscription = await self.broker.subscribe(GROUP, [TOPIC])
        runner = Runner(self.consumer, subscription, self.database, self._settings)
        running = asyncio.create_task(runner.run())
        async with asyncio.timeout(30):
            while len(self.handled) < until:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        early, committed = len(self.handled), self.broker.committed(GROUP).get(PLACE, 0)
        assert early == until
        self.may_end.set()
        async with asyncio.timeout(30):
            while self.broker.lag(GROUP, TOPIC):
                await asyncio.sleep(0.01)
        runner.stop()
        await running
        return committed


def test_all_others_are_handled_while_one_message_is_slow():
    async def scenario() -> None:
        # Leased: in a database in memory, an open transaction would hold up all the others.
        scene = Scene(600, mode=Mode.LEASED, concurrency=8)

        committed = await scene.serve(until=599)

        assert committed == 0, "the slow message is first, and was passed over"
        assert sorted(scene.handled) == sorted({"s", *(f"q{n}" for n in range(599))})

    asyncio.run(scenario())


def test_no_more_is_fetched_than_may_be_in_flight():
    async def scenario() -> None:
        scene = Scene(200, mode=Mode.LEASED, concurrency=4, max_records=10, max_in_flight=50)

        committed = await scene.serve(until=49)

        assert committed == 0
        assert len(scene.handled) == 200

    asyncio.run(scenario())


def test_slow_messages_stop_their_own_partitions_and_no_other():
    async def scenario() -> None:
        scene = Scene(100, mode=Mode.LEASED, concurrency=4, max_records=10, max_in_flight=50)
        scene.broker.create_topic("refunds", 3)
        for number in range(400):
            # Partition 0 has a slow message first, too; the others have none.
            name = "s2" if number == 0 else f"r{number}"
            value, key = f'{{"id": "{name}"}}'.encode(), name.encode()
            scene.broker.put("refunds", value, key=key, partition=number // 150)
        subscription = await scene.broker.subscribe(GROUP, [TOPIC, "refunds"])
        runner = Runner(scene.consumer, subscription, scene.database, scene._settings)
        running = asyncio.create_task(runner.run())
        free = {f"r{number}" for number in range(150, 400)}

        async with asyncio.timeout(30):
            while not free <= set(scene.handled):
                await asyncio.sleep(0.01)

        # Each of the two has less than 50 in flight.
        assert len(scene.handled) - len(free) < 2 * 50
        assert not {"s", "s2"} & set(scene.handled)
        scene.may_end.set()
        async with asyncio.timeout(30):
            while scene.broker.lag(GROUP, TOPIC) or scene.broker.lag(GROUP, "refunds"):
                await asyncio.sleep(0.01)
        runner.stop()
        await running
        assert len(scene.handled) == len(set(scene.handled)) == 500

    asyncio.run(scenario())


def test_a_handler_that_takes_too_long_is_cancelled_and_counts_as_a_failed_attempt():
    async def scenario() -> None:
        broker, database = MemoryBroker({TOPIC: 1}), memory_database()
        broker.put(TOPIC, b'{"id": "m1"}')
        settings = ConsumerSettings(
            handler_seconds=0.05, retry=RetryPolicy(max_attempts=2, initial_delay_seconds=0.0)
        )

        @consumer(GROUP, policy=settings, id_from=FromPayload("id"))
        async def hang(message: Message) -> None:
            await asyncio.Event().wait()

        subscription = await broker.subscribe(GROUP, [TOPIC])
        await Runner(hang, subscription, database).run_until_idle()

        async with database.begin() as unit:
            [letter] = await unit.dead_letters.find(DeadLetterFilter(GROUP), 10)
        assert (letter.error_code, letter.attempts) == ("HANDLER_TIMEOUT", 2)
        assert "longer than 0.05 s" in letter.reason
        assert broker.lag(GROUP, TOPIC) == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("gaps", [GapPolicy.FETCH, GapPolicy.REBUILD])
def test_a_repair_of_missing_versions_that_takes_too_long_is_cancelled_like_a_handler(gaps):
    async def scenario() -> None:
        settings = ConsumerSettings(
            handler_seconds=0.05, retry=RetryPolicy(max_attempts=1), versioned=True, gaps=gaps
        )

        async def hang(message: Message, session: object, gap: object) -> None:
            await asyncio.Event().wait()

        @consumer(GROUP, policy=settings, fetch_missing=hang, rebuild=hang)
        async def handle(message: Message) -> None: ...

        message = Message("m3", {}, b"{}", "k", version=3)
        async with asyncio.timeout(10):
            outcome = await handle_message(handle, memory_database(), message)

        assert isinstance(outcome, DeadLettered)
        assert outcome.failure.code == "HANDLER_TIMEOUT"

    asyncio.run(scenario())


def test_a_handler_that_takes_too_long_with_a_duplicate_is_cancelled():
    async def scenario() -> None:
        database = memory_database()
        settings = ConsumerSettings(
            handler_seconds=0.05,
            retry=RetryPolicy(max_attempts=1),
            duplicates=Duplicates.INVOKE,
        )

        @consumer(GROUP, policy=settings)
        async def handle(message: Message) -> None:
            if message.is_duplicate:
                await asyncio.Event().wait()

        await handle_message(handle, database, Message("m1", {}, b"{}"))
        async with asyncio.timeout(10):
            outcome = await handle_message(handle, database, Message("m1", {}, b"{}"))

        assert isinstance(outcome, DeadLettered)
        assert outcome.failure.code == "HANDLER_TIMEOUT"

    asyncio.run(scenario())


def test_a_leased_handler_has_a_time_limit_where_one_is_set():
    async def scenario() -> None:
        settings = ConsumerSettings(leased_handler_seconds=0.05, retry=RetryPolicy(max_attempts=1))

        @consumer(GROUP, policy=settings, mode=Mode.LEASED)
        async def hang(message: Message, lease: object) -> None:
            await asyncio.Event().wait()

        message = Message("m1", {}, b"{}")
        async with asyncio.timeout(10):
            outcome = await handle_leased(hang, memory_database(), message, "me")

        assert isinstance(outcome, DeadLettered)
        assert outcome.failure.code == "HANDLER_TIMEOUT"

    asyncio.run(scenario())


def test_a_handler_of_batches_that_takes_too_long_fails_with_the_same_code():
    async def scenario() -> None:
        broker, database = MemoryBroker({TOPIC: 1}), memory_database()
        broker.put(TOPIC, b'{"id": "m1"}')
        settings = ConsumerSettings(handler_seconds=0.05, retry=RetryPolicy(max_attempts=1))

        @consumer(GROUP, policy=settings, id_from=FromPayload("id"), batches=True)
        async def hang(messages: list[Message]) -> None:
            await asyncio.Event().wait()

        subscription = await broker.subscribe(GROUP, [TOPIC])
        batched = RunnerSettings(mode=Mode.BATCHED)
        await Runner(hang, subscription, database, batched).run_until_idle()

        async with database.begin() as unit:
            [letter] = await unit.dead_letters.find(DeadLetterFilter(GROUP), 10)
        assert letter.error_code == "HANDLER_TIMEOUT"

    asyncio.run(scenario())
