"""Whoever works on an inbox and is really killed: every message has one effect, in its order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from semel.messaging.receive.broker import INBOX
from semel.messaging.receive.inbox import Inbox
from semel.messaging.records import DeadLetterFilter
from semel.sql.database import SqlDatabase
from semel.testing.kill import EndedProcess, Zygote
from tests.crash.programs.inbox import effect, effects, message, stock

pytestmark = [pytest.mark.kill, pytest.mark.timeout(120)]

NORMAL = ["handle:after", "message_commit:before", "message_commit:after"]
WORKING = [*NORMAL, "settle:before", "settle:after"]
CAREFUL = [*WORKING, "careful_attempt:after"]
KEYS = "abc"
"""As many as there are messages in a batch: a kill finds one of each."""


@pytest.fixture(scope="module")
def inboxes() -> Iterator[Zygote]:
    """A process that forks whoever works on an inbox."""
    modules = ("sqlalchemy.dialects.sqlite.aiosqlite", "sqlalchemy.dialects.postgresql.asyncpg")
    with Zygote("tests.crash.programs.inbox:main", modules) as zygote:
        yield zygote


class Scene:
    """A database with an inbox, and what its messages did."""

    def __init__(self, inboxes: Zygote, folder: Path, url: str) -> None:
        self.url = url
        self.ids: list[str] = []
        self._program = inboxes.program(folder / "log", url)

        async def create(database: SqlDatabase) -> None:
            await database.create_tables()
            async with database.engine.begin() as connection:
                await connection.run_sync(effects.create_all)

        self._with_database(create)

    def _with_database(self, do: Callable[[SqlDatabase], Awaitable[Any]]) -> Any:
        async def whole() -> Any:
            database = SqlDatabase(self.url)
            try:
                return await do(database)
            finally:
                await database.close()

        return asyncio.run(whole())

    def name(self, kind: str = "good", count: int = 1) -> list[str]:
        """Make up new messages, of one key after the other."""
        first = len(self.ids)
        new = [f"{kind}{n}-{KEYS[n % len(KEYS)]}" for n in range(first, first + count)]
        self.ids += new
        return new

    def store(self, kind: str = "good", count: int = 1) -> None:
        new = self.name(kind, count)

        async def store(database: SqlDatabase) -> None:
            for id in new:
                await Inbox(stock, database).store(message(id))

        self._with_database(store)

    def work(self, crash_at: str | None = None) -> EndedProcess:
        return self._program.run("work", crash_at=crash_at)

    def deliver(self, ids: list[str], crash_at: str | None = None) -> EndedProcess:
        return self._program.run("deliver", *ids, crash_at=crash_at)

    def assert_clean(self) -> None:
        """See that all had one effect in the order of its key, but poison, which is buried."""

        async def look(database: SqlDatabase) -> Any:
            async with database.begin() as unit:
                in_order = select(effect.c.id).order_by(effect.c.number)
                had = list((await unit.session.execute(in_order)).scalars())
                letters = await unit.dead_letters.find(DeadLetterFilter(), 100)
                dead = {letter.message_id: letter.error_code for letter in letters}
                members = await unit.members.others("stock", "", [INBOX])
                left = [await unit.inbox.pending("stock"), members]
                notes = await unit.members.notes("stock", self.ids)
            return had, dead, left, notes

        had, dead, left, notes = self._with_database(look)
        for key in KEYS:
            mine = [id for id in self.ids if id.endswith(key) and not id.startswith("poison")]
            assert [id for id in had if id.endswith(key)] == mine
        poison = [id for id in self.ids if id.startswith("poison")]
        assert dead == dict.fromkeys(poison, "DEPENDENCY_UNAVAILABLE")
        assert not any(left)
        assert notes == {}


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def scene(request, inboxes, tmp_path) -> Scene:
    sqlite = f"sqlite:///{tmp_path}/inbox.db"
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else sqlite
    return Scene(inboxes, tmp_path, url)


def test_a_worker_killed_at_one_window_after_another_handles_everything_once(scene):
    """At each window in normal operation, and at each while the next one is careful."""
    for number, careful in enumerate(CAREFUL):
        normal = WORKING[number % len(WORKING)]
        for kind, count in (("good", 4), ("transient", 1), ("poison", 1), ("good", 2)):
            scene.store(kind, count)
        for window in (f"{normal}#2", careful):
            ended = scene.work(crash_at=window)
            assert ended.was_killed, f"{window} was not reached:\n{ended.output}"
        assert "one message at a time" in ended.output
        assert scene.work().code == 0

    scene.assert_clean()


def test_deliveries_that_are_stored_and_handled_have_one_effect_whenever_they_are_killed(scene):
    for window in ("claim:after", *NORMAL):
        ids = scene.name(count=3)
        assert scene.deliver(ids, crash_at=f"{window}#2").was_killed
        assert scene.deliver(ids).code == 0

    scene.assert_clean()
