"""The databases that every contract of the messaging half is bound to."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import JSON, Text, case, create_engine, event, or_, text, update
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from semel.clock import Clock
from semel.sql.database import SqlDatabase
from semel.sql.engine import _KEEPERS, LOCK_SECONDS, open_engine
from semel.sql.schema import create
from semel.sql.types import metadata
from semel.testing.clock import SimulatedClock
from semel.testing.services import PostgresServer
from tests.stores.world import DatabaseWorld

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
    "consumer_engine": ("since",),
    "cycle_outcome": ("at",),
    "approval": ("asked_at", "decided_at"),
    "message_revision": ("at",),
    "replay_run": ("began_at", "updated_at"),
}


class Base(DeclarativeBase):
    pass


class Effect(Base):
    """What a handler did: a name, and a value that JSON can say."""

    __tablename__ = "test_effect"

    number: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(Text)
    value: Mapped[Any] = mapped_column(JSON)

    def __init__(self, name: str, value: Any) -> None:
        super().__init__(name=name, value=value)


def effects(database: SqlDatabase, name: str) -> list[Any]:
    """Return the committed effects of this name of a database in memory, in their order."""
    asked = "SELECT value FROM test_effect WHERE name = ? ORDER BY number"
    # SQLite keeps a JSON that is a number as that number.
    found = [value for (value,) in rows_of(database, asked, name)]
    return [json.loads(value) if isinstance(value, str) else value for value in found]


def keeper_of(engine: AsyncEngine) -> sqlite3.Connection:
    """Return the idle connection that keeps the database in memory of *engine* alive."""
    return _KEEPERS[engine.sync_engine]


def rows_of(database: SqlDatabase, query: str, *values: Any) -> list[Any]:
    """Return what is committed in a database in memory; while a unit is open, what that sees."""
    try:
        return keeper_of(database.engine).execute(query, values).fetchall()
    except sqlite3.OperationalError:
        return _connections[database].execute(query, values).fetchall()


_connections: WeakKeyDictionary[SqlDatabase, sqlite3.Connection] = WeakKeyDictionary()
"""The connection that the units of a database in memory have, one after the other."""


@cache
def template() -> sqlite3.Connection:
    """A database with semel's tables and that of the effects: making them takes a while."""
    made = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    engine = create_engine("sqlite://", creator=lambda: made)
    metadata.create_all(engine)
    Base.metadata.create_all(engine)
    return made


def make_tables(path: Path) -> None:
    """Make a database in a file, with all tables."""
    with closing(sqlite3.connect(path)) as file:
        file.execute("PRAGMA synchronous=OFF")
        template().backup(file)


_in_memory: list[SqlDatabase] = []


def memory_database(clock: Clock | None = None, lock_seconds: float = LOCK_SECONDS) -> SqlDatabase:
    """Return a new SQLite in memory with all tables, whose time is that of *clock*.

    It is closed when the test ends.
    """
    database = SqlDatabase("sqlite://", lock_seconds=lock_seconds)
    keeper = keeper_of(database.engine)
    template().backup(keeper)
    # Whoever holds the lock is on the same event loop: waiting would not help.
    keeper.execute("PRAGMA busy_timeout=0")
    _follow(database, clock)
    _in_memory.append(database)
    return database


