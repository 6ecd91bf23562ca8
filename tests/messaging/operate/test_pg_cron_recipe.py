"""The pg_cron recipe of the docs deletes what `semel retention` would, and nothing else."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import text

from semel.messaging.handle.claims import ClaimState, Failure
from semel.messaging.records import FailedAttempt, InboxMessage, WaitingMessage, Waits
from semel.messaging.send.outbox import OutboxEntry, parent_of
from semel.messaging.settings import DAY_SECONDS
from semel.operate.stores import OVER, ReplayRun, ReplayState
from tests.messaging.act_world import BILLING
from tests.messaging.places import InPostgres
from tests.stores.claims_world import beside
from tests.stores.deadletters import LETTER
from tests.stores.world import DatabaseContract, in_world

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "retention-and-erasure.md"
JOBS = re.findall(r"\$\$(.*?)\$\$", PAGE.read_text(), re.S)
STATES = list(ClaimState)
RUN = ReplayRun("r", BILLING, "{}", "ann")


class TestTheRecipe(InPostgres, DatabaseContract):
    @in_world
    async def test_it_deletes_what_is_over_and_old(self, world):
        await fill(world, "old")
        await world.age(28 * DAY_SECONDS + 60)
        await fill(world, "new")

        await run_jobs(world)

        left = [f"old {s}" for s in STATES if s not in ("COMPLETED", "FAILED_TERMINAL")]
        assert await claims(world) == {*left, *(f"new {state}" for state in STATES)}
        async with world.database.begin() as unit:
            found = [await unit.inbox.get(BILLING, name) for name in ("old", "old-2", "new")]
            tried = {name: await unit.attempts.of(BILLING, name) for name in ("old", "old-2")}
        assert [message is not None for message in found] == [False, True, True]
        assert [len(attempts) for attempts in tried.values()] == [0, 1]

    @in_world
    async def test_it_deletes_the_attempts_of_the_messages_that_it_deletes(self, world):
        await fill(world, "old")
        await world.age(28 * DAY_SECONDS + 60)

        await run_jobs(world)

        left = await claims(world)
        async with world.database.begin() as unit:
            names = [f"old {state}" for state in STATES]
            tried = {name for name in names if await unit.attempts.of(BILLING, name)}
        assert tried == left
        assert 0 < len(left) < len(STATES)

    @in_world
    async def test_it_keeps_the_claims_of_messages_that_can_be_sent_back(self, world):
        await fill(world, "old")
        async with world.database.begin() as unit:
            letter = replace(LETTER, consumer=BILLING, message_id="old COMPLETED")
            await unit.dead_letters.put(letter)
            waiting = WaitingMessage(BILLING, "old FAILED_TERMINAL", Waits.RETRY, payload=b"{}")
            await unit.waiting.put(waiting)
        await world.age(99 * DAY_SECONDS)

        await run_jobs(world)

        assert await claims(world) == {f"old {state}" for state in STATES}

    @in_world
    async def test_it_keeps_what_the_outbox_still_has_messages_of(self, world):
        await fill(world, "old")
        async with world.database.begin() as unit:
            for parent in ("old COMPLETED", "old"):
                sent = OutboxEntry(f"of {parent}", "out", b"", parent=parent_of(BILLING, parent))
                await unit.outbox.add([sent])
        await world.age(99 * DAY_SECONDS)

        await run_jobs(world)

        assert "old COMPLETED" in await claims(world)
        async with world.database.begin() as unit:
            assert await unit.inbox.get(BILLING, "old") is not None

    @pytest.mark.parametrize("state", sorted({*ReplayState} - OVER))
    def test_it_deletes_nothing_while_somebody_can_go_on_with_a_replay(self, state):
        @in_world
        async def scenario(self, world):
            await fill(world, "old")
            await world.age(99 * DAY_SECONDS)
            async with world.database.begin() as unit:
                await unit.replays.begin(replace(RUN, state=state))

            await run_jobs(world)

            assert len(await claims(world)) == len(STATES)

        scenario(self)

    @in_world
    async def test_it_waits_for_a_replay_that_is_being_begun(self, world):
        await fill(world, "old")
        await world.age(99 * DAY_SECONDS)

        async with world.database.begin() as unit:
            await unit.replays.begin(RUN)
            deleting = await beside(run_jobs(world))
        await deleting

        assert len(await claims(world)) == len(STATES)


async def fill(world, prefix):
    async with world.database.begin() as unit:
        for state in STATES:
            name = f"{prefix} {state}"
            await unit.claims.mark_failed(BILLING, name, Failure(state, 1, "X"))
            await unit.attempts.add(FailedAttempt(BILLING, name, 1, "X", "poison"))
        for name in (prefix, f"{prefix}-2"):
            await unit.attempts.add(FailedAttempt(BILLING, name, 1, "X", "poison"))
            await unit.inbox.store(InboxMessage(BILLING, name, payload=b""))
        await unit.inbox.close(BILLING, prefix, "SKIPPED")


async def run_jobs(world):
    assert len(JOBS) == 3
    async with world.database.begin() as unit:
        for job in JOBS:
            # SQLAlchemy takes a colon for a parameter; a cast has two of them.
            await unit.session.execute(text(job.replace("::", r"\:\:")))


async def claims(world):
    names = [f"{prefix} {state}" for prefix in ("old", "new") for state in STATES]
    async with world.database.begin() as unit:
        return {name for name in names if await unit.claims.look_up(BILLING, name)}
