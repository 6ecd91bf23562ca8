"""Replays: how careful they are, what they are about, and what strange messages do to them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from semel.errors import Misuse
from semel.messaging.claims import ClaimState
from semel.messaging.deadletters import DeadLetterFilter
from semel.messaging.failure import Classified, FailureClass
from semel.messaging.lanes import Order
from semel.messaging.outcome import Handled, RetryLater
from semel.messaging.replay import (
    Replay,
    ReplayNotAllowed,
    ReplaySettings,
    ReplayTaken,
)
from semel.messaging.replay_acts import stop_replay
from semel.messaging.replay_report import report_of
from semel.messaging.replaying import ReplayInterrupted
from semel.messaging.replays import ReplayState
from semel.messaging.selection import (
    Ids,
    Letters,
    Offsets,
    Times,
    Waiting,
    from_json,
    parked_key,
    to_json,
)
from semel.messaging.settings import Duplicates
from semel.messaging.waiting import WaitingFilter, Waits
from semel.testing.contracts.messaging_world import in_world
from tests.messaging.act_world import acts, claim_of, letters, queue
from tests.messaging.places import InMemory
from tests.messaging.replay_world import (
    ALL_AT_ONCE,
    DEAD,
    P0,
    PARKS,
    Service,
    counts,
    dead,
)
from tests.messaging.worlds import memory_world

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


class TestSelections(InMemory):
    """Which messages it is about."""

    @in_world
    async def test_records_are_selected_by_the_brokers_time(self, world):
        service = await Service(world).open()
        for message_id in ("m1", "m2", "m3"):
            service.put(message_id)
            service.clock.advance(60)
        began = service.clock.now() - 180

        report = await service.run(Times(P0, began + 60, began + 120))

        assert counts(report) == {"handled": 1}
        assert await service.paid() == ["m2"]

    @in_world
    async def test_letters_are_selected_by_their_filter(self, world):
        service = await dead(world, 3)

        report = await service.run(Letters(DeadLetterFilter(message_id="m1")))

        assert counts(report) == {"handled": 1}
        assert await service.paid() == ["m1"]

    @in_world
    async def test_a_letter_that_comes_while_it_runs_is_not_part_of_it(self, world):
        service = await dead(world, 2)
        replay = service.replay(Letters(), ReplaySettings(canary=(1,), asks_after_canary=True))
        await replay.run()
        await world.age(1)
        service.refuse("late")
        await service.deliver("late")

        report = await service.run(None)

        assert counts(report) == {"handled": 2}

    @in_world
    async def test_waiting_messages_are_selected_by_label_and_code(self, world):
        service = await Service(world, replace(PARKS, order=Order.NONE, holds_keys=False)).open()
        service.refuse("m1", "m2")
        await service.deliver("m1", "m2")
        service.heal()
        async with world.database.begin() as unit:
            await unit.waiting.label("billing", "m2", "data")

        report = await service.run(Waiting(WaitingFilter(label="data", waits=Waits.PARKED)))

        assert counts(report) == {"handled": 1}
        assert await service.paid() == ["m2"]

    @pytest.mark.parametrize(
        "selection",
        [
            Ids(("a", "b")),
            Letters(DeadLetterFilter("billing", until=12.5)),
            Waiting(WaitingFilter("billing", waits=Waits.PARKED, key="k")),
            Offsets(P0, 3, 9),
            Times(P0, 1.0, 2.0, 5, 6),
        ],
        ids=lambda selection: type(selection).__name__,
    )
    def test_a_selection_survives_its_table(self, selection):
        assert from_json(to_json(selection)) == selection

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "moods"}', '{"kind": "ids"}'])
    def test_something_else_is_no_selection(self, text):
        with pytest.raises(Misuse, match="no selection"):
            from_json(text)

    @pytest.mark.parametrize(
        ("selection", "why"),
        [
            (Ids(()), "at least one id"),
            (Letters(DeadLetterFilter("shipping")), "about consumer shipping"),
            (Waiting(WaitingFilter("shipping")), "about consumer shipping"),
            (Offsets(P0, 5, 4), "no offsets from 5 to 4"),
            (Times(P0, 2.0, 2.0), "begins before it ends"),
            (None, "select its messages"),
        ],
    )
    def test_what_selects_nothing_is_refused(self, selection, why):
        async def scenario() -> None:
            async with memory_world() as world:
                with pytest.raises(Misuse, match=why):
                    await (await Service(world).open()).run(selection)
                assert await acts(world) == []

        asyncio.run(scenario())

    @in_world
    async def test_a_topic_needs_a_reader(self, world):
        service = await Service(world).open()

        with pytest.raises(Misuse, match="reader"):
            await Replay(service.consumer, world.database, Offsets(P0, 0, 1), actor="ann").run()


class TestStrangeMessages(InMemory):
    """What a replay does with messages that are not simply there to be handled."""

    @in_world
    async def test_duplicates_do_not_invoke_the_handler_even_where_deliveries_do(self, world):
        service = await Service(world, replace(DEAD, duplicates=Duplicates.INVOKE)).open()
        service.put("m1")
        await service.deliver("m1")

        await service.run(Offsets(P0, 0, 0))

        assert await service.paid() == ["m1"]

    @in_world
    async def test_what_fails_waits_for_the_retry_worker_for_no_broker_brings_it_back(self, world):
        policy = replace(DEAD.retry, max_attempts=3)
        service = await Service(world, replace(DEAD, retry=policy)).open()
        service.put("m1")

        def down(message):
            raise ConnectionError("down")

        service.broken = down
        report = await service.run(Offsets(P0, 0, 0))

        assert counts(report) == {"failed": 1}
        assert await queue(world) == [("m1", "retry")]

    @in_world
    async def test_a_record_that_can_be_read_at_last_is_handled_under_its_own_id(self, world):
        service = await Service(world).open()
        service.put("m1", value=b"not json")
        service.put("m2")
        report = await service.run(Offsets(P0, 0, 1), replace(ALL_AT_ONCE, stop_after_failures=9))
        assert counts(report) == {"failed": 1, "handled": 1}

        service.read_everything()
        again = await service.run(Letters(), name="twice")

        assert counts(again) == {"handled": 1}
        assert sorted(await service.paid()) == ["m1", "m2"]
        assert await letters(world) == 0
        claim = await claim_of(world, "m1")
        assert claim is not None
        assert claim.state is ClaimState.COMPLETED
        assert ("ann", "dlq.read", "unreadable:payments/0/0") in await acts(world)

    @in_world
    async def test_the_letter_of_an_unreadable_record_goes_when_its_range_is_replayed(self, world):
        service = await Service(world).open()
        service.put("m1", value=b"not json")
        await service.run(Offsets(P0, 0, 0))
        service.read_everything()

        report = await service.run(Offsets(P0, 0, 0), name="twice")

        assert counts(report) == {"handled": 1}
        assert await letters(world) == 0

    @in_world
    async def test_a_letter_that_still_cannot_be_read_is_refused_and_stays(self, world):
        service = await Service(world).open()
        service.put("m1", value=b"not json")
        await service.run(Offsets(P0, 0, 0))

        report = await service.run(Letters(), name="twice")

        assert counts(report) == {"refused": 1}
        assert await letters(world) == 1

    @in_world
    async def test_a_conflict_is_for_a_person(self, world):
        service = await Service(world).open()
        await service.deliver("m1")
        await service.deliver("m1", key="another payload")
        assert await letters(world) == 1

        report = await service.run(Letters())

        assert counts(report) == {"refused": 1}
        assert await service.paid() == ["m1"]

    @in_world
    async def test_what_was_erased_is_refused(self, world):
        service = await dead(world, 1)
        async with world.database.begin() as unit:
            await unit.dead_letters.erase(DeadLetterFilter())

        assert counts(await service.run(Letters())) == {"refused": 1}


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
