"""The relay sends everything, in order per key, and stops when it is told to."""

from __future__ import annotations

import asyncio
import random

import pytest

from semel.errors import Misuse, Permanent, Retryable
from semel.events import Events, Measurement, Metric
from semel.messaging.settings import RetryPolicy
from tests.messaging.outgoing import (
    Broker,
    by_key,
    entry,
    fill,
    id_of,
    keyed,
    left,
    relay,
    run,
    until,
)


def test_messages_leave_in_order_and_the_outbox_is_empty_afterwards(database):
    async def test(world):
        broker = Broker()
        sent = [f"k{n % 3}-{n}" for n in range(50)]
        await fill(world, *keyed(sent))

        assert await relay(world, broker, batch=7).run_until_empty() == 50

        assert broker.ids == sent
        assert max(broker.batches) == 7
        assert await left(world) == []

    run(database, test)


def test_the_broker_gets_key_value_and_headers_with_the_id_among_them(database):
    async def test(world):
        broker = Broker()
        async with world.database.begin() as unit:
            one = entry("1", "ä")
            await unit.outbox.add(
                [type(one)("1", "payments", b"\x00", "ä", {"trace": b"\xff"}), entry("2")]
            )

        await relay(world, broker).run_until_empty()

        first, second = broker.taken
        assert (first.topic, first.value, first.key) == ("payments", b"\x00", "ä".encode())
        assert first.headers == {"message-id": b"1", "trace": b"\xff"}
        assert (second.key, second.headers) == (None, {"message-id": b"2"})

    run(database, test)


def test_other_outboxes_are_left_alone(memory):
    async def test(world):
        broker = Broker()
        await fill(world, entry("1"))
        await relay(world, broker, outbox="other").run_until_empty()

        assert (broker.ids, await left(world)) == ([], ["1"])

    run(memory, test)


@pytest.mark.postgres
def test_a_message_whose_transaction_commits_late_is_sent(postgres):
    async def test(world):
        broker = Broker()
        working = relay(world, broker, batch=2, poll_seconds=0.02)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(working.run())
            async with world.database.begin() as late:
                await late.outbox.add([entry("late")])
                await fill(world, *(entry(str(n)) for n in range(5)))
                await until(lambda: len(broker.taken) == 5)
            await until(lambda: len(broker.taken) == 6)
            working.stop()

        assert broker.ids == ["0", "1", "2", "3", "4", "late"]
        assert await left(world) == []

    run(postgres, test)


def test_while_the_broker_is_away_everything_waits(database):
    async def test(world):
        broker = Broker()
        broker.outages = 5
        await fill(world, *(entry(str(n)) for n in range(5)))

        await relay(world, broker, batch=2).run_until_empty()

        assert broker.ids == ["0", "1", "2", "3", "4"]
        assert await left(world) == []

    run(database, test)


def test_a_publisher_that_does_not_answer_for_every_message_is_misused(memory):
    class Forgetful(Broker):
        async def publish(self, batch):
            return (await super().publish(batch))[:-1]

    async def test(world):
        await fill(world, entry("1"), entry("2"))

        with pytest.raises(Misuse, match="answered for 1 of 2"):
            await relay(world, Forgetful()).run()

        assert await left(world) == ["1", "2"]

    run(memory, test)


def test_a_stopped_relay_finishes_its_batch_and_resigns(database):
    async def test(world):
        broker = Broker()
        working = relay(world, broker, batch=2)
        await fill(world, *(entry(str(n)) for n in range(6)))

        async def stop(batch):
            working.stop()

        broker.before = stop
        await working.run()

        assert broker.ids == ["0", "1"]
        assert await left(world) == ["2", "3", "4", "5"]
        async with world.database.begin() as unit:
            leader = await unit.outbox.leader("outbox")
        assert leader.owner == ""

    run(database, test)


def test_a_relay_can_be_stopped_while_the_broker_is_away_and_run_again(memory):
    async def test(world):
        broker = Broker()
        broker.outages = 1_000_000
        slow = RetryPolicy(initial_delay_seconds=60.0, max_delay_seconds=60.0)
        working = relay(world, broker, retry=slow)
        await fill(world, entry("1"))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(working.run())
            await until(lambda: broker.outages < 1_000_000)
            working.stop()
        broker.outages = 0

        assert await working.run_until_empty() == 1

    run(memory, test)


def test_numbers_are_measured(memory):
    async def test(world):
        broker, events, seen = Broker(), Events(), []
        events.subscribe(seen.append, Measurement)
        broker.refusals = {"2": [Permanent("no")], "3": [Retryable("not now"), ValueError()]}
        await fill(world, entry("1"), entry("2"), entry("3"), entry("4", topic="refunds"))
        await world.age(10)

        await relay(world, broker, events=events).run_until_empty()

        found = {(m.metric, *m.labels.values()): m.value for m in seen}
        assert found[Metric.OUTBOX_PENDING, "outbox"] == 4
        assert found[Metric.OUTBOX_OLDEST_SECONDS, "outbox"] >= 10
        assert found[Metric.OUTBOX_PUBLISHED, "outbox", "payments", "ok"] == 1
        assert found[Metric.OUTBOX_PUBLISHED, "outbox", "refunds", "ok"] == 1
        assert found[Metric.OUTBOX_PUBLISHED, "outbox", "payments", "parked"] == 1
        assert found[Metric.OUTBOX_PUBLISHED, "outbox", "payments", "retried"] == 1

    run(memory, test)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_fails_when_every_key_keeps_its_order_and_nothing_is_lost(memory, seed):
    dice = random.Random(seed)
    names = [f"k{dice.randrange(8)}-{n:03}" for n in range(120)]

    class Unreliable(Broker):
        async def publish(self, batch):
            self.outages = dice.choice([0, 0, 0, 1])
            self.batch_error = dice.choice([None, None, None, ValueError("?")])
            self.refusals = {
                id_of(m): [dice.choice([Retryable("later"), ConnectionError()])]
                for m in batch
                if dice.random() < 0.05
            }
            return await super().publish(batch)

    async def test(world):
        broker = Unreliable()
        working = relay(world, broker, batch=dice.randrange(1, 30), poll_seconds=0.001)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(working.run())
            for begin in range(0, 120, 30):
                batch = names[begin : begin + 30]
                await fill(world, *keyed(batch))
                await asyncio.sleep(0.002)
            await until(lambda: set(broker.ids) == set(names))
            working.stop()

        assert sorted(broker.ids) == sorted(names)
        assert by_key(broker.ids) == by_key(names)
        assert await left(world) == []

    run(memory, test)
