"""What a message that the broker refuses does to those behind it, and to nobody else."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from semel.errors import Permanent, Retryable
from semel.messaging.settings import RetryPolicy
from tests.messaging.outgoing import (
    AT_ONCE,
    Broker,
    Counted,
    entry,
    fill,
    id_of,
    left,
    relay,
    run,
    until,
)


def test_a_refused_message_is_parked_and_only_its_key_waits(database):
    async def test(world):
        broker = Broker()
        broker.refusals = {"a-2": [Permanent("too large")], "3": [Permanent("no such topic")]}
        names = ["a-1", "a-2", "b-1", "3", "a-3", "4", "b-2", "a-4"]
        await fill(world, *(entry(n, n[0] if "-" in n else None) for n in names))

        await relay(world, broker, batch=3).run_until_empty()

        assert broker.ids == ["a-1", "b-1", "4", "b-2"]
        assert await left(world) == ["a-2", "3", "a-3", "a-4"]
        async with world.database.begin() as unit:
            parked = await unit.outbox.parked("outbox", 10)
        assert [(p.message_id, p.parked_reason, p.attempts) for p in parked] == [
            ("a-2", "too large", 1),
            ("3", "no such topic", 1),
        ]

    run(database, test)


def test_when_an_operator_lets_it_go_the_key_goes_on_in_order(database):
    async def test(world):
        broker = Broker()
        broker.refusals = {"a-1": [Permanent("too large")]}
        await fill(world, *(entry(f"a-{n}", "a") for n in range(1, 4)))
        working = relay(world, broker, poll_seconds=0.01)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(working.run())
            while not await world_is_parked(world):
                await asyncio.sleep(0.005)
            assert broker.ids == []
            broker.refusals = {}
            async with world.database.begin() as unit:
                assert await unit.outbox.unpark("outbox", "a-1")
            await until(lambda: len(broker.taken) == 3)
            working.stop()

        assert broker.ids == ["a-1", "a-2", "a-3"]

    async def world_is_parked(world):
        async with world.database.begin() as unit:
            return bool(await unit.outbox.parked("outbox", 1))

    run(database, test)


def test_a_dropped_message_lets_its_key_go_on_without_it(memory):
    async def test(world):
        broker = Broker()
        broker.refusals = {"a-1": [Permanent("too large")]}
        await fill(world, entry("a-1", "a"), entry("a-2", "a"))
        await relay(world, broker).run_until_empty()

        async with world.database.begin() as unit:
            await unit.outbox.drop("outbox", "a-1")
        await relay(world, broker).run_until_empty()

        assert (broker.ids, await left(world)) == (["a-2"], [])

    run(memory, test)


def test_a_message_that_fails_for_now_holds_back_its_key_and_no_other(database):
    async def test(world):
        broker = Broker()
        slow = RetryPolicy(initial_delay_seconds=0.02, max_delay_seconds=0.02)
        broker.refusals = {"a-1": [Retryable("not now")] * 3}
        names = ["a-1", "a-2", "b-1", "a-3", "b-2"]
        await fill(world, *(entry(n, n[0]) for n in names))
        seen_attempts = []

        async def watch(batch):
            if any(id_of(message) == "a-1" for message in batch):
                async with world.database.begin() as unit:
                    [first, *_] = await unit.outbox.read("outbox", 0, 1)
                seen_attempts.append(first.attempts)
            if len(seen_attempts) == 3:
                broker.refusals = {}

        broker.before = watch
        await relay(world, broker, batch=2, retry=slow).run_until_empty()

        assert broker.ids == ["b-1", "b-2", "a-1", "a-2", "a-3"]
        assert seen_attempts == [0, 1, 2]
        assert await left(world) == []

    run(database, test)


def test_the_brokers_own_troubles_never_park_a_message(memory):
    async def test(world):
        broker = Broker()
        broker.refusals = {"1": [Retryable("not now")] * 20}
        await fill(world, entry("1"))

        async def mend(batch):
            if len(broker.refusals["1"]) == 1:
                broker.refusals = {"1": []}

        broker.before = mend
        await relay(world, broker).run_until_empty()

        assert (broker.ids, await left(world)) == (["1"], [])

    run(memory, test)


def test_an_error_that_nobody_knows_is_tried_a_few_times_and_then_parked(database):
    async def test(world):
        broker = Broker()
        broker.refusals = {"1": [KeyError("what?")]}
        await fill(world, entry("1"), entry("2"))

        await relay(world, broker, retry=AT_ONCE).run_until_empty()

        async with world.database.begin() as unit:
            [parked] = await unit.outbox.parked("outbox", 10)
        assert (parked.message_id, parked.attempts) == ("1", AT_ONCE.max_attempts)
        assert "KeyError" in parked.parked_reason
        assert broker.ids == ["2"]

    run(database, test)


def test_a_batch_that_is_refused_as_a_whole_is_sent_one_by_one(memory):
    async def test(world):
        broker = Broker()
        broker.batch_error = ValueError("one of them is wrong, and I do not say which")
        broker.refusals = {"a-1": [Permanent("it is me")]}
        names = ["a-1", "a-2", "b-1", "b-2"]
        await fill(world, *(entry(n, n[0]) for n in names))

        await relay(world, broker).run_until_empty()

        assert broker.ids == ["b-1", "b-2"]
        assert await left(world) == ["a-1", "a-2"]

    run(memory, test)


def test_a_parked_message_is_logged_with_its_id_and_its_reason(memory, caplog):
    async def test(world):
        broker = Broker()
        broker.refusals = {"1": [Permanent("too large")]}
        await fill(world, entry("1"))
        await relay(world, broker).run_until_empty()

    with caplog.at_level(logging.ERROR, "semel.messaging"):
        run(memory, test)

    [line] = [record for record in caplog.records if record.getMessage() == "message parked"]
    assert (line.outbox, line.id, line.reason) == ("outbox", "1", "too large")


def test_a_long_queue_behind_a_parked_message_keeps_nobody_waiting(memory):
    async def test(world):
        broker = Broker()
        broker.refusals = {"a-0": [Permanent("no")]}
        await fill(world, *(entry(f"a-{n}", "a") for n in range(500)))
        working = relay(world, broker, batch=50, poll_seconds=0.01)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(working.run())
            for n in range(5):
                await fill(world, entry(f"b-{n}", "b"))
                await until(lambda n=n: len(broker.taken) == n + 1)
            working.stop()

        assert broker.ids == [f"b-{n}" for n in range(5)]

    run(memory, test)


def test_a_long_queue_behind_a_message_that_is_due_is_no_reason_to_hurry(memory, monkeypatch):
    monkeypatch.setattr("semel.messaging.send.relay.PAUSE_PER_SKIPPED_SECONDS", 0.001)

    async def test(world):
        broker, counted = Broker(), Counted(world.database)
        broker.refusals = {"a-0": [Retryable("not now")]}
        await fill(world, *(entry(f"a-{n}", "a") for n in range(300)))

        async def mend(batch):
            if mended := broker.batches:
                broker.refusals = {} if len(mended) > 1 else broker.refusals

        broker.before = mend
        await relay(replace(world, database=counted), broker, batch=100).run_until_empty()

        assert broker.ids == [f"a-{n}" for n in range(300)]
        assert counted.transactions < 200

    run(memory, test)
