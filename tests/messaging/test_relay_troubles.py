"""A publisher that hangs, and a topic that is refused as a whole, cost time and nothing else."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest

from semel.errors import Misuse, Permanent
from semel.messaging.erase import erase
from semel.messaging.outbox import Leadership
from semel.messaging.retry import RetryPolicy
from tests.messaging.outgoing import (
    DATABASES,
    Broker,
    Counted,
    by_key,
    entry,
    fill,
    id_of,
    left,
    opened,
    relay,
    run,
    until,
)

QUICK = RetryPolicy(
    max_attempts=3, initial_delay_seconds=0.02, max_delay_seconds=0.02, jitter=False
)


@pytest.fixture(params=DATABASES)
def database(request):
    return opened(request.param, request)


@pytest.fixture
def memory(request):
    return opened("memory", request)


async def parked(world):
    async with world.database.begin() as unit:
        return [e.message_id for e in await unit.outbox.parked("outbox", 1000)]


class Hanging(Broker):
    """Takes what it gets, and does not say so: the first so many times, or for ever."""

    def __init__(self, hangs=10**9, *, is_stubborn=False):
        super().__init__()
        self.hangs = hangs
        self.asked = 0
        self.is_stubborn = is_stubborn

    async def publish(self, batch):
        self.asked += 1
        if self.asked > self.hangs:
            return await super().publish(batch)
        await super().publish(batch)
        try:
            return await asyncio.sleep(3600)
        except asyncio.CancelledError:
            if not self.is_stubborn:
                raise
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3)
        return []


def test_a_publisher_that_does_not_answer_is_asked_again_with_the_same_ids(database):
    async def test(world):
        broker = Hanging(hangs=2)
        await fill(world, *(entry(f"a-{n}", "a") for n in range(3)))

        sent = await relay(world, broker, publish_seconds=0.05).run_until_empty()

        assert sent == 3
        assert broker.ids == ["a-0", "a-1", "a-2"] * 3
        assert await left(world) == []

    run(database, test)


def test_a_stop_ends_a_relay_whose_publisher_hangs_and_hands_the_leadership_over(database):
    async def test(world):
        broker = Hanging()
        await fill(world, entry("1"))
        working = relay(world, broker, stop_seconds=0.1)
        task = asyncio.create_task(working.run())
        await until(lambda: broker.asked == 1)

        began = time.monotonic()
        working.stop()
        await task

        assert time.monotonic() - began < 5
        assert await left(world) == ["1"]
        assert await relay(world, Broker()).run_until_empty() == 1

    run(database, test)


def test_even_a_publisher_that_ignores_its_cancellation_stops_nobody(memory, monkeypatch):
    monkeypatch.setattr("semel.messaging.publishing.CLEAN_UP_SECONDS", 0.05)

    async def test(world):
        broker = Hanging(is_stubborn=True)
        await fill(world, entry("1"))
        working = relay(world, broker, publish_seconds=0.05, stop_seconds=0.05)
        task = asyncio.create_task(working.run())
        await until(lambda: broker.asked == 2)

        began = time.monotonic()
        working.stop()
        await task

        assert time.monotonic() - began < 2

    run(memory, test)


def test_a_stop_lets_the_batch_in_hand_end(memory):
    async def test(world):
        broker = Broker()
        is_asked = asyncio.Event()

        async def slowly(batch):
            is_asked.set()
            await asyncio.sleep(0.1)

        broker.before = slowly
        await fill(world, entry("1"))
        working = relay(world, broker)
        task = asyncio.create_task(working.run())
        await is_asked.wait()
        working.stop()
        await task

        assert (broker.ids, await left(world)) == (["1"], [])

    run(memory, test)


def test_one_by_one_the_first_silence_ends_the_round(memory):
    class Silent(Broker):
        singles = 0

        async def publish(self, batch):
            if len(batch) > 1 and self.singles < 2:
                raise ValueError("one of them")
            self.singles += 1
            if self.singles == 2:
                await asyncio.sleep(3600)
            return await super().publish(batch)

    async def test(world):
        broker = Silent()
        await fill(world, *(entry(f"k{n}-1", f"k{n}") for n in range(20)))

        began = time.monotonic()
        await relay(world, broker, publish_seconds=0.2).run_until_empty()

        assert time.monotonic() - began < 3
        assert len(set(broker.ids)) == 20
        assert await left(world) == []

    run(memory, test)


@pytest.mark.parametrize("wrong", [{"publish_seconds": 0}, {"stop_seconds": -1}])
def test_a_relay_needs_time(memory, wrong):
    async def test(world):
        with pytest.raises(Misuse, match="needs some time"):
            relay(world, Broker(), **wrong)

    run(memory, test)


class Away(Broker):
    """Nobody is there until it comes back, after something was done meanwhile."""

    def __init__(self, meanwhile):
        super().__init__()
        self.meanwhile = meanwhile
        self.asked = 0

    async def publish(self, batch):
        self.asked += 1
        if self.asked == 2:
            await self.meanwhile()
        self.outages = 1 if self.asked in (2, 3) else 0
        return await super().publish(batch)


def test_what_is_erased_while_the_broker_is_away_is_not_sent_when_it_is_back(database):
    async def test(world):
        async def erase_ann():
            await erase(world.database, key="ann", actor="bob", reason="request 4711")

        broker = Away(erase_ann)
        names = ["ann-1", "bob-1", "ann-2", "bob-2", "ann-3", "bob-3"]
        await fill(world, *(entry(name, name.partition("-")[0]) for name in names))

        assert await relay(world, broker, batch=2).run_until_empty() == 4

        assert broker.ids == ["ann-1", "bob-1", "bob-2", "bob-3"]
        assert await left(world) == ["ann-2", "ann-3"]

    run(database, test)


def test_what_comes_while_the_broker_is_away_goes_behind_what_was_there(memory):
    async def test(world):
        async def add():
            await fill(world, entry("a-4", "a"), entry("b-2", "b"))

        broker = Away(add)
        names = ["a-1", "b-1", "a-2", "a-3"]
        await fill(world, *(entry(name, name.partition("-")[0]) for name in names))

        await relay(world, broker, batch=2).run_until_empty()

        assert broker.ids == [*names, "a-4", "b-2"]
        assert await left(world) == []

    run(memory, test)


def test_the_longer_the_broker_is_away_the_longer_are_the_pauses(memory):
    async def test(world):
        broker, asked = Broker(), []

        async def note(batch):
            asked.append(time.monotonic())

        broker.before, broker.outages = note, 4
        slower = RetryPolicy(initial_delay_seconds=0.02, max_delay_seconds=0.08, jitter=False)
        await fill(world, entry("1"))
        await relay(world, broker, retry=slower).run_until_empty()

        pauses = [later - earlier for earlier, later in pairwise(asked)]
        assert all(
            found >= least for found, least in zip(pauses, [0.02, 0.04, 0.08, 0.08], strict=True)
        )

    run(memory, test)


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
        await fill(world, *(entry(name, name.partition("-")[0]) for name in names))
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
        await fill(world, *(entry(name, name.partition("-")[0]) for name in names))
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
