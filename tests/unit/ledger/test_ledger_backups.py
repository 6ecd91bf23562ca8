"""A backup holds the whole ledger; a restored one fences the owners that it does not know."""

from __future__ import annotations

import shlex
import sqlite3
from contextlib import closing
from dataclasses import replace

import psycopg
import pytest

from semel.errors import LeaseHeld, LeaseLost, LedgerUnusable, Misuse
from semel.lease import Takeover
from semel.ledger.ledger import EPOCH_LEAP
from semel.ledger.sqlite import SqliteLedger
from semel.memory.sink import MemorySink
from semel.pipeline.ledger import CycleState
from semel.postgres.ledger import PostgresLedger
from semel.testing.contracts.ledger_world import (
    LEASE_SECONDS,
    LedgerOwner,
    files,
    offsets,
    owner_elsewhere,
    scope_of,
)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def make(request, tmp_path):
    """Makes a ledger by a name: the same name, the same ledger."""
    opened = []

    def open_it(name="ledger"):
        if request.param == "sqlite":
            opened.append(SqliteLedger(tmp_path / f"{name}.ledger"))
        else:
            opened.append(PostgresLedger(request.getfixturevalue("postgres_url"), schema=name))
        return opened[-1]

    yield open_it
    for ledger in opened:
        ledger.close()


@pytest.fixture
def ledger(make):
    return make()


def filled(ledger):
    """A ledger with something in every table, whose owner has left."""
    driver = LedgerOwner.of(ledger)
    ledger.open_generation(driver.lease, "checkpoint")
    driver.commit(offsets(0, 10, topic_id="id"), 0)
    driver.commit(files("/in/ü", source="1"), 1)
    driver.reach(CycleState.PREPARED, 2, offsets(10, 20, topic_id="id"))
    ledger.record_act(driver.scope, "ann", "adopt", "because", {"x": [1]})
    ledger.release(driver.lease)
    return driver


def contents(ledger, scope):
    return (
        ledger.ledger_id,
        ledger.scopes(),
        ledger.history(scope),
        ledger.positions(scope),
        ledger.generations(scope),
        ledger.acts(scope),
        ledger.scope_record(scope),
    )


def test_a_restore_leaps_every_epoch_and_is_recorded_in_every_scope(ledger):
    driver = filled(ledger)
    *before, acts, record = contents(ledger, driver.scope)

    ledger.restore("ann", "disk replaced")

    *after, all_acts, restored = contents(ledger, driver.scope)
    assert after == before
    assert restored == replace(record, epoch=record.epoch + EPOCH_LEAP)
    assert all_acts[1:] == acts
    told = (all_acts[0].who, all_acts[0].act, all_acts[0].why)
    assert told == ("ann", "ledger-restore", "disk replaced")
    LedgerOwner.of(ledger).commit(offsets(10, 20, topic_id="id"), 2)


def test_a_scope_that_the_backup_saw_before_its_first_owner_leaps_too(ledger):
    ledger.record_act(scope_of(ledger), "ann", "note", "mentioned only")

    ledger.restore("ann", "disk replaced")

    assert LedgerOwner.of(ledger).lease.epoch == EPOCH_LEAP + 1


def test_an_owner_that_may_still_run_is_fenced_only_by_takeover(ledger):
    running = LedgerOwner.of(ledger)
    txn = running.reach(CycleState.PREPARED, 0, offsets(0, 10))

    with pytest.raises(LeaseHeld):
        ledger.restore("ann", "disk replaced")
    assert ledger.scope_record(running.scope).epoch == running.lease.epoch
    ledger.restore("ann", "disk replaced", Takeover.FORCE)

    with pytest.raises(LeaseLost):
        ledger.decide_commit(running.lease, txn)
    assert LedgerOwner.of(ledger).lease.epoch == running.lease.epoch + EPOCH_LEAP + 1


def test_a_restore_that_one_scope_refuses_changes_no_other(ledger):
    driver = filled(ledger)
    ledger.acquire(replace(driver.scope, query="zz"), owner_elsewhere(), LEASE_SECONDS)

    with pytest.raises(LeaseHeld):
        ledger.restore("ann", "disk replaced")

    assert ledger.scope_record(driver.scope).epoch == 1
    assert [act.act for act in ledger.acts(driver.scope)] == ["adopt"]


def test_owners_of_a_restored_ledger_are_not_fenced_by_sinks_that_outlived_the_lost_one(tmp_path):
    sink = MemorySink()
    with closing(SqliteLedger(tmp_path / "lost.ledger")) as lost:
        driver = LedgerOwner.of(lost)
        lost.release(driver.lease)
        lost.backup(tmp_path / "restored.ledger")
        for _ in range(5):
            sink.fence(driver.scope, LedgerOwner.of(lost).lease.epoch)

    with closing(SqliteLedger(tmp_path / "restored.ledger")) as restored:
        restored.restore("ann", "disk replaced")

        sink.fence(driver.scope, LedgerOwner.of(restored).lease.epoch)


@pytest.fixture
def sqlite_ledger(tmp_path):
    with closing(SqliteLedger(tmp_path / "test.ledger")) as made:
        yield made


def test_a_copy_is_the_same_ledger(sqlite_ledger, tmp_path):
    driver = filled(sqlite_ledger)

    sqlite_ledger.backup(tmp_path / "backup")

    with closing(SqliteLedger(tmp_path / "backup")) as copy:
        assert contents(copy, driver.scope) == contents(sqlite_ledger, driver.scope)


