"""Every database keeps the contracts of the members, the outcomes and the versions."""

from __future__ import annotations

from tests.messaging.places import InPostgres, InSqlite
from tests.stores.members import MembersContract
from tests.stores.outcomes import OutcomesContract
from tests.stores.versions import VersionsContract


class TestSqliteMembers(InSqlite, MembersContract):
    pass


class TestPostgresMembers(InPostgres, MembersContract):
    pass


class TestSqliteOutcomes(InSqlite, OutcomesContract):
    pass


class TestPostgresOutcomes(InPostgres, OutcomesContract):
    pass


class TestSqliteVersions(InSqlite, VersionsContract):
    pass


class TestPostgresVersions(InPostgres, VersionsContract):
    pass
