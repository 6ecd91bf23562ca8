"""A backup holds the whole ledger, and never replaces one that knows more."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from semel.errors import LeaseHeld, LeaseLost, LedgerUnusable, Misuse, NeedsOperator
from semel.memory.sink import MemorySink
from semel.pipeline.states import CycleState
from semel.postgres.ledger import PostgresLedger
from semel.sql.backup import EPOCH_LEAP, Overwrite
from semel.sql.sqlite import SqliteLedger
from semel.testing.contracts.ledger_world import Driver, files, offsets


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
    driver = Driver.of(ledger)
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


def test_a_restored_ledger_is_the_same_ledger(make, tmp_path):
    ledger = make()
    driver = filled(ledger)
    ledger.backup(tmp_path / "backup")

    restored = make("elsewhere")
    restored.restore(tmp_path / "backup")

    *everything, record = contents(restored, driver.scope)
    *expected, left = contents(ledger, driver.scope)
    assert everything == expected
    assert record == replace(left, epoch=left.epoch + EPOCH_LEAP)
    successor = Driver.of(restored)
    successor.commit(offsets(10, 20, topic_id="id"), 2)


def test_owners_of_a_restored_ledger_are_not_fenced_by_sinks_that_outlived_the_lost_one(
    ledger, make, tmp_path
):
    sink = MemorySink()
    driver = Driver.of(ledger)
    ledger.backup(tmp_path / "backup")
    for _ in range(5):
        sink.fence(driver.scope, Driver.of(ledger).lease.epoch)

    restored = make("elsewhere")
    restored.restore(tmp_path / "backup")

    sink.fence(driver.scope, Driver.of(restored).lease.epoch)


def test_a_backup_is_taken_while_the_ledger_is_in_use(ledger, tmp_path):
    driver = Driver.of(ledger)
    driver.commit(offsets(0, 10), 0)

    ledger.backup(tmp_path / "backup")
    driver.commit(offsets(10, 20), 1)

    assert driver.end() == 20
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_a_backup_replaces_no_file(ledger, tmp_path):
    (tmp_path / "backup").write_text("mine")

    with pytest.raises(Misuse, match="exists already"):
        ledger.backup(tmp_path / "backup")

    assert (tmp_path / "backup").read_text() == "mine"


def test_a_ledger_that_knows_more_is_kept(ledger, tmp_path):
    driver = filled(ledger)
    ledger.backup(tmp_path / "backup")
    later = Driver.of(ledger)
    later.commit(offsets(10, 20, topic_id="id"), 2)
    ledger.release(later.lease)
    before = contents(ledger, driver.scope)

    with pytest.raises(NeedsOperator, match=r"epoch 2.*g1\.b2 is committed"):
        ledger.restore(tmp_path / "backup")

    assert contents(ledger, driver.scope) == before


def test_a_ledger_that_is_in_use_is_kept(ledger, tmp_path):
    filled(ledger)
    Driver.of(ledger)
    ledger.backup(tmp_path / "backup")

    with pytest.raises(LeaseHeld):
        ledger.restore(tmp_path / "backup")


def test_force_goes_back_and_fences_whoever_still_runs(ledger, tmp_path):
    filled(ledger)
    running = Driver.of(ledger)
    ledger.backup(tmp_path / "backup")
    running = Driver.of(ledger)
    txn = running.reach(CycleState.PREPARED, 2, offsets(10, 20, topic_id="id"))

    ledger.restore(tmp_path / "backup", Overwrite.FORCE)

    with pytest.raises(LeaseLost):
        ledger.decide_commit(running.lease, txn)
    assert Driver.of(ledger).lease.epoch == running.lease.epoch + 1
    assert running.end() == 10


def test_pruning_after_the_backup_loses_no_decision(ledger, tmp_path):
    driver = filled(ledger)
    ledger.backup(tmp_path / "backup")
    ledger.prune(driver.scope, 0)

    ledger.restore(tmp_path / "backup")

    assert len(ledger.history(driver.scope)) == 3


def test_another_ledger_is_replaced_only_by_force(make, tmp_path):
    ledger, other = make(), make("other")
    filled(ledger)
    driver = filled(other)
    ledger.backup(tmp_path / "backup")

    with pytest.raises(NeedsOperator, match="another ledger"):
        other.restore(tmp_path / "backup")
    assert other.scopes() == [driver.scope]

    other.restore(tmp_path / "backup", Overwrite.FORCE)
    assert other.ledger_id == ledger.ledger_id


@pytest.mark.parametrize("overwrite", Overwrite)
def test_a_damaged_backup_changes_nothing(ledger, tmp_path, overwrite):
    driver = filled(ledger)
    ledger.backup(tmp_path / "backup")
    whole = (tmp_path / "backup").read_bytes()
    before = contents(ledger, driver.scope)

    for damage in (b"", b"junk", whole[: len(whole) // 2], None):
        (tmp_path / "damaged").unlink(missing_ok=True)
        if damage is not None:
            (tmp_path / "damaged").write_bytes(damage)
        with pytest.raises(LedgerUnusable):
            ledger.restore(tmp_path / "damaged", overwrite)

    assert contents(ledger, driver.scope) == before


@pytest.mark.postgres
def test_a_changed_line_of_a_backup_is_noticed(postgres_url, tmp_path):
    with closing(PostgresLedger(postgres_url)) as ledger:
        filled(ledger)
        ledger.backup(tmp_path / "backup")
        text = (tmp_path / "backup").read_text()
        (tmp_path / "backup").write_text(text.replace("finished", "aborted"))

        with pytest.raises(LedgerUnusable, match="checksum"):
            ledger.restore(tmp_path / "backup", Overwrite.FORCE)


@pytest.mark.postgres
def test_a_backup_of_version_1_is_brought_up_to_date(postgres_url, tmp_path):
    with closing(PostgresLedger(postgres_url)) as ledger:
        driver = filled(ledger)
        with ledger._database.transaction("test", "read") as session:
            snapshot = _as_version_1(session)
        ledger.backup(tmp_path / "backup")
        _write(tmp_path / "old", snapshot)

        ledger.restore(tmp_path / "old")

        assert driver.mark() is not None
        with pytest.raises(NeedsOperator):
            ledger.decide_abort(driver.cycle(0).attempt())


def test_force_sets_a_damaged_file_aside(tmp_path):
    path = tmp_path / "test.ledger"
    with closing(SqliteLedger(path)) as ledger:
        driver = filled(ledger)
        ledger.backup(tmp_path / "backup")
    path.write_bytes(b"not a database at all, but long enough" * 100)

    with closing(SqliteLedger(path)) as ledger:
        with pytest.raises(LedgerUnusable):
            ledger.restore(tmp_path / "backup")
        ledger.restore(tmp_path / "backup", Overwrite.FORCE)

        assert len(ledger.history(driver.scope)) == 3
    assert (tmp_path / "test.ledger.damaged").read_bytes().startswith(b"not a database")


def test_a_sqlite_backup_is_one_whole_database(tmp_path):
    with closing(SqliteLedger(tmp_path / "test.ledger")) as ledger:
        filled(ledger)
        ledger.backup(tmp_path / "backup")

    with closing(sqlite3.connect(tmp_path / "backup")) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        assert connection.execute("SELECT count(*) FROM semel_attempt").fetchone() == (3,)
    assert not list(tmp_path.glob("backup-*"))


def _as_version_1(session):
    from semel.sql import backup

    taken = backup.take(session.run)
    scopes = [
        {name: value for name, value in row.items() if not name.startswith("pruned")}
        for row in taken.tables["semel_scope"]
    ]
    return backup.Snapshot(taken.ledger_id, 1, {**taken.tables, "semel_scope": scopes})


def _write(path, snapshot):
    from semel.sql import backup

    backup.write_lines(snapshot, path)
    assert json.loads(path.read_text().splitlines()[0])["version"] == 1
