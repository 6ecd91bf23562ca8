"""What the tests that kill services on Kafka share."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from semel.testing.kill import Zygote


@pytest.fixture(scope="session")
def services() -> Iterator[Zygote]:
    """A process that forks services."""
    modules = ["asyncpg", "sqlalchemy.dialects.postgresql.asyncpg"]
    if find_spec("faststream"):
        modules.append("tests.kafka.faststream_service")
    with Zygote("tests.kafka.service_program:main", modules) as zygote:
        yield zygote


@pytest.fixture
def make_scene(services, tmp_path, kafka_server, postgres_url):
    """Make a scene on the real broker and the real database."""
    from tests.kafka.kill_scene import KafkaScene

    made = []

    def make(kind="single", **more):
        made.append(KafkaScene(services, tmp_path, kafka_server, postgres_url, kind, **more))
        return made[-1]

    yield make
    for scene in made:
        scene.close()
