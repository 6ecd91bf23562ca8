"""Engines that are set up as the claims need it.

SQLite needs it most: with the driver's own transactions, a savepoint that was
released survives the outer ROLLBACK, and a transaction that begins with a read
cannot become a write.
"""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from typing import Any, Final

from sqlalchemy import event
from sqlalchemy.engine import Connection, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from semel.errors import Misuse
from semel.secrets import masked
from semel.sqlalchemy.listening import listen_once

LOCK_SECONDS: Final = 2.0
DRIVERS: Final = {
    "postgresql": "postgresql+asyncpg",
    "postgres": "postgresql+asyncpg",
    "sqlite": "sqlite+aiosqlite",
}
SUPPORTED: Final = frozenset({"postgresql", "sqlite"})
READY: Final = "semel_ready"


def open_engine(url: str, lock_seconds: float = LOCK_SECONDS, **options: Any) -> AsyncEngine:
    """Make an engine for PostgreSQL or SQLite.

    ``postgresql://…`` means asyncpg and ``sqlite://…`` aiosqlite; other drivers are named as
    SQLAlchemy names them.

    Raises:
        Misuse: it is another database, or no URL at all.
    """
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise Misuse(
            f"{masked(url)} is no database's URL; it looks like postgresql://… or sqlite:///path"
        ) from error
    parsed = parsed.set(drivername=DRIVERS.get(parsed.drivername, parsed.drivername))
    if parsed.get_backend_name() not in SUPPORTED:
        raise Misuse(
            f"{masked(url)}: claims are kept in PostgreSQL or SQLite; "
            f"{parsed.get_backend_name()} has other statements"
        )
    if parsed.drivername == "postgresql+asyncpg":
        # Once per connection, without a statement of its own.
        settings = {"lock_timeout": str(round(lock_seconds * 1000)), "application_name": "semel"}
        arguments = options.setdefault("connect_args", {})
        arguments["server_settings"] = {**settings, **arguments.get("server_settings", {})}
    engine = create_async_engine(parsed, **options)
    if parsed.drivername == "postgresql+asyncpg":
        engine = engine.execution_options(**{READY: True})
    return made_ready(engine, lock_seconds)


def made_ready(engine: AsyncEngine, lock_seconds: float = LOCK_SECONDS) -> AsyncEngine:
    """Set an engine of the caller's up, where its database needs it; doing so twice is harmless.

    Raises:
        Misuse: it is another database.
    """
    if engine.dialect.name not in SUPPORTED:
        raise Misuse(f"claims are kept in PostgreSQL or SQLite, not in {engine.dialect.name}")
    if engine.dialect.name == "sqlite" and listen_once(engine, "begin", _begin_immediate):
        event.listen(engine.sync_engine, "connect", _own_transactions(lock_seconds))
        event.listen(engine.sync_engine, "do_connect", _close_completely)
    return engine


class CompletelyClosed(sqlite3.Connection):
    """A connection that gives its locks back when it is closed.

    SQLite keeps a closed connection, and its transaction, for as long as somebody has a cursor
    of it: the traceback of a cancelled statement, say.
    """

    def close(self) -> None:
        """Roll back what is open, and close."""
        with suppress(sqlite3.Error):
            self.rollback()
        super().close()


def _close_completely(dialect: Any, record: Any, arguments: Any, options: dict[str, Any]) -> None:
    options.setdefault("factory", CompletelyClosed)


def _own_transactions(lock_seconds: float) -> Any:
    def on_connect(driver: Any, record: Any) -> None:
        driver.isolation_level = None
        cursor = driver.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute(f"PRAGMA busy_timeout={round(lock_seconds * 1000)}")
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.close()

    return on_connect


def _begin_immediate(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
