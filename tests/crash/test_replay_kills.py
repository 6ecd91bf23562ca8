"""Replays that are really killed: run again, they go on, and every effect is there once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from semel.codec import FromHeader
from semel.message import Message
from semel.messaging.failure import NonRetryableMessageError
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handler import Consumer, consumer
from semel.messaging.records import DeadLetterFilter, WaitingFilter
from semel.operate.replay import ReplayReport, report_of
from semel.operate.replay_message import ReplayResult
from semel.sql.database import SqlDatabase

pytestmark = [pytest.mark.kill, pytest.mark.timeout(300)]

IDS = [f"m{n}" for n in range(4)]
SHOP = """
import asyncio
import os
import signal
import sys

from sqlalchemy import text

from semel.codec import FromHeader
from semel.messaging.handler import consumer
from semel.operate.replay import Replay
from semel.operate.selection import Letters
from semel.sql.database import SqlDatabase


@consumer("billing", id_from=FromHeader("message-id"))
async def billing(message, session):
    await session.execute(text("INSERT INTO paid VALUES (:id)"), {"id": message.id})
    if message.id == os.environ.get("KILLER"):
        os.kill(os.getpid(), signal.SIGKILL)


async def main():
    database = SqlDatabase(sys.argv[1])
    await Replay(billing, database, Letters(), name="again", actor="ann").run()
    await database.close()


asyncio.run(main())
"""


class Shop:
    """A program that replays, and a database with its dead letters."""

    def __init__(self, folder: Path, url: str) -> None:
        self.url = url
        self.program = folder / "shop_that_dies.py"
        self.program.write_text(SHOP)
        asyncio.run(self._fill())

    async def _fill(self) -> None:
        database = SqlDatabase(self.url)
        await database.create_tables()
        async with database.engine.begin() as connection:
            await connection.execute(text("CREATE TABLE paid (id text)"))
        for message_id in IDS:
            raw, headers = b"{}", {"message-id": message_id.encode()}
            await handle_message(
                _failing(), database, Message(message_id, {}, raw, headers=headers)
            )
        await database.close()

    def run(self, **environment: str) -> int:
        """Replay in a process of its own; return how it ended."""
        done = subprocess.run(
            [sys.executable, str(self.program), self.url],
            env={**os.environ, **environment},
            timeout=120,
            check=False,
        )
        return done.returncode

    def found(self) -> tuple[list[str], int, int, ReplayReport]:
        """Return the effects, what is left, and how far the replay is."""

        async def look() -> Any:
            database = SqlDatabase(self.url)
            async with database.begin() as unit:
                paid = (await unit.session.execute(text("SELECT id FROM paid"))).scalars()
                letters = await unit.dead_letters.count(DeadLetterFilter())
                waiting = await unit.waiting.count(WaitingFilter())
                run = await unit.replays.get("again")
            await database.close()
            return sorted(paid), letters, waiting, report_of(run)

        return asyncio.run(look())


def _failing() -> Consumer:

    @consumer("billing", id_from=FromHeader("message-id"))
    async def handle(message: Message, session: Any) -> None:
        raise NonRetryableMessageError("not yet")

    return handle


def killed_and_run_again(shop: Shop, window: str) -> None:
    assert shop.run(SEMEL_CRASH_AT=window) == -signal.SIGKILL
    assert shop.run() == 0

    paid, letters, waiting, report = shop.found()
    assert paid == IDS
    assert (letters, waiting) == (0, 0)
    assert report.counts[ReplayResult.HANDLED] == report.done == len(IDS)
    assert report.state == "finished"


@pytest.mark.parametrize("window", ["replay:before#2", "replay:after#2", "message_commit:after#2"])
def test_a_killed_replay_goes_on_with_the_message_in_its_hand(tmp_path, window):
    killed_and_run_again(Shop(tmp_path, f"sqlite:///{tmp_path}/shop.db"), window)


@pytest.mark.postgres
def test_so_it_does_on_postgres(tmp_path, quick_postgres_server):
    url = quick_postgres_server.create_database("killed_replay")
    killed_and_run_again(Shop(tmp_path, url), "replay:after#2")


def test_a_message_that_kills_every_replay_is_refused_in_the_end(tmp_path):
    shop = Shop(tmp_path, f"sqlite:///{tmp_path}/shop.db")
    limit = _failing().settings.poison_attempts

    deaths = 0
    while shop.run(KILLER="m1") == -signal.SIGKILL:
        deaths += 1
        assert shop.found()[:3] == (["m0"], 3, 0)
        assert deaths <= limit + 1

    paid, letters, waiting, report = shop.found()
    assert paid == ["m0", "m2", "m3"]
    assert (letters, waiting) == (1, 0)
    assert report.counts[ReplayResult.HANDLED] == 3
    assert report.refusals == {f"the process died {deaths} times while it was tried": 1}
