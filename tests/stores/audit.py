"""The executable contract of the audit trail."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from semel.operate.audit import break_in
from semel.operate.stores import FIRST_HASH, Act, AuditEntry
from tests.stores.claims_world import Rollback, rolled_back
from tests.stores.world import (
    DatabaseContract,
    DatabaseWorld,
    in_world,
    patiently,
)

ACT = Act("ann", "park.release", "billing", "m1", "the address is known now", {"key": "k", "n": 1})


class AuditContract(DatabaseContract):
    """Everything a `semel.operate.stores.AuditTrail` must do."""

    @in_world
    async def test_an_empty_trail_has_a_head_of_its_own(self, world: DatabaseWorld) -> None:
        assert await head(world) == (0, FIRST_HASH)
        assert await read(world) == []

    @in_world
    async def test_entries_are_read_as_they_were_appended(self, world: DatabaseWorld) -> None:
        written = [await append(world, ACT), await append(world, Act("bob", "park.skip"))]

        assert await read(world) == written
        assert written[0].act == ACT
        assert written[0].at > 0

    @in_world
    async def test_each_entry_carries_the_hash_of_the_one_before(
        self, world: DatabaseWorld
    ) -> None:
        first, second, third = [await append(world, ACT) for _ in range(3)]

        assert [first.number, second.number, third.number] == [1, 2, 3]
        assert first.previous_hash == FIRST_HASH
        assert second.previous_hash == first.hash
        assert third.previous_hash == second.hash
        assert break_in(await read(world)) is None

    @in_world
    async def test_the_head_is_the_last_entry(self, world: DatabaseWorld) -> None:
        await append(world, ACT)
        last = await append(world, ACT)

        assert await head(world) == (last.number, last.hash)

    @in_world
    async def test_an_act_and_its_entry_are_durable_together(self, world: DatabaseWorld) -> None:
        first = await append(world, ACT)
        async with rolled_back(world) as unit:
            await unit.audit.append(ACT)
        second = await append(world, ACT)

        assert await read(world) == [first, second]
        assert second.number == 2
        assert await head(world) == (2, second.hash)

    @in_world
    async def test_an_entry_that_a_savepoint_took_back_leaves_no_hole(
        self, world: DatabaseWorld
    ) -> None:
        async with world.database.begin() as unit:
            await unit.audit.append(ACT)
            with suppress(Rollback):
                async with unit.savepoint():
                    await unit.audit.append(ACT)
                    raise Rollback
            await unit.audit.append(ACT)

        entries = await read(world)
        assert [entry.number for entry in entries] == [1, 2]
        assert break_in(entries) is None

    @in_world
    async def test_whatever_people_write_hashes_the_same_when_it_is_read(
        self, world: DatabaseWorld
    ) -> None:
        for text in ("nul\0inside", "half a \ud83d pair", "Ä🐟", "x" * 5000, '"quoted"\n'):
            details = {"text": text, "list": (1, 2.5, None), "nested": {"b": 1, "a": [True]}}
            await append(world, Act(text, text, "billing", text, text, details))

        entries = await read(world)
        assert len(entries) == 5
        assert break_in(entries) is None

    @in_world
    async def test_entries_are_read_in_pages(self, world: DatabaseWorld) -> None:
        for _ in range(5):
            await append(world, ACT)

        assert [entry.number for entry in await read(world, after=1, limit=3)] == [2, 3, 4]
        assert [entry.number for entry in await read(world, after=4, limit=3)] == [5]

    @in_world
    async def test_the_entries_about_a_message_are_found(self, world: DatabaseWorld) -> None:
        long_id = "x" * 5000
        for consumer, message_id in (("billing", "m1"), ("shipping", "m1"), ("billing", long_id)):
            await append(world, Act("ann", "park.skip", consumer, message_id))
        await append(world, Act("bob", "park.skip", "billing", "m1"))

        async with world.database.begin() as unit:
            about = await unit.audit.about("billing", "m1")
            about_long = await unit.audit.about("billing", long_id)
        assert [entry.number for entry in about] == [1, 4]
        assert [entry.number for entry in about_long] == [3]

    @in_world
    async def test_appends_at_once_form_one_chain(self, world: DatabaseWorld) -> None:
        acts = [Act(f"person {n}", "park.skip") for n in range(6)]

        await asyncio.gather(*(patiently(partial(append, world, act)) for act in acts))

        entries = await read(world)
        assert [entry.number for entry in entries] == [1, 2, 3, 4, 5, 6]
        assert {entry.act.actor for entry in entries} == {f"person {n}" for n in range(6)}
        assert break_in(entries) is None
        assert await head(world) == (6, entries[-1].hash)


async def append(world: DatabaseWorld, act: Act) -> AuditEntry:
    """Write an act in a transaction of its own."""
    async with world.database.begin() as unit:
        return await unit.audit.append(act)


async def read(world: DatabaseWorld, after: int = 0, limit: int = 100) -> Sequence[AuditEntry]:
    """Read committed entries."""
    async with world.database.begin() as unit:
        return await unit.audit.read(after, limit)


async def head(world: DatabaseWorld) -> tuple[int, str]:
    """Read the committed head."""
    async with world.database.begin() as unit:
        return await unit.audit.head()
