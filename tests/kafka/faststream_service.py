"""A FastStream service in a process of its own: python -m tests.kafka.faststream_service URL …"""

from __future__ import annotations

import asyncio
import sys

from faststream import FastStream
from faststream.kafka import KafkaBroker
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from semel.messaging import Mode, RunnerSettings, Semel


class Paid(BaseModel):
    id: str
    amount: int


def application(bootstrap: str, topic: str, group: str, url: str, seconds: float) -> FastStream:
    """Make a service whose handler takes *seconds*."""
    broker = KafkaBroker(bootstrap)
    semel = Semel(broker, database=url)

    @semel.subscriber(
        topic,
        consumer="billing",
        group_id=group,
        session_timeout_ms=6_000,
        runner=RunnerSettings(mode=Mode.BATCHED, max_records=10, member_seconds=2.0),
    )
    async def on_paid(event: Paid, session: AsyncSession) -> None:
        await session.execute(
            text("INSERT INTO payments VALUES (:id, :amount)"), event.model_dump()
        )
        await asyncio.sleep(seconds)

    return FastStream(broker)


if __name__ == "__main__":
    *where, seconds = sys.argv[1:]
    asyncio.run(application(*where, float(seconds)).run())
