"""Consume, begin, claim, handle, commit the database, and only then the broker."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import pytest
from sqlalchemy import text

from semel.crashpoints import CrashPoint
from semel.errors import InDoubt, Retryable
from semel.message import Message
from semel.messaging.handle.claims import ClaimState
from semel.testing.crash import Crash, crash_at
from tests.scenarios.services import BATCHED, GROUP, SINGLE, Service
from tests.scenarios.watching import WatchedDatabase, WatchedSubscription

MODES = pytest.mark.parametrize("mode", [SINGLE, BATCHED], ids=["single", "batched"])
IN_ORDER = ["consume", "begin", "claim", "handle", "commit", "broker commit"]


@MODES
def test_the_five_steps_happen_in_their_order(serve, mode):
    async def scenario(service: Service) -> None:
        said: list[str] = []
        service.fail = lambda message: said.append("handle")
        service.send(1)

        await service.work(
            mode,
            database=WatchedDatabase(service.database, said),
            watch=partial(WatchedSubscription, said=said),
        )

        assert said == IN_ORDER

    serve(scenario)


WINDOWS = {
    # where the process dies          is the effect durable?   is the offset committed?
    CrashPoint.CLAIM_BEFORE: (False, False),
    CrashPoint.CLAIM_AFTER: (False, False),
    CrashPoint.HANDLE_AFTER: (False, False),
    CrashPoint.MESSAGE_COMMIT_BEFORE: (False, False),
    CrashPoint.MESSAGE_COMMIT_AFTER: (True, False),
    CrashPoint.OUTCOMES_AFTER: (True, False),
    CrashPoint.SETTLE_BEFORE: (True, False),
    CrashPoint.SETTLE_AFTER: (True, True),
}


@MODES
@pytest.mark.parametrize("point", WINDOWS)
def test_a_crash_between_two_steps_keeps_what_was_before_and_loses_nothing(serve, mode, point):
    async def scenario(service: Service) -> None:
        service.send(1)
        dying = await service.runner(mode)
        with crash_at(point), pytest.raises(Crash):
            await dying.run_until_idle()

        effect, offset = WINDOWS[point]
        assert (await service.effects() == ["m1"]) == effect
        assert (service.committed == {0: 1}) == offset
        await service.die(dying)

        await service.work(mode)

        assert await service.effects() == ["m1"]
        assert service.committed == {0: 1}
        claim = await service.claim(1)
        assert claim is not None
        assert claim.state is ClaimState.COMPLETED

    serve(scenario)


@MODES
def test_a_commit_that_fails_is_not_acknowledged_and_the_message_comes_again(serve, mode):
    async def scenario(service: Service) -> None:
        said: list[str] = []
        service.fail = lambda message: said.append("handle")
        service.send(1)
        failing = WatchedDatabase(service.database, said)
        failing.before_commit = [Retryable("the commit was refused")] * 2

        await service.work(mode, database=failing, watch=partial(WatchedSubscription, said=said))

        assert said.count("commit") == 1
        assert said.count("consume") > 1 or mode is BATCHED
        assert said.index("broker commit") > said.index("commit")
        assert said.count("broker commit") == 1
        assert await service.effects() == ["m1"]
        assert service.committed == {0: 1}
        assert await service.outcomes() == {0: {"success"}}

    serve(scenario)


@MODES
def test_a_commit_whose_answer_was_lost_is_found_out_by_the_next_delivery(serve, mode):
    async def scenario(service: Service) -> None:
        said: list[str] = []
        service.send(1)
        losing = WatchedDatabase(service.database, said)
        losing.after_commit = [InDoubt("no answer came")]

        await service.work(mode, database=losing, watch=partial(WatchedSubscription, said=said))

        assert service.calls == ["m1"]
        assert await service.effects() == ["m1"]
        assert service.committed == {0: 1}

    serve(scenario)


@pytest.mark.postgres
def test_a_commit_that_the_database_refuses_for_good_makes_a_dead_letter(serve_on_postgres):
    async def scenario(service: Service) -> None:
        async with service.database.begin() as unit:
            await unit.session.execute(
                text(
                    "ALTER TABLE effect ADD CONSTRAINT once UNIQUE (id) "
                    "DEFERRABLE INITIALLY DEFERRED"
                )
            )
            await unit.session.execute(text("INSERT INTO effect (id) VALUES ('m2')"))
        service.send(1, 2, 3)

        await service.work()

        assert sorted(await service.effects()) == ["m1", "m2", "m3"]
        [letter] = await service.letters()
        assert (letter.message_id, letter.error_code) == ("m2", "CONSTRAINT_VIOLATED")
        assert service.committed == {0: 3}

    serve_on_postgres(scenario)


def test_a_failing_handler_leaves_nothing_and_its_message_can_be_claimed_again(serve):
    async def scenario(service: Service) -> None:
        def fail(message: Message) -> None:
            if message.attempt == 1:
                raise RuntimeError("closed")

        service.fail = fail
        service.send(1)
        runner = await service.runner()
        await runner._pass()
        await runner._finish(1e12)

        assert await service.effects() == []
        assert service.committed == {}
        claim = await service.claim(1)
        assert claim is not None
        assert claim.state is ClaimState.FAILED_RETRYABLE
        await runner.subscription.close()

        await service.work()
        assert await service.effects() == ["m1"]

    serve(scenario)


@MODES
def test_a_rebalance_between_effect_and_commit_makes_a_duplicate_that_is_skipped(serve, mode):
    async def scenario(service: Service) -> None:
        service.send(1, 2)
        first = await service.runner(replace(mode, settle_seconds=5.0))
        with crash_at(CrashPoint.SETTLE_BEFORE), pytest.raises(Crash):
            await first.run_until_idle()
        assert await service.effects() == ["m1", "m2"]
        assert service.committed == {}

        await service.die(first)
        second = await service.runner(mode)
        assert second.subscription.assignment
        running = asyncio.create_task(second.run())
        async with asyncio.timeout(20):
            while service.committed != {0: 2}:
                await asyncio.sleep(0.01)
        second.stop()
        await running

        assert await service.effects() == ["m1", "m2"]
        assert service.calls == ["m1", "m2"]
        both = {"success", "duplicate_skipped"}
        outcomes = await service.outcomes()
        assert outcomes[0] == both
        # The second may have been under way when the first was settled, and the process died.
        assert outcomes[1] in (both, {"duplicate_skipped"})
        assert service.broker.lag(GROUP, "cases") == 0

    serve(scenario)
