"""Every database keeps the contract of the claims."""

from __future__ import annotations

from semel.testing.contracts.claims import ClaimsContract
from tests.messaging.places import InMemory, InPostgres, InSqlite


class TestMemoryClaims(InMemory, ClaimsContract):
    pass


class TestSqliteClaims(InSqlite, ClaimsContract):
    pass


class TestPostgresClaims(InPostgres, ClaimsContract):
    pass
