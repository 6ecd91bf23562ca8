"""Every database keeps the contract of the claims."""

from __future__ import annotations

from tests.messaging.places import InPostgres, InSqlite
from tests.stores.claims import ClaimStoreContract


class TestSqliteClaims(InSqlite, ClaimStoreContract):
    pass


class TestPostgresClaims(InPostgres, ClaimStoreContract):
    pass
