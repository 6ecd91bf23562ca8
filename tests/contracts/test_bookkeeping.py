"""Every database keeps the contracts of the members, the outcomes and the versions."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
from sqlalchemy import delete

from semel.sqlalchemy.tables import (
    aggregate_version,
    consumer_member,
    consumer_outcome,
    crash_suspect,
    sequence_gap,
)
from semel.testing.contracts.bookkeeping import (
    MembersContract,
    OutcomesContract,
    VersionsContract,
)
from tests.messaging.worlds import memory_world, sql_world, sqlite_world

TABLES = (consumer_member, crash_suspect, consumer_outcome, aggregate_version, sequence_gap)


class InMemory:
    def world(self):
        return memory_world()


class InSqlite:
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.folder = tmp_path

    def world(self):
        return sqlite_world(self.folder)


class InPostgres:
    @pytest.fixture(autouse=True)
    def _place(self, books_url):
        self.url = books_url

    @asynccontextmanager
    async def world(self):
        async with sql_world(self.url, waits_for_locks=True) as world:
            async with world.database.engine.begin() as connection:
                for table in TABLES:
                    await connection.execute(delete(table))
            yield world


@pytest.fixture(scope="module")
def books_url(quick_postgres_server):
    """One database for all tests: making tables takes longer than most of them."""
    yield quick_postgres_server.create_database("books")
    quick_postgres_server.drop_database("books")


class TestMemoryMembers(InMemory, MembersContract):
    pass


class TestSqliteMembers(InSqlite, MembersContract):
    pass


@pytest.mark.postgres
class TestPostgresMembers(InPostgres, MembersContract):
    pass


class TestMemoryOutcomes(InMemory, OutcomesContract):
    pass


class TestSqliteOutcomes(InSqlite, OutcomesContract):
    pass


@pytest.mark.postgres
class TestPostgresOutcomes(InPostgres, OutcomesContract):
    pass


class TestMemoryVersions(InMemory, VersionsContract):
    pass


class TestSqliteVersions(InSqlite, VersionsContract):
    pass


@pytest.mark.postgres
class TestPostgresVersions(InPostgres, VersionsContract):
    pass
