"""The messages sink through crashes, failing calls, woken owners and late tasks, in process."""

from __future__ import annotations

from itertools import count

import pytest

from semel.arrow.changes import to_batch
from semel.lease import Takeover
from semel.messaging.changes import MessageChange, Op
from semel.postgres.connect import pool
from semel.postgres.messages import MessagesSink
from semel.testing.chaos import EXAMPLE_ROWS
from semel.testing.explore import (
    explore_crashes,
    explore_faults,
    explore_late_tasks,
    explore_woken,
)
from semel.testing.world import LEDGER, World
from tests.unit.postgres.messages.message_place import connect, make_tables

pytestmark = [
    pytest.mark.postgres,
    # A task that dies while it copies is collected with its copy unfinished.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

places = count(1)


@pytest.fixture(scope="module")
def make_world(quick_postgres_server):
    url = quick_postgres_server.create_database("chaos")
    make_tables(url)
    database = connect(url)

    def make(faults) -> World:
        place = f"place_{next(places)}"

        def make_sinks():
            books = {"bookkeeping_schema": place, "lock_seconds": 0.3}
            return [MessagesSink(url, place, **books)]

        return World(EXAMPLE_ROWS, make_sinks, visible_rows, left_behind, as_batch, faults)

    def as_batch(rows):
        """Each row is a claim, whose source is its name."""
        claims = [MessageChange(Op.CLAIM, str(row["id"]), state="COMPLETED") for row in rows]
        for row, claim in zip(rows, claims, strict=True):
            claim.source = row["name"]
        return to_batch(claims)

    def visible_rows(sink):
        query = "SELECT message_id, source FROM processed_message WHERE consumer_name = %s"
        rows = database.execute(query, [sink.consumer]).fetchall()
        return [{"id": int(number), "name": name} for number, name in rows]

    def left_behind(sink):
        place = sink.consumer
        query = "SELECT tablename FROM pg_tables WHERE schemaname = %s AND tablename ~ '^stg_'"
        tables = database.execute(query, [place]).fetchall()
        held = database.execute(
            f"SELECT attempt FROM {place}.sink_attempt WHERE state = 'prepared'".encode()
        )
        return [*tables, *held.fetchall()]

    yield make
    pool().close_all()
    database.close()
    quick_postgres_server.drop_database("chaos")


def every(quick, soak=1):
    return pytest.mark.parametrize("every", [quick, pytest.param(soak, marks=pytest.mark.soak)])


@every(12)
def test_a_crash_at_any_window_loses_and_doubles_nothing(make_world, every):
    assert explore_crashes(make_world, depth=1, every=every).histories > 3


@every(40, soak=8)
def test_a_call_that_fails_or_gets_no_answer_loses_and_doubles_nothing(make_world, every):
    assert explore_faults(make_world, crashes=0, spare=[LEDGER], every=every).histories > 1


@every(12)
def test_an_owner_that_wakes_after_a_takeover_changes_nothing(make_world, every):
    assert explore_woken(make_world, Takeover.FORCE, depth=1, every=every).histories > 2


@every(32)
def test_tasks_that_outlive_their_driver_leave_nothing_behind(make_world, every):
    assert explore_late_tasks(make_world, depth=1, every=every).histories > 2
