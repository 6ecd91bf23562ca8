"""The executable contract of revisions."""

from __future__ import annotations

from dataclasses import replace

from semel.messaging.records import MessageFilter, conflict_id
from semel.operate.stores import KEEP_ID, NEW_ID, Revision
from tests.stores.claims_world import rolled_back
from tests.stores.world import DatabaseContract, DatabaseWorld, in_world

ORIGINAL = Revision("billing", "m1", b"old", "ab" * 32, key="customer-7")
FIXED = replace(
    ORIGINAL, payload=b"new", payload_hash="cd" * 32, actor="ann", reason="typo", id_policy=KEEP_ID
)


class RevisionsContract(DatabaseContract):
    """Everything a `semel.operate.stores.Revisions` must do."""

    @in_world
    async def test_revisions_are_numbered_from_the_original_on(self, world: DatabaseWorld) -> None:
        written = [await add(world, revision) for revision in (ORIGINAL, FIXED, FIXED)]

        assert [revision.number for revision in written] == [0, 1, 2]
        assert await of(world, "m1") == written
        assert written[0] == replace(ORIGINAL, at=written[0].at)
        assert written[1] == replace(FIXED, number=1, at=written[1].at)
        assert written[0].at > 0

    @in_world
    async def test_each_message_of_each_consumer_has_its_own(self, world: DatabaseWorld) -> None:
        await add(world, ORIGINAL)

        other = await add(world, replace(ORIGINAL, consumer="shipping"))
        strange = await add(
            world, replace(ORIGINAL, message_id="x" * 5000, key="nul\0", reason="\0")
        )

        assert (other.number, strange.number) == (0, 0)
        assert len(await of(world, "m1")) == 1
        (found,) = await of(world, "x" * 5000)
        assert (found.message_id, found.key) == ("x" * 5000, "nul\0")

    @in_world
    async def test_a_revision_that_is_rolled_back_leaves_no_hole(
        self, world: DatabaseWorld
    ) -> None:
        await add(world, ORIGINAL)
        async with rolled_back(world) as unit:
            await unit.revisions.add(FIXED)

        assert (await add(world, FIXED)).number == 1

    @in_world
    async def test_the_names_of_a_message_are_found_in_both_directions(
        self, world: DatabaseWorld
    ) -> None:
        long_id = "y" * 5000
        await add(world, ORIGINAL)
        await add(world, replace(FIXED, id_policy=NEW_ID, new_id=long_id))
        await add(world, replace(ORIGINAL, message_id=long_id))

        async with world.database.begin() as unit:
            assert await unit.revisions.other_names("m1") == {long_id}
            assert await unit.revisions.other_names(long_id) == {"m1"}
            assert await unit.revisions.other_names("nobody") == set()

    @in_world
    async def test_a_conflict_is_another_name_of_the_id_it_came_with(
        self, world: DatabaseWorld
    ) -> None:
        its_own = conflict_id("m1", ORIGINAL.payload_hash)
        await add(world, replace(ORIGINAL, message_id=its_own))

        async with world.database.begin() as unit:
            assert await unit.revisions.other_names("m1") == {its_own}
            assert await unit.revisions.other_names("1") == set()

    @in_world
    async def test_erasing_leaves_hashes_and_reasons(self, world: DatabaseWorld) -> None:
        for revision in (ORIGINAL, FIXED, replace(ORIGINAL, message_id="m2", key="customer-8")):
            await add(world, revision)
        before = await of(world, "m1")

        async with world.database.begin() as unit:
            assert await unit.revisions.erase(MessageFilter(key="customer-7")) == 2
            assert await unit.revisions.erase(MessageFilter(message_id="m1")) == 0

        for old, now in zip(before, await of(world, "m1"), strict=True):
            assert now.erased_at is not None
            assert now == replace(old, payload=None, erased_at=now.erased_at)
        assert (await of(world, "m2"))[0].payload == b"old"


async def add(world: DatabaseWorld, revision: Revision) -> Revision:
    """Write a revision in a transaction of its own."""
    async with world.database.begin() as unit:
        return await unit.revisions.add(revision)


async def of(world: DatabaseWorld, message_id: str) -> list[Revision]:
    """Read a message's committed revisions."""
    async with world.database.begin() as unit:
        return list(await unit.revisions.of("billing", message_id))
