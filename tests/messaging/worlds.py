"""The databases that every contract of the messaging half is bound to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import event, text, update
from sqlalchemy.ext.asyncio import AsyncEngine

from semel.memory.database import MemoryDatabase
from semel.sql.database import SqlDatabase
from semel.sql.types import metadata
from semel.testing.clock import SimulatedClock
from semel.testing.contracts.messaging_world import DatabaseWorld
from semel.testing.services import PostgresServer

_numbers = count(1)

AGING = {
    "processed_message": ("lease_until", "due_at", "first_seen_at", "updated_at", "failed_at"),
    "failed_attempt": ("at",),
    "dead_letter": ("first_failed_at", "last_failed_at"),
    "waiting_message": ("due_at", "since", "first_failed_at"),
    "inbox_message": ("received_at", "processed_at", "due_at"),
    "outbox_message": ("created_at",),
    "outbox_leader": ("lease_until",),
    "consumer_member": ("expires_at",),
    "crash_suspect": ("noted_at",),
    "sequence_gap": ("since", "closed_at"),
    "approval": ("asked_at", "decided_at"),
    "message_revision": ("at",),
    "replay_run": ("began_at", "updated_at"),
}


@asynccontextmanager
async def memory_world() -> AsyncIterator[DatabaseWorld]:
    clock = SimulatedClock()

    async def age(seconds: float) -> None:
        clock.advance(seconds)

    yield DatabaseWorld(MemoryDatabase(clock, lock_seconds=0.3), age, waits_for_locks=False)


@asynccontextmanager
async def sqlite_world(folder: Path) -> AsyncIterator[DatabaseWorld]:
    async with sql_world(f"sqlite:///{folder}/{next(_numbers)}.db", waits_for_locks=False) as world:
        yield world


@asynccontextmanager
async def postgres_world(server: PostgresServer) -> AsyncIterator[DatabaseWorld]:
    """One database per server, emptied for every test: making one takes a second."""
    if server not in _made:
        _made[server] = server.create_database(f"messaging_{next(_numbers)}")
    async with sql_world(_made[server], waits_for_locks=True) as world:
        await _empty(world)
        yield world


_made: WeakKeyDictionary[PostgresServer, str] = WeakKeyDictionary()


EMPTY = f"""DO $$ DECLARE name text; BEGIN
    FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'public'
        AND tablename NOT IN ({", ".join(f"'{name}'" for name in metadata.tables)}) LOOP
        EXECUTE format('DROP TABLE %I CASCADE', name);
    END LOOP;
    {" ".join(f"DELETE FROM {name};" for name in metadata.tables)}
    FOR name IN SELECT sequencename FROM pg_sequences WHERE last_value IS NOT NULL LOOP
        PERFORM setval(quote_ident(name), 1, false);
    END LOOP;
END $$"""
"""Empties semel's tables and drops any other: two tests may mean different ones by one name."""


async def _empty(world: DatabaseWorld) -> None:
    async with world.database.begin() as unit:
        await unit.session.execute(text(EMPTY))


@asynccontextmanager
async def sql_world(url: str, *, waits_for_locks: bool) -> AsyncIterator[DatabaseWorld]:
    database = SqlDatabase(url, lock_seconds=0.5)
    async with database.engine.begin() as connection:
        await connection.run_sync(metadata.create_all)

    async def age(seconds: float) -> None:
        await make_older(database.engine, seconds)

    try:
        yield DatabaseWorld(database, age, waits_for_locks)
    finally:
        await database.close()


async def check_foreign_keys(database: SqlDatabase, *, to_disk: bool = True) -> None:
    """Let SQLite check foreign keys, as PostgreSQL does; and wait for the disk, or not."""
    if database.is_postgres:
        return

    def on_connect(driver: Any, record: Any) -> None:
        driver.execute("PRAGMA foreign_keys=ON")
        if not to_disk:
            driver.execute("PRAGMA synchronous=OFF")

    event.listen(database.engine.sync_engine, "connect", on_connect)
    await database.engine.dispose()


async def make_older(engine: AsyncEngine, seconds: float) -> None:
    """Move every time in the tables into the past."""
    async with engine.begin() as connection:
        for name, columns in AGING.items():
            table = metadata.tables[name]
            for column in columns:
                where = table.c[column] != 0
                older = {column: table.c[column] - round(seconds * 1_000_000)}
                await connection.execute(update(table).where(where).values(older))
