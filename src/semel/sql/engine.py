"""Engines that are set up as the claims need it, and the URLs that name them.

    postgresql://db/shop?sslmode=require&application_name=billing

A URL may have the settings of PostgreSQL's own clients.  asyncpg takes them in a DSN and not one
by one, so they are handed to it there.

SQLite needs the setup most: with the driver's own transactions, a savepoint that was released
survives the outer ROLLBACK, and a transaction that begins with a read cannot become a write.
``sqlite://`` is a database in memory: one for each engine, which lives as long as the engine does.
It has one connection, and another one in its place if that is lost.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlencode
from weakref import WeakKeyDictionary, finalize

from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, InvalidRequestError, NoSuchModuleError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool

from semel.errors import Misuse, reason_of
from semel.secrets import masked

DRIVERS: Final = {
    "postgresql": "postgresql+asyncpg",
    "postgres": "postgresql+asyncpg",
    "sqlite": "sqlite+aiosqlite",
}

ASYNCPG: Final = "postgresql+asyncpg"

IN_DSN: Final = frozenset(
    [
        "sslmode",
        "sslrootcert",
        "sslcert",
        "sslkey",
        "sslpassword",
        "sslcrl",
        "sslnegotiation",
        "ssl_min_protocol_version",
        "ssl_max_protocol_version",
        "passfile",
        "target_session_attrs",
        "krbsrvname",
        "gsslib",
    ]
)
"""What asyncpg reads in a DSN as PostgreSQL's own clients do."""

SSL_MODES: Final = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
FOR_SERVER: Final = frozenset({"application_name", "options"})
"""What a client only passes on."""

OF_DRIVER: Final = frozenset(
    [
        "host",
        "port",
        "user",
        "password",
        "database",
        "service",
        "servicefile",
        "timeout",
        "command_timeout",
        "ssl",
        "direct_tls",
        "statement_cache_size",
        "max_cached_statement_lifetime",
        "max_cacheable_statement_size",
        "prepared_statement_cache_size",
        "async_fallback",
    ]
)
"""What SQLAlchemy and asyncpg have as settings of their own."""


