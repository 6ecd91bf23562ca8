"""Which mode the PostgreSQL sink works in, and what readers see in it."""

from __future__ import annotations

import logging

import psycopg
import pyarrow as pa
import pytest

from semel.errors import Retryable
from semel.memory.ledger import MemoryLedger
from semel.pipeline.cycle import CommitFatal, CycleRefused
from semel.pipeline.driver import Driver
from semel.pipeline.sink import SinkFatal, SinkOK
from semel.pipeline.source import BatchRange
from semel.pipeline.txn import CycleId
from semel.postgres.connect import pool
from semel.postgres.sink import PostgresSink
from semel.testing.services import PostgresServer
from tests.unit.postgres.postgres_place import (
    SCHEMA,
    TABLE,
    committed,
    left_behind,
    row,
    rows_of,
    stage,
    txn,
)

pytestmark = pytest.mark.postgres


def test_auto_says_in_one_line_what_it_chose_and_what_readers_see(url, database, caplog):
    caplog.set_level(logging.INFO, "semel")

    PostgresSink(url, "entries", mode="auto").check(SCHEMA)
    PostgresSink(url, "entries", mode="auto", key="id").check(SCHEMA)

    chosen = [line for line in caplog.messages if "mode auto" in line]
    assert "chose prepared: it only appends" in chosen[0]
    assert "part of a batch for a moment" in chosen[0]
    assert "chose staging: prepared mode can only append" in chosen[1]
    assert "whole batches or nothing" in chosen[1]


def test_auto_keeps_to_staging_for_a_text_that_is_cast_after_a_failure_too(url, database):
    database.execute("DROP TABLE entries")
    database.execute("CREATE TABLE entries (id int, address inet)")
    schema = pa.schema([("id", pa.int64()), ("address", pa.string())])
    sink = PostgresSink(url, "entries", mode="auto")
    sink.check(schema)
    assert isinstance(sink.abort(txn(), None), SinkOK)

    committed(sink, [{"id": 1, "address": "::1"}], schema=schema)

    assert len(database.execute("SELECT FROM entries").fetchall()) == 1


@pytest.mark.parametrize("mode", ["auto", "prepared"])
def test_a_key_that_two_tasks_insert_ends_with_the_constraints_own_error(url, database, mode):
    sink = PostgresSink(url, "entries", mode=mode, lock_seconds=0.2)
    first = txn(1000)
    with pytest.raises(Retryable, match="lock timeout"):
        stage(sink, first, [row(1)], [row(1)])
    assert isinstance(sink.abort(first, None), SinkOK)

    second = first.cycle.attempt()
    outcome = sink.prepare(second, stage(sink, second, [row(1)], [row(1)]))

    assert isinstance(outcome, SinkFatal)
    assert "rows (id) = (1)" in outcome.reason
    assert isinstance(sink.abort(second, None), SinkOK)
    assert left_behind(database) == []
    committed(sink, [row(1)])
    assert len(rows_of(database)) == 1


@pytest.mark.parametrize("mode", ["auto", "prepared"])
def test_a_row_that_a_task_could_not_write_is_named_by_one_more_attempt(url, database, mode):
    database.execute("ALTER TABLE entries ADD CHECK (amount > 0)")
    sink = PostgresSink(url, "entries", mode=mode)
    driver = Driver("payments", MemoryLedger(), [sink])
    driver.start()
    generation = driver.ledger.open_generation(driver.lease, "test").number

    outcome = driver.run_cycle(
        CycleId(driver.scope, generation, 0),
        lambda: BatchRange.of_offsets({"": (0, 2)}),
        lambda of: {sink.name: stage(sink, of, [row(1)], [row(2, "-1.00")])},
    )

    assert isinstance(outcome, CommitFatal)
    assert isinstance(outcome.cause, CycleRefused)
    assert "rows (id) = (2)" in outcome.reason
    assert len(driver.ledger.history(driver.scope, 9)) == 2
    assert left_behind(database) == []
    driver.stop()


