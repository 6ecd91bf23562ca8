"""Every change to the audit trail is found, and where."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from sqlalchemy import delete, update

from semel.operate import audit
from semel.operate.audit import Broken, NotedHead, Verified, verify_audit
from semel.operate.stores import Act, hash_of, readable_diff
from semel.sql.tables import audit_entry, audit_head
from tests.messaging.places import InSqlite
from tests.messaging.worlds import memory_database
from tests.stores.world import DatabaseContract, in_world


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch):
    monkeypatch.setattr(audit, "PAGE", 2)


async def trail(entries=5):
    database = memory_database()
    for number in range(entries):
        async with database.begin() as unit:
            await unit.audit.append(Act(f"person {number}", "park.skip", "billing", f"m{number}"))
    return database


async def run(database, *statements):
    """Change rows behind the trail's back."""
    async with database.begin() as unit:
        for statement in statements:
            await unit.session.execute(statement)


def numbered(number):
    return audit_entry.c.number == number


def without(number):
    return delete(audit_entry).where(numbered(number))


async def entry_of(database, number):
    async with database.begin() as unit:
        [entry] = await unit.audit.read(number - 1, 1)
        return entry


@pytest.mark.parametrize("entries", [0, 1, 2, 5])
def test_a_whole_trail_is_verified_with_its_last_hash(entries):
    async def whole():
        database = await trail(entries)
        found = await verify_audit(database)
        async with database.begin() as unit:
            assert found == Verified(*await unit.audit.head())
        assert found.entries == entries

    asyncio.run(whole())


@pytest.mark.parametrize("number", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "changed",
    [
        {"actor": "somebody else"},
        {"reason": "another reason"},
        {"details": '{"n": 1}'},
        {"at": audit_entry.c.at + 1_000_000},
        {"hash": "0" * 64},
        {"previous_hash": "1" * 64},
    ],
    ids=["actor", "reason", "details", "time", "hash", "previous"],
)
def test_a_changed_entry_is_found(number, changed):
    async def whole():
        database = await trail()
        await run(database, update(audit_entry).where(numbered(number)).values(changed))

        found = await verify_audit(database)

        assert isinstance(found, Broken)
        assert f"entry {number}" in found.where or f"entry {number + 1}" in found.where

    asyncio.run(whole())


@pytest.mark.parametrize("number", [1, 3, 4])
def test_a_removed_entry_is_found(number):
    async def whole():
        database = await trail()
        await run(database, without(number))

        assert await verify_audit(database) == Broken(
            f"entry {number} is missing: {number + 1} follows {number - 1}"
        )

    asyncio.run(whole())


def test_an_end_that_was_cut_off_is_found_by_the_head():
    async def whole():
        database = await trail()
        await run(database, without(5))

        assert await verify_audit(database) == Broken("the trail ends at 4, and its head says 5")

    asyncio.run(whole())


def test_an_end_that_was_cut_off_with_the_head_is_found_by_a_noted_head():
    async def whole():
        database = await trail()
        noted = NotedHead(5, (await entry_of(database, 5)).hash)
        fourth = await entry_of(database, 4)
        head = update(audit_head).values(number=4, hash=fourth.hash)
        await run(database, without(5), head)

        assert isinstance(await verify_audit(database), Verified)
        assert await verify_audit(database, noted) == Broken("the trail ends at 4, and 5 was noted")

    asyncio.run(whole())


def test_a_trail_that_was_written_anew_is_found_by_a_noted_head():
    async def whole():
        original, forged = await trail(), await trail()
        entry = await entry_of(original, 2)

        found = await verify_audit(forged, NotedHead(2, entry.hash))

        assert found == Broken("entry 2 is not the one that was noted")
        assert isinstance(await verify_audit(original, NotedHead(2, entry.hash)), Verified)

    asyncio.run(whole())


def test_a_forged_head_is_found():
    async def whole():
        database = await trail()
        await run(database, update(audit_head).values(number=5, hash="0" * 64))
        assert await verify_audit(database) == Broken("the head has another hash than entry 5")

        await run(database, update(audit_head).values(number=6, hash="0" * 64))
        assert await verify_audit(database) == Broken("the trail ends at 5, and its head says 6")

    asyncio.run(whole())


def test_a_trail_that_grows_meanwhile_is_whole():
    async def whole():
        database = await trail()

        async def grow():
            for _ in range(20):
                async with database.begin() as unit:
                    await unit.audit.append(Act("ann", "park.skip"))
                await asyncio.sleep(0)

        found, _ = await asyncio.gather(verify_audit(database), grow())
        assert isinstance(found, Verified)

    asyncio.run(whole())


class TestTheTrailInADatabase(InSqlite, DatabaseContract):
    @in_world
    async def test_a_row_that_was_changed_by_hand_is_found(self, world):
        for _ in range(5):
            async with world.database.begin() as unit:
                await unit.audit.append(Act("ann", "park.skip", details={"n": 1}))
        assert isinstance(await verify_audit(world.database), Verified)

        async with world.database.begin() as unit:
            third = audit_entry.c.number == 3
            await unit.session.execute(update(audit_entry).where(third).values(actor="bob"))
        assert await verify_audit(world.database) == Broken("entry 3 was changed")

        async with world.database.begin() as unit:
            await unit.session.execute(delete(audit_head))
            await unit.session.execute(delete(audit_entry))
        assert await verify_audit(world.database) == Verified(0, "0" * 64)


def test_the_hash_covers_every_word():
    act = Act("a", "b", "c", "d", "e", {"f": 1})
    changes = [
        hash_of(2, 1.0, act, "x"),
        hash_of(1, 1.000001, act, "x"),
        hash_of(1, 1.0, act, "y"),
        *(
            hash_of(1, 1.0, replace(act, **{name: "other"}), "x")
            for name in ("actor", "act", "consumer", "message_id", "reason")
        ),
        hash_of(1, 1.0, replace(act, details={"f": 2}), "x"),
    ]

    assert len({hash_of(1, 1.0, act, "x"), *changes}) == len(changes) + 1


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        (b'{"b":1,"a":2}', b'{"a": 3, "b": 1}', ['-  "a": 2,', '+  "a": 3,']),
        (b'{"a":1}', b'{ "a": 1 }', ['-{"a":1}', '+{ "a": 1 }']),
        (b"one\ntwo", b"one\nthree", ["-two", "+three"]),
        (b"\x00\x01", b"\xff\x01", ["-00 01", "+ff 01"]),
        (b"text", b"\xff", ["-74 65 78 74", "+ff"]),
        (b"same", b"same", []),
        (b"a\n", b"a", ["-61 0a", "+61"]),
    ],
)
def test_a_diff_can_be_read(before, after, lines):
    shown = readable_diff(before, after).splitlines()[2:]

    assert [line for line in shown if line[0] in "+-"] == lines


def test_a_diff_of_what_was_erased_says_so():
    assert readable_diff(None, b"x") == "(erased)\n"
