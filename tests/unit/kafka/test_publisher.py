"""A publisher of Kafka whose broker is not there."""

from __future__ import annotations

import asyncio

from semel.errors import Retryable
from semel.messaging import KafkaBroker, Outgoing


def test_a_publisher_closes_while_its_broker_is_away():
    async def scenario():
        publisher = KafkaBroker("127.0.0.1:1").publisher()
        sending = asyncio.create_task(publisher.publish([Outgoing("invoices", b"1")]))
        await asyncio.sleep(0.1)
        # Without it, each message would be waited for until its own deadline, a minute.
        async with asyncio.timeout(10):
            await publisher.close()
            (answer,) = await sending
        assert isinstance(answer, Retryable)

    asyncio.run(scenario())
