"""Every ledger keeps the same contract."""

from __future__ import annotations

import psycopg
import pytest

from semel.ledger.schema import TABLES
from semel.ledger.sqlite import SqliteLedger
from semel.memory.ledger import MemoryLedger
from semel.postgres.ledger import PostgresLedger
from semel.testing.clock import SimulatedClock
from semel.testing.contracts.ledger import LedgerContract
from semel.testing.contracts.ledger_world import LEASE_SECONDS


class TestMemoryLedger(LedgerContract):
    def make_ledger(self):
        self.clock = SimulatedClock()
        return MemoryLedger(self.clock)

    def another(self, ledger):
        return ledger

    def expire(self, ledger, scope):
        self.clock.sleep(LEASE_SECONDS)


class TestSqliteLedger(LedgerContract):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.path = tmp_path / "test.ledger"
        self.clock = SimulatedClock()

    def make_ledger(self):
        return SqliteLedger(self.path, clock=self.clock)

    def another(self, ledger):
        return SqliteLedger(f"sqlite:///{self.path}", clock=self.clock)

    def expire(self, ledger, scope):
        self.clock.advance(LEASE_SECONDS)


@pytest.mark.postgres
class TestPostgresLedger(LedgerContract):
    @pytest.fixture(autouse=True)
    def _place(self, emptied_ledger_url):
        self.url = emptied_ledger_url

    def make_ledger(self):
        return PostgresLedger(self.url)

    def another(self, ledger):
        return PostgresLedger(self.url)

    def expire(self, ledger, scope):
        with psycopg.connect(self.url) as connection:
            connection.execute("UPDATE semel.semel_scope SET lease_until = 0")


@pytest.fixture(scope="module")
def ledger_url(postgres_server):
    """One ledger for all tests: making tables takes longer than most of them."""
    url = postgres_server.create_database("ledgers")
    assert PostgresLedger(url).ledger_id
    yield url
    postgres_server.drop_database("ledgers")


@pytest.fixture
def emptied_ledger_url(ledger_url):
    with psycopg.connect(ledger_url) as connection:
        for table in set(TABLES) - {"semel_ledger_meta"}:
            connection.execute(f"DELETE FROM semel.{table}")
    return ledger_url
