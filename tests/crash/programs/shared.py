"""Two consumers in one process: the messages of one kill it, those of the other take their time.

shared DATABASE-URL FOLDER
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from semel.memory.broker import FileBroker
from semel.memory.broker_groups import Patience
from semel.message import Message
from semel.messaging.failed.retries import RetryWorker
from semel.messaging.failure import RetryableMessageError
from semel.messaging.handler import consumer
from semel.messaging.receive.runner import Runner
from semel.messaging.settings import ConsumerSettings, RetryPolicy, RunnerSettings
from semel.policy.vocabulary import RetryMode
from semel.sql.database import SqlDatabase

SOON, LATER = 0.15, 0.4
"""When the killer strikes, and how long the others are at work: longer."""

POLICY = ConsumerSettings(
    poison_attempts=1,
    held_retry_seconds=0.05,
    retry=RetryPolicy(initial_delay_seconds=0.0, max_delay_seconds=0.0, mode=RetryMode.RETRY_TABLE),
)
SETTINGS = RunnerSettings(wait_seconds=0.05, stop_seconds=2.0)


@consumer("killing", policy=POLICY)
async def killing(message: Message, lease: object) -> None:
    """Kill the process, whatever it is at."""
    if message.id == "killer":
        await asyncio.sleep(SOON)
        os._exit(9)


@consumer("harmless", policy=POLICY)
async def harmless(message: Message, session: object) -> None:
    """Take longer than the killer; some of it from the waiting room."""
    if message.id == "retried" and message.attempt == 1:
        raise RetryableMessageError("down")
    await asyncio.sleep(LATER)


def main(arguments: Sequence[str]) -> int:
    """Run both until nothing is left to do."""
    url, folder = arguments
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    asyncio.run(serve(url, Path(folder)))
    return 0


async def serve(url: str, folder: Path) -> None:
    """Run a runner for each consumer, and the retry worker beside its own."""
    database = SqlDatabase(url, lock_seconds=5)
    broker = FileBroker(folder, patience=Patience(session_seconds=1.0))
    runners = []
    for chosen in (killing, harmless):
        subscription = await broker.subscribe(chosen.name, [chosen.name])
        await broker.settled(chosen.name)
        runners.append(Runner(chosen, subscription, database, SETTINGS))
    retrying = RetryWorker(harmless, database, poll_seconds=0.05)
    retries = asyncio.create_task(retrying.run())
    await asyncio.gather(*(runner.run_until_idle() for runner in runners))
    while await _waits(database):
        await asyncio.sleep(0.05)
    retrying.stop()
    await retries
    await broker.close()
    await database.close()


async def _waits(database: SqlDatabase) -> bool:
    async with database.begin() as unit:
        return await unit.waiting.seconds_to_next("harmless") is not None
