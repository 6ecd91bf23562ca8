"""Engines are set up one by one, however many have come and gone before them."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from semel.sql.database import SqlDatabase
from semel.sql.engine import CompletelyClosed, _begin_immediate, made_ready
from semel.sql.session import _note_failure

ENGINES = 1000


@pytest.mark.parametrize("url", ["postgresql://nobody@127.0.0.1:1/none", "sqlite:///none.db"])
def test_every_engine_notes_failures_after_many_others_were_freed(url):
    # A dialect outlives its engine where a traceback or a compiled statement refers to it.
    kept = []
    deaf = 0

    for _ in range(ENGINES):
        database = SqlDatabase(url)
        kept.append(database.engine.dialect)
        deaf += _note_failure not in list(database.engine.sync_engine.dialect.dispatch.handle_error)

    assert deaf == 0


def test_every_sqlite_engine_begins_its_own_transactions_after_many_others_were_freed():
    kept = []
    plain = 0

    for _ in range(ENGINES):
        inside = made_ready(create_async_engine("sqlite+aiosqlite:///none.db")).sync_engine
        kept.append((inside.dialect, inside.dispatch))
        plain += list(inside.dispatch.begin) != [_begin_immediate]

    assert plain == 0


def test_an_engine_with_other_options_is_not_set_up_a_second_time(tmp_path):
    async def numbers():
        engine = made_ready(create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/own.db"))
        optioned = made_ready(engine.execution_options(logging_token="reports"))
        found = []
        for one in (engine, optioned, made_ready(engine)):
            async with one.begin() as connection:
                found.append((await connection.execute(text("SELECT 1"))).scalar_one())
        await engine.dispose()
        return found

    assert asyncio.run(numbers()) == [1, 1, 1]


def test_an_engine_that_was_set_up_through_its_options_is_set_up_whole(tmp_path):
    async def left_behind():
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/own.db")
        made_ready(engine.execution_options(logging_token="reports"))
        async with engine.begin() as connection:
            await connection.execute(text("CREATE TABLE t (x integer)"))
        async with engine.connect() as connection:
            transaction = await connection.begin()
            await connection.execute(text("INSERT INTO t VALUES (1)"))
            await transaction.rollback()
            found = (await connection.execute(text("SELECT count(*) FROM t"))).scalar_one()
        await engine.dispose()
        return found

    assert asyncio.run(left_behind()) == 0


def test_a_closed_connection_keeps_no_lock_whoever_has_a_cursor_of_it(tmp_path):
    path = tmp_path / "locked.db"

    def began(factory):
        """Return a cursor of a connection that was closed within its transaction."""
        closed = sqlite3.connect(path, isolation_level=None, factory=factory)
        closed.execute("PRAGMA journal_mode=WAL")
        closed.execute("CREATE TABLE IF NOT EXISTS x (i)")
        closed.execute("BEGIN IMMEDIATE")
        cursor = closed.execute("INSERT INTO x VALUES (1), (2) RETURNING i")
        closed.close()
        return cursor

    def write():
        with closing(sqlite3.connect(path, timeout=0)) as other, other:
            other.execute("INSERT INTO x VALUES (3)")

    cursor = began(sqlite3.Connection)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        write()
    del cursor

    cursor = began(CompletelyClosed)
    write()
    del cursor


def test_connections_of_every_engine_are_closed_completely(tmp_path):
    async def kind():
        database = SqlDatabase(create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'x.db'}"))
        async with database.engine.connect() as connection:
            raw = await connection.get_raw_connection()
            inside = raw.driver_connection._conn
        await database.engine.dispose()
        return type(inside)

    assert asyncio.run(kind()) is CompletelyClosed


def test_a_new_sqlite_database_is_a_file_of_its_owner_alone(tmp_path):
    async def scenario():
        database = SqlDatabase(f"sqlite:///{tmp_path / 'shop.db'}")
        await database.create_tables()
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
        await database.close()
        return modes

    assert set(asyncio.run(scenario()).values()) == {0o600}
