"""What was erased, and is delivered again, and queues up behind its key."""

from __future__ import annotations

from semel.codec import RawCodec
from semel.messaging.failed.retries import retry_due
from semel.messaging.failure import NonRetryableMessageError
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.batch import consume_many
from semel.messaging.handle.claims import ClaimState
from semel.messaging.handler import consumer
from semel.messaging.outcome import Refused
from semel.messaging.settings import ConsumerSettings, Order
from semel.operate.parking import release, skip
from semel.policy.vocabulary import GiveUp
from tests.messaging.act_world import ANN, BILLING, claim_of, park, queue, waiting_of
from tests.messaging.erasures import SECRET, erased, message
from tests.messaging.places import InPostgres, InSqlite
from tests.stores.world import in_world

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
    assert (claim.state, claim.marker) == (ClaimState.PARKED, "ERASED")
    return waiting.erased_at is not None and claim.erased_at is not None


class ErasingQueued:
    @in_world
    async def test_a_message_whose_claim_says_erased_queues_up_without_its_payload(self, world):
        await erased_after_a_failure(world, "m2")
        await handle_message(parking(), world.database, message("m1"))

        await handle_message(parking(), world.database, message("m2"))

        assert await is_gone(world, "m2")

    @in_world
    async def test_in_a_batch_it_queues_up_without_its_payload(self, world):
        await erased_after_a_failure(world, "m2")

        await consume_many(parking(), world.database, [message("m1"), message("m2")])

        assert (await waiting_of(world, "m1")).payload == SECRET
        assert await is_gone(world, "m2")

    @in_world
    async def test_it_is_skipped_by_a_person_and_the_key_goes_on(self, world):
        handled = []
        await erased_after_a_failure(world, "m2")
        for name in ("m1", "m2"):
            await handle_message(parking(), world.database, message(name))
        await handle_message(parking(), world.database, message("m3"))

        again = await handle_message(parking(), world.database, message("m2"))
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

        await handle_message(parking(), world.database, message("m2"))

        waiting = await waiting_of(world, "m2")
        assert (waiting.payload, waiting.waits) == (SECRET, "behind")


async def erased_after_a_failure(world, message_id):
    """Leave a claim that says erased, of a message that the broker will deliver again."""
    failing = consumer(BILLING, policy=ConsumerSettings())(_times_out)
    await handle_message(failing, world.database, message(message_id))
    await erased(world, message_id=message_id)
    await world.age(1_000)


async def _times_out(message, session):
    raise TimeoutError("no")


class TestErasingQueuedInSqlite(InSqlite, ErasingQueued):
    pass


class TestErasingQueuedInPostgres(InPostgres, ErasingQueued):
    pass
