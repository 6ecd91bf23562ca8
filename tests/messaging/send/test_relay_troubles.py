"""A publisher that hangs, and a broker that is away, cost time and nothing else."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from itertools import pairwise

import pytest

from semel.errors import Misuse, Permanent, Retryable
from semel.messaging.settings import RetryPolicy
from semel.operate.retention import erase
from tests.messaging.outgoing import Broker, entry, fill, keyed, left, relay, run, until


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
    monkeypatch.setattr("semel.messaging.send.publish.CLEAN_UP_SECONDS", 0.05)

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


async def say_nothing():
    await asyncio.sleep(3600)


async def find_nobody():
    await asyncio.sleep(0.01)
    raise Retryable("nobody is there")


@pytest.mark.parametrize("silence", [say_nothing, find_nobody])
def test_one_by_one_the_first_silence_ends_the_round(memory, silence):
    class Silent(Broker):
        singles = 0
        silences = 0

        async def publish(self, batch):
            if len(batch) > 1 and self.singles < 2:
                raise ValueError("one of them")
            self.singles += 1
            if len(batch) == 1 and self.singles >= 2:
                self.silences += 1
                await silence()
            return await super().publish(batch)

    async def test(world):
        broker = Silent()
        await fill(world, *(entry(f"k{n}-1", f"k{n}") for n in range(20)))

        began = time.monotonic()
        await relay(world, broker, publish_seconds=0.2).run_until_empty()

        assert time.monotonic() - began < 3
        assert broker.silences == 1
        assert len(set(broker.ids)) == 20
        assert await left(world) == []

    run(memory, test)


def test_one_by_one_an_answer_about_one_message_is_no_silence(memory):
    async def test(world):
        broker = Broker()
        broker.batch_error = ValueError("one of them")
        broker.refusals = {"k1-1": [Retryable("its partition has no leader")]}
        await fill(world, *(entry(f"k{n}-1", f"k{n}") for n in range(20)))
        working = relay(world, broker)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(working.run())
            await until(lambda: len(broker.taken) == 19)
            working.stop()

        assert await left(world) == ["k1-1"]

    run(memory, test)


@pytest.mark.parametrize("wrong", [{"publish_seconds": 0}, {"stop_seconds": -1}])
def test_a_relay_needs_time(memory, wrong):
    async def test(world):
        with pytest.raises(
            Misuse, match="publish_seconds must be greater than 0, and stop_seconds at least 0"
        ):
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
        await fill(world, *keyed(names))

        assert await relay(world, broker, batch=2).run_until_empty() == 4

        assert broker.ids == ["ann-1", "bob-1", "bob-2", "bob-3"]
        assert await left(world) == ["ann-2", "ann-3"]

    run(database, test)


def test_an_erased_message_holds_no_others_of_its_key(database):
    async def test(world):
        broker = Broker()
        broker.refusals = {"store-1": [Permanent("too large")]}
        await fill(world, *(entry(f"store-{n}", "store") for n in range(1, 5)))
        await relay(world, broker).run_until_empty()
        for message_id in ("store-1", "store-3"):
            await erase(world.database, message_id=message_id, actor="bob", reason="request 4711")

        assert await relay(world, broker).run_until_empty() == 2

        assert broker.ids == ["store-2", "store-4"]
        assert await left(world) == ["store-1", "store-3"]

    run(database, test)


def test_what_comes_while_the_broker_is_away_goes_behind_what_was_there(memory):
    async def test(world):
        async def add():
            await fill(world, entry("a-4", "a"), entry("b-2", "b"))

        broker = Away(add)
        names = ["a-1", "b-1", "a-2", "a-3"]
        await fill(world, *keyed(names))

        await relay(world, broker, batch=2).run_until_empty()

        assert broker.ids == [*names, "a-4", "b-2"]
        assert await left(world) == []

    run(memory, test)


def test_the_longer_the_broker_is_away_the_longer_are_the_pauses_until_it_is_back(memory):
    async def test(world):
        broker, asked = Broker(), []

        async def note(batch):
            asked.append(time.monotonic())
            broker.outages = 1 if len(asked) in (1, 2, 3, 4, 5, 7) else 0

        broker.before = note
        slower = RetryPolicy(initial_delay_seconds=0.02, max_delay_seconds=0.64, jitter=False)
        await fill(world, entry("1"), entry("2"))
        await relay(world, broker, batch=1, retry=slower).run_until_empty()

        pauses = [later - earlier for earlier, later in pairwise(asked)]
        expected = [0.02, 0.04, 0.08, 0.16, 0.32, 0.0, 0.02]
        assert all(found >= least for found, least in zip(pauses, expected, strict=True))
        assert pauses[-1] < 0.6

    run(memory, test)
