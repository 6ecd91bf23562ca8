"""Members of a memory broker's group: they come, die, wake up, and give up slowly."""

from __future__ import annotations

import asyncio
import threading

import pytest

from semel.errors import Fenced, Misuse
from semel.testing.clock import SimulatedClock
from tests.stores.world import asynchronous, run
from tests.unit.memory.filled_broker import P0, P1, filled, values


async def until(met, broker):
    async with asyncio.timeout(10):
        while not met():
            await broker.bell.wait(broker.bell.number, 0.05)


async def settled_pair(broker):
    first = await broker.subscribe("g", ["t"])
    second = await broker.subscribe("g", ["t"])
    await broker.settled("g")
    return first, second


@asynchronous
async def test_the_only_member_has_its_partitions_at_once():
    broker = filled(partitions=3)

    member = await broker.subscribe("g", ["t"])

    assert member.assignment == set(broker.partitions("t"))
    assert member.generation == 1


@asynchronous
async def test_a_dead_member_keeps_its_partitions_until_its_session_has_run_out():
    clock = SimulatedClock()
    broker = filled("a", clock=clock, partitions=2)
    dead, living = await settled_pair(broker)

    broker.kill(dead)
    clock.advance(9.9)
    await broker.settled("g")
    assert len(living.assignment) == 1

    clock.advance(0.1)
    await broker.settled("g")
    assert living.assignment == {P0, P1}


@asynchronous
async def test_a_zombie_that_wakes_up_in_time_has_lost_nothing():
    clock = SimulatedClock()
    broker = filled(clock=clock, partitions=2)
    sleeper, other = await settled_pair(broker)
    (mine,) = sleeper.assignment

    broker.kill(sleeper)
    clock.advance(9.0)
    broker.revive(sleeper)
    clock.advance(9.0)
    await broker.settled("g")
    await sleeper.commit({mine: 1})

    assert (sleeper.generation, other.generation) == (2, 2)


@asynchronous
async def test_a_zombie_that_wakes_up_late_is_told_what_it_lost_and_joins_again():
    clock = SimulatedClock()
    broker = filled(clock=clock, partitions=2)
    zombie, _ = await settled_pair(broker)
    (lost,) = zombie.assignment
    told = []

    async def commit(partitions):
        told.append(set(partitions))
        await zombie.commit({lost: 7})

    zombie.on_revoked(commit)
    name = zombie.member
    broker.kill(zombie)
    clock.advance(10.0)
    await broker.settled("g")
    broker.revive(zombie)
    await broker.settled("g")

    assert told == [{lost}]
    assert broker.committed("g") == {}
    assert zombie.member != name
    assert len(zombie.assignment) == 1
    assert await zombie.fetch(1, 0) == []


@asynchronous
async def test_a_member_that_dies_while_it_gives_up_holds_the_others_for_its_session_only():
    clock = SimulatedClock()
    broker = filled(clock=clock, partitions=2)
    dying = await broker.subscribe("g", ["t"])
    began = asyncio.Event()

    async def never_ends(partitions):
        began.set()
        await asyncio.Event().wait()

    dying.on_revoked(never_ends)
    other = await broker.subscribe("g", ["t"])
    await began.wait()
    broker.kill(dying)
    assert other.assignment == frozenset()
    clock.advance(10.0)
    await broker.settled("g")

    assert other.assignment == {P0, P1}


@asynchronous
async def test_a_member_that_dies_and_wakes_up_at_once_tells_its_listener_again():
    broker = filled(partitions=2)
    member = await broker.subscribe("g", ["t"])
    told, may_end = [], asyncio.Event()

    async def waits(partitions):
        told.append(partitions)
        await may_end.wait()

    member.on_revoked(waits)
    await broker.subscribe("g", ["t"])
    await until(lambda: len(told) == 1, broker)
    broker.kill(member)
    broker.revive(member)
    await until(lambda: len(told) == 2, broker)
    may_end.set()
    await broker.settled("g")

    assert len(told) == 2
    assert len(member.assignment) == 1