def test_a_copy_is_taken_while_the_ledger_is_in_use(sqlite_ledger, tmp_path):
    driver = LedgerOwner.of(sqlite_ledger)
    driver.commit(offsets(0, 10), 0)

    sqlite_ledger.backup(tmp_path / "backup")
    driver.commit(offsets(10, 20), 1)

    assert driver.end() == 20
    with closing(SqliteLedger(tmp_path / "backup")) as copy:
        assert copy.positions(driver.scope).ends[("0", "t/0")].end == 10


def test_a_copy_replaces_no_file(sqlite_ledger, tmp_path):
    (tmp_path / "backup").write_text("mine")

    with pytest.raises(Misuse, match="exists already"):
        sqlite_ledger.backup(tmp_path / "backup")
    with pytest.raises(Misuse, match="nowhere does not exist"):
        sqlite_ledger.backup(tmp_path / "nowhere" / "backup")

    assert (tmp_path / "backup").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_a_copy_is_one_whole_database(sqlite_ledger, tmp_path):
    filled(sqlite_ledger)

    sqlite_ledger.backup(tmp_path / "backup")

    with closing(sqlite3.connect(tmp_path / "backup")) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        assert connection.execute("SELECT count(*) FROM semel_attempt").fetchone() == (3,)
    assert not list(tmp_path.glob("backup-*"))


def test_a_damaged_file_is_neither_copied_nor_taken_for_restored(sqlite_ledger, tmp_path):
    driver = filled(sqlite_ledger)
    sqlite_ledger.close()
    damage_an_index(tmp_path / "test.ledger")

    with pytest.raises(LedgerUnusable, match="damaged"):
        sqlite_ledger.backup(tmp_path / "backup")
    with pytest.raises(LedgerUnusable, match="damaged"):
        sqlite_ledger.restore("ann", "disk replaced")

    assert not (tmp_path / "backup").exists()
    assert sqlite_ledger.scope_record(driver.scope).epoch == 1


def test_a_restore_makes_no_ledger(tmp_path):
    ledger = SqliteLedger(tmp_path / "none.ledger")

    with pytest.raises(LedgerUnusable, match="cannot be opened"):
        ledger.restore("ann", "disk replaced")

    assert list(tmp_path.iterdir()) == []


def damage_an_index(path):
    """Let an index hold other rows than it should: only an integrity check notices."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(
            "UPDATE sqlite_master SET sql = replace(sql, 'finished', 'planned')"
            " WHERE name = 'semel_attempt_one_commit'"
        )


@pytest.mark.postgres
def test_a_ledger_in_postgres_names_the_command_that_copies_it():
    ledger = PostgresLedger("postgresql://ann:s3cret@db/shop")

    with pytest.raises(Misuse) as refused:
        ledger.backup("my backup")

    assert str(refused.value).endswith(
        "pg_dump --format=custom --table='semel.semel_*' "
        "--exclude-table='semel.semel_messaging' --file='my backup' "
        "--dbname=postgresql://ann@db/shop"
    )


@pytest.mark.postgres
def test_what_pg_dump_copied_comes_back_without_the_records_of_a_sink(
    postgres_url, postgres_server
):
    file = postgres_server.folder / "ledger.backup"  # the server's user may not write elsewhere
    with closing(PostgresLedger(postgres_url)) as ledger:
        driver = filled(ledger)
        expected = contents(ledger, driver.scope)
        with pytest.raises(Misuse) as told:
            ledger.backup(file)
        command = str(told.value).partition("pg_dump ")[2]
        postgres_server._run("pg_dump", *shlex.split(command))
        LedgerOwner.of(ledger).commit(offsets(10, 20, topic_id="id"), 2)
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE semel.sink_fence AS SELECT 7 AS epoch")

    options = ("--clean", "--if-exists", "--single-transaction", f"--dbname={postgres_url}")
    postgres_server._run("pg_restore", *options, str(file))

    with closing(PostgresLedger(postgres_url)) as restored:
        assert contents(restored, driver.scope) == expected
        restored.restore("ann", "server replaced")
        assert LedgerOwner.of(restored).lease.epoch == EPOCH_LEAP + 2
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT epoch FROM semel.sink_fence").fetchone() == (7,)


def test_a_ledger_and_its_backup_are_files_of_their_owner_alone(tmp_path):
    with closing(SqliteLedger(tmp_path / "a.ledger")) as ledger:
        filled(ledger)
        ledger.backup(tmp_path / "b.ledger")
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}

    assert set(modes.values()) == {0o600}, modes


def test_a_restored_file_brings_rows_and_no_triggers(tmp_path):
    path = tmp_path / "a.ledger"
    with closing(SqliteLedger(path)) as ledger:
        filled(ledger)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(
            'CREATE TRIGGER "a ""b" AFTER UPDATE ON semel_scope BEGIN DELETE FROM semel_scope; END'
        )

    with closing(SqliteLedger(path)) as ledger:
        ledger.restore("ann", "because")

    with closing(sqlite3.connect(path)) as connection:
        (scopes,) = connection.execute("SELECT count(*) FROM semel_scope").fetchone()
        found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")
        assert (scopes, found.fetchall()) == (1, [])
