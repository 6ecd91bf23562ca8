"""An operator's command that is really killed has been done wholly and audited, or not at all."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, MetaData, select

from semel.crashpoints import CrashPoint
from semel.messaging.failure import NonRetryableMessageError
from semel.messaging.records import Gap
from semel.messaging.send.outbox import OutboxEntry
from semel.operate.deletion import ask_to_delete
from semel.operate.replay import Cursor
from semel.operate.selection import Letters, to_json
from semel.operate.stores import ReplayRun
from semel.sql.database import SqlDatabase
from semel.testing.kill import Zygote
from tests.messaging.replay_world import DEAD, PARKS, Service
from tests.messaging.worlds import sql_world

pytestmark = [pytest.mark.kill, pytest.mark.timeout(120)]

TIMES = {"at", "since", "lease_until", "hash", "previous_hash", "used_at"}
"""Columns that differ from run to run, beside those that end in _at."""

ACTS: dict[str, tuple[str, ...]] = {
    "park.classify": ("parking", "classify", "m1", "--label", "data"),
    "park.fix": ("parking", "fix", "m1", "--keep-id", "--payload", "fixed.json"),
    "park.fix as": ("parking", "fix", "m1", "--new-id", "m9", "--payload", "fixed.json"),
    "park.release": ("parking", "release", "m1"),
    "park.skip": ("parking", "skip", "m1"),
    "delete.ask": ("parking", "delete", "m1"),
    "delete.approve": ("parking", "approve", "1", "--shared-account"),
    "dlq.retry": ("dlq", "retry", "d1"),
    "dlq.park": ("dlq", "park", "d1"),
    "dlq.skip": ("dlq", "skip", "d1"),
    "erase": ("erase", "--key", "k"),
    "gap.close": ("gaps", "close", "--key", "g"),
    "gap.pass": ("gaps", "close", "--key", "g", "--pass-over"),
    "replay.stop": ("replay", "stop", "nightly"),
    "replay.abandon": ("replay", "abandon", "nightly"),
    "outbox.retry": ("outbox", "retry", "o1"),
    "outbox.drop": ("outbox", "drop", "o1"),
}
NO_WINDOWS = ("--topic-days", "0", "--replay-days", "0", "--dlq-days", "0", "--parking-days", "0")
RETENTION = ("retention", "--ttl-days", "0.0000001", *NO_WINDOWS, "--batch", "1")
OF_A_CONSUMER = {"parking", "dlq", "gaps", "retention"}

QUICK = {"erase"}
"""Acts that are killed on PostgreSQL in every run; the others are for the soak."""


def _on_postgres(act: str) -> Any:
    marks = [pytest.mark.postgres] + ([] if act in QUICK else [pytest.mark.soak])
    return pytest.param(act, "postgres", marks=marks)


CASES = [*((act, "sqlite") for act in ACTS), *map(_on_postgres, ACTS)]


@pytest.fixture(scope="module")
def commands() -> Iterator[Zygote]:
    """A process that forks commands."""
    modules = ("sqlalchemy.dialects.sqlite.aiosqlite", "sqlalchemy.dialects.postgresql.asyncpg")
    with Zygote("tests.crash.programs.act:main", modules) as found:
        yield found


@pytest.fixture
def new_url(request, tmp_path) -> Iterator[Callable[[str], str]]:
    """Makes an empty database of a kind."""
    made: list[str] = []

    def new(on: str) -> str:
        name = f"office_{next(_numbers)}"
        if on == "sqlite":
            return f"sqlite:///{tmp_path}/{name}.db"
        made.append(name)
        url: str = request.getfixturevalue("quick_postgres_server").create_database(name)
        return url

    yield new
    for name in made:
        request.getfixturevalue("quick_postgres_server").drop_database(name)


_numbers = count(1)


@dataclass
class Office:
    """A database with what waits for a person, and commands about it."""

    commands: Zygote
    folder: Path
    act: str
    url: str

    def __post_init__(self) -> None:
        self.folder.mkdir()
        (self.folder / "fixed.json").write_text('{"id": "m1", "amount": 7}')
        asyncio.run(self._fill())

    async def _fill(self) -> None:
        def broken(message: Any) -> None:
            raise NonRetryableMessageError("no such account")

        async with sql_world(self.url, waits_for_locks=False) as world:
            for settings, name in ((PARKS, "m1"), (DEAD, "d1")):
                service = await Service(world, settings, broken=broken).open()
                await service.deliver(name, key="k" if settings is PARKS else None)
            async with world.database.begin() as unit:
                await unit.outbox.add([OutboxEntry("o1", "receipts", b"paid", "k")])
                leadership = await unit.outbox.lead("outbox", "relay", 60)
                [entry] = await unit.outbox.read("outbox", 0, 9)
                await unit.outbox.park(leadership, entry.place, "too large")
                await unit.versions.open_gap(Gap("billing", "g", 2, 4))
                if self.act != "retention":
                    which, far = to_json(Letters()), Cursor().text()
                    run = ReplayRun("nightly", "billing", which, "ann", cursor=far)
                    await unit.replays.begin(run)
                await unit.claims.mark_completed("billing", "c1")
            if self.act == "delete.approve":
                await ask_to_delete(world.database, "billing", "m1", actor="ann", reason="wrong")

    def do(self, crash_at: str = "") -> Any:
        typed = RETENTION if self.act == "retention" else ACTS[self.act]
        words = [self.folder / word if word.endswith(".json") else word for word in typed]
        has_consumer = words[0] in OF_A_CONSUMER and "approve" not in words
        more = ("--consumer", "billing") if has_consumer else ()
        if self.act == "gap.pass":  # only the consumer's own code reads versions
            more = ("--handler", "tests.crash.programs.act:billing")
        named = ("--database", self.url, "--actor", "bob", "--reason", "so", "-y")
        program = self.commands.program(self.folder / "log", *map(str, words), *more, *named)
        return program.run(crash_at=crash_at) if crash_at else program.run()

    def books(self) -> dict[str, list[tuple[Any, ...]]]:
        """Return every row without its times."""

        async def read() -> dict[str, list[tuple[Any, ...]]]:
            database = SqlDatabase(self.url)
            async with database.engine.connect() as connection:
                found = await connection.run_sync(_rows)
            await database.close()
            return found

        return asyncio.run(read())


def _rows(connection: Connection) -> dict[str, list[tuple[Any, ...]]]:
    there = MetaData()
    there.reflect(connection)
    found: dict[str, list[tuple[Any, ...]]] = {}
    for name, table in there.tables.items():
        # A number that a transaction got which was taken back is not given again.
        kept = [c for c in table.c if not _is_time(c.name) and c.identity is None]
        rows = connection.execute(select(*kept)).all()
        found[name] = sorted((tuple(map(_without_number, row)) for row in rows), key=repr)
    return found


def _is_time(column: str) -> bool:
    return column in TIMES or column.endswith("_at")


def _without_number(value: Any) -> Any:
    """Leave the number of a request out of the details that name it."""
    return re.sub(r'"request": ?\d+', '"request"', value) if isinstance(value, str) else value


@pytest.mark.parametrize(("act", "on"), CASES)
def test_a_killed_act_is_done_once_and_audited_or_not_at_all(commands, tmp_path, new_url, act, on):
    whole, before, after = (
        Office(commands, tmp_path / name, act, new_url(on)) for name in ("whole", "before", "after")
    )
    untouched = whole.books()
    assert before.books() == untouched

    ended = whole.do()
    assert ended.code == 0, ended.output
    done = whole.books()
    assert done != untouched

    # `fix` shows the payload first: that look is an act of its own.
    looks = act.startswith("park.fix")
    audit = {"audit_entry", "audit_head"} if looks else set()
    assert before.do(f"{CrashPoint.ACT_BEFORE}#{1 + looks}").was_killed
    assert changes(before.books(), untouched) <= audit
    assert after.do(f"{CrashPoint.ACT_AFTER}#{1 + looks}").was_killed
    assert after.books() == done

    assert before.do().code == 0
    assert changes(before.books(), done) <= audit


def test_retention_that_is_killed_has_left_word_of_who_began_it(commands, tmp_path, new_url):
    office = Office(commands, tmp_path / "office", "retention", new_url("sqlite"))
    untouched = office.books()

    assert office.do(CrashPoint.ACT_BEFORE).was_killed
    killed = office.books()
    assert office.do().code == 0

    assert "processed_message" in changes(killed, untouched)
    assert [entry[1:3] for entry in killed["audit_entry"]] == [("bob", "retention.begin")]
    # The second run found nothing to delete: it has nothing to say.
    assert changes(office.books(), killed) == set()


def changes(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Name the tables that differ."""
    return {table for table in one if one[table] != other[table]}
