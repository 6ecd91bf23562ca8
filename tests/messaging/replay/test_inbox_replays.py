"""Replays and inboxes: whichever of the two has a message first, its effect is there once."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from semel.crashpoints import CrashPoint
from semel.errors import InDoubt, Retryable
from semel.messaging.failed.retries import retry_due
from semel.messaging.failure import NonRetryableMessageError
from semel.messaging.handle.claims import ClaimRequest
from semel.messaging.outcome import Conflicted, Refused, Skipped
from semel.messaging.receive.inbox import Inbox, InboxWorker, Stored
from semel.operate import replay_message as inbox_turns
from semel.operate.audit import NotPossible
from semel.operate.deadletters import retry_dead_letter
from semel.operate.replay import Replay, abandon_replay
from semel.operate.replay_message import ReplayInterrupted
from semel.operate.selection import Letters, Offsets
from semel.testing.crash import Crash, crash_at
from tests.messaging.act_world import ANN, BILLING, acts, letter_of, letters
from tests.messaging.places import InPostgres, InSqlite
from tests.messaging.replay_world import ALL_AT_ONCE, DEAD, P0, PARKS, Service, counts, message
from tests.stores.world import in_world


async def replayed(world, settings=DEAD, *, fails=None):
    """Return a service that had its message replayed before its inbox got it."""
    service = await Service(world, settings).open()
    service.put("m1")
    if fails is not None:
        service.broken = fails
    await service.run(Offsets(P0, 0, 0))
    service.heal()
    return service


def refuse(message):
    raise NonRetryableMessageError("no such account")


def be_down(message):
    raise ConnectionError("down")


async def deliver(service, one=None):
    """Deliver a message to the inbox in both ways, and let everybody work."""
    inbox, one = Inbox(service.consumer, service.database), one or message("m1")
    answers = [await inbox.store(one), await inbox.store_and_handle(one)]
    await work(service)
    return answers


async def work(service):
    """Let the inbox's workers and the retry worker do what is due."""
    await InboxWorker(service.consumer, service.database).run_until_empty()
    await retry_due(service.consumer, service.database)


class AfterAReplay:
    @in_world
    async def test_a_delivery_of_what_was_replayed_has_no_second_effect(self, world):
        service = await replayed(world)

        answers = await deliver(service)

        assert answers == [Skipped("duplicate"), Skipped("duplicate")]
        assert await service.paid() == ["m1"]
        async with world.database.begin() as unit:
            assert await unit.inbox.get(BILLING, "m1") is None

    @in_world
    async def test_a_delivery_of_what_is_dead_is_refused(self, world):
        service = await replayed(world, fails=refuse)

        assert await deliver(service) == [Refused("dead letter (REJECTED)")] * 2
        assert await service.paid() == []

    @in_world
    async def test_a_delivery_of_what_is_parked_is_refused(self, world):
        service = await replayed(world, PARKS, fails=refuse)
        # As it is now; an inbox takes none that parks.
        service.consumer = service.consumer.with_settings(DEAD)

        assert await deliver(service) == [Refused("parked")] * 2
        assert await service.paid() == []

    @in_world
    async def test_what_waits_for_the_retry_worker_is_handled_by_it_alone(self, world):
        policy = replace(DEAD.retry, max_attempts=3, initial_delay_seconds=0.0)
        service = await replayed(world, replace(DEAD, retry=policy), fails=be_down)

        answers = await deliver(service)

        assert answers == [Skipped("stored before"), Skipped("stored before")]
        assert await service.paid() == ["m1"]

    @in_world
    async def test_another_payload_under_the_same_id_is_a_conflict(self, world):
        service = await replayed(world)

        answers = await deliver(service, message("m1", "another"))

        assert [type(answer) for answer in answers] == [Conflicted, Conflicted]
        assert await letters(world) == 1
        assert await service.paid() == ["m1"]

    @in_world
    async def test_a_delivery_of_what_is_under_a_lease_comes_back(self, world):
        service = await Service(world).open()
        async with world.database.begin() as unit:
            await unit.claims.lease(BILLING, ClaimRequest("m1"), owner="somebody", seconds=60.0)

        with pytest.raises(Retryable, match="somebody is handling"):
            await Inbox(service.consumer, world.database).store(message("m1"))

    @in_world
    async def test_a_claim_that_anybody_may_take_does_not_keep_a_message_out(self, world):
        service = await replayed(world)
        one = message("m2")

        assert (await deliver(service, one))[0] == Stored()
        assert await service.paid() == ["m1", "m2"]
        assert counts(await service.run(Offsets(P0, 0, 0), name="twice")) == {"duplicate": 1}


