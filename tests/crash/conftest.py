"""What the tests with real processes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from semel.testing.kill import Zygote
from tests.crash.local_scene import MODULES


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """A process that forks local drivers."""
    with Zygote("tests.crash.local_driver:main", MODULES) as zygote:
        yield zygote


@pytest.fixture(scope="session")
def workers() -> Iterator[Zygote]:
    """A process that forks consumer workers."""
    modules = ("tests.crash.scripted", "aiosqlite", "asyncpg")
    with Zygote("semel.testing.worker:main", modules) as zygote:
        yield zygote
