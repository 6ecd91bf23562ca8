"""The SQLite ledger: its file, its locks, and every way in which they can fail."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from semel.errors import InDoubt, LedgerUnavailable, LedgerUnusable, Misuse, NeedsOperator
from semel.ledger import sqlite, statements
from semel.ledger.sqlite import SqliteLedger, network_file_system
from semel.ledgers import open_ledger
from semel.memory.ledger import MemoryLedger
from semel.pipeline.ledger import CycleState, Decision
from semel.testing.contracts.ledger_world import LedgerOwner, files, offsets, scope_of, together


@pytest.fixture
def path(tmp_path):
    return tmp_path / "test.ledger"


@pytest.fixture
def ledger(path):
    with closing(SqliteLedger(path, busy_seconds=0.05)) as made:
        yield made


def connection_of(ledger):
    """The connection itself, to break it."""
    assert ledger.ledger_id
    return ledger._database._session._connection


def test_committed_files_cost_little_more_than_their_names(ledger, path):
    folder = f"file:///data/{'x' * 100}/date=2026-11-18/"
    names = [f"part-{number:06}.json" for number in range(20_000)]
    driver = LedgerOwner.of(ledger)
    ledger.adopt_generation(driver.lease, "one", 0, {}, {"0": {folder + name for name in names}})
    ledger.close()

    assert path.stat().st_size / len(names) < 100  # twice the name, and not its folder
    assert ledger.positions(driver.scope).paths["0"] == {folder + name for name in names}


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("tokens", "{"),
        ("tokens", "[1]"),
        ("tokens", '{"left": 5}'),
        ("tokens", '{"left": null}'),
        ("row_counts", "7"),
        ("range_read", '{"sources": 5}'),
        ("range_read", "["),
    ],
)
def test_a_row_that_was_changed_by_hand_needs_an_operator(ledger, path, column, value):
    driver = LedgerOwner.of(ledger)
    txn = driver.commit(offsets(0, 1))
    with closing(sqlite3.connect(path)) as rows:
        rows.execute(f"UPDATE semel_attempt SET {column} = ?", [value])
        rows.commit()

    with pytest.raises(NeedsOperator, match="was damaged, or changed by hand"):
        ledger.attempt(txn)
    with pytest.raises(NeedsOperator, match="was damaged, or changed by hand"):
        ledger.history(driver.scope)


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [("act", "detail", "5"), ("act", "detail", "{"), ("scope", "owner", "[]")],
)
def test_an_act_and_an_owner_that_were_changed_by_hand_need_one_too(
    ledger, path, table, column, value
):
    driver = LedgerOwner.of(ledger)
    ledger.record_act(driver.scope, "ann", "test", "a test", {})
    with closing(sqlite3.connect(path)) as rows:
        rows.execute(f"UPDATE semel_{table} SET {column} = ?", [value])
        rows.commit()

    with pytest.raises(NeedsOperator, match="was damaged, or changed by hand"):
        ledger.acts(driver.scope), ledger.scope_record(driver.scope)


def test_paths_come_back_as_they_were_whatever_their_folders_are(ledger):
    paths = {"a", "/a", "a/", "/", "//a", "s3a://bucket/a", "s3a://bucket/b/a"}
    driver = LedgerOwner.of(ledger)
    driver.commit(files(*paths))

    assert ledger.positions(driver.scope).paths == {"0": paths}
    assert ledger.positions(driver.scope, files("/a", "b/a")).paths == {"0": {"/a"}}


class TestPlace:
    def test_a_url_names_a_file_and_nothing_is_made_before_the_first_use(
        self, tmp_path, monkeypatch
    ):
        monkeypatch.chdir(tmp_path)

        relative, absolute = open_ledger("sqlite:///a.ledger"), SqliteLedger(tmp_path / "a.ledger")

        assert relative.url == absolute.url == f"sqlite:///{tmp_path}/a.ledger"
        assert not (tmp_path / "a.ledger").exists()
        assert open_ledger(relative.url).ledger_id == absolute.ledger_id

    @pytest.mark.parametrize(
        "url", ["sqlite://a", "sqlite:a", "sqlite:///", "sqlite:///:memory:", "", "file:a"]
    )
    def test_what_names_no_file_is_refused(self, url):
        with pytest.raises(Misuse):
            SqliteLedger(url)

    @pytest.mark.parametrize("url", ["mysql://u:s3cret@h/d", "ledger.db", "memory:x", ""])
    def test_an_unknown_url_is_refused_with_those_that_are_known(self, url):
        with pytest.raises(Misuse) as refused:
            open_ledger(url)

        assert "s3cret" not in str(refused.value)

    def test_a_ledger_is_opened_as_itself(self, ledger):
        assert open_ledger(ledger) is ledger
        assert isinstance(open_ledger("memory:"), MemoryLedger)

    def test_a_ledger_pickles_as_its_path(self, ledger):
        driver = LedgerOwner.of(ledger)

        with closing(pickle.loads(pickle.dumps(ledger))) as copy:
            assert copy.scopes() == [driver.scope]
        with pytest.raises(Misuse, match="one process"):
            pickle.dumps(MemoryLedger())

    def test_the_file_is_written_ahead_and_fully_synced(self, ledger):
        connection = connection_of(ledger)

        assert connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        assert connection.execute("PRAGMA synchronous").fetchone()[0] == 2

    def test_a_missing_folder_is_named(self, tmp_path):
        with pytest.raises(LedgerUnusable, match="nowhere does not exist"):
            SqliteLedger(tmp_path / "nowhere" / "a").scopes()

    @pytest.mark.parametrize(
        ("path", "kind"),
        [
            ("/data/share/a b/x", "nfs4"),
            ("/data/share/other", None),
            ("/home/me/x", "fuse.sshfs"),
            ("/mnt/c/x", "9p"),
            ("/mnt/stick/x", None),
            ("/x", None),
        ],
    )
    def test_a_network_file_system_is_recognised_by_its_mount(self, path, kind):
        mounts = (
            "/dev/vda / ext4 rw 0 0\n"
            "srv:/e /data/share/a\\040b nfs4 rw 0 0\n"
            "me@srv: /home/me fuse.sshfs rw 0 0\n"
            "drvfs /mnt/c 9p rw 0 0\n"
            "/dev/sdb /mnt/stick fuse.ntfs-3g rw 0 0\n"
        )

        assert network_file_system(Path(path), mounts) == kind

    def test_a_network_file_system_is_refused_with_the_reason(self, ledger, path, monkeypatch):
        monkeypatch.setattr(sqlite, "network_file_system", lambda folder: "nfs4")

        with pytest.raises(LedgerUnusable, match=r"network file system \(nfs4\)"):
            ledger.scopes()

        assert not path.exists()

    def test_processes_that_make_a_ledger_at_once_make_one(self, path):
        made = [SqliteLedger(path) for _ in range(6)]

        ids = together(*(lambda ledger=ledger: ledger.ledger_id for ledger in made))

        assert len(set(ids)) == 1
        for ledger in made:
            ledger.close()


class TestFaults:
    def test_a_file_that_is_no_database_is_left_alone(self, ledger, path):
        path.write_bytes(b"dear diary, " * 1000)

        with pytest.raises(LedgerUnusable, match="not a SQLite database"):
            ledger.scopes()

        assert path.read_bytes().startswith(b"dear diary")

    def test_a_damaged_file_is_unusable(self, ledger, path):
        LedgerOwner.of(ledger).reach(CycleState.FINISHED)
        ledger.close()
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(b"\xff" * (size - 4096))

        with pytest.raises(LedgerUnusable, match="damaged"):
            ledger.scopes()

    @pytest.mark.parametrize("act", ["decide_commit", "decide_abort"])
    def test_a_read_only_file_takes_no_decision(self, ledger, act):
        driver = LedgerOwner.of(ledger)
        txn = driver.reach(CycleState.PREPARED)
        connection_of(ledger).execute("PRAGMA query_only=1")

        with pytest.raises(LedgerUnusable, match="read-only"):
            _decide(driver, txn, act)

        assert driver.state(txn) is CycleState.PREPARED

    def test_a_full_disk_takes_no_decision_and_loses_nothing(self, ledger):
        driver = LedgerOwner.of(ledger)
        txn = driver.reach(CycleState.PREPARED, 0, offsets(0, 10))
        connection = connection_of(ledger)
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count={pages}")

        with pytest.raises(LedgerUnusable, match="full"):
            ledger.record_act(driver.scope, "ann", "note", "x" * 500_000)
        with pytest.raises(LedgerUnusable, match="full"):
            ledger.decide_abort(driver.cycle(1).attempt(), "y" * 500_000)

        assert ledger.open_attempts(driver.scope)[0].txn == txn
        connection.execute("PRAGMA max_page_count=100000")
        ledger.decide_commit(driver.lease, txn)
        assert driver.end() == 10

    @pytest.mark.parametrize("act", ["decide_commit", "decide_abort"])
    def test_a_locked_file_takes_no_decision_and_names_the_owner(self, ledger, path, act):
        driver = LedgerOwner.of(ledger)
        txn = driver.reach(CycleState.PREPARED)

        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(LedgerUnavailable, match="process 7 on elsewhere"):
                _decide(driver, txn, act)
            assert driver.state(txn) is CycleState.PREPARED

        _decide(driver, txn, act)
        assert driver.state(txn).is_decided

    @pytest.mark.kill
    def test_a_stopped_owner_with_the_lock_is_named(self, ledger, path):
        stopped = subprocess.Popen([sys.executable, "-c", _STOPS_WITH_THE_LOCK, str(path)])
        try:
            os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
            with pytest.raises(LedgerUnavailable, match=f"process {stopped.pid} .* is stopped"):
                LedgerOwner.of(ledger)
        finally:
            stopped.kill()
            stopped.wait()

        assert LedgerOwner.of(ledger).lease.epoch == 2

    @pytest.mark.kill
    def test_a_decision_survives_the_kill_right_after_it(self, ledger, path):
        killed = subprocess.run(
            [sys.executable, "-c", _DIES_AFTER_THE_DECISION, str(path)], check=False
        )

        assert killed.returncode == -signal.SIGKILL
        (record,) = ledger.open_attempts(scope_of(ledger))
        assert record.state is CycleState.COMMITTED
        assert ledger.decide_abort(record.txn) is Decision.COMMIT

    def test_a_commit_whose_sync_failed_is_in_doubt(self, ledger):
        driver = LedgerOwner.of(ledger)
        txn = driver.reach(CycleState.PREPARED)
        ledger._database._session._connection = _Failing(connection_of(ledger), "IOERR_FSYNC")

        with pytest.raises(InDoubt, match=str(txn)):
            ledger.decide_commit(driver.lease, txn)

        assert ledger.decide_abort(txn) is Decision.ABORT

    @pytest.mark.parametrize(
        ("code", "raised"),
        [("IOERR_FSYNC", LedgerUnavailable), ("FULL", LedgerUnusable), ("BUSY", LedgerUnavailable)],
    )
    def test_only_decisions_are_ever_in_doubt(self, ledger, code, raised):
        driver = LedgerOwner.of(ledger)
        ledger._database._session._connection = _Failing(connection_of(ledger), code)

        with pytest.raises(raised):
            ledger.renew(driver.lease)

        ledger.renew(driver.lease)

    def test_a_file_removed_while_in_use_is_not_made_again(self, ledger, path):
        driver = LedgerOwner.of(ledger)
        path.unlink()

        for _ in range(2):
            with pytest.raises(LedgerUnusable, match="removed"):
                ledger.renew(driver.lease)

        assert not path.exists()

    def test_another_ledger_in_its_place_is_not_taken_for_it(self, ledger, path, tmp_path):
        driver = LedgerOwner.of(ledger)
        with closing(SqliteLedger(tmp_path / "other")) as other:
            assert other.ledger_id
        for suffix in ("-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        shutil.move(tmp_path / "other", path)

        for _ in range(2):
            with pytest.raises(LedgerUnusable, match="replaced"):
                ledger.renew(driver.lease)

    def test_the_schema_itself_allows_a_cycle_one_commit(self, ledger):
        driver = LedgerOwner.of(ledger)
        driver.reach(CycleState.COMMITTED)
        second = "INSERT INTO semel_attempt SELECT app, query, generation, batch, 'x', 9, epoch,"
        second += " state, range_read, tokens, row_counts, '', planned_at, decided_at, NULL"

        with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"):
            connection_of(ledger).execute(f"{second} FROM semel_attempt")


class TestUse:
    def test_a_fork_uses_its_own_connection(self, ledger):
        driver = LedgerOwner.of(ledger)
        child = os.fork()
        if child == 0:
            try:
                driver.reach(CycleState.FINISHED)
                os._exit(0)
            finally:
                os._exit(1)

        assert os.waitpid(child, 0)[1] == 0
        assert driver.end() == 10
        driver.reach(CycleState.FINISHED, 1)

    def test_a_thousand_open_attempts_are_listed_at_once(self, ledger):
        driver = LedgerOwner.of(ledger)
        txn = driver.reach(CycleState.PREPARED)
        columns = "app, query, generation, attempt, epoch, state, range_read, tokens, planned_at"
        connection_of(ledger).execute(
            f"INSERT INTO semel_attempt ({columns}, batch, seq)"
            f" WITH RECURSIVE n(i) AS (SELECT 2 UNION ALL SELECT i + 1 FROM n WHERE i < 1000)"
            f" SELECT {columns}, n.i, n.i FROM semel_attempt, n"
        )

        started = time.perf_counter()
        listed = ledger.open_attempts(driver.scope)
        seconds = time.perf_counter() - started

        assert len(listed) == 1000
        assert listed[0].txn == txn
        assert seconds < 5  # 15 ms on an idle machine; a thousand statements took minutes

    @pytest.mark.parametrize(
        ("statement", "index"),
        [
            ("READ_ATTEMPT", "sqlite_autoindex_semel_attempt_1"),
            ("READ_COMMITTED", "semel_attempt"),
            ("LIST_OPEN", "semel_attempt_open"),
            ("FIRST_UNFINISHED", "semel_attempt_open"),
            ("LAST_COMMITTED", "semel_attempt_one_commit"),
            ("LAST_COMMITTED_BELOW", "semel_attempt_one_commit"),
            ("LIST_NEWEST", "sqlite_autoindex_semel_attempt_2"),
        ],
    )
    def test_every_question_has_its_index(self, ledger, statement, index):
        text = getattr(statements, statement)
        keys = ("app", "query", "generation", "batch", "attempt", "limit")

        plan = connection_of(ledger).execute(f"EXPLAIN QUERY PLAN {text}", dict.fromkeys(keys, 0))

        steps = [row["detail"] for row in plan]
        assert len(steps) == 1
        assert "SEARCH semel_attempt" in steps[0]
        assert index in steps[0]


class _Failing:
    """A connection whose next COMMIT fails before it does anything."""

    def __init__(self, connection, code):
        self._connection = connection
        self._code = code

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def execute(self, statement, *values):
        if statement == "COMMIT" and self._code:
            error = sqlite3.OperationalError("made up")
            error.sqlite_errorname, self._code = f"SQLITE_{self._code}", ""
            raise error
        return self._connection.execute(statement, *values)


def _decide(driver, txn, act):
    if act == "decide_commit":
        driver.ledger.decide_commit(driver.lease, txn)
    else:
        driver.ledger.decide_abort(txn)


_STOPS_WITH_THE_LOCK = """
import os, signal, sys
from semel.lease import Owner
from semel.pipeline.txn import Scope
from semel.ledger.database import TransactionMode
from semel.ledger.sqlite import SqliteLedger

ledger = SqliteLedger(sys.argv[1])
ledger.acquire(Scope(ledger.ledger_id, "payments", "main"), Owner.here(), 60)
with ledger._database.transaction("test", TransactionMode.WRITE):
    os.kill(os.getpid(), signal.SIGSTOP)
"""

_DIES_AFTER_THE_DECISION = """
import os, signal, sys
from semel.pipeline.ledger import CycleState
from semel.ledger.sqlite import SqliteLedger
from semel.testing.contracts.ledger_world import LedgerOwner

LedgerOwner.of(SqliteLedger(sys.argv[1])).reach(CycleState.COMMITTED)
os.kill(os.getpid(), signal.SIGKILL)
"""
