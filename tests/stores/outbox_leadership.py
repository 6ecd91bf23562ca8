"""The outbox contract, second part: who relays, and what the epoch refuses."""

from __future__ import annotations

import pytest

from semel.errors import Fenced
from semel.messaging.handle.claims import Locked
from tests.stores.outbox_entries import (
    LEASE_SECONDS,
    OUTBOX,
    add,
    delete,
    entry,
    ids,
    lead,
    leads,
    park,
    read,
)
from tests.stores.world import DatabaseContract, DatabaseWorld, in_world


class LeadershipRules(DatabaseContract):
    """Who relays."""

    @in_world
    async def test_the_first_leader_has_the_first_epoch_and_keeps_it(
        self, world: DatabaseWorld
    ) -> None:
        first = await leads(world.database)
        again = await leads(world.database)

        assert first.epoch == 1
        assert (first.outbox, first.owner) == (OUTBOX, "one")
        assert again == first

    @in_world
    async def test_nobody_else_leads_while_the_lease_lives(self, world: DatabaseWorld) -> None:
        await leads(world.database)
        await world.age(LEASE_SECONDS - 10)

        assert await lead(world.database, "two") is None

    @in_world
    async def test_an_expired_lease_is_taken_with_the_next_epoch(
        self, world: DatabaseWorld
    ) -> None:
        await leads(world.database)
        await world.age(LEASE_SECONDS + 1)

        second = await leads(world.database, "two")

        assert second.epoch == 2
        assert await lead(world.database, "one") is None

    @in_world
    async def test_leading_again_prolongs_the_lease(self, world: DatabaseWorld) -> None:
        await leads(world.database)
        await world.age(LEASE_SECONDS - 10)
        await leads(world.database)
        await world.age(LEASE_SECONDS - 10)

        assert await lead(world.database, "two") is None

    @in_world
    async def test_whoever_was_not_replaced_leads_on_after_the_lease(
        self, world: DatabaseWorld
    ) -> None:
        await add(world.database, entry("1"))
        [found] = await read(world.database)
        mine = await leads(world.database)
        await world.age(LEASE_SECONDS + 1)

        assert await delete(world.database, mine, found.place) == 1
        assert await leads(world.database) == mine

    @in_world
    async def test_an_owner_that_is_gone_is_not_waited_for(self, world: DatabaseWorld) -> None:
        await leads(world.database)

        assert await lead(world.database, "two", instead_of="three") is None
        second = await lead(world.database, "two", instead_of="one")

        assert second is not None
        assert second.epoch == 2

    @in_world
    async def test_whoever_resigns_is_followed_at_once_and_even_by_itself_with_a_new_epoch(
        self, world: DatabaseWorld
    ) -> None:
        first = await leads(world.database)
        await add(world.database, entry("1"))
        [found] = await read(world.database)

        async with world.database.begin() as unit:
            await unit.outbox.resign(first)
        with pytest.raises(Fenced):
            await delete(world.database, first, found.place)
        second = await leads(world.database)
        async with world.database.begin() as unit:
            await unit.outbox.resign(second)
        third = await leads(world.database, "two")

        assert [first.epoch, second.epoch, third.epoch] == [1, 2, 3]

    @in_world
    async def test_resigning_a_lost_leadership_changes_nothing(self, world: DatabaseWorld) -> None:
        first = await leads(world.database)
        second = await lead(world.database, "two", instead_of="one")

        async with world.database.begin() as unit:
            await unit.outbox.resign(first)

        assert await lead(world.database, "three") is None
        assert await lead(world.database, "two") == second

    @in_world
    async def test_everybody_can_see_who_leads_and_for_how_long(self, world: DatabaseWorld) -> None:
        async with world.database.begin() as unit:
            assert await unit.outbox.leader(OUTBOX) is None
        first = await leads(world.database)
        await world.age(LEASE_SECONDS / 2)

        async with world.database.begin() as unit:
            living = await unit.outbox.leader(OUTBOX)
        await world.age(LEASE_SECONDS)
        async with world.database.begin() as unit:
            expired = await unit.outbox.leader(OUTBOX)
            await unit.outbox.resign(first)
            resigned = await unit.outbox.leader(OUTBOX)

        assert living is not None
        assert (living.owner, living.epoch) == ("one", 1)
        assert 0 < living.seconds_left <= LEASE_SECONDS / 2
        assert expired is not None
        assert (expired.owner, expired.seconds_left) == ("one", 0.0)
        assert resigned is not None
        assert (resigned.owner, resigned.epoch) == ("", 1)

    @in_world
    async def test_every_outbox_has_its_own_leader(self, world: DatabaseWorld) -> None:
        await leads(world.database, "one")

        theirs = await leads(world.database, "two", "other")

        assert theirs.epoch == 1

    @in_world
    async def test_a_leader_that_was_replaced_deletes_parks_and_counts_nothing(
        self, world: DatabaseWorld
    ) -> None:
        await add(world.database, entry("1"), entry("2"))
        places = [e.place for e in await read(world.database)]
        first = await leads(world.database)
        await world.age(LEASE_SECONDS + 1)
        await leads(world.database, "two")

        with pytest.raises(Fenced):
            await delete(world.database, first, *places)
        with pytest.raises(Fenced):
            await park(world.database, first, places[0])
        with pytest.raises(Fenced):
            async with world.database.begin() as unit:
                await unit.outbox.failed(first, places)

        assert await ids(world.database) == ["1", "2"]
        assert [e.attempts for e in await read(world.database)] == [0, 0]

    @in_world
    async def test_deleting_what_is_gone_already_is_no_lost_leadership(
        self, world: DatabaseWorld
    ) -> None:
        await add(world.database, entry("1"))
        [found] = await read(world.database)
        mine = await leads(world.database)

        assert await delete(world.database, mine, found.place) == 1
        assert await delete(world.database, mine, found.place) == 0
        assert await delete(world.database, mine) == 0

    @in_world
    async def test_a_new_leader_waits_for_what_the_old_one_is_deleting(
        self, world: DatabaseWorld
    ) -> None:
        if not world.waits_for_locks:
            pytest.skip("one transaction at a time: there is nothing to wait for")
        await add(world.database, entry("1"))
        [found] = await read(world.database)
        first = await leads(world.database)
        await world.age(LEASE_SECONDS + 1)

        async with world.database.begin() as unit:
            await unit.outbox.delete(first, [found.place])
            with pytest.raises(Locked):
                await lead(world.database, "two")

        assert (await leads(world.database, "two")).epoch == 2

    @in_world
    async def test_an_old_leader_waits_for_a_new_one_that_is_taking_over(
        self, world: DatabaseWorld
    ) -> None:
        if not world.waits_for_locks:
            pytest.skip("one transaction at a time: there is nothing to wait for")
        await add(world.database, entry("1"))
        [found] = await read(world.database)
        first = await leads(world.database)
        await world.age(LEASE_SECONDS + 1)

        async with world.database.begin() as unit:
            assert await unit.outbox.lead(OUTBOX, "two", LEASE_SECONDS) is not None
            with pytest.raises(Locked):
                await delete(world.database, first, found.place)

        with pytest.raises(Fenced):
            await delete(world.database, first, found.place)
        assert await ids(world.database) == ["1"]
