"""The classic consumer under FastStream: python -m tests.kafka.seed_service BOOTSTRAP TOPIC …"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

from faststream import AckPolicy, FastStream
from faststream.kafka import KafkaBroker
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from semel import IdempotentConsumerBase, SqlAlchemyProcessedMessageStore, SqlDatabase

logger = logging.getLogger("shop")

ACKS: dict[str, dict[str, Any]] = {
    # As it is documented; the timer is shorter, so that the test need not wait for it.
    "default": {"auto_commit_interval_ms": 100},
    "after the commit": {"ack_policy": AckPolicy.NACK_ON_ERROR},
}
"""What the subscriber says about acknowledgements."""


class Payments(IdempotentConsumerBase[dict[str, Any]]):
    """Writes one row per event, with the session that the claim is in."""

    stuck_at = ""

    async def handle_event(self, message: dict[str, Any]) -> None:
        insert = text("INSERT INTO payments VALUES (:id, :amount)")
        row = {"id": message["event_id"], "amount": message["amount"]}
        await self.session.execute(insert, row)
        if message["event_id"] == self.stuck_at:
            await asyncio.sleep(3_600)


def application(bootstrap: str, topic: str, group: str, url: str, acks: str) -> FastStream:
    broker = KafkaBroker(bootstrap)
    engine = SqlDatabase(url).engine

    @broker.subscriber(
        topic,
        group_id=group,
        auto_offset_reset="earliest",
        session_timeout_ms=2_000,
        heartbeat_interval_ms=300,
        **ACKS[acks],
    )
    async def consume_message(message: dict[str, Any]) -> None:
        async with AsyncSession(engine) as session:
            consumer = Payments(SqlAlchemyProcessedMessageStore(session))
            if await consumer.consume(message):
                await session.commit()
                logger.info("message %s committed", message["event_id"])
            else:
                await session.rollback()
                logger.debug("message %s skipped", message["event_id"])

    return FastStream(broker)


if __name__ == "__main__":
    *where, Payments.stuck_at = sys.argv[1:]
    asyncio.run(application(*where).run())
