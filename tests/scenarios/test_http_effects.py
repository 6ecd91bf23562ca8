"""A call to somebody else's system happens once, though its caller is killed behind it (S3-22)."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from sqlalchemy import text

from semel.sql.database import SqlDatabase
from semel.testing.kill import Forked, Zygote

pytestmark = [pytest.mark.kill, pytest.mark.timeout(120)]

DATABASES = ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]


class Provider:
    """A payment provider that takes every key once, and counts."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.answer = 201
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                if provider.answer == 201:
                    provider.calls[self.headers["Idempotency-Key"]] += 1
                self.send_response(provider.answer)
                self.end_headers()

            def log_message(self, *said: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/charges"

    @property
    def effects(self) -> int:
        """How often a customer was charged."""
        return len(self.calls)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def provider() -> Iterator[Provider]:
    started = Provider()
    yield started
    started.close()


@pytest.fixture(scope="module")
def programs() -> Iterator[Zygote]:
    modules = ("sqlalchemy.dialects.sqlite.aiosqlite", "sqlalchemy.dialects.postgresql.asyncpg")
    with Zygote("tests.scenarios.effects_program:main", modules) as zygote:
        yield zygote


class Shop:
    """A database with orders that were charged."""

    def __init__(self, url: str) -> None:
        self.url = url
        asyncio.run(self._create())

    def charged(self) -> list[str]:
        return asyncio.run(self._charged())

    async def _create(self) -> None:
        database = SqlDatabase(self.url)
        async with database.engine.begin() as connection:
            if connection.dialect.name == "postgresql":
                await connection.execute(text("DROP SCHEMA IF EXISTS semel CASCADE"))
            await connection.execute(text("DROP TABLE IF EXISTS charge"))
            await connection.execute(text("CREATE TABLE charge (id text)"))
        await database.create_tables()
        await database.close()

    async def _charged(self) -> list[str]:
        database = SqlDatabase(self.url)
        async with database.engine.connect() as connection:
            found = (await connection.execute(text("SELECT id FROM charge"))).scalars().all()
        await database.close()
        return list(found)


@pytest.fixture(scope="module")
def shop_url(quick_postgres_server) -> Iterator[str]:
    yield quick_postgres_server.create_database("http_effects")
    quick_postgres_server.drop_database("http_effects")


@pytest.fixture(params=DATABASES)
def shop(request, tmp_path) -> Iterator[Shop]:
    if request.param == "sqlite":
        yield Shop(f"sqlite:///{tmp_path}/shop.db")
        return
    yield Shop(request.getfixturevalue("shop_url"))


@pytest.fixture
def program(programs, shop, provider, tmp_path):
    def of(way: str) -> Forked:
        return programs.program(tmp_path / "log", way, shop.url, provider.url)

    return of


@pytest.mark.parametrize("way", ["key", "intent"])
def test_in_peace_there_is_one_call(program, provider, shop, way):
    for _ in range(2):
        program(way).run_until_done(most_starts=1)

    assert (provider.effects, provider.calls.total()) == (1, 1)
    assert shop.charged() == ["order-7"]


def test_a_handler_killed_between_its_call_and_its_commit_has_one_effect(program, provider, shop):
    assert program("key").run(crash_at="handle:after").was_killed
    assert shop.charged() == []
    program("key").run_until_done(most_starts=1)

    assert provider.calls.total() == 2
    assert provider.effects == 1
    assert shop.charged() == ["order-7"]


@pytest.mark.parametrize(
    ("window", "calls"),
    [
        ("message_commit:before", 1),
        ("message_commit:after", 1),
        ("relay_publish:after", 2),
        ("relay_delete:after", 1),
    ],
)
def test_an_intent_that_is_killed_anywhere_has_one_effect(program, provider, shop, window, calls):
    assert program("intent").run(crash_at=window).was_killed
    program("intent").run_until_done(most_starts=1)

    assert provider.effects == 1
    assert provider.calls.total() == calls
    assert shop.charged() == ["order-7"]


def test_without_a_key_the_customer_is_charged_twice(program, provider, shop):
    assert program("no-key").run(crash_at="handle:after").was_killed
    program("no-key").run_until_done(most_starts=1)

    assert provider.effects == 2
    assert shop.charged() == ["order-7"]


def test_an_intent_waits_until_the_provider_is_back(program, provider, shop):
    provider.answer = 503
    waiting = program("intent").start()
    while not shop.charged():
        threading.Event().wait(0.02)
    provider.answer = 201

    assert waiting.wait().code == 0
    assert provider.effects == 1
