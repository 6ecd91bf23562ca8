"""The outbox contract, first part: what is written, read, and deleted; what all parts share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pytest

from semel.errors import Misuse
from semel.messaging.database import Database
from semel.messaging.send.outbox import Leadership, OutboxEntry
from tests.stores.world import DatabaseContract, DatabaseWorld, in_world

OUTBOX: Final = "outbox"
LEASE_SECONDS: Final = 60.0


def entry(message_id: str, key: str | None = "k", **more: Any) -> OutboxEntry:
    """Make an entry."""
    fields: dict[str, Any] = {"topic": "payments", "value": message_id.encode(), **more}
    return OutboxEntry(message_id, key=key, **fields)


async def add(database: Database, *entries: OutboxEntry) -> None:
    """Write entries in a transaction of their own."""
    async with database.begin() as unit:
        await unit.outbox.add(entries)


async def read(
    database: Database, after_place: int = 0, limit: int = 100, outbox: str = OUTBOX
) -> Sequence[OutboxEntry]:
    """Read in a transaction of its own."""
    async with database.begin() as unit:
        return await unit.outbox.read(outbox, after_place, limit)


async def ids(database: Database, outbox: str = OUTBOX) -> list[str]:
    """Return the ids of everything that can be read, in order."""
    return [entry.message_id for entry in await read(database, outbox=outbox)]


async def lead(
    database: Database, owner: str, outbox: str = OUTBOX, *, instead_of: str = ""
) -> Leadership | None:
    """Try to lead, in a transaction of its own."""
    async with database.begin() as unit:
        return await unit.outbox.lead(outbox, owner, LEASE_SECONDS, instead_of=instead_of)


async def leads(database: Database, owner: str = "one", outbox: str = OUTBOX) -> Leadership:
    """Lead, or fail the test."""
    found = await lead(database, owner, outbox)
    assert found is not None, "nobody else leads, and yet the leadership was refused"
    return found


async def delete(database: Database, leadership: Leadership, *places: int) -> int:
    """Delete in a transaction of its own."""
    async with database.begin() as unit:
        return await unit.outbox.delete(leadership, places)


async def park(database: Database, leadership: Leadership, place: int, reason: str = "no") -> None:
    """Park in a transaction of its own."""
    async with database.begin() as unit:
        await unit.outbox.park(leadership, place, reason)


async def parked(database: Database, outbox: str = OUTBOX) -> list[str]:
    """Return the ids of what was set aside, in order."""
    async with database.begin() as unit:
        return [entry.message_id for entry in await unit.outbox.parked(outbox, 100)]


LONG_ID = "order/" + "0123456789" * 500
LOOKS_HASHED = "sha256:" + "0" * 64


class EntryRules(DatabaseContract):
    """What is written, read, and deleted."""

    @in_world
    async def test_entries_come_back_as_they_were_written_and_in_order(
        self, world: DatabaseWorld
    ) -> None:
        written = [
            entry("1", headers={"trace": b"\x00\xff", "empty": b""}, parent="billing/in-1"),
            entry("2", key=None, value=None),
            entry("3", key="", topic="refunds", value=bytes(range(256))),
        ]

        await add(world.database, *written[:2])
        await add(world.database, written[2])

        found = await read(world.database)
        assert [e._replace(place=0, created_at=0.0) for e in found] == written
        assert [e.place for e in found] == sorted({e.place for e in found})

    @in_world
    async def test_an_entry_knows_the_databases_time_at_which_it_was_written(
        self, world: DatabaseWorld
    ) -> None:
        async with world.database.begin() as unit:
            before = await unit.now()
            await unit.outbox.add([entry("1")])
            after = await unit.now()

        [found] = await read(world.database)
        assert before <= found.created_at <= after

    @in_world
    async def test_what_a_transaction_takes_back_was_never_there(
        self, world: DatabaseWorld
    ) -> None:
        async def add_and_fail() -> None:
            async with world.database.begin() as unit:
                await unit.outbox.add([entry("1")])
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await add_and_fail()

        assert await ids(world.database) == []

    @in_world
    async def test_an_entry_that_is_there_already_is_left_as_it_is(
        self, world: DatabaseWorld
    ) -> None:
        await add(world.database, entry("1", headers={"n": b"first"}), entry("2"))

        await add(world.database, entry("1", headers={"n": b"second"}), entry("3"))

        assert await ids(world.database) == ["1", "2", "3"]
        assert (await read(world.database))[0].headers == {"n": b"first"}

    @in_world
    async def test_another_message_under_an_id_that_is_there_is_refused(
        self, world: DatabaseWorld
    ) -> None:
        first = entry("1", value=b"first")
        await add(world.database, first, entry(LONG_ID, value=b"first"))

        for other in (
            first._replace(value=b"second"),
            first._replace(value=None),
            first._replace(topic="refunds"),
            first._replace(key=None),
            entry(LONG_ID, value=b"second"),
        ):
            with pytest.raises(Misuse, match=other.message_id):
                await add(world.database, entry("2"), other)

        assert [e.value for e in await read(world.database)] == [b"first", b"first"]

    @in_world
    async def test_an_id_twice_in_one_call_is_one_entry(self, world: DatabaseWorld) -> None:
        await add(world.database, entry("1"), entry("1"))
        with pytest.raises(Misuse):
            await add(world.database, entry("2", value=b"first"), entry("2", value=b"second"))

        assert await ids(world.database) == ["1"]

    @in_world
    async def test_what_was_erased_may_be_added_again_and_stays_erased(
        self, world: DatabaseWorld
    ) -> None:
        await add(world.database, entry("1"))
        async with world.database.begin() as unit:
            await unit.outbox.erase(message_id="1")

        await add(world.database, entry("1"))

        assert await ids(world.database) == []

    @in_world
    async def test_ids_of_any_length_stay_apart_and_come_back(self, world: DatabaseWorld) -> None:
        await add(world.database, entry(LONG_ID), entry(LONG_ID + "x"), entry(LOOKS_HASHED))

        assert await ids(world.database) == [LONG_ID, LONG_ID + "x", LOOKS_HASHED]

    @in_world
    async def test_outboxes_never_see_one_another(self, world: DatabaseWorld) -> None:
        await add(world.database, entry("1"), entry("1", outbox="other"), entry("2"))
        mine = await leads(world.database)
        [theirs] = await read(world.database, outbox="other")

        assert await delete(world.database, mine, theirs.place) == 0
        assert await ids(world.database) == ["1", "2"]
        assert await ids(world.database, "other") == ["1"]

    @in_world
    async def test_reading_goes_on_behind_a_place_and_stops_at_the_limit(
        self, world: DatabaseWorld
    ) -> None:
        await add(world.database, *(entry(str(n)) for n in range(5)))

        first = await read(world.database, limit=2)
        rest = await read(world.database, after_place=first[-1].place)

        assert [e.message_id for e in [*first, *rest]] == ["0", "1", "2", "3", "4"]
        assert len(first) == 2
        assert await read(world.database, after_place=rest[-1].place) == []

    @in_world
    async def test_exactly_the_named_entries_are_deleted(self, world: DatabaseWorld) -> None:
        await add(world.database, *(entry(str(n)) for n in range(5)))
        places = [e.place for e in await read(world.database)]
        mine = await leads(world.database)

        assert await delete(world.database, mine, places[0], places[3], places[1]) == 3

        assert await ids(world.database) == ["2", "4"]

    @in_world
    async def test_many_entries_are_deleted_at_once(self, world: DatabaseWorld) -> None:
        await add(world.database, *(entry(str(n)) for n in range(3000)))
        found = await read(world.database, limit=5000)
        mine = await leads(world.database)

        assert await delete(world.database, mine, *(e.place for e in found[1:])) == 2999

        assert await ids(world.database) == ["0"]

    @in_world
    async def test_what_was_deleted_may_be_written_again_at_a_place_of_its_own(
        self, world: DatabaseWorld
    ) -> None:
        await add(world.database, entry("1"))
        [before] = await read(world.database)
        mine = await leads(world.database)
        await delete(world.database, mine, before.place)

        await add(world.database, entry("1"))

        [after] = await read(world.database)
        assert after.place > before.place
        assert await delete(world.database, mine, before.place) == 0

    @in_world
    async def test_children_are_found_by_their_parent(self, world: DatabaseWorld) -> None:
        await add(
            world.database,
            entry("1", parent="billing/in-1"),
            entry("2", parent="billing/in-2"),
            entry("3", parent="billing/in-1", outbox="other"),
        )

        async with world.database.begin() as unit:
            found = await unit.outbox.children("billing/in-1")

        assert [e.message_id for e in found] == ["1", "3"]

    @in_world
    async def test_the_numbers_say_how_many_wait_and_for_how_long(
        self, world: DatabaseWorld
    ) -> None:
        await add(world.database, entry("1"), entry("2"))
        await world.age(100)
        await add(world.database, entry("3"), entry("4", outbox="other"))

        async with world.database.begin() as unit:
            numbers = await unit.outbox.numbers(OUTBOX)
            empty = await unit.outbox.numbers("nothing")

        assert (numbers.pending, numbers.parked) == (3, 0)
        assert 100 <= numbers.oldest_seconds < 130
        assert (empty.pending, empty.parked, empty.oldest_seconds) == (0, 0, 0.0)
