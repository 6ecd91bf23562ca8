"""One relay leads, another one follows it, and one that was replaced changes nothing."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from semel.crashpoints import CrashPoint, install
from semel.errors import InDoubt, Retryable
from semel.lease import Owner
from semel.messaging.send.relay import LEASE_SECONDS
from semel.testing.clock import SimulatedClock
from tests.messaging.outgoing import Broker, entry, fill, left, pass_time, relay, run, until


async def lead(world, owner, *, instead_of=""):
    async with world.database.begin() as unit:
        return await unit.outbox.lead("outbox", owner, LEASE_SECONDS, instead_of=instead_of)


async def leader(world):
    async with world.database.begin() as unit:
        return await unit.outbox.leader("outbox")


def test_of_two_relays_one_leads_and_the_other_follows_when_it_stops(database):
    async def test(world):
        first, second = Broker(), Broker()
        leading = relay(world, first, poll_seconds=0.01)
        waiting = relay(world, second, poll_seconds=0.01, lease_seconds=0.15)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(leading.run())
            await fill(world, entry("1"))
            await until(lambda: first.ids == ["1"])
            tasks.create_task(waiting.run())
            await fill(world, entry("2"))
            await until(lambda: first.ids == ["1", "2"])
            leading.stop()
            await fill(world, entry("3"))
            await until(lambda: "3" in first.ids + second.ids)
            await fill(world, entry("4"))
            await until(lambda: "4" in second.ids)
            waiting.stop()

        assert sorted(first.ids + second.ids) == ["1", "2", "3", "4"]
        assert await left(world) == []

    run(database, test)


def test_a_leader_that_is_silent_is_replaced_when_its_lease_ends(database):
    async def test(world):
        broker = Broker()
        await fill(world, entry("1"))
        await lead(world, "elsewhere")
        working = relay(world, broker, lease_seconds=0.06)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(working.run())
            await asyncio.sleep(0.1)
            assert broker.ids == []
            await pass_time(world, LEASE_SECONDS + 1)
            await until(lambda: broker.ids == ["1"])
            working.stop()

        assert (await leader(world)).epoch == 2

    run(database, test)


def test_a_leader_whose_process_is_gone_is_not_waited_for(database):
    async def test(world):
        broker = Broker()
        await fill(world, entry("1"))
        gone = replace(Owner.here(), started="1")
        await lead(world, json.dumps(gone.to_json()))

        await relay(world, broker).run_until_empty()

        assert broker.ids == ["1"]

    run(database, test)


def test_a_leader_that_is_replaced_while_it_publishes_deletes_nothing(database):
    async def test(world):
        broker = Broker()
        working = relay(world, broker)
        await fill(world, entry("1"), entry("2"))

        async def replace_it(batch):
            held = await leader(world)
            assert await lead(world, "two", instead_of=held.owner) is not None
            working.stop()

        broker.before = replace_it
        await working.run()

        assert broker.ids == ["1", "2"]
        assert await left(world) == ["1", "2"]
        assert (await leader(world)).owner == "two"

    run(database, test)


def test_a_leader_that_hangs_in_the_broker_notices_that_it_was_replaced(memory):
    async def test(world):
        class Hanging(Broker):
            cancelled = False

            async def publish(self, batch):
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    self.cancelled = True
                    raise

        broker = Hanging()
        working = relay(world, broker, lease_seconds=0.15)
        await fill(world, entry("1"))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(working.run())
            while (held := await leader(world)) is None:
                await asyncio.sleep(0.005)
            await lead(world, "two", instead_of=held.owner)
            await until(lambda: broker.cancelled)
            working.stop()

        assert await left(world) == ["1"]

    run(memory, test)


class Away:
    """A database that can be out of reach, or lose the answer to a commit."""

    def __init__(self, database):
        self._database = database
        self.is_away = False
        self.lost_answers = 0

    @asynccontextmanager
    async def begin(self):
        if self.is_away:
            raise Retryable("the database is away")
        async with self._database.begin() as unit:
            yield unit
        if self.lost_answers:
            self.lost_answers -= 1
            raise InDoubt("the answer was lost")


def test_a_leader_without_its_database_stops_publishing_when_its_lease_ends(memory):
    async def test(world):
        away, broker = Away(world.database), Broker()
        seen_away = []

        async def go_away(batch):
            seen_away.append(away.is_away)
            away.is_away = True

        broker.before = go_away
        broker.outages = 1_000_000
        working = relay(replace(world, database=away), broker, lease_seconds=0.1)
        await fill(world, entry("1"))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(working.run())
            await asyncio.sleep(0.3)
            calls = len(seen_away)
            broker.outages, broker.before = 0, None
            await asyncio.sleep(0.1)
            assert len(seen_away) == calls
            assert broker.ids == []
            away.is_away = False
            await until(lambda: broker.ids == ["1"])
            working.stop()

        assert await left(world) == []

    run(memory, test)


def test_a_database_that_comes_back_within_the_lease_costs_no_repetition(memory):
    async def test(world):
        away, broker = Away(world.database), Broker()

        async def go_away(batch):
            away.is_away = True

        broker.before = go_away
        working = relay(replace(world, database=away), broker, batch=2)
        await fill(world, *(entry(str(n)) for n in range(4)))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(working.run_until_empty())
            await until(lambda: len(broker.taken) >= 2)
            broker.before = None
            await asyncio.sleep(0.05)
            away.is_away = False

        assert broker.ids == ["0", "1", "2", "3"]
        assert await left(world) == []

    run(memory, test)


@pytest.mark.parametrize("lost", range(1, 8))
def test_an_answer_that_is_lost_costs_nothing(memory, lost):
    async def test(world):
        away, broker = Away(world.database), Broker()
        away.lost_answers = lost
        await fill(world, *(entry(str(n)) for n in range(6)))

        await relay(replace(world, database=away), broker, batch=2).run_until_empty()

        assert broker.ids == ["0", "1", "2", "3", "4", "5"]
        assert await left(world) == []

    run(memory, test)


def test_a_leader_that_slept_through_its_lease_reads_again_before_it_publishes(memory):
    async def test(world):
        clock, seen = SimulatedClock(), []
        await fill(world, entry("a"))

        def sleep_once(point, _):
            seen.append(point)
            if seen == [CrashPoint.RELAY_READ_AFTER]:
                clock.advance(1.0)

        before = install(sleep_once)
        try:
            await relay(world, Broker(), lease_seconds=0.3, clock=clock).run_until_empty()
        finally:
            install(before)

        assert seen[:3] == [
            CrashPoint.RELAY_READ_AFTER,
            CrashPoint.RELAY_READ_AFTER,
            CrashPoint.RELAY_PUBLISH_BEFORE,
        ]
        assert await left(world) == []

    run(memory, test)


def test_a_relay_that_is_to_empty_its_outbox_looks_behind_its_cursor_once_more(memory):
    async def test(world):
        broker = Broker()
        # So many wait behind the first that it is long until the next whole sweep.
        behind = [entry(f"k-{n}", "k") for n in range(1, 1500)]
        await fill(world, entry("k-0", "k"), *behind, entry("b"))
        leadership = await lead(world, "somebody")
        async with world.database.begin() as unit:
            [first] = await unit.outbox.read("outbox", 0, 1)
            await unit.outbox.park(leadership, first.place, "too large")
            await unit.outbox.resign(leadership)

        async def let_go_on(batch):
            async with world.database.begin() as unit:
                await unit.outbox.unpark("outbox", "k-0")

        broker.before = let_go_on
        await relay(world, broker).run_until_empty()

        assert broker.ids == ["b", "k-0", *(one.message_id for one in behind)]
        assert await left(world) == []

    run(memory, test)


def test_a_relay_can_be_stopped_while_its_database_is_away(memory):
    async def test(world):
        away = Away(world.database)
        away.is_away = True
        working = relay(replace(world, database=away), Broker())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(working.run())
            await asyncio.sleep(0.02)
            working.stop()

    run(memory, test)


def test_a_relay_is_woken_and_stopped_from_another_thread(memory):
    async def test(world):
        broker = Broker()
        working = relay(world, broker, poll_seconds=3600)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(working.run())
            await asyncio.sleep(0.05)
            await fill(world, entry("1"))
            threading.Thread(target=working.wake).start()
            await until(lambda: broker.ids == ["1"])
            threading.Thread(target=working.stop).start()

    run(memory, test)
