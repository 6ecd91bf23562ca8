"""Every database keeps the contract of the claims."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
from sqlalchemy import delete

from semel.sqlalchemy.tables import processed_message
from semel.testing.contracts.claims import ClaimsContract
from tests.messaging.worlds import memory_world, sql_world, sqlite_world


class TestMemoryClaims(ClaimsContract):
    def world(self):
        return memory_world()


class TestSqliteClaims(ClaimsContract):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.folder = tmp_path

    def world(self):
        return sqlite_world(self.folder)


@pytest.mark.postgres
class TestPostgresClaims(ClaimsContract):
    @pytest.fixture(autouse=True)
    def _place(self, claims_url):
        self.url = claims_url

    @asynccontextmanager
    async def world(self):
        async with sql_world(self.url, waits_for_locks=True) as world:
            async with world.database.engine.begin() as connection:
                await connection.execute(delete(processed_message))
            yield world


@pytest.fixture(scope="module")
def claims_url(quick_postgres_server):
    """One database for all tests: making tables takes longer than most of them."""
    yield quick_postgres_server.create_database("claims")
    quick_postgres_server.drop_database("claims")
