"""Who may still write through the PostgreSQL sink once a newer owner, or a faster one, is there."""

from __future__ import annotations

import pyarrow as pa
import pytest

from semel.crashpoints import CrashPoint
from semel.errors import Fenced
from semel.pipeline.sink import SinkFatal, SinkOK
from semel.postgres.connect import pool
from semel.postgres.sink import PostgresSink
from tests.unit.postgres.postgres_place import (
    SCHEMA,
    SCOPE,
    left_behind,
    prepared,
    row,
    rows_of,
    stage,
    txn,
)

pytestmark = pytest.mark.postgres


def test_a_newer_owner_ends_the_session_that_holds_the_rows(url, database):
    zombie, successor = PostgresSink(url, "entries"), PostgresSink(url, "entries")
    zombie.fence(SCOPE, 1)
    of = txn()
    token = prepared(zombie, of, [row(1)])

    successor.fence(SCOPE, 2)

    held = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
    assert database.execute(held, [f"semel:{SCOPE.slug}:1"]).fetchone() == (0,)
    assert isinstance(successor.commit(of, token), SinkOK)
    assert isinstance(zombie.commit(of, token), SinkOK)
    assert isinstance(zombie.prepare(txn(), []), SinkFatal)
    with pytest.raises(Fenced):
        zombie.fence(SCOPE, 1)
    assert len(rows_of(database)) == 1
    assert left_behind(database) == []


@pytest.mark.parametrize("mode", ["staging", "prepared"])
def test_an_owner_whose_session_a_newer_one_ended_learns_that_it_is_fenced(
    url, database, monkeypatch, mode
):
    zombie, successor = (PostgresSink(url, "entries", mode=mode) for _ in range(2))
    zombie.fence(SCOPE, 1)
    of = txn()
    receipts = stage(zombie, of, [row(1)])
    successor.fence(SCOPE, 2)
    # The farewell is still on its way when the session is used.
    monkeypatch.setattr("semel.postgres.connect._is_alive", lambda connection: True)

    outcome = zombie.prepare(of, receipts)

    assert isinstance(outcome, SinkFatal), outcome
    assert "fenced" in outcome.reason
    assert rows_of(database) == []


@pytest.mark.parametrize(
    "moment", [CrashPoint.POSTGRES_PROOF_WRITTEN, CrashPoint.POSTGRES_COMMIT_PREPARED_ONE]
)
def test_a_commit_that_another_process_overtakes_is_not_called_lost(
    url, database, monkeypatch, moment
):
    slow, fast = (PostgresSink(url, "entries", mode="prepared") for _ in range(2))
    of = txn()
    token = prepared(slow, of, [row(1)], [row(2)])
    overtaken = []

    def overtake(point, sink):
        if point is moment and not overtaken:
            overtaken.append(point)
            assert isinstance(fast.commit(of, token), SinkOK)

    monkeypatch.setattr("semel.postgres.prepared.reach", overtake)

    assert isinstance(slow.commit(of, token), SinkOK)
    assert overtaken
    assert len(rows_of(database)) == 2


def test_late_tasks_of_a_dead_owner_do_not_block_the_next_attempt(url, database):
    dead, sink = (PostgresSink(url, "entries", mode="prepared", lock_seconds=1) for _ in range(2))
    dead.fence(SCOPE, 1)
    first = txn(2000)
    late = dead.stager(first)
    sink.fence(SCOPE, 2)
    pool().close_idle()  # the late task runs elsewhere, on a connection of its own
    writer = late.open("late")
    writer.write(pa.RecordBatch.from_pylist([row(1)], schema=SCHEMA))
    writer.finish()

    second = first.cycle.attempt()
    token = prepared(sink, second, [row(1)])

    assert isinstance(sink.commit(second, token), SinkOK)
    assert len(rows_of(database)) == 1
