"""Where the tests of the messaging half run: mixins for contracts and for classes of tests."""

from __future__ import annotations

import pytest

from tests.messaging.worlds import memory_world, postgres_world, sqlite_world


class InMemory:
    def world(self):
        return memory_world()


class InSqlite:
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = tmp_path

    def world(self):
        return sqlite_world(self.folder)


@pytest.mark.postgres
class InPostgres:
    @pytest.fixture(autouse=True)
    def _server(self, quick_postgres_server):
        self.server = quick_postgres_server

    def world(self):
        return postgres_world(self.server)
