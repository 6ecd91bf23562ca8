"""Several workers in the waiting room at once, and the lock of a key."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from itertools import count
from typing import Any

from semel.messaging.handle.claims import Locked
from semel.messaging.records import Waits
from tests.stores.waiting_world import CONSUMER, behind, due, held, parked, put, remove, waiting
from tests.stores.world import (
    DatabaseContract,
    DatabaseWorld,
    in_world,
    patiently,
)

WORKERS = 4


class WorkerRules(DatabaseContract):
    """Several at once."""

    @in_world
    async def test_what_one_worker_has_taken_another_does_not_get(
        self, world: DatabaseWorld
    ) -> None:
        await put(world, waiting("m1"), waiting("a1", key="a"), behind("a2", "a"), waiting("m2"))

        async with world.database.begin() as unit:
            mine = await unit.waiting.take_due(CONSUMER, 2)
            others = await _elsewhere(world, 10)
            assert [found.message_id for found in mine] == ["m1", "a1"]
            assert others == (["m2"] if world.waits_for_locks else [])

        assert await due(world) == ["m1", "a1", "m2"], "whoever took them let them go"

    @in_world
    async def test_several_workers_take_every_message_once(self, world: DatabaseWorld) -> None:
        names = [f"m{number:02}" for number in range(30)]
        await put(world, *(waiting(name) for name in names))

        left = await _worked_off(world)

        assert sorted(left) == names

    @in_world
    async def test_several_workers_keep_the_order_of_every_key(self, world: DatabaseWorld) -> None:
        expected: dict[str, list[str]] = defaultdict(list)
        for number in range(24):
            key = "abc"[number % 3]
            first = not expected[key]
            expected[key].append(f"{key}{number}")
            waits = Waits.RETRY if first else Waits.BEHIND
            await put(world, waiting(f"{key}{number}", waits, key=key))

        left = await _worked_off(world)

        by_key = defaultdict(list)
        for name in left:
            by_key[name[0]].append(name)
        assert by_key == expected

    @in_world
    async def test_whoever_asks_for_a_key_waits_for_a_parking_that_commits(
        self, world: DatabaseWorld
    ) -> None:
        async with world.database.begin() as unit:
            assert await unit.waiting.hold(CONSUMER, ["k"]) == set()
            asking = asyncio.create_task(held(world, "k"))
            await _let_run(asking)
            await unit.waiting.put(parked("m1", "k"))
            assert not asking.done()

        assert await asking == {"k"}

    @in_world
    async def test_a_parking_waits_for_whoever_has_asked_for_its_key(
        self, world: DatabaseWorld
    ) -> None:
        async with world.database.begin() as unit:
            assert await unit.waiting.hold(CONSUMER, ["k"]) == set()
            parking = asyncio.create_task(put(world, parked("m1", "k")))
            await _let_run(parking)
            assert not parking.done()

        await parking
        assert await held(world, "k") == {"k"}

    @in_world
    async def test_a_key_that_is_not_released_in_time_is_locked(self, world: DatabaseWorld) -> None:
        async with world.database.begin() as unit:
            await unit.waiting.hold(CONSUMER, ["k"])
            try:
                await held(world, "k")
            except Locked:
                return
        raise AssertionError("a key was given to two transactions")

    @in_world
    async def test_keys_in_any_order_never_lock_each_other_out(self, world: DatabaseWorld) -> None:
        keys = ["b", "A", "a", "Z", "é", "B"]

        async def ask(rotation: int) -> None:
            rotated = keys[rotation:] + keys[:rotation]
            assert await patiently(lambda: held(world, *rotated)) == set()

        for _ in range(3):
            await asyncio.gather(*(ask(rotation) for rotation in range(len(keys))))

    @in_world
    async def test_a_key_is_released_while_another_message_queues_for_it(
        self, world: DatabaseWorld
    ) -> None:
        await put(world, parked("a1", "a"))

        async with world.database.begin() as unit:
            assert await unit.waiting.hold(CONSUMER, ["a"]) == {"a"}
            if world.waits_for_locks:
                await remove(world, "a1")
            await unit.waiting.put(behind("a2", "a"))
        await remove(world, "a1")

        assert await due(world) == ["a2"]


async def _elsewhere(world: DatabaseWorld, limit: int) -> list[str]:
    """Take what is due in another transaction; nothing where it cannot begin."""
    try:
        return await due(world, limit)
    except Locked:
        return []


async def _worked_off(world: DatabaseWorld) -> list[str]:
    """Let several workers empty the room; return the ids in the order they were taken.

    Not in the order of the commits' replies: a reply may arrive after a later commit's.
    """
    left: list[tuple[int, str]] = []
    turns = count()

    async def work() -> None:
        while True:
            try:
                async with world.database.begin() as unit:
                    taken = await unit.waiting.take_due(CONSUMER, 2)
                    mine = [(next(turns), found.message_id) for found in taken]
                    for found in taken:
                        # Others run while this one is handled.
                        await asyncio.sleep(0)
                        await unit.waiting.remove_many(CONSUMER, [found.message_id])
            except Locked:
                continue
            left.extend(mine)
            if not taken and not await _is_anybody_here(world):
                return

    await asyncio.wait_for(asyncio.gather(*(work() for _ in range(WORKERS))), 60)
    return [message_id for _, message_id in sorted(left)]


async def _is_anybody_here(world: DatabaseWorld) -> bool:
    async with world.database.begin() as unit:
        return await unit.waiting.seconds_to_next(CONSUMER) is not None


async def _let_run(task: asyncio.Task[Any]) -> None:
    """Give *task* time to get as far as it can, but less than the lock timeout."""
    await asyncio.wait([task], timeout=0.15)
