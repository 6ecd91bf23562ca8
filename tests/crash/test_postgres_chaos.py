"""The PostgreSQL sink through crashes, failing calls, woken owners and late tasks, in process.

A crashed process's connections stay open here, as those of a stopped process do: its successor
has to end them.
"""

from __future__ import annotations

from itertools import count

import psycopg
import pyarrow as pa
import pytest

from semel.lease import Takeover
from semel.postgres.connect import pool
from semel.postgres.sink import PostgresSink
from semel.testing.chaos import EXAMPLE_ROWS, world_of
from semel.testing.explore import explore_crashes, explore_late_tasks, explore_woken
from semel.testing.world import World

pytestmark = [
    pytest.mark.postgres,
    # A task that dies while it copies is collected with its copy unfinished.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

runs = count(1)


@pytest.fixture(params=["staging", "prepared", "group staging", "group prepared"])
def make_world(request, quick_postgres_server):
    """One table beside a witness in memory, or two tables that share their transactions."""
    mode = request.param.split()[-1]
    server = quick_postgres_server
    database = psycopg.connect(server.url, autocommit=True)
    run = next(runs)

    def make_sink(place: str, name: str = "postgres") -> PostgresSink:
        books = f"run_{run}_{place}"
        table = f'"{books}"."{name}"'
        database.execute(f'CREATE SCHEMA IF NOT EXISTS "{books}"')
        database.execute(f"CREATE TABLE IF NOT EXISTS {table} (id bigint PRIMARY KEY, name text)")
        sink = PostgresSink(
            server.url, table, name=name, mode=mode, bookkeeping_schema=books, lock_seconds=0.3
        )
        sink.books = books
        return sink

    def make_group(faults) -> World:
        place = f"group-{next(runs)}"
        return World(
            EXAMPLE_ROWS,
            lambda: [make_sink(place, "first"), make_sink(place, "second")],
            visible_rows,
            left_behind,
            pa.RecordBatch.from_pylist,
            faults,
        )

    def visible_rows(sink):
        rows = database.execute(f'SELECT id, name FROM "{sink.books}"."{sink.name}" ORDER BY id')
        return [{"id": number, "name": name} for number, name in rows]

    def left_behind(sink):
        query = "SELECT tablename FROM pg_tables WHERE schemaname = %s AND tablename ~ '^stg_'"
        tables = database.execute(query, [sink.books]).fetchall()
        held = database.execute(
            f"SELECT attempt FROM \"{sink.books}\".sink_attempt WHERE state = 'prepared'"
        )
        return [*tables, *held.fetchall()]

    is_group = request.param.startswith("group")
    yield make_group if is_group else world_of(make_sink, visible_rows, left_behind=left_behind)
    pool().close_all()
    # Every history ends with nothing prepared, in whichever schema it was.
    assert database.execute("SELECT gid FROM pg_prepared_xacts").fetchall() == []
    database.close()


def test_a_crash_at_any_window_loses_and_doubles_nothing(make_world):
    assert explore_crashes(make_world, depth=1, every=4).histories > 12


def test_an_owner_that_wakes_after_a_takeover_changes_nothing(make_world):
    assert explore_woken(make_world, Takeover.FORCE, depth=1, every=4).histories > 8


def test_tasks_that_outlive_their_driver_leave_nothing_behind(make_world):
    assert explore_late_tasks(make_world, depth=1, every=16).histories > 5
