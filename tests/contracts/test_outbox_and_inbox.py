"""Every outbox and inbox keeps its contract."""

from __future__ import annotations

from tests.messaging.places import InPostgres, InSqlite
from tests.stores.inbox import InboxContract
from tests.stores.outbox import OutboxContract


class TestSqliteOutbox(InSqlite, OutboxContract):
    pass


class TestPostgresOutbox(InPostgres, OutboxContract):
    pass


class TestSqliteInbox(InSqlite, InboxContract):
    pass


class TestPostgresInbox(InPostgres, InboxContract):
    pass
