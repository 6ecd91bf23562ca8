"""The databases that scenarios run on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from tests.messaging.worlds import memory_database, postgres_world, sqlite_world
from tests.scenarios.orders import InShop, in_shop
from tests.scenarios.services import Serve, served
from tests.stores.world import DatabaseWorld


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def run(request, tmp_path) -> InShop:
    """Runs a scenario on a database of its own."""
    if request.param == "sqlite":
        return in_shop(partial(sqlite_world, tmp_path))
    return request.getfixturevalue("run_on_postgres")


@pytest.fixture
def run_on_postgres(quick_postgres_server) -> InShop:
    """Runs a scenario on PostgreSQL: for what SQLite, with its one writer, does otherwise."""
    return in_shop(partial(postgres_world, quick_postgres_server))


@pytest.fixture(params=["memory", pytest.param("postgres", marks=pytest.mark.postgres)])
def serve(request) -> Serve:
    """Runs a scenario with a service of its own, in memory and on PostgreSQL."""
    if request.param == "memory":
        return served(real_time_world)
    return request.getfixturevalue("serve_on_postgres")


@pytest.fixture
def serve_on_postgres(quick_postgres_server) -> Serve:
    """Runs a scenario with a service of its own on PostgreSQL."""
    return served(partial(postgres_world, quick_postgres_server))


@asynccontextmanager
async def real_time_world() -> AsyncIterator[DatabaseWorld]:
    """A database in memory on the machine's clock: the runner waits by it, too."""

    async def age(seconds: float) -> None:
        raise NotImplementedError("time passes by itself")

    yield DatabaseWorld(memory_database(), age, waits_for_locks=False)