def read_url(url: str) -> URL:
    """Read a database's URL, and name its driver.

    Raises:
        Misuse: it is none.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        # SQLAlchemy makes a number of the port.
        raise Misuse(
            f"{masked(url)} is no database's URL; it looks like postgresql://… or sqlite:///path"
        ) from error
    return parsed.set(drivername=DRIVERS.get(parsed.drivername, parsed.drivername))


def connect_arguments(url: URL) -> tuple[URL, dict[str, Any]]:
    """Take out of an asyncpg's URL what it wants to be told otherwise, and say how.

    Raises:
        Misuse: it has a setting that asyncpg does not know.
    """
    if url.drivername != ASYNCPG:
        return url, {}
    known = IN_DSN | FOR_SERVER | OF_DRIVER | {"connect_timeout"}
    if unknown := sorted(set(url.query) - known):
        raise Misuse(
            f"{_shown(url)}: asyncpg has no setting {', '.join(unknown)}; leave it out, or choose "
            f"another driver, as in postgresql+psycopg://…"
        )
    if url.query.get("sslmode", SSL_MODES[0]) not in SSL_MODES:
        raise Misuse(f"{_shown(url)}: sslmode is one of {', '.join(SSL_MODES)}")
    arguments: dict[str, Any] = {}
    if in_dsn := {name: url.query[name] for name in sorted(IN_DSN & set(url.query))}:
        arguments["dsn"] = f"postgresql://?{urlencode(in_dsn, doseq=True)}"
    if for_server := {name: url.query[name] for name in FOR_SERVER & set(url.query)}:
        arguments["server_settings"] = for_server
    if seconds := url.query.get("connect_timeout"):
        arguments["timeout"] = _seconds(url, seconds)
    return url.difference_update_query(IN_DSN | FOR_SERVER | {"connect_timeout"}), arguments


def _seconds(url: URL, given: str | tuple[str, ...]) -> float:
    try:
        return float(str(given))
    except ValueError as error:
        raise Misuse(
            f"{_shown(url)}: connect_timeout is a number of seconds, not {given!r}"
        ) from error


def _shown(url: URL) -> str:
    return url.set(drivername="postgresql").render_as_string(hide_password=True)


LOCK_SECONDS: Final = 2.0
SUPPORTED: Final = frozenset({"postgresql", "sqlite"})
READY: Final = "semel_ready"
_KEEPERS: Final[WeakKeyDictionary[Engine, sqlite3.Connection]] = WeakKeyDictionary()


def open_engine(url: str, lock_seconds: float = LOCK_SECONDS, **options: Any) -> AsyncEngine:
    """Make an engine for PostgreSQL or SQLite.

    ``postgresql://…`` means asyncpg and ``sqlite://…`` aiosqlite; other drivers are named as
    SQLAlchemy names them.  ``sqlite://`` alone is a new database in memory.  The URL may have
    settings of PostgreSQL's own clients, as ``?sslmode=require``.

    Raises:
        Misuse: it is another database, no URL at all, or one of a driver or with a setting that
            cannot be used.
    """
    parsed = read_url(url)
    if parsed.get_backend_name() not in SUPPORTED:
        raise Misuse(
            f"{masked(url)}: claims are kept in PostgreSQL or SQLite; "
            f"{parsed.get_backend_name()} has other statements"
        )
    parsed, told = connect_arguments(parsed)
    if parsed.drivername == ASYNCPG:
        # Once per connection, without a statement of its own.
        settings = {"lock_timeout": str(round(lock_seconds * 1000)), "application_name": "semel"}
        arguments = options["connect_args"] = {**told, **options.get("connect_args", {})}
        said = told.get("server_settings", {}), arguments.get("server_settings", {})
        arguments["server_settings"] = {**settings, **said[0], **said[1]}
    is_new = is_in_memory(parsed)
    if is_new:
        alone = {"poolclass": AsyncAdaptedQueuePool, "pool_size": 1, "max_overflow": 0}
        options = {**alone, "pool_timeout": lock_seconds, **options}
    try:
        engine = create_async_engine(parsed, **options)
    except (InvalidRequestError, NoSuchModuleError, ModuleNotFoundError) as error:
        raise Misuse(
            f"{masked(url)}: {parsed.drivername} is no asynchronous driver that is installed; "
            f"postgresql://… or sqlite:///… chooses one ({reason_of(error)})"
        ) from error
    if parsed.drivername == ASYNCPG:
        engine = engine.execution_options(**{READY: True})
    if is_new:
        _keep_in_memory(engine.sync_engine)
    return made_ready(engine, lock_seconds)


def is_in_memory(url: URL) -> bool:
    """Tell whether a URL names no file: each connection would have a database of its own."""
    return url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:")


def keeper_of(engine: AsyncEngine) -> sqlite3.Connection:
    """Return the connection that keeps the database in memory of *engine*; it is never in use.

    Raises:
        KeyError: `open_engine` made no database in memory for this engine.
    """
    return _KEEPERS[engine.sync_engine]


def _keep_in_memory(engine: Engine) -> None:
    """Give *engine* a database in memory that outlives its connections.

    A connection is given up where a cancelled statement may still run on it; the data of a
    plain ``:memory:`` would go with it.
    """
    # SQLite shares a database of this kind among the connections of one process, by its name.
    name = f"file:/semel-{uuid.uuid4().hex}?vfs=memdb"
    keeper = sqlite3.connect(name, uri=True, isolation_level=None, check_same_thread=False)
    _KEEPERS[engine] = keeper
    finalize(engine, keeper.close)

    def connect_there(dialect: Any, record: Any, arguments: Any, options: dict[str, Any]) -> None:
        arguments[:] = [name]
        options.update(uri=True, check_same_thread=False)

    event.listen(engine, "do_connect", connect_there)


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


Listener = tuple[str, Callable[..., Any]]

# `sqlalchemy.event.contains` knows engines by their address, and takes a new engine at the
# address of a freed one for one that is listened to already.
_LISTENING: Final[WeakKeyDictionary[Engine, set[Listener]]] = WeakKeyDictionary()


def listen_once(
    engine: AsyncEngine, name: str, listener: Callable[..., Any], **options: Any
) -> bool:
    """Register *listener* for *engine*'s event *name* once; False where it is registered.

    An engine that differs from another in its execution options only is that other one: they
    have their connections in common.
    """
    inside = _whole(engine.sync_engine)
    known = _LISTENING.setdefault(inside, set())
    if (name, listener) in known:
        return False
    event.listen(inside, name, listener, **options)
    known.add((name, listener))
    return True


def _whole(engine: Engine) -> Engine:
    while (proxied := getattr(engine, "_proxied", None)) is not None:
        engine = proxied
    return engine
