"""Replayed dead letters: one transaction has the effect, the letter, the trail and the cursor."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from semel.crashpoints import CrashPoint
from semel.errors import InDoubt, Retryable
from semel.messaging.handle.claims import ClaimState
from semel.operate.replay import Replay, stop_replay
from semel.operate.replay_message import ReplayInterrupted
from semel.operate.selection import Ids, Letters
from semel.operate.stores import ReplayState
from semel.sql.operators import SqlAuditTrail
from semel.testing.crash import Crash, crash_at
from tests.messaging.act_world import acts, claim_of, letter_of, letters, queue, waiting_of
from tests.messaging.places import InPostgres, InSqlite
from tests.messaging.replay_world import DEAD, PARKS, Service, counts, dead
from tests.stores.world import in_world


def be_down(message):
    raise ConnectionError("down")


class DoubtfulCommit:
    """A database that does not answer the commit of the transaction in which a handler ran."""

    def __init__(self, database, *, is_lost):
        self.database = database
        self.classification = database.classification
        self.is_lost = is_lost
        self.ran = False

    def run(self, message):
        self.ran = True

    @asynccontextmanager
    async def begin(self):
        async with self.database.begin() as unit:
            yield unit
            if self.ran and self.is_lost:
                self.ran = False
                raise InDoubt("no answer to the commit")
        if self.ran:
            self.ran = False
            raise InDoubt("no answer to the commit")


class ReplayedLetters:
    """What holds on every database."""

    @in_world
    async def test_a_crash_before_the_commit_leaves_the_letter_and_no_entry(self, world):
        service = await dead(world, 1)

        with crash_at(CrashPoint.MESSAGE_COMMIT_BEFORE), pytest.raises(Crash):
            await service.run(Letters())

        assert await service.paid() == []
        assert await letters(world) == 1
        assert await queue(world) == []
        assert [act for _, act, _ in await acts(world)] == ["replay.begin"]
        assert counts(await service.run(None)) == {"handled": 1}
        assert await service.paid() == ["m0"]

    @in_world
    async def test_a_crash_while_its_failure_is_written_leaves_the_letter_as_it_was(self, world):
        service = await dead(world, 1)
        service.refuse("m0")
        before = await letter_of(world, "m0")

        with crash_at(CrashPoint.MESSAGE_COMMIT_BEFORE), pytest.raises(Crash):
            await service.run(Letters())

        assert await letter_of(world, "m0") == before
        assert await queue(world) == []
        assert "dlq.retry" not in [act for _, act, _ in await acts(world)]

    @pytest.mark.parametrize("is_lost", [False, True])
    def test_a_commit_in_doubt_is_counted_once_whether_it_happened_or_not(self, is_lost):
        @in_world
        async def scenario(self, world):
            service = await dead(world, 1)
            doubtful = DoubtfulCommit(world.database, is_lost=is_lost)
            service.broken = doubtful.run

            with pytest.raises(InDoubt):
                await Replay(service.consumer, doubtful, Letters(), actor="ann", name="again").run()
            service.heal()

            assert await service.paid() == ([] if is_lost else ["m0"])
            assert counts(await service.run(None)) == {"handled": 1}
            assert await service.paid() == ["m0"]
            assert await letters(world) == 0

        scenario(self)

    @in_world
    async def test_a_locked_trail_is_no_failure_of_the_message(self, world):
        service = await dead(world, 1)
        append = SqlAuditTrail.append

        async def locked(trail, act):
            if act.act == "dlq.retry":
                raise Retryable("the audit trail is locked")
            return await append(trail, act)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SqlAuditTrail, "append", locked)
            patch.setattr("semel.operate.replay_message.TRIES", 1)
            with pytest.raises(ReplayInterrupted, match="'m0' could not be tried"):
                await service.run(Letters())

        assert await service.paid() == []
        claim = await claim_of(world, "m0")
        assert (claim.state, claim.attempts) == (ClaimState.FAILED_TERMINAL, 1)
        assert counts(await service.run(None)) == {"handled": 1}

    @in_world
    async def test_what_fails_and_may_succeed_later_waits_and_does_not_hold_its_key(self, world):
        service = await Service(world, PARKS).open()
        letter = await Service(world, DEAD).open()
        letter.refuse("m1")
        await letter.deliver("m1", key="k")
        retries = replace(PARKS, retry=replace(PARKS.retry, max_attempts=3))
        service.consumer = service.consumer.with_settings(retries)
        service.broken = be_down

        report = await service.run(Ids(("m1",)))
        service.heal()
        await service.deliver("m2", key="k")

        assert counts(report) == {"failed": 1}
        assert await letters(world) == 0
        assert (await waiting_of(world, "m1")).held is False
        assert await service.paid() == ["m2"]

    @in_world
    async def test_it_does_not_wait_for_the_later_messages_of_its_key(self, world):
        service = await Service(world, PARKS).open()
        buried = await Service(world, DEAD).open()
        buried.refuse("m1")
        await buried.deliver("m1", key="k")
        service.refuse("m2")
        await service.deliver("m2", "m3", key="k")

        report = await service.run(Ids(("m1",)))

        assert counts(report) == {"handled": 1}
        assert await service.paid() == ["m1"]
        assert await queue(world) == [("m2", "parked"), ("m3", "behind")]

    @in_world
    async def test_what_a_person_took_away_meanwhile_is_not_handled(self, world):
        service = await dead(world, 1)
        replay = service.replay(Letters())
        taken = replay._take

        async def take(item, found):
            async with world.database.begin() as unit:
                await unit.dead_letters.remove("billing", "m0")
            return await taken(item, found)

        replay._take = take

        assert counts(await replay.run()) == {"refused": 1}
        assert await service.paid() == []

    @in_world
    async def test_a_message_that_ends_after_the_replay_was_stopped_is_counted_later(self, world):
        service = await dead(world, 2)
        replay = service.replay(Letters())
        taken = replay._take

        async def take(item, found):
            await stop_replay(world.database, "again", actor="bob")
            return await taken(item, found)

        replay._take = take
        stopped = await replay.run()
        finished = await service.run(None)

        assert stopped.state is ReplayState.STOPPED
        assert counts(finished) == {"handled": 2}
        assert sorted(await service.paid()) == ["m0", "m1"]


class TestInSqlite(InSqlite, ReplayedLetters):
    pass


class TestInPostgres(InPostgres, ReplayedLetters):
    pass
