"""A FastStream service on RabbitMQ: python -m tests.rabbit.service URL QUEUE DATABASE SECONDS"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from faststream import FastStream
from faststream.rabbit import RabbitBroker
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from semel.messaging import Semel

INSERT = text("INSERT INTO payments VALUES (:id, :amount)")


class Paid(BaseModel):
    id: str
    amount: int


def application(url: str, queue: str, database: str, seconds: float) -> FastStream:
    broker = RabbitBroker(url)
    semel = Semel(broker, database=database)

    @semel.subscriber(queue, consumer="billing")
    async def on_paid(event: Paid, session: AsyncSession) -> None:
        await session.execute(INSERT, event.model_dump())
        await asyncio.sleep(seconds)
        if event.amount < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return FastStream(broker)


if __name__ == "__main__":
    *where, seconds = sys.argv[1:]
    asyncio.run(application(*where, float(seconds)).run())
