"""Every database keeps the contract of replays."""

from __future__ import annotations

from tests.messaging.places import InPostgres, InSqlite
from tests.stores.replays import ReplaysContract


class TestSqliteReplays(InSqlite, ReplaysContract):
    pass


class TestPostgresReplays(InPostgres, ReplaysContract):
    pass
