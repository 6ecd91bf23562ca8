"""Every outbox and inbox keeps its contract."""

from __future__ import annotations

from semel.testing.contracts.inbox import InboxContract
from semel.testing.contracts.outbox import OutboxContract
from tests.messaging.places import InMemory, InPostgres, InSqlite


class TestMemoryOutbox(InMemory, OutboxContract):
    pass


class TestSqliteOutbox(InSqlite, OutboxContract):
    pass


class TestPostgresOutbox(InPostgres, OutboxContract):
    pass


class TestMemoryInbox(InMemory, InboxContract):
    pass


class TestSqliteInbox(InSqlite, InboxContract):
    pass


class TestPostgresInbox(InPostgres, InboxContract):
    pass
