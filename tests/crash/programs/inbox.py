"""The two ways through an inbox, in a process of its own.

inbox DATABASE-URL work           handle what is stored until nothing is left
inbox DATABASE-URL deliver ID …   store and handle deliveries, one after the other
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Column, Integer, MetaData, Table, Text, insert

from semel.message import Message
from semel.messaging.failure import RetryableMessageError
from semel.messaging.handler import consumer
from semel.messaging.receive.inbox import Inbox, InboxWorker
from semel.messaging.settings import ConsumerSettings, RetryPolicy
from semel.sql.database import SqlDatabase

BATCH = 3
SETTINGS = ConsumerSettings(
    retry=RetryPolicy(
        max_attempts=3, initial_delay_seconds=0.0, max_delay_seconds=0.0, jitter=False
    )
)
effects = MetaData()
effect = Table(
    "effect",
    effects,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("id", Text),
)


def message(id: str) -> Message:
    """Return a message whose id says all of it: how it fails, and behind a dash its key."""
    return Message(id, None, b"null", id.rpartition("-")[2])


@consumer("stock", policy=SETTINGS)
async def stock(message: Message, session: Any) -> None:
    """Write the effect, and fail behind it where the message says so."""
    await session.execute(insert(effect).values(id=message.id))
    if message.id.startswith("poison") or (
        message.id.startswith("transient") and message.attempt == 1
    ):
        raise RetryableMessageError("down")


def main(arguments: Sequence[str]) -> int:
    """Do what the arguments say."""
    url, how, *ids = arguments
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    asyncio.run(work(url) if how == "work" else deliver(url, ids))
    return 0


async def work(url: str) -> None:
    database = SqlDatabase(url)
    await InboxWorker(stock, database, batch=BATCH, poll_seconds=0.02).run_until_empty()
    await database.close()


async def deliver(url: str, ids: Sequence[str]) -> None:
    database = SqlDatabase(url)
    for id in ids:
        await Inbox(stock, database).store_and_handle(message(id))
    await database.close()
