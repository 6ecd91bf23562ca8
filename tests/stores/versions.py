"""The executable contract of the applied versions, and of the gaps between them."""

from __future__ import annotations

from semel.messaging.records import Gap
from semel.testing.contracts.claims import STRANGE_IDS
from tests.stores.claims_world import CONSUMER, beside, rolled_back
from tests.stores.world import DatabaseContract, DatabaseWorld, in_world


async def _version(world: DatabaseWorld, key: str) -> int | None:
    async with world.database.begin() as unit:
        return await unit.versions.current(CONSUMER, key)


async def _apply(world: DatabaseWorld, key: str, version: int) -> None:
    async with world.database.begin() as unit:
        await unit.versions.advance(CONSUMER, key, version)


async def _gaps(world: DatabaseWorld, consumer: str | None = CONSUMER) -> list[tuple[str, int]]:
    async with world.database.begin() as unit:
        return [(gap.key, gap.expected) for gap in await unit.versions.gaps(consumer, 100)]


async def _notice(world: DatabaseWorld, key: str, expected: int, found: int) -> None:
    async with world.database.begin() as unit:
        await unit.versions.open_gap(Gap(CONSUMER, key, expected, found))


class VersionsContract(DatabaseContract):
    """Everything `semel.messaging.database.Versions` must do."""

    @in_world
    async def test_a_key_stands_at_the_version_that_was_applied_last(
        self, world: DatabaseWorld
    ) -> None:
        before = await _version(world, "order-1")
        await _apply(world, "order-1", 1)
        await _apply(world, "order-1", 2)
        async with rolled_back(world) as unit:
            await unit.versions.advance(CONSUMER, "order-1", 3)
        async with world.database.begin() as unit:
            of_shipping = await unit.versions.current("shipping", "order-1")

        assert (before, await _version(world, "order-1")) == (None, 2)
        assert (of_shipping, await _version(world, "order-2")) == (None, None)

    @in_world
    async def test_a_version_of_zero_is_not_none(self, world: DatabaseWorld) -> None:
        for _ in range(2):
            assert await _version(world, "order-1") is None, "asking applies nothing"
        await _apply(world, "order-1", 0)

        assert await _version(world, "order-1") == 0

    @in_world
    async def test_a_key_may_be_any_text(self, world: DatabaseWorld) -> None:
        for version, key in enumerate(STRANGE_IDS, start=1):
            await _apply(world, key, version)
            await _notice(world, key, version, version + 2)
        found = [await _version(world, key) for key in STRANGE_IDS]
        noticed = {key for key, _ in await _gaps(world)}
        async with world.database.begin() as unit:
            closed = [
                await unit.versions.close_gaps(CONSUMER, key, 100, "arrived") for key in STRANGE_IDS
            ]

        assert found == list(range(1, len(STRANGE_IDS) + 1))
        assert {"x" * 100_000, "Case", "case", " "} <= noticed, "people see the key, not a hash"
        assert closed == [1] * len(STRANGE_IDS)

    @in_world
    async def test_whoever_asks_second_waits_for_the_first_ones_version(
        self, world: DatabaseWorld
    ) -> None:
        await _apply(world, "known", 4)
        for key, applied in (("new", 1), ("known", 5)):
            async with world.database.begin() as first:
                await first.versions.current(CONSUMER, key)
                second = await beside(_version(world, key))
                await first.versions.advance(CONSUMER, key, applied)

            assert await second == applied, key

    @in_world
    async def test_whoever_asks_second_gets_a_key_that_the_first_gave_up(
        self, world: DatabaseWorld
    ) -> None:
        async with rolled_back(world) as first:
            await first.versions.current(CONSUMER, "k")
            second = await beside(_version(world, "k"))
            await first.versions.advance(CONSUMER, "k", 1)

        assert await second is None

    @in_world
    async def test_a_gap_is_listed_once_and_keeps_its_time(self, world: DatabaseWorld) -> None:
        await _notice(world, "k", 3, 5)
        async with world.database.begin() as unit:
            (first,) = await unit.versions.gaps(CONSUMER, 10)
            noticed = await unit.now()
        await _notice(world, "k", 3, 7)
        async with world.database.begin() as unit:
            (second,) = await unit.versions.gaps(CONSUMER, 10)

        assert abs(first.since - noticed) < 30
        assert (first.consumer, first.key, first.expected) == (CONSUMER, "k", 3)
        assert (first.found, second.found) == (5, 7)
        assert second.since == first.since

    @in_world
    async def test_gaps_are_listed_the_oldest_first_and_not_too_many(
        self, world: DatabaseWorld
    ) -> None:
        for key in ("c", "a", "b"):
            await _notice(world, key, 1, 3)
            await world.age(10)
        async with world.database.begin() as unit:
            await unit.versions.open_gap(Gap("shipping", "s", 1, 3))
            two = await unit.versions.gaps(CONSUMER, 2)
            last = await unit.versions.gaps(CONSUMER, 1, key="b")

        assert [gap.key for gap in two] == ["c", "a"]
        assert [gap.key for gap in last] == ["b"]
        assert await _gaps(world) == [("c", 1), ("a", 1), ("b", 1)]
        assert await _gaps(world, None) == [("c", 1), ("a", 1), ("b", 1), ("s", 1)]

    @in_world
    async def test_a_gap_is_closed_when_all_that_was_missing_has_come(
        self, world: DatabaseWorld
    ) -> None:
        await _notice(world, "k", 3, 6)
        await _notice(world, "other", 3, 6)
        closed = []
        for up_to in (3, 4, 5, 6):
            async with world.database.begin() as unit:
                closed.append(await unit.versions.close_gaps(CONSUMER, "k", up_to, "arrived"))

        assert closed == [0, 0, 1, 0]
        assert await _gaps(world) == [("other", 3)]

    @in_world
    async def test_a_gap_that_was_crossed_is_not_closed_by_what_comes_later(
        self, world: DatabaseWorld
    ) -> None:
        await _notice(world, "k", 1, 3)
        await _notice(world, "k", 4, 6)
        closed = []
        for after in (3, 5, 4, 2, 1):
            async with world.database.begin() as unit:
                closed.append(await unit.versions.close_gaps(CONSUMER, "k", 5, "arrived", after))

        assert closed == [1, 0, 0, 0, 1]

    @in_world
    async def test_only_gaps_that_are_closed_since_long_are_deleted(
        self, world: DatabaseWorld
    ) -> None:
        for key in ("a", "b", "open", "again"):
            await _notice(world, key, 3, 6)
        async with world.database.begin() as unit:
            for key in ("a", "b", "again"):
                await unit.versions.close_gaps(CONSUMER, key, 5, "fetched")
        await world.age(1000)
        await _notice(world, "again", 3, 6)
        await _notice(world, "new", 3, 6)
        deleted = []
        for consumer in ("shipping", CONSUMER, CONSUMER, CONSUMER):
            async with world.database.begin() as unit:
                await unit.versions.close_gaps(CONSUMER, "new", 5, "fetched")
                deleted.append(await unit.versions.delete_closed(consumer, 500, 1))

        assert deleted == [0, 1, 1, 0]
        assert sorted(await _gaps(world)) == [("again", 3), ("open", 3)]

    @in_world
    async def test_a_gap_that_opens_again_is_a_new_one(self, world: DatabaseWorld) -> None:
        await _notice(world, "k", 3, 6)
        async with world.database.begin() as unit:
            await unit.versions.close_gaps(CONSUMER, "k", 5, "fetched")
        await world.age(1000)
        await _notice(world, "k", 3, 6)

        async with world.database.begin() as unit:
            (gap,) = await unit.versions.gaps(CONSUMER, 10)
            assert abs(gap.since - await unit.now()) < 500
