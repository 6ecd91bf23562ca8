"""The PostgreSQL ledger: its place, its sessions, its locks, and what makes it unusable."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from contextlib import closing
from urllib.parse import urlsplit

import psycopg
import pytest

from semel.errors import LeaseHeld, LedgerUnavailable, LedgerUnusable, Misuse
from semel.lease import Owner, Takeover
from semel.ledger.database import TransactionMode
from semel.ledger.ledger import session_name
from semel.ledgers import open_ledger
from semel.pipeline.ledger import CycleState
from semel.postgres.ledger import PostgresLedger
from semel.testing.contracts.ledger_world import (
    LEASE_SECONDS,
    LedgerOwner,
    offsets,
    scope_of,
    together,
)
from tests.unit.postgres.postgres_place import create_role

pytestmark = pytest.mark.postgres


@pytest.fixture
def ledger(postgres_url):
    with closing(PostgresLedger(postgres_url, lock_seconds=0.2)) as made:
        yield made


def backend_of(ledger):
    assert ledger.ledger_id
    return ledger._database._session.backend


class TestPlace:
    def test_a_url_opens_it_and_nothing_is_connected_before_the_first_use(self):
        ledger = open_ledger("postgresql://u:s3cret@nowhere.invalid/db")

        assert ledger.url == "postgresql://u:***@nowhere.invalid/db"
        assert "s3cret" not in repr(ledger)

    def test_an_unreachable_server_is_unavailable_and_its_password_hidden(self):
        ledger = PostgresLedger("postgresql://u:s3cret@127.0.0.1:1/db")

        with pytest.raises(LedgerUnavailable) as refused:
            ledger.scopes()

        assert "s3cret" not in f"{refused.value}{refused.value!r}{refused.value.__cause__!r}"

    def test_a_url_of_another_kind_is_refused(self):
        with pytest.raises(Misuse):
            PostgresLedger("host=h password=s3cret")

    def test_a_missing_package_is_named_with_its_extra(self):
        script = (
            "import sys; sys.modules['psycopg'] = None\n"
            "from semel.errors import MissingExtra\n"
            "from semel.ledgers import open_ledger\n"
            "try: open_ledger('postgresql://h/d')\n"
            "except MissingExtra as error: print(error)"
        )

        told = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        )

        assert "semel[postgres]" in told.stdout

    def test_a_ledger_pickles_as_its_url(self, ledger):
        driver = LedgerOwner.of(ledger)

        with closing(pickle.loads(pickle.dumps(ledger))) as copy:
            assert copy.scopes() == [driver.scope]

    def test_a_password_may_come_from_a_callable_at_every_connection(self, postgres_url):
        asked = []

        def password():
            asked.append(1)
            return urlsplit(postgres_url).password

        without = postgres_url.replace(f":{urlsplit(postgres_url).password}@", "@")
        with closing(PostgresLedger(without, password=password)) as ledger:
            assert ledger.scopes() == []
            ledger.close()
            assert ledger.scopes() == []

        assert len(asked) == 2

    def test_processes_that_make_a_ledger_at_once_make_one(self, postgres_url):
        made = [PostgresLedger(postgres_url) for _ in range(4)]

        ids = together(*(lambda ledger=ledger: ledger.ledger_id for ledger in made))

        assert len(set(ids)) == 1, ids
        for ledger in made:
            ledger.close()

    def test_two_schemas_are_two_ledgers(self, ledger, postgres_url):
        with closing(PostgresLedger(postgres_url, schema='Other "one"')) as other:
            assert other.ledger_id != ledger.ledger_id
            LedgerOwner.of(other)

        assert ledger.scopes() == []

    @pytest.mark.postgres
    def test_it_works_on_the_older_server_too(self, postgres16_url):
        with closing(PostgresLedger(postgres16_url)) as ledger:
            driver = LedgerOwner.of(ledger)
            driver.commit(offsets(0, 10), 0)
            driver.commit(offsets(10, 20), 1)
            assert ledger.prune(driver.scope, 0) == 1
            assert driver.end() == 20


class TestSessions:
    def test_a_transaction_says_whose_it_is(self, ledger, postgres_url):
        driver = LedgerOwner.of(ledger)
        seen = "SELECT application_name FROM pg_stat_activity WHERE pid = %s"

        with psycopg.connect(postgres_url, autocommit=True) as watcher:
            with ledger._leased(driver.lease):
                inside = watcher.execute(seen, (backend_of(ledger),)).fetchone()
            outside = watcher.execute(seen, (backend_of(ledger),)).fetchone()

        assert inside == (f"semel:{driver.scope.slug}:1",)
        assert outside == ("semel",)

    def test_every_setting_lasts_for_a_transaction_only(self, ledger):
        LedgerOwner.of(ledger)

        connection = ledger._database._session.connection

        assert "semel" not in connection.execute("SHOW search_path").fetchone()[0]
        assert connection.execute("SHOW lock_timeout").fetchone() == ("0",)

    def test_a_session_that_was_ended_while_idle_is_replaced(self, ledger, postgres_url):
        driver = LedgerOwner.of(ledger)
        with psycopg.connect(postgres_url, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s, 5000)", (backend_of(ledger),))

        driver.commit(offsets(0, 10))

        assert driver.end() == 10

    def test_a_lock_that_does_not_come_takes_no_decision(self, ledger, postgres_url):
        driver = LedgerOwner.of(ledger)
        txn = driver.reach(CycleState.PREPARED)

        with psycopg.connect(postgres_url) as other:
            other.execute("SELECT FROM semel.semel_scope FOR UPDATE")
            with pytest.raises(LedgerUnavailable, match="lock"):
                ledger.decide_commit(driver.lease, txn)
            with pytest.raises(LedgerUnavailable, match="lock"):
                ledger.decide_abort(txn)
            assert driver.state(txn) is CycleState.PREPARED

        ledger.decide_commit(driver.lease, txn)

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

    def test_a_dead_session_of_a_fork_never_ends_its_parents(self, ledger):
        backend = backend_of(ledger)
        child = os.fork()
        if child == 0:
            ledger.close()
            os._exit(0)
        os.waitpid(child, 0)

        ledger.scopes()

        assert backend_of(ledger) == backend


class TestTakeover:
    @pytest.mark.kill
    def test_a_stopped_predecessor_with_the_lock_is_ended(self, ledger, postgres_url):
        stopped = subprocess.Popen([sys.executable, "-c", _STOPS_WITH_THE_LOCK, postgres_url])
        try:
            os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)

            with pytest.raises(LeaseHeld):
                LedgerOwner.of(ledger, takeover=Takeover.WAIT)
            successor = LedgerOwner.of(ledger, takeover=Takeover.FORCE)

            assert successor.lease.epoch == 2
            successor.commit(offsets(0, 10))
            os.kill(stopped.pid, signal.SIGCONT)
            assert stopped.wait(timeout=30) == 17
        finally:
            stopped.kill()
            stopped.wait()

    def test_only_this_scopes_older_sessions_are_ended(self, ledger, postgres_url):
        driver = LedgerOwner.of(ledger)
        other = LedgerOwner.of(ledger, query="other")
        newer = session_name(driver.scope, driver.lease.epoch + 1)
        names = [session_name(other.scope, 1), newer, session_name(driver.scope, 1)]
        sessions = []
        for name in names:
            session = psycopg.connect(postgres_url, application_name=name)
            session.execute("SELECT FROM semel.semel_scope WHERE app = 'nobody' FOR UPDATE")
            sessions.append(session)
        sink = psycopg.connect(postgres_url, application_name=names[2])
        sink.execute("SELECT 1")

        ledger._end_holders(driver.scope, driver.lease.epoch)

        alive = [_answers(session) for session in (*sessions, sink)]
        assert alive == [True, True, False, True]
        for session in (*sessions, sink):
            session.close()


class TestFaults:
    def test_a_read_only_database_takes_no_decision(self, ledger, postgres_url):
        driver = LedgerOwner.of(ledger)
        txn = driver.reach(CycleState.PREPARED)
        ledger._database._session.begin = _read_only(ledger._database._session)

        with pytest.raises(LedgerUnusable, match="read-only"):
            ledger.decide_commit(driver.lease, txn)

        assert driver.state(txn) is CycleState.PREPARED

    def test_a_user_without_rights_is_told_so(self, ledger, postgres_url):
        assert ledger.ledger_id
        url = create_role(postgres_url, "stranger")

        with (
            closing(PostgresLedger(url)) as other,
            pytest.raises(LedgerUnusable, match="may not use it"),
        ):
            other.scopes()

    def test_tables_that_vanish_make_it_unusable(self, ledger, postgres_url):
        driver = LedgerOwner.of(ledger)
        with psycopg.connect(postgres_url) as connection:
            connection.execute("DROP TABLE semel.semel_attempt")

        with pytest.raises(LedgerUnusable, match="42P01"):
            driver.reach(CycleState.PLANNED)

    def test_another_ledger_in_its_place_is_not_taken_for_it(self, ledger, postgres_url):
        driver = LedgerOwner.of(ledger)
        ledger.close()
        with psycopg.connect(postgres_url) as connection:
            connection.execute("DROP SCHEMA semel CASCADE")

        for _ in range(2):
            with pytest.raises(LedgerUnusable, match="replaced"):
                ledger.renew(driver.lease)

    def test_the_schema_itself_allows_a_cycle_one_commit(self, ledger, postgres_url):
        LedgerOwner.of(ledger).reach(CycleState.COMMITTED)
        second = "INSERT INTO semel.semel_attempt SELECT app, query, generation, batch, 'x', 9,"
        second += " epoch, state, range_read, tokens, row_counts, '', planned_at, decided_at, NULL"

        with psycopg.connect(postgres_url) as connection:
            with pytest.raises(psycopg.errors.UniqueViolation, match="one_commit"):
                connection.execute(f"{second} FROM semel.semel_attempt")
            connection.rollback()


def test_the_lease_is_on_the_servers_clock(ledger, monkeypatch):
    driver = LedgerOwner.of(ledger)
    monkeypatch.setattr("time.time", lambda: 0.0)

    with pytest.raises(LeaseHeld):
        ledger.acquire(scope_of(ledger), Owner.here(), LEASE_SECONDS)

    assert driver.lease.epoch == 1


def _answers(session):
    try:
        session.execute("SELECT 1")
    except psycopg.OperationalError:
        return False
    return True


def _read_only(session):
    def begin(name, mode):
        type(session).begin(session, name, mode)
        if mode is TransactionMode.WRITE:
            session.connection.execute("SET TRANSACTION READ ONLY")

    return begin


_STOPS_WITH_THE_LOCK = """
import os, signal, sys
from semel.errors import LedgerUnavailable
from semel.lease import Owner
from semel.pipeline.txn import Scope
from semel.postgres.ledger import PostgresLedger

ledger = PostgresLedger(sys.argv[1])
lease = ledger.acquire(Scope(ledger.ledger_id, "payments", "main"), Owner.here(), 60)
try:
    with ledger._leased(lease):
        os.kill(os.getpid(), signal.SIGSTOP)
except LedgerUnavailable:
    sys.exit(17)
"""
