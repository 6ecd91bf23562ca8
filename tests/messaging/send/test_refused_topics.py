"""A topic that the broker refuses as a whole costs time and nothing else."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from semel.errors import Permanent
from semel.messaging.send.outbox import Leadership
from semel.messaging.settings import RetryPolicy
from tests.messaging.outgoing import (
    Broker,
    Counted,
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

QUICK = RetryPolicy(
    max_attempts=3, initial_delay_seconds=0.02, max_delay_seconds=0.02, jitter=False
)


async def parked(world):
    async with world.database.begin() as unit:
        return [e.message_id for e in await unit.outbox.parked("outbox", 1000)]


class Denying(Broker):
    """Takes nothing of the topic payments until it may."""

    def __init__(self, error):
        super().__init__()
        self.error = error
        self.is_denied = True
        self.denied = []

    async def publish(self, batch):
        if not self.is_denied:
            return await super().publish(batch)
        if self.before is not None:
            await self.before(batch)
        self.denied.append([id_of(m) for m in batch if m.topic == "payments"])
        return [self.error if m.topic == "payments" else None for m in batch]


@pytest.mark.parametrize("error", [PermissionError("denied"), Permanent("no such topic")])
def test_a_topic_that_is_refused_for_a_while_parks_nothing(database, error):
    async def test(world):
        broker = Denying(error)
        names = [f"k{n % 50}-{n:03}" for n in range(200)]
        await fill(world, *keyed(names))
        working = relay(world, broker, retry=QUICK, poll_seconds=0.005)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(working.run())
            await until(lambda: len(broker.denied) >= 2)
            broker.is_denied = False
            await until(lambda: len(broker.taken) == 200)
            working.stop()

        assert len(broker.denied[0]) == 200
        assert {len(ahead) for ahead in broker.denied[1:]} == {10}
        assert by_key(broker.ids) == by_key(names)
        assert sorted(broker.ids) == sorted(names)
        assert await left(world) == []

    run(database, test)


def test_a_topic_that_stays_refused_is_parked_a_few_keys_at_a_time(memory, caplog):
    async def test(world):
        broker = Denying(PermissionError("denied"))

        async def stop_at_the_third(batch):
            if len(broker.denied) == 2:
                working.stop()

        broker.before = stop_at_the_third
        await fill(world, *(entry(f"k{n:02}-1", f"k{n:02}") for n in range(40)))
        working = relay(world, broker, retry=QUICK, poll_seconds=0.005)
        await working.run()

        assert await parked(world) == [f"k{n:02}-1" for n in range(10)]

    with caplog.at_level(logging.ERROR, "semel.messaging"):
        run(memory, test)

    told = [r for r in caplog.records if r.getMessage() == "topic refused, trying again"]
    assert {(r.outbox, r.topic, r.reason) for r in told} == {
        ("outbox", "payments", "PermissionError: denied")
    }


def test_other_topics_go_on(memory):
    async def test(world):
        broker = Denying(PermissionError("denied"))
        await fill(world, *(entry(f"p{n}", str(n)) for n in range(20)))
        await fill(world, *(entry(f"r{n}", str(n), "refunds") for n in range(20)))
        working = relay(world, broker, retry=QUICK, poll_seconds=0.005)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(working.run())
            await until(lambda: working.published == 20)
            working.stop()

        assert await left(world) == [f"p{n}" for n in range(20)]
        assert await parked(world) == []

    run(memory, test)


@pytest.mark.parametrize("behind", [0, 1])
def test_a_refused_topic_with_nothing_left_to_send_is_forgotten(database, behind):
    async def test(world):
        broker, counted = Denying(PermissionError("denied")), Counted(world.database)
        names = [f"k{n}-{m}" for m in range(1 + behind) for n in range(6)]
        await fill(world, *keyed(names))
        working = relay(replace(world, database=counted), broker, retry=QUICK, poll_seconds=0.01)

        assert await working.run_until_empty() == 0

        assert await parked(world) == names[:6]
        assert await left(world) == names
        assert counted.transactions < 100

    run(database, test)


async def drop_all(world):
    mine = await leadership_of(world)
    async with world.database.begin() as unit:
        places = [e.place for e in await unit.outbox.read("outbox", 0, 100)]
        await unit.outbox.delete(mine, places)


async def erase_all(world):
    async with world.database.begin() as unit:
        for e in await unit.outbox.read("outbox", 0, 100):
            await unit.outbox.erase(message_id=e.message_id)


async def leadership_of(world):
    async with world.database.begin() as unit:
        leader = await unit.outbox.leader("outbox")
    return Leadership("outbox", leader.owner, leader.epoch)


@pytest.mark.parametrize("take_away", [drop_all, erase_all])
def test_when_somebody_takes_a_refused_topics_messages_away_nobody_looks_for_them(
    database, take_away
):
    async def test(world):
        broker, counted = Denying(PermissionError("denied")), Counted(world.database)
        await fill(world, *(entry(f"k{n}-1", f"k{n}") for n in range(6)))
        working = relay(replace(world, database=counted), broker, retry=QUICK, poll_seconds=0.05)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(working.run())
            await until(lambda: len(broker.denied) == 1)
            await take_away(world)
            before = counted.transactions
            await asyncio.sleep(0.5)
            idle = counted.transactions - before
            broker.is_denied = False
            await fill(world, entry("k9-1", "k9"))
            await until(lambda: broker.ids == ["k9-1"])
            working.stop()

        assert idle < 100

    run(database, test)