@asynchronous
async def test_a_listener_that_takes_too_long_loses_its_partitions():
    clock = SimulatedClock()
    broker = filled(clock=clock)
    slow = await broker.subscribe("g", ["t"])
    may_end, refused = asyncio.Event(), []

    async def work(partitions):
        await may_end.wait()
        try:
            await slow.commit(dict.fromkeys(partitions, 1))
        except Fenced as error:
            refused.append(error)

    slow.on_revoked(work)
    other = await broker.subscribe("g", ["t"])
    for _ in range(3):
        clock.advance(10.0)
        assert await other.fetch(1, 0) == []
    await until(lambda: other.assignment == {P0}, broker)
    may_end.set()
    await broker.settled("g")

    assert len(refused) == 1
    assert broker.committed("g") == {}


@asynchronous
async def test_an_error_of_a_listener_is_raised_by_the_next_fetch_and_the_partitions_go():
    broker = filled(partitions=2)
    member = await broker.subscribe("g", ["t"])

    async def fails(partitions):
        raise LookupError("listener")

    member.on_revoked(fails)
    other = await broker.subscribe("g", ["t"])
    await broker.settled("g")

    assert len(other.assignment) == 1
    with pytest.raises(LookupError):
        await member.fetch(1, 0)
    assert await member.fetch(1, 0) == []


@asynchronous
async def test_a_waiting_fetch_returns_when_partitions_begin_to_go():
    broker = filled(partitions=2)
    member = await broker.subscribe("g", ["t"])
    may_end = asyncio.Event()

    async def waits(partitions):
        await may_end.wait()

    member.on_revoked(waits)
    waiting = asyncio.create_task(member.fetch(1, 60))
    await asyncio.sleep(0)
    await broker.subscribe("g", ["t"])

    assert await asyncio.wait_for(waiting, 10) == []
    may_end.set()
    await broker.close()


@asynchronous
async def test_a_rebalance_on_demand_delivers_again_what_is_not_committed():
    broker = filled("a", "b", "c")
    member = await broker.subscribe("g", ["t"])
    assert values(await member.fetch(3, 0)) == ["a", "b", "c"]
    await member.commit({P0: 1})

    broker.rebalance("g")
    await broker.settled("g")

    assert values(await member.fetch(3, 0)) == ["b", "c"]


@asynchronous
async def test_new_partitions_of_a_topic_are_shared():
    broker = filled(partitions=1)
    member = await broker.subscribe("g", ["t"])

    broker.create_topic("t", 2)
    await broker.settled("g")

    assert member.assignment == {P0, P1}
    with pytest.raises(Misuse, match="has 2 partitions and cannot have 1"):
        broker.create_topic("t", 1)


def test_a_member_whose_loop_ended_is_dead_after_its_session():
    clock = SimulatedClock()
    broker = filled("a", clock=clock)

    async def leaves_without_closing():
        member = await broker.subscribe("g", ["t"])
        await member.fetch(1, 0)

    async def comes_later():
        member = await broker.subscribe("g", ["t"])
        assert member.assignment == frozenset()
        clock.advance(10.0)
        return values(await member.fetch(1, 10))

    run(leaves_without_closing())

    assert run(comes_later()) == ["a"]


def test_members_on_loops_of_several_threads_share_a_group():
    broker = filled(partitions=4)
    sent = {f"v{number}" for number in range(40)}
    seen = [set(), set()]
    both_joined = threading.Barrier(3)

    async def consume(number):
        member = await broker.subscribe("g", ["t"])
        both_joined.wait(10)
        await broker.settled("g")
        both_joined.wait(10)
        while seen[0] | seen[1] != sent:
            found = await member.fetch(10, 0.2)
            await member.commit({record.at.place: record.at.offset + 1 for record in found})
            seen[number] |= set(values(found))
        await member.close()

    threads = [threading.Thread(target=lambda n=n: run(consume(n)), daemon=True) for n in (0, 1)]
    for thread in threads:
        thread.start()
    both_joined.wait(10)
    both_joined.wait(10)
    for value in sent:
        broker.put("t", value.encode(), value.encode())
    for thread in threads:
        thread.join(30)

    assert not any(thread.is_alive() for thread in threads)
    assert seen[0] | seen[1] == sent
    assert seen[0] & seen[1] == set()
