"""Where the tests of the messaging half run: mixins for contracts and for classes of tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from tests.messaging.worlds import memory_world, postgres_world, sqlite_world
from tests.stores.world import DatabaseWorld


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


class Scenarios:
    """Tests whose body is a coroutine, which runs in a world of its own."""

    def world(self) -> AbstractAsyncContextManager[DatabaseWorld]:
        raise NotImplementedError("say where it runs: InSqlite or InPostgres")

    def run(self, scenario: Callable[[DatabaseWorld], Awaitable[None]]) -> None:
        async def whole() -> None:
            async with self.world() as world:
                await scenario(world)

        asyncio.run(whole())


class DatabaseScenarios(Scenarios):
    """Those that need nothing of the world but its database."""

    def run(self, scenario: Callable[[Any], Awaitable[None]]) -> None:
        super().run(lambda world: scenario(world.database))
