"""The outbox contract, third part: what the broker will never take."""

from __future__ import annotations

import pytest

from semel.errors import Misuse
from semel.messaging.redact import ERASED_REASON
from tests.stores.outbox_entries import LONG_ID, OUTBOX, add, entry, ids, leads, park, parked, read
from tests.stores.world import DatabaseContract, DatabaseWorld, in_world


class ParkingRules(DatabaseContract):
    """What is set aside, and what an operator does with it."""

    @in_world
    async def test_a_parked_entry_is_listed_with_its_reason_and_no_longer_read(
        self, world: DatabaseWorld
    ) -> None:
        await add(world.database, entry("1", key="a"), entry("2", key="b"), entry("3", key="a"))
        places = [e.place for e in await read(world.database)]
        mine = await leads(world.database)

        await park(world.database, mine, places[0], "too large")

        assert await ids(world.database) == ["2", "3"]
        async with world.database.begin() as unit:
            [aside] = await unit.outbox.parked(OUTBOX, 10)
            numbers = await unit.outbox.numbers(OUTBOX)
        assert (aside.message_id, aside.parked_reason, aside.attempts) == ("1", "too large", 1)
        assert (numbers.pending, numbers.parked) == (2, 1)

    @in_world
    async def test_keys_of_parked_entries_are_named_with_their_topic(
        self, world: DatabaseWorld
    ) -> None:
        await add(
            world.database,
            entry("1", key="a"),
            entry("2", key="a"),
            entry("3", key=None),
            entry("4", key="b", topic="refunds"),
            entry("5", key="c"),
            entry("6", key="d", outbox="other"),
        )
        mine = await leads(world.database)
        theirs = await leads(world.database, "two", "other")

        for e in (await read(world.database))[:4]:
            await park(world.database, mine, e.place)
        [other] = await read(world.database, outbox="other")
        await park(world.database, theirs, other.place)

        async with world.database.begin() as unit:
            assert await unit.outbox.parked_keys(OUTBOX) == {("payments", "a"), ("refunds", "b")}
            assert await unit.outbox.parked_keys("nothing") == frozenset()

    @in_world
    async def test_nothing_waits_behind_an_erased_entry(self, world: DatabaseWorld) -> None:
        await add(
            world.database,
            entry("1", key="a", parent_key="ada"),
            entry("2", key="b", parent_key="ada"),
            entry("3", key="b"),
            entry("4", key="c", parent_key="ada"),
        )
        mine = await leads(world.database)
        for e in (await read(world.database))[1:]:
            await park(world.database, mine, e.place)

        async with world.database.begin() as unit:
            assert await unit.outbox.erase(key="ada") == 3

        async with world.database.begin() as unit:
            assert await unit.outbox.parked_keys(OUTBOX) == {("payments", "b")}
        assert await parked(world.database) == ["1", "2", "3", "4"]

    @in_world
    async def test_the_list_of_parked_entries_stops_at_its_limit(
        self, world: DatabaseWorld
    ) -> None:
        await add(world.database, *(entry(str(n)) for n in range(4)))
        mine = await leads(world.database)
        for e in await read(world.database):
            await park(world.database, mine, e.place)

        async with world.database.begin() as unit:
            found = await unit.outbox.parked(OUTBOX, 3)

        assert [e.message_id for e in found] == ["0", "1", "2"]

    @in_world
    async def test_an_entry_that_is_sent_again_has_its_old_place_and_no_failures(
        self, world: DatabaseWorld
    ) -> None:
        await add(world.database, entry(LONG_ID), entry("2"))
        before = await read(world.database)
        mine = await leads(world.database)
        await park(world.database, mine, before[0].place)

        async with world.database.begin() as unit:
            assert await unit.outbox.unpark(OUTBOX, LONG_ID)

        assert await read(world.database) == before
        assert await parked(world.database) == []

    @in_world
    async def test_an_entry_that_is_dropped_is_gone(self, world: DatabaseWorld) -> None:
        await add(world.database, entry(LONG_ID), entry("2"))
        before = await read(world.database)
        mine = await leads(world.database)
        await park(world.database, mine, before[0].place)

        async with world.database.begin() as unit:
            assert await unit.outbox.drop(OUTBOX, LONG_ID)
            assert not await unit.outbox.drop(OUTBOX, LONG_ID)

        assert await parked(world.database) == []
        assert await ids(world.database) == ["2"]

    @in_world
    async def test_operators_touch_only_what_is_parked_in_the_outbox_they_name(
        self, world: DatabaseWorld
    ) -> None:
        await add(world.database, entry("1"), entry("2"))
        mine = await leads(world.database)
        await park(world.database, mine, (await read(world.database))[0].place)

        async with world.database.begin() as unit:
            for outbox, message_id in [(OUTBOX, "2"), (OUTBOX, "3"), ("other", "1")]:
                assert not await unit.outbox.unpark(outbox, message_id)
                assert not await unit.outbox.drop(outbox, message_id)

        assert await ids(world.database) == ["2"]
        assert await parked(world.database) == ["1"]

    @in_world
    async def test_failed_publications_are_counted(self, world: DatabaseWorld) -> None:
        await add(world.database, entry("1"), entry("2"))
        places = [e.place for e in await read(world.database)]
        mine = await leads(world.database)

        for failed in (places, places[:1]):
            async with world.database.begin() as unit:
                await unit.outbox.failed(mine, failed)

        assert [e.attempts for e in await read(world.database)] == [2, 1]

    @in_world
    async def test_an_erased_entry_is_parked_and_never_sent(self, world: DatabaseWorld) -> None:
        headers = {"name": b"Ada"}
        await add(
            world.database,
            entry("1", key="ada", headers=headers),
            entry("2", key="bob", headers=headers),
            entry("3", key="ada", headers=headers, outbox="other"),
        )

        async with world.database.begin() as unit:
            assert await unit.outbox.erase(key="ada") == 2
            assert await unit.outbox.erase(key="ada") == 0
            assert await unit.outbox.erase(message_id="2", key="ada") == 0
            [aside] = await unit.outbox.parked(OUTBOX, 10)
            assert not await unit.outbox.unpark(OUTBOX, "1")

        assert (aside.message_id, aside.value, aside.headers) == ("1", None, {})
        assert aside.erased_at is not None
        assert aside.parked_reason == ERASED_REASON
        assert await ids(world.database) == ["2"]
        assert (await read(world.database))[0].headers == headers
        assert await parked(world.database, "other") == ["3"]

    @in_world
    async def test_an_entry_is_erased_by_its_id(self, world: DatabaseWorld) -> None:
        await add(world.database, entry(LONG_ID), entry("2"))
        mine = await leads(world.database)
        await park(world.database, mine, (await read(world.database))[0].place, "too large")

        async with world.database.begin() as unit:
            assert await unit.outbox.erase(message_id=LONG_ID) == 1
            [aside] = await unit.outbox.parked(OUTBOX, 10)
            assert await unit.outbox.drop(OUTBOX, LONG_ID)

        assert (aside.value, aside.parked_reason) == (None, ERASED_REASON)
        assert await ids(world.database) == ["2"]

    @in_world
    async def test_what_the_broker_says_of_an_erased_entry_is_not_kept(
        self, world: DatabaseWorld
    ) -> None:
        await add(world.database, entry("1", key="ada"))
        mine = await leads(world.database)
        sent = (await read(world.database))[0].place
        async with world.database.begin() as unit:
            await unit.outbox.erase(key="ada")

        await park(world.database, mine, sent, "invalid: Ada")

        async with world.database.begin() as unit:
            [aside] = await unit.outbox.parked(OUTBOX, 10)
        assert (aside.parked_reason, aside.attempts) == (ERASED_REASON, 1)

    @in_world
    async def test_what_a_message_caused_is_erased_with_it(self, world: DatabaseWorld) -> None:
        long_key = "k" * 600
        await add(
            world.database,
            entry("1", key="invoice-1", parent="billing/in-1", parent_key="ada"),
            entry("2", key="invoice-2", parent="billing/in-2", parent_key=long_key),
            entry("3", key="ada", parent="billing/in-3", parent_key="bob"),
            entry("4", parent="billing/in-4"),
        )

        async with world.database.begin() as unit:
            by_key = await unit.outbox.erase(key=long_key)
            by_parent = await unit.outbox.erase(parent="billing/in-4")
            both = await unit.outbox.erase(key="ada")

        assert (by_key, by_parent, both) == (1, 1, 2)
        assert await ids(world.database) == []

    @in_world
    async def test_erasing_needs_somebody_to_be_named(self, world: DatabaseWorld) -> None:
        await add(world.database, entry("1"))

        with pytest.raises(Misuse):
            async with world.database.begin() as unit:
                await unit.outbox.erase()

        assert await ids(world.database) == ["1"]
