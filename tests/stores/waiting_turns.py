"""Whose turn it is in the waiting room, and which keys are held."""

from __future__ import annotations

from dataclasses import replace

from semel.messaging.records import WaitingFilter, Waits
from tests.stores.waiting_world import (
    CONSUMER,
    LONG_SECONDS,
    behind,
    due,
    get,
    held,
    parked,
    put,
    remove,
    waiting,
)
from tests.stores.world import DatabaseContract, DatabaseWorld, in_world


class TurnRules(DatabaseContract):
    """Whose turn it is."""

    @in_world
    async def test_a_retry_is_due_when_its_time_has_come(self, world: DatabaseWorld) -> None:
        await put(world, waiting("later"), delay_seconds=60.0)
        await put(world, waiting("now"))

        assert await due(world) == ["now"]
        await world.age(59.0)
        assert await due(world) == ["now"]
        await world.age(2.0)
        assert await due(world) == ["later", "now"]

    @in_world
    async def test_an_update_sets_the_time_anew(self, world: DatabaseWorld) -> None:
        await put(world, waiting("m1"))
        await put(world, waiting("m1"), delay_seconds=60.0)

        assert await due(world) == []
        await world.age(61.0)
        assert await due(world) == ["m1"]

    @in_world
    async def test_what_is_parked_is_never_due(self, world: DatabaseWorld) -> None:
        await put(world, parked("m1"), parked("m2", "k"))
        await world.age(LONG_SECONDS)

        assert await due(world) == []

    @in_world
    async def test_of_several_messages_those_are_taken_whose_turn_it_is(
        self, world: DatabaseWorld
    ) -> None:
        await put(world, waiting("z"), waiting("y"), waiting("a1", key="a"), behind("a2", "a"))
        await put(world, waiting("later"), delay_seconds=60.0)
        asked = ["a2", "a1", "z", "later", "never came"]
        async with world.database.begin() as unit:
            taken = await unit.waiting.take_many(CONSUMER, asked)
            nothing = await unit.waiting.take_many(CONSUMER, [])
            elsewhere = await unit.waiting.take_many("shipping", asked)

        assert [one.message_id for one in taken] == ["z", "a1"]
        assert (list(nothing), list(elsewhere)) == ([], [])

    @in_world
    async def test_a_retry_that_came_back_is_taken_before_its_time_by_its_number_of_attempts(
        self, world: DatabaseWorld
    ) -> None:
        await put(world, replace(waiting("m1"), attempts=2), delay_seconds=60.0)
        await put(world, replace(parked("m2"), attempts=2))
        async with world.database.begin() as unit:
            taken = await unit.waiting.take_retry(CONSUMER, "m1", 2)
            earlier = await unit.waiting.take_retry(CONSUMER, "m1", 1)
            held = await unit.waiting.take_retry(CONSUMER, "m2", 2)
            elsewhere = await unit.waiting.take_retry("shipping", "m1", 2)

        assert taken is not None
        assert taken.message_id == "m1"
        assert (earlier, held, elsewhere) == (None, None, None)

    @in_world
    async def test_nothing_passes_a_parked_message_of_its_key(self, world: DatabaseWorld) -> None:
        await put(world, parked("a1", "a"), behind("a2", "a"), behind("a3", "a"))
        await put(world, waiting("b1", key="b"), behind("b2", "b"))

        assert await due(world) == ["b1"]

    @in_world
    async def test_nothing_passes_a_retry_of_its_key_that_is_not_due(
        self, world: DatabaseWorld
    ) -> None:
        await put(world, waiting("a1", key="a"), delay_seconds=60.0)
        await put(world, behind("a2", "a"))

        assert await due(world) == []
        await world.age(61.0)
        assert await due(world) == ["a1"]

    @in_world
    async def test_messages_of_a_key_leave_in_the_order_they_came(
        self, world: DatabaseWorld
    ) -> None:
        await put(world, parked("a1", "a"), behind("a2", "a"), behind("a3", "a"))
        await put(world, waiting("a1", key="a"))

        left = []
        while turn := await due(world):
            left.append(turn)
            await remove(world, turn[0])

        assert left == [["a1"], ["a2"], ["a3"]]

    @in_world
    async def test_a_message_that_fails_on_its_turn_keeps_its_place(
        self, world: DatabaseWorld
    ) -> None:
        await put(world, parked("a1", "a"), behind("a2", "a"), behind("a3", "a"))
        await remove(world, "a1")
        await put(world, waiting("a2", key="a"), delay_seconds=60.0)

        assert await due(world) == []
        await world.age(61.0)
        assert await due(world) == ["a2"]

    @in_world
    async def test_a_message_released_on_its_own_waits_for_no_other_of_its_key(
        self, world: DatabaseWorld
    ) -> None:
        await put(world, parked("a1", "a"), behind("a2", "a"), behind("a3", "a"), parked("a4", "a"))
        async with world.database.begin() as unit:
            known = [await unit.waiting.let_overtake(CONSUMER, name) for name in ("a3", "a4", "?")]

        assert known == [True, True, False]
        assert await due(world) == ["a3"], "a person is waited for all the same"
        assert await held(world, "a") == {"a"}
        await remove(world, "a1")
        await remove(world, "a2")
        assert await held(world, "a") == frozenset()

    @in_world
    async def test_without_order_per_key_nobody_waits_for_anybody(
        self, world: DatabaseWorld
    ) -> None:
        await put(world, parked("a1", "a", held=False))
        await put(world, waiting("a2", key="a", held=False), waiting("a3", key="a", held=False))
        await put(world, waiting("b1"), waiting("b2"))

        assert await due(world) == ["a2", "a3", "b1", "b2"]
        assert await held(world, "a") == set()

    @in_world
    async def test_one_without_a_key_cannot_hold_one(self, world: DatabaseWorld) -> None:
        await put(world, parked("m1", None, held=True), waiting("m2", held=True))

        assert await due(world) == ["m2"]
        async with world.database.begin() as unit:
            assert await unit.waiting.held_keys(CONSUMER, 10) == []

    @in_world
    async def test_no_more_is_taken_than_was_asked_for(self, world: DatabaseWorld) -> None:
        await put(world, *(waiting(name) for name in "abcd"))

        assert await due(world, limit=2) == ["a", "b"]

    @in_world
    async def test_more_is_taken_behind_what_was_taken(self, world: DatabaseWorld) -> None:
        await put(world, waiting("a"), waiting("b"), parked("c", "k"), behind("d", "k"))
        await put(world, waiting("e"), waiting("f"))
        async with world.database.begin() as unit:
            first = await unit.waiting.take_due(CONSUMER, 2)
            rest = await unit.waiting.take_due(CONSUMER, 2, first[-1].place)

        assert [found.message_id for found in first] == ["a", "b"]
        assert [found.message_id for found in rest] == ["e", "f"]

    @in_world
    async def test_consumers_do_not_see_each_other(self, world: DatabaseWorld) -> None:
        await put(world, parked("m1", "k"), waiting("m1", key="k", consumer="shipping"))

        assert await due(world) == []
        assert await due(world, consumer="shipping") == ["m1"]
        await remove(world, "m1")
        assert await held(world, "k") == set()

    @in_world
    async def test_a_released_message_has_its_turn_in_its_old_place(
        self, world: DatabaseWorld
    ) -> None:
        await put(world, parked("a1", "a"), behind("a2", "a"), waiting("b1"))
        before = await get(world, "a1")

        async with world.database.begin() as unit:
            assert await unit.waiting.release(CONSUMER, "a1")
            for name in ("a1", "a2", "b1", "nobody"):
                assert not await unit.waiting.release(CONSUMER, name), name

        released = await get(world, "a1")
        assert released == replace(before, waits=Waits.RETRY, due_at=released.due_at)
        assert await due(world) == ["a1", "b1"]

    @in_world
    async def test_one_message_is_taken_only_if_it_is_its_turn(self, world: DatabaseWorld) -> None:
        await put(world, waiting("a1", key="a"), behind("a2", "a"), parked("p"))
        await put(world, waiting("later"), delay_seconds=60.0)

        async with world.database.begin() as unit:
            taken = await unit.waiting.take(CONSUMER, "a1")
            assert taken is not None
            assert taken.payload == b"a1"
            for name in ("a2", "p", "later", "nobody"):
                assert await unit.waiting.take(CONSUMER, name) is None, name

    @in_world
    async def test_a_key_is_held_as_long_as_a_message_of_it_waits(
        self, world: DatabaseWorld
    ) -> None:
        await put(world, parked("a1", "a"), behind("a2", "a"), waiting("b1", key="b"))

        assert await held(world, "a", "b", "c") == {"a", "b"}
        await remove(world, "a1")
        assert await held(world, "a", "b", "c") == {"a", "b"}
        await remove(world, "a2")
        assert await held(world, "a", "b", "c") == {"b"}
        assert await held(world) == set()

    @in_world
    async def test_held_keys_are_listed_with_their_queue_the_longest_held_first(
        self, world: DatabaseWorld
    ) -> None:
        await put(world, parked("b1", "b"))
        await world.age(60.0)
        await put(world, waiting("a1", key="a"), behind("a2", "a"), behind("b2", "b"))
        await put(world, behind("b3", "b"), waiting("free", key="c", held=False))

        async with world.database.begin() as unit:
            keys = await unit.waiting.held_keys(CONSUMER, 10)
            assert [key.key for key in await unit.waiting.held_keys(CONSUMER, 1)] == ["b"]

        found = [(key.key, key.head.message_id, key.behind) for key in keys]
        assert found == [("b", "b1", 2), ("a", "a1", 1)]
        assert keys[0].since == (await get(world, "b1")).since
        assert keys[0].head.waits is Waits.PARKED

    @in_world
    async def test_the_time_to_the_next_turn_is_known(self, world: DatabaseWorld) -> None:
        async def seconds() -> float | None:
            async with world.database.begin() as unit:
                return await unit.waiting.seconds_to_next(CONSUMER)

        await put(world, parked("p1", "p"), behind("p2", "p"))
        assert await seconds() is None, "nobody in the queue waits for time"

        await put(world, waiting("m1", key="m"), delay_seconds=60.0)
        await put(world, behind("m2", "m"))
        left = await seconds()
        assert left is not None
        assert 50 < left <= 60

        await world.age(100.0)
        assert await seconds() == 0
        await remove(world, "m1")
        assert await seconds() == 0, "m2 waits for nobody any more"

    @in_world
    async def test_forgetting_the_locks_of_keys_changes_nothing(self, world: DatabaseWorld) -> None:
        await put(world, parked("a1", "a"))
        assert await held(world, "a", "b") == {"a"}

        async with world.database.begin() as unit:
            assert await unit.waiting.forget_keys(CONSUMER, -LONG_SECONDS, 1) in (0, 1)
            assert await unit.waiting.forget_keys(CONSUMER, -LONG_SECONDS, 100) in (0, 1)
            assert await unit.waiting.forget_keys(CONSUMER, -LONG_SECONDS, 100) == 0

        assert await held(world, "a", "b") == {"a"}
        async with world.database.begin() as unit:
            assert await unit.waiting.count(WaitingFilter()) == 1
