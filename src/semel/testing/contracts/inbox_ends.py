"""The rules of an inbox's ends: what is deleted, erased, or closed by a person."""

from __future__ import annotations

from dataclasses import replace

import pytest

from semel.errors import Misuse
from semel.testing.contracts.deadletters import LETTER
from semel.testing.contracts.inbox_world import done, due, failed, get, message, store
from semel.testing.contracts.messaging_world import DatabaseContract, DatabaseWorld, in_world


class InboxEnds(DatabaseContract):
    """How messages leave an inbox without being handled, and what stays of them."""

    @in_world
    async def test_only_messages_that_were_processed_long_ago_are_deleted(
        self, world: DatabaseWorld
    ) -> None:
        await store(world.database, *(message(str(n)) for n in range(6)))
        await store(world.database, message("1", consumer="audit"))
        for message_id in ("0", "1", "2"):
            await done(world.database, message_id)
        await failed(world.database, "4", None)
        await world.age(1000)
        await done(world.database, "3")

        async with world.database.begin() as unit:
            assert await unit.inbox.delete_processed("stock", 500, 2) == 2
            assert await unit.inbox.delete_processed("stock", 500, 10) == 1
            assert await unit.inbox.delete_processed("stock", 500, 10) == 0
            left = [await unit.inbox.get("stock", str(n)) for n in range(6)]

        assert [one is not None for one in left] == [False, False, False, True, True, True]
        assert await due(world.database, consumer="audit") == ["1"]

    @in_world
    async def test_an_erased_message_has_no_payload_and_is_not_tried(
        self, world: DatabaseWorld
    ) -> None:
        await store(
            world.database,
            message("1", "ada", headers={"name": b"Ada"}, payload_hash="aa"),
            message("2", "bob"),
            message("3", "ada"),
            message("4", "ada", consumer="audit"),
        )
        await done(world.database, "3", '{"name": "Ada"}')

        async with world.database.begin() as unit:
            assert await unit.inbox.erase(key="ada", consumer="nobody") == 0
            assert await unit.inbox.erase(key="ada") == 3
            assert await unit.inbox.erase(key="ada") == 0
            assert await unit.inbox.erase(message_id="2", key="ada") == 0
            assert await unit.inbox.erase(message_id="2") == 1

        found = await get(world.database, "1")
        assert (found.payload, found.headers, found.payload_hash) == (None, {}, "aa")
        assert found.erased_at is not None
        assert await due(world.database) == []
        processed = await get(world.database, "3")
        assert processed.processed_at is not None
        assert processed.result is None

    @in_world
    async def test_an_attempt_that_fails_late_does_not_bring_an_erased_message_back(
        self, world: DatabaseWorld
    ) -> None:
        await store(world.database, message("1"))
        async with world.database.begin() as unit:
            await unit.inbox.erase(message_id="1")

        assert await failed(world.database, "1", 0.0) == 0

        assert await due(world.database) == []
        assert (await get(world.database, "1")).due_at is None

    @in_world
    async def test_an_erased_message_without_a_dead_letter_is_closed(
        self, world: DatabaseWorld
    ) -> None:
        await store(world.database, *(message(name) for name in ("1", "2", "3", "4")))
        await failed(world.database, "2", None)
        await failed(world.database, "3", None)
        await done(world.database, "4")

        async with world.database.begin() as unit:
            await unit.dead_letters.put(replace(LETTER, consumer="stock", message_id="3"))
            for name in ("1", "2", "3", "4"):
                await unit.inbox.erase(message_id=name)

        found = [await get(world.database, name) for name in ("1", "2", "3", "4")]
        assert [one.processed_at is not None for one in found] == [True, True, False, True]
        assert [one.error for one in found] == ["ERASED", "ERASED", "ERASED", ""]
        assert all(one.erased_at is not None for one in found)
        # An attempt that fails late writes none of its words either.
        await failed(world.database, "3", None)
        assert (await get(world.database, "3")).error == "ERASED"
        await world.age(1000)
        async with world.database.begin() as unit:
            assert await unit.inbox.delete_processed("stock", 500, 10) == 3

    @in_world
    async def test_a_message_that_a_person_closed_is_processed_without_a_result(
        self, world: DatabaseWorld
    ) -> None:
        await store(world.database, message("1"), message("2"))
        await done(world.database, "2")

        async with world.database.begin() as unit:
            closed = [await unit.inbox.close("stock", n, "SKIPPED") for n in ("1", "1", "2", "3")]
            assert not await unit.inbox.try_again("stock", "1")

        found = await get(world.database, "1")
        assert closed == [True, False, False, False]
        assert found.processed_at is not None
        assert (found.error, found.result, found.payload) == ("SKIPPED", None, b"1")
        assert (await get(world.database, "2")).error == ""
        assert await due(world.database) == []

    @in_world
    async def test_erasing_needs_somebody_to_be_named(self, world: DatabaseWorld) -> None:
        await store(world.database, message("1"))

        with pytest.raises(Misuse):
            async with world.database.begin() as unit:
                await unit.inbox.erase()

        assert (await get(world.database, "1")).payload == b"1"
