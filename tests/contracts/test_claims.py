"""Every database keeps the contract of the claims."""

from __future__ import annotations

from semel.testing.contracts.claims import ClaimsContract
from tests.messaging.places import InPostgres, InSqlite


class TestSqliteClaims(InSqlite, ClaimsContract):
    pass


class TestPostgresClaims(InPostgres, ClaimsContract):
    pass
