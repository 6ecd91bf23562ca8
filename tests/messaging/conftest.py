"""How a test of the outbox, the relay or the inbox opens its database."""

from __future__ import annotations

import pytest

from tests.messaging.outgoing import DATABASES, OpenWorld, opened


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest) -> OpenWorld:
    """Every kind of database, one after the other."""
    return opened(request.param, request)


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> OpenWorld:
    """The one in memory, for what does not depend on the kind."""
    return opened("memory", request)


@pytest.fixture
def postgres(request: pytest.FixtureRequest) -> OpenWorld:
    """PostgreSQL; a test that takes it is marked so."""
    return opened("postgres", request)
