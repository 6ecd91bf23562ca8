"""Every outbox and inbox keeps its contract."""

from __future__ import annotations

import pytest

from semel.testing.contracts.inbox import InboxContract
from semel.testing.contracts.outbox import OutboxContract
from tests.messaging.worlds import memory_world, postgres_world, sqlite_world


class InMemory:
    def world(self):
        return memory_world()


class OnSqlite:
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = tmp_path

    def world(self):
        return sqlite_world(self.folder)


@pytest.mark.postgres
class OnPostgres:
    @pytest.fixture(autouse=True)
    def _server(self, quick_postgres_server):
        self.server = quick_postgres_server

    def world(self):
        return postgres_world(self.server)


class TestMemoryOutbox(InMemory, OutboxContract):
    pass


class TestSqliteOutbox(OnSqlite, OutboxContract):
    pass


class TestPostgresOutbox(OnPostgres, OutboxContract):
    pass


class TestMemoryInbox(InMemory, InboxContract):
    pass


class TestSqliteInbox(OnSqlite, InboxContract):
    pass


class TestPostgresInbox(OnPostgres, InboxContract):
    pass
