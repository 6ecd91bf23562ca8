"""A database for one test of the PostgreSQL sink.

Nothing of PostgreSQL is imported before a test asks for it: most tests here need none of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import psycopg


@pytest.fixture
def url(postgres_url: str) -> Iterator[str]:
    from semel.postgres.connect import pool

    yield postgres_url
    pool().close_all()


@pytest.fixture
def database(url: str) -> Iterator[psycopg.Connection]:
    """A connection, beside those of the sink; the table is there."""
    import psycopg

    from tests.unit.postgres.postgres_place import TABLE

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(TABLE)
        yield connection
