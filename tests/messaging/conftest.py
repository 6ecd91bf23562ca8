"""How tests open their database: those of the outbox, the relay and the inbox, and of commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.messaging.cli_books import CliBooks
from tests.messaging.outgoing import DATABASES, OpenWorld, opened
from tests.messaging.worlds import memory_world


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest) -> OpenWorld:
    """Every kind of database, one after the other."""
    return opened(request.param, request)


@pytest.fixture
def memory() -> OpenWorld:
    """SQLite in memory, for what does not depend on the kind."""
    return memory_world


@pytest.fixture
def postgres(request: pytest.FixtureRequest) -> OpenWorld:
    """PostgreSQL; a test that takes it is marked so."""
    return opened("postgres", request)


@pytest.fixture
def books(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliBooks:
    """A database in a file, which commands find without being told."""
    made = CliBooks(tmp_path / "shop.db")
    monkeypatch.setenv("SEMEL_DATABASE", made.url)
    return made
