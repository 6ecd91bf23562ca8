"""The executable contract of the running members, and of the notes about suspects."""

from __future__ import annotations

from typing import Final

from semel.message import Partition
from semel.messaging.records import Member
from semel.testing.contracts.claims import STRANGE_IDS
from tests.stores.claims_world import CONSUMER
from tests.stores.world import DatabaseContract, DatabaseWorld, in_world

P0: Final = Partition("payments", 0)
P1: Final = Partition("payments", 1)
ELSEWHERE: Final = Partition("refunds", 0)
ME: Final = '{"host": "here"}'


def _member(name: str, *partitions: Partition, consumer: str = CONSUMER) -> Member:
    return Member(consumer, name, ME, frozenset(partitions), 20)


async def _enter(world: DatabaseWorld, *members: Member, seconds: float = 60.0) -> None:
    async with world.database.begin() as unit:
        for member in members:
            await unit.members.enter(member, seconds)


async def _others(world: DatabaseWorld, name: str, *partitions: Partition) -> list[str]:
    async with world.database.begin() as unit:
        found = await unit.members.others(CONSUMER, name, partitions)
        return sorted(member.name for member in found)


class MembersContract(DatabaseContract):
    """Everything `semel.messaging.database.Members` must do."""

    @in_world
    async def test_a_member_is_found_by_the_partitions_that_it_names(
        self, world: DatabaseWorld
    ) -> None:
        await _enter(world, _member("a", P0, P1), _member("b", P1), _member("c", ELSEWHERE))

        assert await _others(world, "b", P0, P1) == ["a"]
        assert await _others(world, "new", P1) == ["a", "b"]
        assert await _others(world, "new", ELSEWHERE) == ["c"]
        assert await _others(world, "new") == []

    @in_world
    async def test_a_member_is_kept_as_it_was_entered(self, world: DatabaseWorld) -> None:
        await _enter(world, _member("a", P0, ELSEWHERE))

        async with world.database.begin() as unit:
            (found,) = await unit.members.others(CONSUMER, "new", [P0])
            now = await unit.now()

        assert (found.owner, found.in_flight) == (ME, 20)
        assert found.partitions == {P0, ELSEWHERE}
        assert 30 < found.expires_at - now <= 60

    @in_world
    async def test_entering_again_renews_the_row_and_replaces_its_partitions(
        self, world: DatabaseWorld
    ) -> None:
        await _enter(world, _member("a", P0))
        await world.age(50)
        await _enter(world, _member("a", P1))

        async with world.database.begin() as unit:
            (found,) = await unit.members.others(CONSUMER, "new", [P0, P1])
            now = await unit.now()

        assert found.partitions == {P1}
        assert found.expires_at - now > 30

    @in_world
    async def test_consumers_have_members_of_their_own(self, world: DatabaseWorld) -> None:
        await _enter(world, _member("a", P0, consumer="shipping"))

        assert await _others(world, "new", P0) == []

    @in_world
    async def test_a_member_that_leaves_is_gone(self, world: DatabaseWorld) -> None:
        await _enter(world, _member("a", P0), _member("b", P0))
        async with world.database.begin() as unit:
            await unit.members.leave(CONSUMER, "a")
            await unit.members.leave(CONSUMER, "never came")

        assert await _others(world, "new", P0) == ["b"]

    @in_world
    async def test_a_partition_that_was_worked_off_is_taken_off_the_row(
        self, world: DatabaseWorld
    ) -> None:
        await _enter(world, _member("a", P0, P1))
        async with world.database.begin() as unit:
            await unit.members.release(CONSUMER, "a", P0)
            await unit.members.release(CONSUMER, "never came", P0)

        assert await _others(world, "new", P0) == []
        assert await _others(world, "new", P1) == ["a"]

    @in_world
    async def test_the_last_partition_removes_the_row_if_it_has_expired(
        self, world: DatabaseWorld
    ) -> None:
        await _enter(world, _member("live", P0), seconds=1000)
        await _enter(world, _member("dead", P0))
        await world.age(61)
        async with world.database.begin() as unit:
            await unit.members.release(CONSUMER, "live", P0)
            await unit.members.release(CONSUMER, "dead", P0)
        await _enter(world, _member("live", P1), seconds=1000)

        assert await _others(world, "new", P0, P1) == ["live"]

    @in_world
    async def test_a_row_that_was_worked_off_before_it_expired_is_forgotten_afterwards(
        self, world: DatabaseWorld
    ) -> None:
        await _enter(world, _member("gone", P0), _member("accused", P1))
        await _enter(world, _member("live", P0), seconds=1000)
        await _enter(world, _member("gone", P0, consumer="shipping"))
        async with world.database.begin() as unit:
            await unit.members.release(CONSUMER, "gone", P0)
            await unit.members.release(CONSUMER, "live", P0)
            early = await unit.members.forget_expired(CONSUMER)
        await world.age(61)
        async with world.database.begin() as unit:
            forgotten = [await unit.members.forget_expired(CONSUMER) for _ in range(2)]

        assert (early, forgotten) == (0, [1, 0])
        assert await _others(world, "new", P0, P1) == ["accused"]

    @in_world
    async def test_only_rows_that_have_not_expired_are_running(self, world: DatabaseWorld) -> None:
        await _enter(world, _member("old", P0), _member("elsewhere", P0, consumer="shipping"))
        await world.age(61)
        await _enter(world, _member("new", P0), _member("idle"))
        async with world.database.begin() as unit:
            found = await unit.members.running(CONSUMER)

        assert sorted(member.name for member in found) == ["idle", "new"]

    @in_world
    async def test_tries_of_a_suspect_count_until_its_note_is_cleared(
        self, world: DatabaseWorld
    ) -> None:
        counts = []
        for act in ("try", "try", "clear", "try"):
            async with world.database.begin() as unit:
                if act == "clear":
                    await unit.members.clear_notes(CONSUMER, ["m"])
                else:
                    counts.append(await unit.members.suspect(CONSUMER, "m", ME))
        async with world.database.begin() as unit:
            others = [
                await unit.members.suspect(CONSUMER, "n", ME),
                await unit.members.suspect("shipping", "m", ME),
            ]

        assert counts == [1, 2, 1]
        assert others == [1, 1]

    @in_world
    async def test_a_suspect_may_have_any_id(self, world: DatabaseWorld) -> None:
        async with world.database.begin() as unit:
            noted = await unit.members.note(CONSUMER, STRANGE_IDS, ME)
            counts = [await unit.members.suspect(CONSUMER, id, ME) for id in STRANGE_IDS]
            again = await unit.members.note(CONSUMER, STRANGE_IDS, ME)
            known = await unit.members.notes(CONSUMER, STRANGE_IDS)
            await unit.members.clear_notes(CONSUMER, STRANGE_IDS, ME)
            after = await unit.members.note(CONSUMER, STRANGE_IDS, ME)

        assert counts == [2] * len(STRANGE_IDS)
        assert again == known
        assert (noted, set(again), after) == ({}, set(STRANGE_IDS), {})

    @in_world
    async def test_a_note_is_one_try_and_is_found_until_it_is_cleared(
        self, world: DatabaseWorld
    ) -> None:
        found = []
        for ids in (["a", "b"], ["b", "c"], []):
            async with world.database.begin() as unit:
                found.append(set(await unit.members.note(CONSUMER, ids, ME)))
        async with world.database.begin() as unit:
            tries = await unit.members.suspect(CONSUMER, "a", ME)
            await unit.members.clear_notes(CONSUMER, ["a", "b", "never noted"], ME)
            await unit.members.clear_notes(CONSUMER, [], ME)
            left = await unit.members.note(CONSUMER, ["a", "b", "c"], ME)
            elsewhere = await unit.members.note("shipping", ["c"], ME)

        assert found == [set(), {"b"}, set()]
        assert tries == 2
        assert (set(left), elsewhere) == ({"c"}, {})

    @in_world
    async def test_a_note_says_who_wrote_it_and_only_a_further_try_changes_that(
        self, world: DatabaseWorld
    ) -> None:
        async with world.database.begin() as unit:
            await unit.members.note(CONSUMER, ["a", "b"], "first")
        async with world.database.begin() as unit:
            before = await unit.members.note(CONSUMER, ["a", "b"], "second")
            await unit.members.suspect(CONSUMER, "a", "second")
        async with world.database.begin() as unit:
            after = await unit.members.notes(CONSUMER, ["a", "b", "never noted"])
            now = await unit.now()

        assert {id: (note.tries, note.writer) for id, note in before.items()} == {
            "a": (1, "first"),
            "b": (1, "first"),
        }
        assert {id: (note.tries, note.writer) for id, note in after.items()} == {
            "a": (2, "second"),
            "b": (1, "first"),
        }
        assert all(-1 < now - note.noted_at < 30 for note in after.values())

    @in_world
    async def test_a_worker_clears_only_its_own_notes(self, world: DatabaseWorld) -> None:
        async with world.database.begin() as unit:
            await unit.members.note(CONSUMER, ["a", "b"], "first")
            await unit.members.suspect(CONSUMER, "b", "second")
            await unit.members.clear_notes(CONSUMER, ["a", "b"], "second")
            left = await unit.members.notes(CONSUMER, ["a", "b"])
            await unit.members.clear_notes(CONSUMER, ["a"])
            after = await unit.members.notes(CONSUMER, ["a", "b"])

        assert (set(left), set(after)) == ({"a"}, set())

    @in_world
    async def test_old_notes_are_forgotten_a_few_at_a_time(self, world: DatabaseWorld) -> None:
        async with world.database.begin() as unit:
            await unit.members.note(CONSUMER, ["a", "b", "c"], ME)
            await unit.members.note("shipping", ["a"], ME)
        await world.age(100)
        async with world.database.begin() as unit:
            await unit.members.suspect(CONSUMER, "b", ME)
            forgotten = [await unit.members.forget_notes(CONSUMER, 50, 1) for _ in range(3)]
            left = await unit.members.notes(CONSUMER, ["a", "b", "c"])
            elsewhere = await unit.members.notes("shipping", ["a"])

        assert forgotten == [1, 1, 0]
        assert (set(left), set(elsewhere)) == ({"b"}, {"a"})
