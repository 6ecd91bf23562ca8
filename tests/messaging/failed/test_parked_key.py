"""A key that is parked, fixed and released: everything once, in order, on its consumer."""

from __future__ import annotations

import asyncio
import json

from semel.codec import FromHeader
from semel.message import Coordinates, Message, digest_of
from semel.messaging.failed.retries import retry_due
from semel.messaging.failure import NonRetryableMessageError
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.claims import ClaimState
from semel.messaging.handler import consumer
from semel.messaging.outcome import Handled, ParkedAway, Skipped
from semel.messaging.settings import ConsumerSettings
from semel.operate.audit import NoSuchMessage, NotPossible
from semel.operate.deadletters import retry_dead_letter
from semel.operate.deletion import approve_delete, ask_to_delete
from semel.operate.parking import KeepId, NewId, fix, release, release_key, skip
from semel.policy.vocabulary import GiveUp
from tests.messaging.act_world import ANN, BILLING, claim_of, letters, park, queue
from tests.messaging.places import InMemory, InPostgres
from tests.stores.world import DatabaseContract, in_world

PARKING = ConsumerSettings(on_hopeless=GiveUp.PARK, on_exhausted=GiveUp.PARK, holds_keys=True)


class Shop:
    """A consumer that cannot work with amounts that are no numbers."""

    def __init__(self, settings=PARKING):
        self.effects = []

        @consumer(BILLING, policy=settings, id_from=FromHeader("message-id"))
        async def handle(message):
            if not isinstance(message.payload["amount"], int):
                raise NonRetryableMessageError("not a number")
            self.effects.append((message.id, message.payload["amount"]))

        self.consumer = handle


def message(number, amount):
    raw = json.dumps({"amount": amount}).encode()
    return Message(
        f"m{number}",
        json.loads(raw),
        raw,
        "customer-7",
        headers={"message-id": f"m{number}".encode()},
        source=Coordinates("payments", 0, number),
    )


class ParkedKey(DatabaseContract):
    @in_world
    async def test_a_parked_key_is_released_in_order_and_every_effect_happens_once(self, world):
        shop = Shop()
        sent = [message(1, 10), message(2, "ten"), message(3, 30), message(4, 40)]

        outcomes = [await handle_message(shop.consumer, world.database, one) for one in sent]
        assert isinstance(outcomes[0], Handled)
        assert all(isinstance(outcome, ParkedAway) for outcome in outcomes[1:])
        assert await retry_due(shop.consumer, world.database) == []

        payload = b'{"amount": 20}'
        await fix(world.database, BILLING, "m2", payload, ids=KeepId(), **ANN)
        await release_key(world.database, BILLING, "customer-7", **ANN)
        while await retry_due(shop.consumer, world.database):
            pass

        assert shop.effects == [("m1", 10), ("m2", 20), ("m3", 30), ("m4", 40)]
        assert await queue(world) == []
        again = await handle_message(shop.consumer, world.database, message(3, 30))
        assert isinstance(again, Skipped)
        assert (await claim_of(world, "m2")).payload_hash == digest_of(payload)

    @in_world
    async def test_under_a_new_id_it_is_handled_once_and_the_old_id_is_a_duplicate(self, world):
        shop = Shop()
        await handle_message(shop.consumer, world.database, message(1, "ten"))

        payload = b'{"amount": 10}'
        await fix(world.database, BILLING, "m1", payload, ids=NewId("m1-fixed"), **ANN)
        await release(world.database, BILLING, "m1-fixed", **ANN)
        while await retry_due(shop.consumer, world.database):
            pass

        assert shop.effects == [("m1-fixed", 10)]
        assert (await claim_of(world, "m1-fixed")).state is ClaimState.COMPLETED
        again = await handle_message(shop.consumer, world.database, message(1, "ten"))
        assert not isinstance(again, Handled)
        assert shop.effects == [("m1-fixed", 10)]

    @in_world
    async def test_skipping_the_head_lets_the_rest_of_the_key_go_on(self, world):
        shop = Shop()
        for one in [message(1, "ten"), message(2, 20)]:
            await handle_message(shop.consumer, world.database, one)

        await skip(world.database, BILLING, "m1", **ANN)
        while await retry_due(shop.consumer, world.database):
            pass

        assert shop.effects == [("m2", 20)]
        after = await handle_message(shop.consumer, world.database, message(3, 30))
        assert isinstance(after, Handled), "the key is free again"

    @in_world
    async def test_a_dead_letter_that_is_sent_back_is_handled(self, world):
        shop = Shop(ConsumerSettings())
        await handle_message(shop.consumer, world.database, message(1, "ten"))
        assert await letters(world) == 1

        await retry_dead_letter(world.database, BILLING, "m1", **ANN)
        await retry_due(shop.consumer, world.database)

        assert await letters(world) == 1, "nothing was changed, so it came back"
        assert await queue(world) == []
        assert (await claim_of(world, "m1")).state is ClaimState.FAILED_TERMINAL

    @in_world
    async def test_of_two_people_who_act_at_once_one_wins(self, world):
        for number in range(4):
            name = f"m{number}"
            await park(world, name)
            asked = await ask_to_delete(world.database, BILLING, name, **ANN)

            done = await asyncio.gather(
                release(world.database, BILLING, name, **ANN),
                approve_delete(world.database, asked.number, actor="bob"),
                skip(world.database, BILLING, name, actor="eve", reason="old"),
                return_exceptions=True,
            )

            released, deleted, skipped = (not isinstance(one, Exception) for one in done)
            state = (await claim_of(world, name)).state
            assert deleted != skipped, done
            assert state is (ClaimState.COMPLETED if skipped else ClaimState.FAILED_TERMINAL)
            assert released or isinstance(done[0], NoSuchMessage | NotPossible)
            assert await queue(world) == []


class TestParkedKeyInMemory(InMemory, ParkedKey):
    pass


class TestParkedKeyInPostgres(InPostgres, ParkedKey):
    pass
