"""A relay that is really killed loses nothing; one that was stopped and replaced does no harm."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from semel.crashpoints import CrashPoint
from semel.messaging.send.outbox import OutboxEntry
from semel.sql.database import SqlDatabase
from semel.testing.kill import Running, Zygote
from tests.crash.programs.relay import BATCH
from tests.messaging.outgoing import by_key

pytestmark = [pytest.mark.kill, pytest.mark.timeout(120)]

WINDOWS = [point.value for point in CrashPoint if point.step.startswith("relay")]
DATABASES = ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]
SHORT_LEASE, MIDDLE_LEASE = "0.4", "3"


@pytest.fixture(scope="module")
def relays() -> Iterator[Zygote]:
    """A process that forks relays."""
    modules = ("sqlalchemy.dialects.sqlite.aiosqlite", "sqlalchemy.dialects.postgresql.asyncpg")
    with Zygote("tests.crash.programs.relay:main", modules) as zygote:
        yield zygote


class Scene:
    """A database with an outbox, and the file that a relay's broker writes."""

    def __init__(self, relays: Zygote, folder: Path, url: str) -> None:
        self.url = url
        self.file = folder / "sent"
        self.file.touch()
        self.log = folder / "log"
        self.names: list[str] = []
        self.program = relays.program(self.log, url, str(self.file))
        self.hasty = relays.program(self.log, url, str(self.file), SHORT_LEASE)
        self.patient = relays.program(self.log, url, str(self.file), MIDDLE_LEASE)
        asyncio.run(self._create())

    def fill(self, count: int) -> None:
        begin = len(self.names)
        new = [f"k{n % 5}-{n}" for n in range(begin, begin + count)]
        self.names += new
        asyncio.run(self._fill(new))

    @property
    def sent(self) -> list[str]:
        return self.file.read_text().split()

    def left(self) -> list[str]:
        return asyncio.run(self._left())

    def assert_clean(self, most_repeated: int) -> None:
        said = f"the relays said:\n{self.log.read_text()[-3000:]}"
        assert by_key(self.sent) == by_key(self.names), f"lost, foreign, or out of order; {said}"
        assert len(self.sent) - len(self.names) <= most_repeated, said
        assert self.left() == [], said

    async def _create(self) -> None:
        database = SqlDatabase(self.url)
        await database.create_tables()
        await database.close()

    async def _fill(self, names: list[str]) -> None:
        database = SqlDatabase(self.url)
        async with database.begin() as unit:
            await unit.outbox.add(
                [OutboxEntry(n, "payments", b"", n.partition("-")[0]) for n in names]
            )
        await database.close()

    async def _left(self) -> list[str]:
        database = SqlDatabase(self.url)
        async with database.begin() as unit:
            found = await unit.outbox.read("outbox", 0, 100_000)
        await database.close()
        return [entry.message_id for entry in found]


@pytest.fixture(params=DATABASES)
def scene(request, relays, tmp_path) -> Iterator[Scene]:
    if request.param == "sqlite":
        yield Scene(relays, tmp_path, f"sqlite:///{tmp_path}/outbox.db")
        return
    server = request.getfixturevalue("quick_postgres_server")
    name = f"relay_{abs(hash(request.node.nodeid))}"
    yield Scene(relays, tmp_path, server.create_database(name))
    server.drop_database(name)


def test_a_relay_killed_at_one_window_after_another_loses_nothing(scene):
    scene.fill(10 * BATCH)

    for window in WINDOWS:
        ended = scene.program.run(crash_at=f"{window}#2")
        assert ended.was_killed, f"{window} was not reached:\n{ended.output}"
    scene.program.run_until_done()

    # A kill finds at most one batch on its way to be deleted, and one published after it.
    scene.assert_clean(most_repeated=2 * BATCH * len(WINDOWS))


@pytest.mark.soak
@pytest.mark.parametrize("occurrence", range(1, 6))
@pytest.mark.parametrize("window", WINDOWS)
def test_a_relay_killed_at_any_window_again_and_again_loses_nothing(scene, window, occurrence):
    scene.fill(60 * BATCH)

    for _ in range(6):
        assert scene.program.run(crash_at=f"{window}#{occurrence}").was_killed
    scene.program.run_until_done()

    scene.assert_clean(most_repeated=2 * BATCH * 6)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_relays_killed_at_random_times_lose_nothing(scene, seed):
    moments = random.Random(seed)
    kills = 0
    # Some relays are done before their moment comes, on a quick machine more than on a slow one.
    for _ in range(100):
        scene.fill(moments.randrange(5 * BATCH))
        kills += scene.program.run(kill_after=moments.uniform(0.0, 0.25)).was_killed
        if kills == 10:
            break
    scene.program.run_until_done()

    assert kills == 10, scene.log.read_text()
    scene.assert_clean(most_repeated=2 * BATCH * kills)


# A process that is stopped on SQLite may hold the only lock there is; that one is in the tests
# of the relay's leadership.
@pytest.mark.parametrize("scene", DATABASES[1:], indirect=True)
def test_a_stopped_leader_that_wakes_after_it_was_replaced_deletes_nothing(scene):
    scene.fill(3 * BATCH)
    first = scene.hasty.start(stop_at="relay_delete:before")
    second = scene.hasty.start(stop_at="relay_read:after")

    first.wake()
    wait_for(first, "leadership lost")
    assert scene.left() == scene.names
    second.wake()
    assert second.wait().code == 0
    assert first.wait().code == 0

    assert by_key(scene.sent) == by_key(scene.names)
    assert scene.left() == []


def test_of_two_relays_at_once_only_one_sends(scene):
    scene.fill(20 * BATCH)

    both = [scene.patient.start(), scene.patient.start()]
    assert [one.wait().code for one in both] == [0, 0]

    assert Counter(scene.sent) == Counter(scene.names)
    scene.assert_clean(most_repeated=0)


def wait_for(running: Running, words: str) -> None:
    """Wait until a process has said something."""
    deadline = time.monotonic() + 30
    while words not in running.output:
        assert time.monotonic() < deadline, running.output
        threading.Event().wait(0.005)