@pytest.mark.parametrize(
    "index",
    [
        "CREATE UNIQUE INDEX ON odd (lower(id))",
        "CREATE UNIQUE INDEX ON odd (id) WHERE id > ''",
        "ALTER TABLE odd ADD UNIQUE (id) DEFERRABLE INITIALLY DEFERRED",
        "ALTER TABLE odd ADD EXCLUDE USING btree (id WITH =)",
        "CREATE UNIQUE INDEX ON odd_rest (id)",
    ],
)
def test_whatever_makes_a_copy_of_a_task_wait_is_noticed_under_speculation(url, database, index):
    partitioned = " PARTITION BY LIST (id)" if "odd_rest" in index else ""
    database.execute(f"CREATE TABLE odd (id text){partitioned}")
    if partitioned:
        database.execute("CREATE TABLE odd_rest PARTITION OF odd DEFAULT")
    database.execute(index)
    sink = PostgresSink(url, "odd", mode="prepared")
    sink.expect_speculation()

    sink.check(pa.schema([("id", pa.string())]))

    assert sink.guarantee().readers_see == "whole batches or nothing"


@pytest.mark.parametrize("mode", ["auto", "prepared"])
def test_a_table_with_a_unique_index_is_staged_under_speculation(url, database, caplog, mode):
    caplog.set_level(logging.INFO, "semel")
    sink = PostgresSink(url, "entries", mode=mode)
    sink.expect_speculation()
    sink.check(SCHEMA)
    of = txn(3100)

    receipts = stage(sink, of, [row(6200)])

    assert receipts[0].detail["mode"] == "staging"
    assert "with speculation, a task and its copy" in caplog.text
    assert isinstance(sink.abort(of, None), SinkOK)


def test_auto_gives_prepared_mode_up_when_it_fails_again_and_again(url, database):
    def modes(batch):
        for attempt in range(2):
            of = txn(batch)
            receipts = stage(sink, of, [row(2 * batch + attempt)])
            yield receipts[0].detail["mode"]
            assert isinstance(sink.abort(of, None), SinkOK)

    sink = PostgresSink(url, "entries", mode="auto")

    assert [[*modes(batch)] for batch in range(3000, 3005)] == [
        ["prepared", "staging"],
        ["prepared", "staging"],
        ["prepared", "staging"],
        ["staging", "staging"],
        ["staging", "staging"],
    ]


def test_too_few_slots_are_worked_around_once_and_told(caplog):
    caplog.set_level(logging.INFO, "semel")
    with (
        PostgresServer(18, {"max_prepared_transactions": "1"}) as server,
        psycopg.connect(server.url, autocommit=True) as connection,
    ):
        connection.execute(TABLE)
        connection.execute("BEGIN; CREATE TABLE t (); PREPARE TRANSACTION 'foreign'")

        full = PostgresSink(server.url, "entries", "full", mode="prepared")
        full.check(None)
        assert "1 of 1 slots" in caplog.text
        assert "whole batches" in full.guarantee().readers_see
        PostgresSink(server.url, "entries", mode="auto").check(None)
        assert "the server has 1 slots" in caplog.text

        connection.execute("ROLLBACK PREPARED 'foreign'")
        sink = PostgresSink(server.url, "entries", mode="prepared")
        sink.check(SCHEMA)
        first = txn()
        with pytest.raises(Retryable, match="maximum number of prepared transactions"):
            stage(sink, first, [row(1)], [row(2)])
        assert isinstance(sink.abort(first, None), SinkOK)
        for batch in range(3):
            committed(sink, [row(batch * 2)], [row(batch * 2 + 1)])

        assert len(rows_of(connection)) == 6
        assert caplog.text.count("staging mode from now on") == 1
        pool().close_all()


def test_the_guarantee_says_what_readers_see(url, database):
    staging, auto = PostgresSink(url, "entries"), PostgresSink(url, "entries", mode="auto")
    auto.check(SCHEMA)

    assert "whole batches" in staging.guarantee().readers_see
    assert "part of a batch" in auto.guarantee().readers_see
    assert "once" in staging.guarantee().effect
