"""A process of several consumers that is really killed: only the killer is blamed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from semel.memory.broker import FileBroker
from semel.memory.broker_groups import Patience
from semel.messaging.handle.claims import ClaimState
from semel.sql.database import SqlDatabase
from semel.testing.kill import Zygote

pytestmark = [pytest.mark.kill, pytest.mark.timeout(120)]

SENT = {"killing": ["killer", "other"], "harmless": ["slow", "retried", "slower"]}
EXPECTED = {
    ("killing", "killer"): ClaimState.PARKED,
    ("killing", "other"): ClaimState.COMPLETED,
    **{("harmless", id): ClaimState.COMPLETED for id in SENT["harmless"]},
}


@pytest.fixture(scope="module")
def services() -> Iterator[Zygote]:
    """A process that forks services."""
    modules = ("sqlalchemy.dialects.sqlite.aiosqlite", "sqlalchemy.dialects.postgresql.asyncpg")
    with Zygote("tests.crash.programs.shared:main", modules) as zygote:
        yield zygote


@pytest.mark.parametrize("on", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def test_what_runs_beside_a_killer_is_never_parked_for_it(services, tmp_path, request, on):
    """With one death allowed, one wrong blame would already park somebody else."""
    sqlite = f"sqlite:///{tmp_path}/shop.db"
    url = request.getfixturevalue("postgres_url") if on == "postgres" else sqlite
    asyncio.run(prepare(url, tmp_path / "broker"))
    program = services.program(tmp_path / "log", url, str(tmp_path / "broker"))

    kills = [program.run().was_killed]
    while kills[-1] and len(kills) < 8:
        kills.append(program.run().was_killed)

    assert kills == [True, True, False]
    assert asyncio.run(found(url)) == EXPECTED


async def prepare(url: str, folder: Path) -> None:
    database = SqlDatabase(url)
    await database.create_tables()
    await database.close()
    broker = FileBroker(folder, dict.fromkeys(SENT, 1), patience=Patience(session_seconds=1.0))
    for topic, ids in SENT.items():
        for id in ids:
            broker.put(topic, b"{}", headers={"message-id": id.encode()})
    await broker.close()


async def found(url: str) -> dict[tuple[str, str], ClaimState | None]:
    database = SqlDatabase(url)
    states: dict[tuple[str, str], ClaimState | None] = {}
    async with database.begin() as unit:
        for name, ids in SENT.items():
            for id in ids:
                row = await unit.claims.look_up(name, id)
                states[name, id] = None if row is None else row.state
    await database.close()
    return states