def _follow(database: SqlDatabase, clock: Clock | None) -> None:
    """Know the connection, and let it tell the time of *clock*."""

    def strftime(form: str, when: str) -> str:
        assert clock is not None
        milliseconds = round(clock.now() * 1000)
        return {
            "%s": str(milliseconds // 1000),
            "%f": f"{milliseconds // 1000 % 60:02}.{milliseconds % 1000:03}",
        }[form]

    def on_connect(driver: Any, record: Any) -> None:
        _connections[database] = driver.driver_connection._conn
        if clock is not None:
            driver.create_function("strftime", 2, strftime)

    event.listen(database.engine.sync_engine, "connect", on_connect)


async def close_all() -> None:
    """Close the databases in memory that are open."""
    while _in_memory:
        await _in_memory.pop().close()


@asynccontextmanager
async def memory_world() -> AsyncIterator[DatabaseWorld]:
    """SQLite in memory, on a clock of its own."""
    clock = SimulatedClock()

    async def age(seconds: float) -> None:
        clock.advance(seconds)

    database = memory_database(clock, lock_seconds=0.3)
    try:
        yield DatabaseWorld(database, age, waits_for_locks=False)
    finally:
        await database.close()


@asynccontextmanager
async def sqlite_world(folder: Path) -> AsyncIterator[DatabaseWorld]:
    path = folder / f"{next(_numbers)}.db"
    make_tables(path)
    async with _opened(f"sqlite:///{path}", waits_for_locks=False) as world:
        yield world


@asynccontextmanager
async def postgres_world(server: PostgresServer) -> AsyncIterator[DatabaseWorld]:
    """One database per server, emptied for every test: making one takes a second."""
    if server not in _made:
        _made[server] = await _made_in(server)
    async with _opened(_made[server], waits_for_locks=True) as world:
        await _empty(world)
        yield world


_made: WeakKeyDictionary[PostgresServer, str] = WeakKeyDictionary()


async def _made_in(server: PostgresServer) -> str:
    name = f"messaging_{next(_numbers)}"
    engine = open_engine(server.create_database(name))
    # So that the statements of tests need not name the schema of semel's tables.
    async with engine.begin() as connection:
        await connection.execute(text(f"ALTER DATABASE {name} SET search_path = public, semel"))
    await create(engine)
    await engine.dispose()
    return server.url_of(name)


EMPTY = f"""DO $$ DECLARE name text; BEGIN
    FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'public' LOOP
        EXECUTE format('DROP TABLE %I CASCADE', name);
    END LOOP;
    {" ".join(f"DELETE FROM semel.{name};" for name in metadata.tables)}
    FOR name IN SELECT format('%I.%I', schemaname, sequencename) FROM pg_sequences
        WHERE last_value IS NOT NULL LOOP
        PERFORM setval(name::regclass, 1, false);
    END LOOP;
END $$"""
"""Empties semel's tables and drops any other: two tests may mean different ones by one name."""


async def _empty(world: DatabaseWorld) -> None:
    async with world.database.begin() as unit:
        await unit.session.execute(text(EMPTY))


@asynccontextmanager
async def _opened(url: str, *, waits_for_locks: bool) -> AsyncIterator[DatabaseWorld]:
    database = SqlDatabase(url, lock_seconds=0.5)
    if not database.is_postgres:
        _do_not_wait_for_the_disk(database.engine)

    async def age(seconds: float) -> None:
        await make_older(database.engine, seconds)

    try:
        yield DatabaseWorld(database, age, waits_for_locks)
    finally:
        await database.close()


def _do_not_wait_for_the_disk(engine: AsyncEngine) -> None:
    """Let SQLite commit without fsync: no test cuts the power."""

    def on_connect(driver: Any, record: Any) -> None:
        driver.execute("PRAGMA synchronous=OFF")

    event.listen(engine.sync_engine, "connect", on_connect)


@asynccontextmanager
async def sql_world(url: str, *, waits_for_locks: bool) -> AsyncIterator[DatabaseWorld]:
    """A database that has no tables yet."""
    async with _opened(url, waits_for_locks=waits_for_locks) as world:
        async with world.database.engine.begin() as connection:
            await connection.run_sync(metadata.create_all)
        yield world


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
            times = [table.c[column] for column in columns]
            older = {
                time: case((time != 0, time - round(seconds * 1_000_000)), else_=time)
                for time in times
            }
            await connection.execute(
                update(table).where(or_(*(time != 0 for time in times))).values(older)
            )
