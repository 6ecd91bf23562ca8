"""Every database keeps the contract of replays."""

from __future__ import annotations

from semel.testing.contracts import ReplaysContract
from tests.messaging.places import InMemory, InPostgres, InSqlite


class TestMemoryReplays(InMemory, ReplaysContract):
    pass


class TestSqliteReplays(InSqlite, ReplaysContract):
    pass


class TestPostgresReplays(InPostgres, ReplaysContract):
    pass
