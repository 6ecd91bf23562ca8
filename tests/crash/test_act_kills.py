"""An operator's command that is really killed has been done wholly and audited, or not at all."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from semel.crashpoints import CrashPoint
from semel.messaging.deletion import ask_to_delete
from semel.messaging.failure import NonRetryableMessageError
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
}


@pytest.fixture(scope="module")
def commands() -> Iterator[Zygote]:
    """A process that forks commands."""
    with Zygote("tests.crash.act_program:main", ("sqlalchemy.dialects.sqlite.aiosqlite",)) as found:
        yield found


@dataclass
class Office:
    """A database with a parked message and a dead letter, and commands about it."""

    commands: Zygote
    folder: Path
    act: str

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.file = self.folder / "office.db"
        (self.folder / "fixed.json").write_text('{"id": "m1", "amount": 7}')
        asyncio.run(self._fill())

    async def _fill(self) -> None:
        def broken(message: Any) -> None:
            raise NonRetryableMessageError("no such account")

        async with sql_world(f"sqlite:///{self.file}", waits_for_locks=False) as world:
            for settings, name in ((PARKS, "m1"), (DEAD, "d1")):
                service = await Service(world, settings, broken=broken).open()
                await service.deliver(name, key="k" if settings is PARKS else None)
            if self.act == "delete.approve":
                await ask_to_delete(world.database, "billing", "m1", actor="ann", reason="wrong")

    def do(self, crash_at: str = "") -> Any:
        words = [self.folder / word if word.endswith(".json") else word for word in ACTS[self.act]]
        more = () if "approve" in words else ("--consumer", "billing")
        named = ("--database", f"sqlite:///{self.file}", "--actor", "bob", "--reason", "so", "-y")
        program = self.commands.program(self.folder / "log", *map(str, words), *more, *named)
        return program.run(crash_at=crash_at) if crash_at else program.run()

    def books(self) -> dict[str, list[tuple[Any, ...]]]:
        """Return every row without its times."""
        with closing(sqlite3.connect(self.file)) as file:
            tables = file.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            return {name: sorted(_rows(file, name), key=repr) for (name,) in tables}


def _rows(file: sqlite3.Connection, table: str) -> Iterator[tuple[Any, ...]]:
    found = file.execute(f'SELECT * FROM "{table}"')
    names = [column[0] for column in found.description]
    kept = [n for n, name in enumerate(names) if name not in TIMES and not name.endswith("_at")]
    for row in found.fetchall():
        yield tuple(row[n] for n in kept)


@pytest.mark.parametrize("act", ACTS)
def test_a_killed_act_is_done_once_and_audited_or_not_at_all(commands, tmp_path, act):
    whole, before, after = (
        Office(commands, tmp_path / name, act) for name in ("whole", "before", "after")
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


def changes(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Name the tables that differ."""
    return {table for table in one if one[table] != other[table]}
