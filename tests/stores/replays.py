"""The executable contract of the replays' records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from semel.operate.stores import ReplayRun, ReplayState
from tests.stores.claims_world import beside, rolled_back
from tests.stores.world import DatabaseContract, DatabaseWorld, in_world

RUN = ReplayRun("nightly", "billing", '{"kind": "ids"}', "ann", cursor='{"after": null}')


class ReplaysContract(DatabaseContract):
    """Everything a `semel.operate.stores.Replays` must do."""

    @in_world
    async def test_a_replay_is_kept_as_it_was_begun(self, world: DatabaseWorld) -> None:
        assert await begin(world, RUN)

        kept = await get(world, "nightly")
        assert kept is not None
        assert kept.updated_at >= kept.began_at > 0
        assert kept == replace(RUN, began_at=kept.began_at, updated_at=kept.updated_at)
        assert await get(world, "another") is None

    @in_world
    async def test_a_name_is_given_once(self, world: DatabaseWorld) -> None:
        await begin(world, RUN)

        assert not await begin(world, replace(RUN, consumer="shipping"))

        kept = await get(world, "nightly")
        assert kept is not None
        assert kept.consumer == "billing"

    @in_world
    async def test_a_replay_that_is_rolled_back_was_never_begun(self, world: DatabaseWorld) -> None:
        async with rolled_back(world) as unit:
            await unit.replays.begin(RUN)

        assert await get(world, "nightly") is None

    @in_world
    async def test_it_goes_on_behind_its_cursor(self, world: DatabaseWorld) -> None:
        await begin(world, RUN)
        further = replace(RUN, cursor='{"after": 1}', done=5, failed=2)

        assert await advance(world, further, RUN.cursor)

        kept = await get(world, "nightly")
        assert kept is not None
        assert (kept.cursor, kept.done, kept.failed) == ('{"after": 1}', 5, 2)
        assert kept.state is ReplayState.RUNNING

    @in_world
    async def test_of_two_that_go_on_from_one_place_the_second_is_refused(
        self, world: DatabaseWorld
    ) -> None:
        await begin(world, RUN)
        await advance(world, replace(RUN, cursor="first"), RUN.cursor)

        assert not await advance(world, replace(RUN, cursor="second"), RUN.cursor)

        kept = await get(world, "nightly")
        assert kept is not None
        assert kept.cursor == "first"

    @in_world
    async def test_a_replay_that_does_not_run_does_not_go_on(self, world: DatabaseWorld) -> None:
        await begin(world, RUN)
        async with world.database.begin() as unit:
            running, stopped = ReplayState.RUNNING, ReplayState.STOPPED
            assert await unit.replays.set_state("nightly", running, stopped)
            assert not await unit.replays.set_state("nightly", running, stopped)
            assert not await unit.replays.set_state("another", running, stopped)

        assert not await advance(world, replace(RUN, cursor="further"), RUN.cursor)

        kept = await get(world, "nightly")
        assert kept is not None
        assert (kept.state, kept.cursor) == (ReplayState.STOPPED, RUN.cursor)

    @in_world
    async def test_a_replay_is_unfinished_until_it_has_finished_or_was_abandoned(
        self, world: DatabaseWorld
    ) -> None:
        for state in ReplayState:
            await begin(world, replace(RUN, name=state.value))
            await advance(world, replace(RUN, name=state.value, state=state), RUN.cursor)
        await begin(world, replace(RUN, name="another", consumer="shipping"))

        async with world.database.begin() as unit:
            assert await unit.replays.unfinished("billing") == ["failed", "running", "stopped"]

    @in_world
    async def test_no_replay_begins_while_somebody_deletes_because_none_was_there(
        self, world: DatabaseWorld
    ) -> None:
        async with world.database.begin() as retention:
            assert await retention.replays.unfinished("billing") == []
            begun = await beside(begin(world, RUN))

        assert await begun

    @in_world
    async def test_whoever_wants_to_delete_waits_for_a_replay_that_is_being_begun(
        self, world: DatabaseWorld
    ) -> None:
        async with world.database.begin() as unit:
            await unit.replays.begin(RUN)
            asked = await beside(unfinished(world))

        assert await asked == ["nightly"]

    @in_world
    async def test_two_who_delete_at_once_wait_for_one_another_and_both_succeed(
        self, world: DatabaseWorld
    ) -> None:
        for name in ("first", "second"):
            await begin(world, replace(RUN, name=name, state=ReplayState.FINISHED))
        await world.age(100)

        async def delete_one() -> int:
            async with world.database.begin() as unit:
                await unit.replays.unfinished("billing")
                return await unit.replays.delete_over("billing", 60, 1)

        async with world.database.begin() as unit:
            await unit.replays.unfinished("billing")
            other = await beside(delete_one())
            assert await unit.replays.delete_over("billing", 60, 1) == 1

        assert await other == 1

    @in_world
    async def test_only_replays_that_are_over_and_old_are_deleted(
        self, world: DatabaseWorld
    ) -> None:
        for state in ReplayState:
            await begin(world, replace(RUN, name=state.value))
            await advance(world, replace(RUN, name=state.value, state=state), RUN.cursor)
        await begin(world, replace(RUN, name="another", consumer="shipping"))
        await world.age(100)
        await begin(world, replace(RUN, name="new"))
        await advance(world, replace(RUN, name="new", state=ReplayState.FINISHED), RUN.cursor)

        deleted = []
        for _ in range(3):
            async with world.database.begin() as unit:
                deleted.append(await unit.replays.delete_over("billing", 60, 1))

        async with world.database.begin() as unit:
            left = {run.name for run in await unit.replays.find(None, 10)}
        assert deleted == [1, 1, 0]
        assert left == {"running", "stopped", "failed", "new", "another"}

    @in_world
    async def test_replays_are_listed_the_newest_first(self, world: DatabaseWorld) -> None:
        for name, consumer in (("a", "billing"), ("b", "shipping"), ("c", "billing")):
            await begin(world, replace(RUN, name=name, consumer=consumer))
            await world.age(60)

        async with world.database.begin() as unit:
            every = await unit.replays.find(None, 10)
            billing = await unit.replays.find("billing", 10)
            newest = await unit.replays.find(None, 1)

        assert [run.name for run in every] == ["c", "b", "a"]
        assert [run.name for run in billing] == ["c", "a"]
        assert [run.name for run in newest] == ["c"]


async def begin(world: DatabaseWorld, run: ReplayRun) -> bool:
    """Begin a replay in a transaction of its own."""
    async with world.database.begin() as unit:
        return await unit.replays.begin(run)


async def unfinished(world: DatabaseWorld) -> Sequence[str]:
    """Ask for the replays that can go on, in a transaction of its own."""
    async with world.database.begin() as unit:
        return await unit.replays.unfinished("billing")


async def advance(world: DatabaseWorld, run: ReplayRun, cursor_before: str) -> bool:
    """Go on with a replay in a transaction of its own."""
    async with world.database.begin() as unit:
        return await unit.replays.advance(run, cursor_before)


async def get(world: DatabaseWorld, name: str) -> ReplayRun | None:
    """Read a committed replay."""
    async with world.database.begin() as unit:
        return await unit.replays.get(name)
