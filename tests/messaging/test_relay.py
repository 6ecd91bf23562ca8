"""The relay sends everything, in order per key, and stops nobody else for one message."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import replace

import pytest

from semel.errors import Misuse, Permanent, Retryable
from semel.measures import Measures, Metric
from semel.messaging.retry import RetryPolicy
from tests.messaging.outgoing import (
    AT_ONCE,
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


def test_while_the_broker_is_away_everything_waits(database):
    async def test(world):
        broker = Broker()
        broker.outages = 5
        await fill(world, *(entry(str(n)) for n in range(5)))

        await relay(world, broker, batch=2).run_until_empty()

        assert broker.ids == ["0", "1", "2", "3", "4"]
        assert await left(world) == []

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
        broker, measures, seen = Broker(), Measures(), []
        measures.subscribe(seen.append)
        broker.refusals = {"2": [Permanent("no")], "3": [Retryable("not now"), ValueError()]}
        await fill(world, entry("1"), entry("2"), entry("3"), entry("4", topic="refunds"))
        await world.age(10)

        await relay(world, broker, measures=measures).run_until_empty()

        found = {(m.metric, *m.labels.values()): m.value for m in seen}
        assert found[Metric.OUTBOX_PENDING, "outbox"] == 4
        assert found[Metric.OUTBOX_OLDEST_SECONDS, "outbox"] >= 10
        assert found[Metric.OUTBOX_PUBLISHED, "outbox", "payments", "ok"] == 1
        assert found[Metric.OUTBOX_PUBLISHED, "outbox", "refunds", "ok"] == 1
        assert found[Metric.OUTBOX_PUBLISHED, "outbox", "payments", "parked"] == 1
        assert found[Metric.OUTBOX_PUBLISHED, "outbox", "payments", "retried"] == 1

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
    monkeypatch.setattr("semel.messaging.relay.PAUSE_PER_SKIPPED_SECONDS", 0.001)

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
