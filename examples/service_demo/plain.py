"""The service without semel, as it is usually written: ``python -m examples.service_demo.plain``.

A session per message, FastStream's default acknowledgements, and a table of processed messages.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

from faststream import FastStream
from faststream.kafka import KafkaBroker
from sqlalchemy import text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from examples.service_demo.service import INSERT, QUICK, Paid, entry

NEW: Final = text("INSERT INTO processed VALUES (:id) ON CONFLICT DO NOTHING")

url = os.environ["DATABASE_URL"].replace("postgresql://", "postgresql+asyncpg://")
sessions = async_sessionmaker(create_async_engine(url, pool_pre_ping=True))
broker = KafkaBroker(os.environ["KAFKA"])


@broker.subscriber(
    "payments-plain", group_id="billing-plain", auto_offset_reset="earliest", **QUICK
)
async def on_paid(event: Paid) -> None:
    async with sessions() as session, session.begin():
        is_new = await session.execute(NEW, {"id": event.id})
        if is_new.rowcount:
            await session.execute(INSERT, entry(event))


app = FastStream(broker)

if __name__ == "__main__":
    asyncio.run(app.run())
