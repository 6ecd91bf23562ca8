"""A pytest plugin: real services as fixtures, for tests of users.

    semel_postgres       a PostgreSQL server, one for the whole session
    semel_postgres_url   an empty database on it, for one test alone
    semel_postgres_proxy a proxy before it, which loses or holds a reply, or cuts connections
    semel_kafka          a Kafka broker, one for the whole session, with such a `proxy`
    semel_seaweedfs      S3 and an Iceberg REST catalog, one for the whole session

pytest loads it where semel is installed.  A service is imported and started when the first test
asks for it.  Without Java or a package, a laptop skips the test and CI (``CI=true``) fails it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from semel.testing.services import CutProxy, KafkaServer, PostgresServer, SeaweedServer

Started = TypeVar("Started")
_numbers = count(1)


def start_or_skip(start: Callable[[], Started]) -> Started:
    """Start a service; without it, a laptop skips the test and CI fails it."""
    from semel.testing.services import ServiceUnavailable

    try:
        return start()
    except ServiceUnavailable as missing:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(missing))


def empty_database(server: PostgresServer) -> Iterator[str]:
    """Create a database, yield its URL, and drop it with everything in it."""
    name = f"test_{next(_numbers)}"
    yield server.create_database(name)
    server.drop_database(name)


@pytest.fixture(scope="session")
def semel_postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server, from a wheel; `stop("immediate")` crashes it, `start` recovers it."""
    from semel.testing.services import PostgresServer

    with start_or_skip(PostgresServer().start) as server:
        yield server


@pytest.fixture
def semel_postgres_url(semel_postgres: PostgresServer) -> Iterator[str]:
    """The URL of an empty PostgreSQL database, for this test alone."""
    yield from empty_database(semel_postgres)


@pytest.fixture
def semel_postgres_proxy(semel_postgres: PostgresServer) -> Iterator[CutProxy]:
    """A proxy before the PostgreSQL server, for this test alone; `through(url)` goes by it."""
    from semel.testing.services import CutProxy

    with CutProxy(semel_postgres.port) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def semel_kafka(pytestconfig: pytest.Config) -> Iterator[KafkaServer]:
    """A Kafka broker at `bootstrap`; clients of `cut_bootstrap` are cut off by `proxy`."""
    from semel.testing.services import KafkaServer, fetch_jars, first_download, java

    start_or_skip(java)
    if download := first_download():
        _say(pytestconfig, download)
        start_or_skip(lambda: fetch_jars(lambda far: _say(pytestconfig, far)))
    with start_or_skip(KafkaServer().start) as broker:
        yield broker


@pytest.fixture(scope="session")
def semel_seaweedfs() -> Iterator[SeaweedServer]:
    """S3 at `endpoint` with a `bucket`, and an Iceberg REST catalog at `catalog_uri`."""
    from semel.testing.services import SeaweedServer

    with start_or_skip(SeaweedServer().start) as server:
        yield server


def _say(config: pytest.Config, text: str) -> None:
    """Print a line now, though pytest captures the output: a download takes a while."""
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\nsemel: {text}", file=sys.__stderr__, flush=True)
