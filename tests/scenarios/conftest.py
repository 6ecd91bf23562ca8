"""The databases that scenarios run on."""

from __future__ import annotations

from functools import partial

import pytest

from tests.messaging.worlds import postgres_world, sqlite_world
from tests.scenarios.orders import InShop, in_shop


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
