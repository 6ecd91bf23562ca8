"""Every database keeps the contract of every internal store."""

from __future__ import annotations

from tests.messaging.places import InPostgres, InSqlite
from tests.stores.claims import ClaimStoreContract
from tests.stores.inbox import InboxContract
from tests.stores.members import MembersContract
from tests.stores.outbox import OutboxContract
from tests.stores.outcomes import OutcomesContract
from tests.stores.replays import ReplaysContract
from tests.stores.versions import VersionsContract


class TestSqliteClaims(InSqlite, ClaimStoreContract):
    pass


class TestPostgresClaims(InPostgres, ClaimStoreContract):
    pass


class TestSqliteInbox(InSqlite, InboxContract):
    pass


class TestPostgresInbox(InPostgres, InboxContract):
    pass


class TestSqliteMembers(InSqlite, MembersContract):
    pass


class TestPostgresMembers(InPostgres, MembersContract):
    pass


class TestSqliteOutbox(InSqlite, OutboxContract):
    pass


class TestPostgresOutbox(InPostgres, OutboxContract):
    pass


class TestSqliteOutcomes(InSqlite, OutcomesContract):
    pass


class TestPostgresOutcomes(InPostgres, OutcomesContract):
    pass


class TestSqliteReplays(InSqlite, ReplaysContract):
    pass


class TestPostgresReplays(InPostgres, ReplaysContract):
    pass


class TestSqliteVersions(InSqlite, VersionsContract):
    pass


class TestPostgresVersions(InPostgres, VersionsContract):
    pass
