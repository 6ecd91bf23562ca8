"""Replays: how careful they are, and what stops them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from semel.errors import Misuse
from semel.messaging.failure import Classified, FailureClass
from semel.messaging.outcome import Handled, RetryLater
from semel.operate.replay import (
    ReplayNotAllowed,
    ReplaySettings,
    ReplayTaken,
    report_of,
    stop_replay,
)
from semel.operate.replay_message import ReplayInterrupted
from semel.operate.selection import Ids, Letters, Offsets, parked_key
from semel.operate.stores import ReplayState
from tests.messaging.act_world import acts, letters
from tests.messaging.places import InMemory
from tests.messaging.replay_world import ALL_AT_ONCE, P0, PARKS, Service, counts, dead
from tests.stores.world import in_world

DOWN = Classified(FailureClass.TRANSIENT, "CONNECTION_LOST", "down", "")


class TestCare(InMemory):
    """How carefully it goes."""

    @in_world
    async def test_a_canary_of_one_and_of_ten_goes_before_the_rest(self, world):
        service = await dead(world, 20)
        settings = ReplaySettings(asks_after_canary=True)

        reports = [await service.run(Letters(), settings) for _ in range(3)]

        assert [report.tried for report in reports] == [1, 11, 20]
        assert [report.state.value for report in reports] == ["stopped", "stopped", "finished"]

    @in_world
    async def test_one_failure_ends_the_canary_and_the_next_run_goes_on_behind_it(self, world):
        service = await dead(world, 5)
        service.refuse("m0")

        first = await service.run(Letters(), ReplaySettings(stop_after_failures=3))
        second = await service.run(None, ReplaySettings(stop_after_failures=3))

        assert (first.state, counts(first)) == (ReplayState.FAILED, {"failed": 1})
        assert counts(second) == {"failed": 1, "handled": 4}
        assert second.state is ReplayState.FINISHED

    @in_world
    async def test_so_many_failures_stop_it(self, world):
        service = await dead(world, 5)
        service.refuse("m1", "m3", "m4")

        report = await service.run(Letters(), ReplaySettings(canary=(), stop_after_failures=2))

        assert counts(report) == {"handled": 2, "failed": 2}
        assert report.why.startswith("message 'm3' failed: REJECTED")

    @in_world
    async def test_the_rate_is_kept_on_the_clock(self, world):
        service = await dead(world, 4)

        await service.run(Letters(), replace(ALL_AT_ONCE, per_second=2.0))

        assert sum(service.clock.slept) == pytest.approx(1.5)

    @in_world
    async def test_duplicates_take_no_time(self, world):
        service = await Service(world).open()
        await service.deliver("m1", "m2", "m3")

        await service.run(Ids(("m1", "m2", "m3")), replace(ALL_AT_ONCE, per_second=0.1))

        assert service.clock.slept == []

    @in_world
    async def test_a_letter_that_came_back_too_often_is_refused(self, world):
        service = await dead(world, 1)
        service.refuse("m0")
        settings = ReplaySettings(most_replays=2)

        reports = [await service.run(Letters(), settings, name=f"r{n}") for n in range(3)]

        assert [counts(report) for report in reports] == [
            {"failed": 1},
            {"failed": 1},
            {"refused": 1},
        ]

    @in_world
    async def test_a_parked_message_that_came_back_too_often_is_refused(self, world):
        service = await Service(world, PARKS).open()
        service.refuse("m1")
        await service.deliver("m1", key="k")
        settings = ReplaySettings(most_replays=1)

        first = await service.run(parked_key("k"), settings)
        second = await service.run(parked_key("k"), settings, name="twice")

        assert (counts(first), counts(second)) == ({"failed": 1}, {"refused": 1})

    @in_world
    async def test_a_policy_that_forbids_it_is_honoured(self, world):
        service = await dead(world, 1)

        with pytest.raises(ReplayNotAllowed, match="not allowed for side effects"):
            await service.run(
                Letters(), ReplaySettings(refusal="replay is not allowed for side effects")
            )

        assert await letters(world) == 1
        assert await acts(world) == []

    @in_world
    async def test_records_beyond_the_replay_window_without_a_claim_are_refused(self, world):
        service = await Service(world).open()
        service.put("old")
        service.clock.advance(100)
        service.put("new")
        await world.age(100)

        report = await service.run(Offsets(P0, 0, 1), replace(ALL_AT_ONCE, window_seconds=50))

        assert counts(report) == {"refused": 1, "handled": 1}
        assert await service.paid() == ["new"]

    @in_world
    async def test_progress_is_told_message_by_message(self, world):
        service = await dead(world, 3)
        told = []

        await service.run(Letters(), progress=lambda report: told.append(report.done))

        assert told == [1, 2, 3]


class TestStopping(InMemory):
    """Several people, several processes, a database that does not answer."""

    @in_world
    async def test_a_message_that_cannot_be_asked_for_is_asked_for_again(self, world):
        service = await dead(world, 1)
        answers = [RetryLater(0.0, DOWN), RetryLater(0.0, DOWN), Handled()]

        async def handle(message, waiting):
            return answers.pop(0)

        assert counts(await service.run(Letters(), handle=handle)) == {"handled": 1}

    @in_world
    async def test_a_database_that_does_not_answer_interrupts_it_and_nothing_is_passed_over(
        self, world
    ):
        service = await Service(world).open()
        service.put("m1", "m2")

        async def handle(message, waiting):
            return RetryLater(0.0, DOWN)

        with pytest.raises(ReplayInterrupted, match="'m1' could not be tried"):
            await service.run(Offsets(P0, 0, 1), handle=handle)

        assert counts(await service.run(None)) == {"handled": 2}
        assert await service.paid() == ["m1", "m2"]

    @in_world
    async def test_somebody_can_stop_it_and_somebody_else_can_go_on(self, world):
        service = await dead(world, 3)

        async def stop() -> None:
            await stop_replay(world.database, "again", actor="bob", reason="lunch")

        tasks = []
        report = await service.replay(
            Letters(), progress=lambda report: tasks.append(asyncio.ensure_future(stop()))
        ).run()
        await asyncio.gather(*tasks, return_exceptions=True)

        assert (report.state, report.why) == (ReplayState.STOPPED, "somebody stopped it")
        assert report.done < 3
        assert ("bob", "replay.stop", "") in await acts(world)
        assert (await service.run(None)).state is ReplayState.FINISHED
        assert sorted(await service.paid()) == ["m0", "m1", "m2"]

    @in_world
    async def test_of_two_processes_the_slower_one_stops(self, world):
        service = await dead(world, 3)
        second = service.replay(None)

        async def takeover(report) -> None:
            await second.run()

        taken = []

        def progress(report):
            if not taken:
                taken.append(asyncio.ensure_future(takeover(report)))

        first = service.replay(Letters(), progress=progress)
        results = await asyncio.gather(first.run(), return_exceptions=True)
        results += await asyncio.gather(*taken, return_exceptions=True)

        assert sum(isinstance(result, ReplayTaken) for result in results) <= 1
        assert sorted(await service.paid()) == ["m0", "m1", "m2"]
        async with world.database.begin() as unit:
            run = await unit.replays.get("again")
        assert run is not None
        assert run.state is ReplayState.FINISHED
        assert report_of(run).done == 3

    @in_world
    async def test_a_replay_that_does_not_run_cannot_be_stopped(self, world):
        service = await dead(world, 1)
        await service.run(Letters())

        for name, why in (("again", "does not run: it is finished"), ("no", "no replay 'no'")):
            with pytest.raises(Misuse, match=why):
                await stop_replay(world.database, name, actor="bob")

    @in_world
    async def test_running_a_finished_replay_changes_nothing(self, world):
        service = await dead(world, 1)
        first = await service.run(Letters())
        before = await acts(world)

        assert counts(await service.run(None)) == counts(first)
        assert await acts(world) == before

    @in_world
    async def test_a_name_belongs_to_one_consumer_and_one_selection(self, world):
        service = await dead(world, 1)
        await service.run(Letters())

        with pytest.raises(Misuse, match="another selection"):
            await service.run(Ids(("m1",)))
        service.consumer = replace(service.consumer, name="shipping")
        with pytest.raises(Misuse, match="one of consumer billing"):
            await service.run(None)
