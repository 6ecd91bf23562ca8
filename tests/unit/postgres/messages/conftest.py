"""One database with the messaging tables for each file; every test finds it empty."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import psycopg

    from semel.postgres.messages import MessagesSink
    from semel.testing.services import PostgresServer


@pytest.fixture(scope="module")
def tables(quick_postgres_server: PostgresServer) -> Iterator[str]:
    from semel.postgres.connect import pool
    from tests.unit.postgres.messages.message_place import make_tables

    url = quick_postgres_server.create_database("messages")
    make_tables(url)
    yield url
    pool().close_all()
    quick_postgres_server.drop_database("messages")


@pytest.fixture
def url(tables: str) -> Iterator[str]:
    from semel.postgres.connect import pool
    from tests.unit.postgres.messages.message_place import empty

    empty(tables)
    yield tables
    pool().close_all()


@pytest.fixture
def database(url: str) -> Iterator[psycopg.Connection]:
    """A connection beside those of the sink."""
    from tests.unit.postgres.messages.message_place import connect

    with connect(url) as connection:
        yield connection


@pytest.fixture
def sink(url: str) -> Iterator[MessagesSink]:
    """The sink of a started pipeline."""
    from tests.unit.postgres.messages.message_place import make_sink

    sink = make_sink(url)
    yield sink
    sink.close()