class GivenUp:
    """Messages that an inbox's workers gave up have another turn by a replay."""

    @in_world
    async def test_a_message_that_may_succeed_later_goes_back_to_the_workers(self, world):
        service = await given_up(world, TWICE)
        service.broken = be_down

        report = await service.run(Letters())
        service.heal()
        await work(service)

        assert counts(report) == {"failed": 1}
        assert await service.paid() == ["m1"]
        assert await letters(world) == 0

    @in_world
    async def test_what_could_not_be_asked_for_is_not_passed_over(self, world):
        service = await given_up(world)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(inbox_turns, "remove_letter", does_not_answer)
            with pytest.raises(ReplayInterrupted, match="'m1' could not be tried"):
                await service.run(Letters())

        assert counts(await service.run(None)) == {"handled": 1}
        assert await service.paid() == ["m1"]

    @in_world
    async def test_a_commit_in_doubt_is_looked_at_by_the_next_run(self, world):
        service = await given_up(world)
        doubtful = Doubtful(world.database)
        service.broken = doubtful.begins

        with pytest.raises(InDoubt):
            await Replay(service.consumer, doubtful, Letters(), actor="ann", name="again").run()

        assert counts(await service.run(None)) == {"handled": 1}
        assert await service.paid() == ["m1"]

    @in_world
    async def test_a_turn_that_failed_is_in_the_trail_and_counts_for_the_loop_guard(self, world):
        service = await given_up(world)
        service.broken = refuse
        settings = replace(ALL_AT_ONCE, most_replays=2)

        reports = [await service.run(Letters(), settings, name=f"r{n}") for n in range(3)]

        assert [counts(one) for one in reports] == [{"failed": 1}] * 2 + [{"refused": 1}]
        assert [act for _, act, about in await acts(world) if about == "m1"] == ["dlq.retry"] * 2
        letter = await letter_of(world, "m1")
        assert (letter.error_code, letter.attempts) == ("REJECTED", 1)
        with pytest.raises(NotPossible, match="sent back 2 times"):
            await retry_dead_letter(world.database, BILLING, "m1", **ANN, at_most=2)

    @in_world
    async def test_a_crash_before_the_end_of_a_turn_leaves_nothing_of_it(self, world):
        service = await given_up(world)

        with crash_at(CrashPoint.ACT_BEFORE), pytest.raises(Crash):
            await service.run(Letters())
        assert await service.paid() == []
        assert "dlq.retry" not in [act for _, act, _ in await acts(world)]
        await service.run(None)

        assert await service.paid() == ["m1"]

    @in_world
    async def test_a_crash_behind_a_turn_leaves_its_effect_and_who_asked_for_it(self, world):
        service = await given_up(world)

        with crash_at(CrashPoint.ACT_AFTER), pytest.raises(Crash):
            await service.run(Letters())
        await service.run(None)

        assert await service.paid() == ["m1"]
        assert [act for _, act, about in await acts(world) if about == "m1"] == ["dlq.retry"]

    @in_world
    async def test_a_crash_while_a_failed_turn_is_written_leaves_all_of_it_or_nothing(self, world):
        for point, trail in ((CrashPoint.ACT_BEFORE, 0), (CrashPoint.ACT_AFTER, 1)):
            service = await given_up(world)
            service.broken = refuse
            with crash_at(point), pytest.raises(Crash):
                await service.run(Letters(), name=point.value)
            await abandon_replay(world.database, point.value, actor="ann", reason="it died")

            sent_back = [act for _, act, about in await acts(world) if about == "m1"]
            assert sent_back == ["dlq.retry"] * trail
            assert (await letter_of(world, "m1")).error_code == "REJECTED"

    @in_world
    async def test_a_payload_that_still_cannot_be_read_is_refused(self, world):
        service = await Service(world).open()
        unread = replace(message("m1"), raw=b"not json", digest="")
        await Inbox(service.consumer, world.database).store(unread)
        await work(service)

        report = await service.run(Letters())

        assert counts(report) == {"refused": 1}
        assert await letters(world) == 1


TWICE = replace(
    DEAD, retry=replace(DEAD.retry, max_attempts=2, initial_delay_seconds=0.0, max_delay_seconds=0)
)


async def given_up(world, settings=DEAD):
    """Return a service whose workers gave a message up, and whose handler is mended."""
    service = await Service(world, settings).open()
    service.broken = refuse
    await Inbox(service.consumer, world.database).store(message("m1"))
    await work(service)
    service.heal()
    return service


async def does_not_answer(*_):
    raise Retryable("the database does not answer")


class Doubtful:
    """A database that does not answer the commit of the transaction in which a handler began."""

    def __init__(self, database):
        self.database = database
        self.classification = database.classification
        self.began = False

    def begins(self, message):
        self.began = True

    @asynccontextmanager
    async def begin(self):
        async with self.database.begin() as unit:
            yield unit
        if self.began:
            self.began = False
            raise InDoubt("no answer to the commit")


class TestInSqlite(InSqlite, AfterAReplay, GivenUp):
    pass


class TestInPostgres(InPostgres, AfterAReplay, GivenUp):
    pass
