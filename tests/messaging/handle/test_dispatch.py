"""One consumer, a handler for each type of message."""

from __future__ import annotations

import asyncio

import pytest

from semel.codec import FromPayload
from semel.errors import Misuse
from semel.memory.broker import MemoryBroker
from semel.messaging import dispatcher
from semel.messaging.handler import consumer
from semel.messaging.receive.runner import Runner
from semel.messaging.records import DeadLetterFilter
from tests.messaging.worlds import memory_database


def test_each_type_has_its_handler_and_an_unknown_one_is_a_dead_letter():
    seen = []
    billing = dispatcher("billing", id_from=FromPayload("id"))

    @billing.on("paid", "paid_late")
    async def on_paid(message, session):
        seen.append(("paid", message.id, session is not None))

    @billing.on("refunded")
    async def on_refunded(message):
        seen.append(("refunded", message.id))

    async def scenario():
        broker, database = MemoryBroker({"payments": 1}), memory_database()
        for number, kind in enumerate(["paid", "refunded", "paid_late", "lost"]):
            broker.put("payments", f'{{"id": "m{number}", "type": "{kind}"}}'.encode())
        subscription = await broker.subscribe("billing", ["payments"])
        await Runner(billing, subscription, database).run_until_idle()
        async with database.begin() as unit:
            return await unit.dead_letters.find(DeadLetterFilter("billing"), 10)

    [letter] = asyncio.run(scenario())

    assert seen == [("paid", "m0", True), ("refunded", "m1"), ("paid", "m2", True)]
    assert (letter.message_id, letter.error_code) == ("m3", "UNKNOWN_EVENT_TYPE")
    assert letter.outcome == "schema_incompatible"
    assert "'lost'; there are: paid, paid_late, refunded" in letter.reason


def test_what_cannot_be_dispatched_is_refused():
    billing = dispatcher("billing")

    @billing.on("paid")
    async def on_paid(message):
        """Do nothing."""

    @consumer("other")
    async def other(message):
        """Do nothing."""

    with pytest.raises(Misuse, match="has a handler already"):
        billing.on("paid")(on_paid)
    with pytest.raises(Misuse, match="handles every type"):
        other.on("paid")
    with pytest.raises(Misuse, match="cannot be chosen by type"):
        dispatcher("billing", batches=True)
    with pytest.raises(Misuse, match="must take the message"):
        billing.on("x")(lambda: None)
