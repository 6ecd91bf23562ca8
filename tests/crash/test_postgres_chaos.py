"""The PostgreSQL sink through crashes, failing calls, woken owners and late tasks, in process.

A crashed process's connections stay open here, as those of a stopped process do: its successor
has to end them.
"""

from __future__ import annotations

from itertools import count

import psycopg
import pytest

from semel.lease import Takeover
from semel.postgres.connect import pool
from semel.postgres.sink import PostgresSink
from semel.testing.chaos import world_of
from semel.testing.explore import explore_crashes, explore_late_tasks, explore_woken

pytestmark = [
    pytest.mark.postgres,
    # A task that dies while it copies is collected with its copy unfinished.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

runs = count(1)


@pytest.fixture(params=["staging", "prepared"])
def make_world(request, quick_postgres_server):
    server = quick_postgres_server
    database = psycopg.connect(server.url, autocommit=True)
    run = next(runs)

    def make_sink(place: str) -> PostgresSink:
        books = f"run_{run}_{place}"
        database.execute(f'CREATE SCHEMA IF NOT EXISTS "{books}"')
        database.execute(
            f'CREATE TABLE IF NOT EXISTS "{books}".t (id bigint PRIMARY KEY, name text)'
        )
        table = f'"{books}".t'
        sink = PostgresSink(
            server.url, table, mode=request.param, bookkeeping_schema=books, lock_seconds=0.3
        )
        sink.books = books
        return sink

    def visible_rows(sink):
        rows = database.execute(f'SELECT id, name FROM "{sink.books}".t ORDER BY id')
        return [{"id": number, "name": name} for number, name in rows]

    def left_behind(sink):
        query = "SELECT tablename FROM pg_tables WHERE schemaname = %s AND tablename ~ '^stg_'"
        tables = database.execute(query, [sink.books]).fetchall()
        held = database.execute(
            f"SELECT attempt FROM \"{sink.books}\".sink_attempt WHERE state = 'prepared'"
        )
        return [*tables, *held.fetchall()]

    yield world_of(make_sink, visible_rows, left_behind=left_behind)
    pool().close_all()
    # Every history ends with nothing prepared, in whichever schema it was.
    assert database.execute("SELECT gid FROM pg_prepared_xacts").fetchall() == []
    database.close()


def test_a_crash_at_any_window_loses_and_doubles_nothing(make_world):
    assert explore_crashes(make_world, depth=1, every=3).histories > 15


def test_an_owner_that_wakes_after_a_takeover_changes_nothing(make_world):
    assert explore_woken(make_world, Takeover.FORCE, depth=1, every=3).histories > 10


def test_tasks_that_outlive_their_driver_leave_nothing_behind(make_world):
    assert explore_late_tasks(make_world, depth=1, every=16).histories > 5
