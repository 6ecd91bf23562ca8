"""Erasing what was read already, and only queues up behind its key."""

from __future__ import annotations

import asyncio

from semel.codec import RawCodec
from semel.messaging.audit import Act
from semel.messaging.batch import consume_many
from semel.messaging.claims import ClaimState
from semel.messaging.consumer import consumer
from semel.messaging.failure import NonRetryableMessageError
from semel.messaging.handling import handle_message
from semel.messaging.ids import hash_of_key
from semel.messaging.lanes import Order
from semel.messaging.leased import handle_leased
from semel.messaging.outcome import ParkedAway, Refused
from semel.messaging.parking import release, skip
from semel.messaging.retry import GiveUp
from semel.messaging.retrying import retry_due
from semel.messaging.settings import ConsumerSettings
from semel.testing.contracts.messaging_world import in_world
from tests.messaging.act_world import ANN, BILLING, claim_of, park, queue, waiting_of
from tests.messaging.erasures import SECRET, erased, message
from tests.messaging.places import InMemory, InPostgres, InSqlite

PARKS = ConsumerSettings(
    on_exhausted=GiveUp.PARK, on_hopeless=GiveUp.PARK, order=Order.KEY, holds_keys=True
)


def parking(handled=None):
    @consumer(BILLING, policy=PARKS, codec=RawCodec())
    async def handle(message, session):
        if handled is None:
            raise NonRetryableMessageError("no")
        handled.append(message.id)

    return handle


async def is_gone(world, message_id):
    waiting, claim = await waiting_of(world, message_id), await claim_of(world, message_id)
    assert (waiting.payload, waiting.headers, waiting.waits) == (None, {}, "parked")
    assert (claim.state, claim.error_code) == (ClaimState.PARKED, "ERASED")
    return waiting.erased_at is not None and claim.erased_at is not None


class ErasingQueued:
    @in_world
    async def test_what_was_read_before_the_erasing_queues_up_without_its_payload(self, world):
        for name, by in {"m2": {"key": "alice"}, "m3": {"message_id": "m3"}}.items():
            await handle_message(parking(), world.database, message("m1"))
            late = message(name)
            await erased(world, **by)

            outcome = await handle_message(parking(), world.database, late)

            assert isinstance(outcome, ParkedAway)
            assert await is_gone(world, name)

    @in_world
    async def test_under_a_lease_it_queues_up_without_its_payload(self, world):
        await handle_message(parking(), world.database, message("m1"))
        late = message("m2")
        await erased(world, key="alice")

        await handle_leased(parking(), world.database, late, "w1")

        assert await is_gone(world, "m2")

    @in_world
    async def test_in_a_batch_it_queues_up_without_its_payload(self, world):
        together = [message("m1"), message("m2")]
        await erased(world, key="alice")

        await consume_many(parking(), world.database, together)

        assert await is_gone(world, "m2")

    @in_world
    async def test_a_message_whose_claim_says_erased_queues_up_without_its_payload(self, world):
        failing = consumer(BILLING, policy=ConsumerSettings())(_times_out)
        await handle_message(failing, world.database, message("m2"))
        await erased(world, message_id="m2")
        await world.age(1_000)
        await handle_message(parking(), world.database, message("m1"))

        await handle_message(parking(), world.database, message("m2"))

        assert await is_gone(world, "m2")

    @in_world
    async def test_it_is_skipped_by_a_person_and_the_key_goes_on(self, world):
        handled = []
        await handle_message(parking(), world.database, message("m1"))
        late = message("m2")
        await erased(world, message_id="m2")
        await handle_message(parking(), world.database, late)
        await handle_message(parking(), world.database, message("m3"))

        again = await handle_message(parking(), world.database, late)
        await release(world.database, BILLING, "m1", **ANN)
        await retry_due(parking(handled), world.database)
        await skip(world.database, BILLING, "m2", **ANN)
        while await retry_due(parking(handled), world.database):
            pass

        assert again == Refused("parked")
        assert handled == ["m1", "m3"]
        assert await queue(world) == []

    @in_world
    async def test_what_is_read_after_the_erasing_queues_up_as_it_is(self, world):
        await park(world, "m1", key="alice")
        await erased(world, key="alice")
        await world.age(60)

        await handle_message(parking(), world.database, message("m2"))

        waiting = await waiting_of(world, "m2")
        assert (waiting.payload, waiting.waits) == (SECRET, "behind")


async def _times_out(message, session):
    raise TimeoutError("no")


class TestErasingQueuedInMemory(InMemory, ErasingQueued):
    pass


class TestErasingQueuedInSqlite(InSqlite, ErasingQueued):
    pass


class TestErasingQueuedInPostgres(InPostgres, ErasingQueued):
    @in_world
    async def test_whoever_queues_up_waits_for_the_erasing_that_is_under_way(self, world):
        await handle_message(parking(), world.database, message("m1"))
        async with world.database.begin() as erasing:
            await erasing.audit.begin_erasing()
            queues = asyncio.create_task(handle_message(parking(), world.database, message("m2")))
            await asyncio.wait([queues], timeout=0.1)
            assert not queues.done()
            details = {"key_hash": hash_of_key("alice")}
            await erasing.audit.append(Act("ann", "erase", details=details))
            await asyncio.sleep(0.15)  # longer than from reading the message to asking

        assert isinstance(await queues, ParkedAway)
        assert await is_gone(world, "m2")
