"""Replays and inboxes: whichever of the two has a message first, its effect is there once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from semel.errors import Retryable
from semel.messaging.claims import ClaimRequest
from semel.messaging.failure import NonRetryableMessageError
from semel.messaging.inbox_worker import InboxWorker
from semel.messaging.inboxes import Inbox, Stored
from semel.messaging.outcome import Conflicted, Refused, Skipped
from semel.messaging.retrying import retry_due
from semel.messaging.selection import Offsets
from semel.testing.contracts.messaging_world import in_world
from tests.messaging.act_world import BILLING, letters
from tests.messaging.places import InMemory, InPostgres, InSqlite
from tests.messaging.replay_world import DEAD, P0, PARKS, Service, counts, message


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
    await InboxWorker(service.consumer, service.database).run_until_empty()
    await retry_due(service.consumer, service.database)
    return answers


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

        with pytest.raises(Retryable, match="somebody is at"):
            await Inbox(service.consumer, world.database).store(message("m1"))

    @in_world
    async def test_a_claim_that_anybody_may_take_does_not_keep_a_message_out(self, world):
        service = await replayed(world)
        one = message("m2")

        assert (await deliver(service, one))[0] == Stored()
        assert await service.paid() == ["m1", "m2"]
        assert counts(await service.run(Offsets(P0, 0, 0), name="twice")) == {"duplicate": 1}


class TestInMemory(InMemory, AfterAReplay):
    pass


class TestInSqlite(InSqlite, AfterAReplay):
    pass


class TestInPostgres(InPostgres, AfterAReplay):
    pass
