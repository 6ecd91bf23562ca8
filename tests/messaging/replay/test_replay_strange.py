"""Replays: what they do with messages that are not simply there to be handled."""

from __future__ import annotations

from dataclasses import replace

from semel.messaging.handle.claims import ClaimState
from semel.messaging.records import DeadLetterFilter
from semel.operate.selection import Letters, Offsets
from semel.policy.vocabulary import Duplicates
from tests.messaging.act_world import acts, claim_of, letters, queue
from tests.messaging.places import InMemory
from tests.messaging.replay_world import ALL_AT_ONCE, DEAD, P0, Service, counts, dead
from tests.stores.world import in_world


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
