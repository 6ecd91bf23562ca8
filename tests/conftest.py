"""The real services that tests share, each started when the first test asks for it."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Connection, Engine, event

from semel.testing.plugin import empty_database
from semel.testing.plugin import start_or_skip as require
from semel.testing.services import (
    KafkaServer,
    PostgresServer,
    SeaweedServer,
    ServiceUnavailable,
    connector_jars,
)
from semel.testing.services.processes import java, package_folder
from tests.rabbit.server import RabbitServer
from tests.turns import JVM, Turns

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.unit.kafka.schema_registry import SchemaRegistry

# Without it, Spark runs Python tasks (those of our subprocesses, too) on PATH's python3.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

# Executors inherit the environment in which Spark's JVM starts, long before a store does.
os.environ["AWS_ACCESS_KEY_ID"] = SeaweedServer.access_key
os.environ["AWS_SECRET_ACCESS_KEY"] = SeaweedServer.secret_key

# The JVMs of tests live for seconds: the optimizing compiler costs them half as much again.
for name in ("SPARK_SUBMIT_OPTS", "SPARK_LAUNCHER_OPTS", "SPARK_DAEMON_JAVA_OPTS"):
    os.environ.setdefault(name, "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


class Statements(dict[Any, Any]):
    """The statements that SQLAlchemy has compiled, for the engines of all tests.

    It compiles them for one engine, whose dialect stands first in the key, and nearly every test
    has an engine of its own: a third of its time would be for compiling the same again.
    """

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._shared(key), default)

    def __setitem__(self, key: Any, compiled: Any) -> None:
        super().__setitem__(self._shared(key), compiled)

    def _shared(self, key: Any) -> Any:
        dialect, *others = key
        return type(dialect), dialect.server_version_info, *others


STATEMENTS = Statements()


@event.listens_for(Engine, "engine_connect")
def _hurry(connection: Connection) -> None:
    """Compile each statement once, and commit to SQLite without fsync: no test cuts the power."""
    connection.execution_options(compiled_cache=STATEMENTS)
    known = connection.connection.info
    # An asynchronous connection could be cancelled here, and would be lost to its pool.
    if connection.dialect.driver == "pysqlite" and "is_hurried" not in known:
        known["is_hurried"] = True
        with suppress(sqlite3.Error), closing(connection.connection.cursor()) as cursor:
            cursor.execute("PRAGMA synchronous=OFF")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Turns:
    """Say which process runs which tests."""
    return Turns(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let what takes longest run first.

    Raises:
        pytest.UsageError: a test needs a JVM, and is not where such tests are.
    """

    def starts_jvm(item: pytest.Item) -> bool:
        return any(item.get_closest_marker(name) for name in ("spark", "kafka"))

    for item in filter(starts_jvm, items):
        if not item.nodeid.startswith(JVM):
            raise pytest.UsageError(f"{item.nodeid} starts a JVM: add its file to tests/turns.py")
    items.sort(key=lambda item: not starts_jvm(item))


@pytest.fixture(autouse=True)
def _close_databases() -> Iterator[None]:
    """Close the databases in memory that a test made."""
    yield
    worlds = sys.modules.get("tests.messaging.worlds")
    if worlds is not None and worlds._in_memory:
        asyncio.run(worlds.close_all())


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    with require(PostgresServer(18).start) as server:
        yield server


@pytest.fixture(scope="session")
def postgres16_server() -> Iterator[PostgresServer]:
    with require(PostgresServer(16).start) as server:
        yield server


@pytest.fixture(scope="session")
def quick_postgres_server() -> Iterator[PostgresServer]:
    """A server that does not wait for the disk, for many small tests that never crash it."""
    with require(PostgresServer(18, {"fsync": "off"}).start) as server:
        yield server


@pytest.fixture(scope="session")
def quick_postgres16_server() -> Iterator[PostgresServer]:
    with require(PostgresServer(16, {"fsync": "off"}).start) as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """An empty database of PostgreSQL 18 for this test alone."""
    yield from empty_database(postgres_server)


@pytest.fixture
def postgres16_url(postgres16_server: PostgresServer) -> Iterator[str]:
    """An empty database of PostgreSQL 16 for this test alone."""
    yield from empty_database(postgres16_server)


@pytest.fixture(scope="session")
def kafka_server() -> Iterator[KafkaServer]:
    # Everything is allowed, but for what a test forbids.
    rights = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
    settings = {"authorizer.class.name": rights, "allow.everyone.if.no.acl.found": "true"}
    with require(KafkaServer(settings=settings).start) as broker:
        yield broker


@pytest.fixture(scope="session")
def rabbit_server() -> Iterator[RabbitServer]:
    """A RabbitMQ node; without the system's package its tests are skipped, in CI, too."""
    if not RabbitServer.is_installed():
        pytest.skip("there is no RabbitMQ: apt install rabbitmq-server")
    with require(RabbitServer().start) as server:
        yield server


@pytest.fixture(scope="session")
def seaweedfs() -> Iterator[SeaweedServer]:
    """S3 and an Iceberg REST catalog; tests share its bucket, each with prefixes of its own."""
    with require(SeaweedServer().start) as server:
        yield server


@pytest.fixture
def schema_registry() -> Iterator[SchemaRegistry]:
    """A schema registry without schemas, in this process."""
    from tests.unit.kafka.schema_registry import SchemaRegistry

    registry = require(SchemaRegistry)
    yield registry
    registry.stop()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session in this process, with Spark's Kafka connector where it can be had."""
    require(java)
    require(lambda: package_folder("pyspark", extra="demo"))
    from pyspark.sql import SparkSession

    try:
        jars = connector_jars()
    except ServiceUnavailable:
        jars = []
    folder = tmp_path_factory.mktemp("spark")
    session = (
        SparkSession.builder.master("local[2]")
        .appName("semel-tests")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.jars", ",".join(jars))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()
