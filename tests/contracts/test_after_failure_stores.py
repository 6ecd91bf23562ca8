"""Every database keeps the contracts of dead letters, waiting room and audit trail."""

from __future__ import annotations

import pytest

from semel.testing.contracts import AuditContract, DeadLettersContract, WaitingContract
from tests.messaging.worlds import memory_world, postgres_world, sqlite_world


class InMemory:
    def world(self):
        return memory_world()


class InSqlite:
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.folder = tmp_path

    def world(self):
        return sqlite_world(self.folder)


class InPostgres:
    @pytest.fixture(autouse=True)
    def _place(self, quick_postgres_server):
        self.server = quick_postgres_server

    def world(self):
        return postgres_world(self.server)


class TestMemoryDeadLetters(InMemory, DeadLettersContract):
    pass


class TestMemoryWaitingRoom(InMemory, WaitingContract):
    pass


class TestMemoryAuditTrail(InMemory, AuditContract):
    pass


class TestSqliteDeadLetters(InSqlite, DeadLettersContract):
    pass


class TestSqliteWaitingRoom(InSqlite, WaitingContract):
    pass


class TestSqliteAuditTrail(InSqlite, AuditContract):
    pass


@pytest.mark.postgres
class TestPostgresDeadLetters(InPostgres, DeadLettersContract):
    pass


@pytest.mark.postgres
class TestPostgresWaitingRoom(InPostgres, WaitingContract):
    pass


@pytest.mark.postgres
class TestPostgresAuditTrail(InPostgres, AuditContract):
    pass
