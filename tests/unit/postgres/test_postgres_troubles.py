"""What the PostgreSQL sink makes of crashed servers, lost answers and foreign writers."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

import psycopg
import pytest

from semel.errors import NeedsOperator, Retryable
from semel.pipeline.sink import Found, SinkFatal, SinkOK, SinkRetryable
from semel.postgres.connect import pool
from semel.postgres.sink import PostgresSink
from semel.testing.services import CutProxy, PostgresServer
from tests.unit.postgres.postgres_place import (
    SCOPE,
    TABLE,
    left_behind,
    prepared,
    row,
    rows_of,
    txn,
)

pytestmark = pytest.mark.postgres


@pytest.fixture
def fragile() -> Iterator[PostgresServer]:
    with PostgresServer(18) as server:
        yield server
        pool().close_all()


@pytest.mark.parametrize("mode", ["staging", "prepared"])
def test_a_server_that_crashes_after_prepare_still_keeps_the_promise(fragile, mode):
    with psycopg.connect(fragile.url, autocommit=True) as connection:
        connection.execute(TABLE)
    sink = PostgresSink(fragile.url, "entries", mode=mode)
    sink.fence(SCOPE, 1)
    of = txn()
    token = prepared(sink, of, [row(1), row(2)], [row(3)])

    fragile.stop("immediate")
    assert sink.look_up(of, token).found is Found.UNREACHABLE
    with pytest.raises(Retryable):
        sink.recover(SCOPE)
    fragile.start()

    assert sink.recover(SCOPE) == [of]
    assert isinstance(sink.commit(of, token), SinkOK)
    with psycopg.connect(fragile.url, autocommit=True) as connection:
        assert len(rows_of(connection)) == 3
        assert left_behind(connection) == []


@pytest.mark.parametrize(
    ("mode", "lost"), [("staging", b"COMMIT"), ("prepared", b"COMMIT PREPARED")]
)
def test_a_commit_whose_reply_is_lost_is_found_and_not_repeated(
    postgres_server, url, database, mode, lost
):
    with CutProxy(postgres_server.port) as proxy:
        through = proxy.through(url)
        sink = PostgresSink(through, "entries", mode=mode)
        of = txn()
        token = prepared(sink, of, [row(1)], [row(2)])
        proxy.swallow_reply_to(lost)

        outcome = sink.commit(of, token)

        assert proxy.wait_until_swallowed()
        if isinstance(outcome, SinkRetryable):
            outcome = sink.commit(of, token)
        assert isinstance(outcome, SinkOK)
        assert sink.look_up(of, token).found is Found.VISIBLE
        sink.close()
    assert len(rows_of(database)) == 2
    assert left_behind(database) == []


def test_a_reader_of_a_staging_table_delays_its_removal_and_nothing_else(
    url, database, monkeypatch
):
    monkeypatch.setattr("semel.postgres.staging._DROP_LOCK_SECONDS", 0.3)
    sink = PostgresSink(url, "entries")
    of = txn()
    token = prepared(sink, of, [row(1)])
    with psycopg.connect(url) as backup:
        for (table,) in left_behind(database):
            backup.execute(f'SELECT * FROM semel."{table}"')

        assert isinstance(sink.commit(of, token), SinkOK)

        assert len(left_behind(database)) == 1
    sink.sweep(SCOPE, lambda txn: False)
    assert left_behind(database) == []


def test_a_stuck_cycle_is_named_and_can_be_retried_or_diverted(url, database):
    sink = PostgresSink(url, "entries")
    of = txn()
    token = prepared(sink, of, [row(n) for n in range(100)], [row(n) for n in range(100, 200)])
    sink.close()
    database.execute("INSERT INTO entries VALUES (42, 0, 'foreign'), (142, 0, 'foreign')")

    outcome = sink.commit(of, token)
    assert isinstance(outcome, SinkFatal)
    assert "stuck" in outcome.reason
    assert "(id) = (42)" in outcome.reason
    assert sink.look_up(of, token).found is Found.HELD

    diverted = sink.resolve_divert(of, token, "rejected")

    assert (diverted.written, diverted.diverted) == (198, 2)
    assert len(rows_of(database)) == 200
    kept = rows_of(database, "SELECT rejected->>'id', sqlstate FROM rejected ORDER BY 1")
    assert kept == [("142", "23505"), ("42", "23505")]
    assert isinstance(sink.commit(of, token), SinkOK)
    assert sink.look_up(of, token).found is Found.VISIBLE
    assert sink.resolve_divert(of, token, "rejected").written == 0
    assert left_behind(database) == []


def test_a_stuck_cycle_can_be_finished_once_the_way_is_free(url, database):
    sink = PostgresSink(url, "entries")
    of = txn()
    token = prepared(sink, of, [row(1)])
    sink.close()
    database.execute("INSERT INTO entries VALUES (1, 0, 'foreign')")
    assert isinstance(sink.resolve_retry(of, token), SinkFatal)

    database.execute("DELETE FROM entries")

    assert isinstance(sink.resolve_retry(of, token), SinkOK)
    assert rows_of(database) == [(1, Decimal("1.00"), "x")]


def test_only_what_is_held_can_be_diverted(url, database):
    sink = PostgresSink(url, "entries")
    of = txn()
    token = prepared(sink, of, [row(1)])
    sink.abort(of, token)

    with pytest.raises(NeedsOperator, match="aborted"):
        sink.resolve_divert(of, token, "rejected")
