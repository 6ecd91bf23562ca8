"""Engines with the settings that the claims need, and the URLs that name them.

    postgresql://db/shop?sslmode=require&application_name=billing

A URL may have the settings of PostgreSQL's own clients.  asyncpg accepts them in a DSN, but not as
arguments of `connect`, so they are passed in a DSN.

SQLite needs the most setup: with the driver's own transactions, a released savepoint survives the
outer ROLLBACK, and a transaction that begins with a read cannot become a write.
``sqlite://`` is a database in memory: one for each engine, which lasts as long as the engine.
It has one connection, which is replaced if it is lost.
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
from semel.messaging.tables import split_schema
from semel.secrets import create_private, masked

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
"""Settings that asyncpg reads from a DSN as PostgreSQL's own clients do."""

SSL_MODES: Final = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
FOR_SERVER: Final = frozenset({"application_name", "options"})
"""Settings that a client passes on to the server."""

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
"""Settings of SQLAlchemy and asyncpg themselves."""


def read_url(url: str) -> URL:
    """Parse a database's URL, and choose its driver.

    Raises:
        Misuse: it is not the URL of a database.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        # A ValueError, because SQLAlchemy converts the port to a number.
        raise Misuse(
            f"{masked(url)} is not the URL of a database; write postgresql://… or sqlite:///path"
        ) from error
    return parsed.set(drivername=DRIVERS.get(parsed.drivername, parsed.drivername))


def connect_arguments(url: URL) -> tuple[URL, dict[str, Any]]:
    """Split a URL of asyncpg into the URL and the arguments of `asyncpg.connect`.

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
        raise Misuse(f"{_shown(url)}: sslmode must be one of {', '.join(SSL_MODES)}")
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
            f"{_shown(url)}: connect_timeout must be a number of seconds, got {given!r}"
        ) from error


def _shown(url: URL) -> str:
    return url.set(drivername="postgresql").render_as_string(hide_password=True)


LOCK_SECONDS: Final = 2.0
SUPPORTED: Final = frozenset({"postgresql", "sqlite"})
READY: Final = "semel_ready"
_KEEPERS: Final[WeakKeyDictionary[Engine, sqlite3.Connection]] = WeakKeyDictionary()


def open_engine(url: str, lock_seconds: float = LOCK_SECONDS, **options: Any) -> AsyncEngine:
    """Create an engine for PostgreSQL or SQLite.

    ``postgresql://…`` means asyncpg and ``sqlite://…`` aiosqlite; other drivers are named as
    SQLAlchemy names them.  ``sqlite://`` alone is a new database in memory.  The URL may have
    settings of PostgreSQL's own clients, as ``?sslmode=require``.

    A ``?schema=`` in it is left out: it is for `SqlDatabase`.

    Raises:
        Misuse: *url* is not a URL, or names another database, a driver that is not installed,
            or a setting that the driver does not know.
    """
    parsed = read_url(split_schema(url)[0])
    if parsed.get_backend_name() not in SUPPORTED:
        raise Misuse(
            f"{masked(url)}: claims are kept in PostgreSQL or SQLite; "
            f"{parsed.get_backend_name()} has other statements"
        )
    parsed, told = connect_arguments(parsed)
    if parsed.drivername == ASYNCPG:
        # As settings of the connection: a SET would cost one more statement.
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
            f"{masked(url)}: {parsed.drivername} is not an installed asynchronous driver; "
            f"postgresql://… or sqlite:///… chooses one ({reason_of(error)})"
        ) from error
    if parsed.drivername == ASYNCPG:
        engine = engine.execution_options(**{READY: True})
    if is_new:
        _keep_in_memory(engine.sync_engine)
    return made_ready(engine, lock_seconds)


def is_in_memory(url: URL) -> bool:
    """Return whether a URL names no file: then each connection would have its own database."""
    return url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:")


def _keep_in_memory(engine: Engine) -> None:
    """Give *engine* a database in memory that stays when its connections are closed.

    A connection is discarded if a cancelled statement may still run on it; a plain ``:memory:``
    database would lose its data with it.
    """
    # SQLite shares a memdb whose name begins with "/" among the connections of one process.
    name = f"file:/semel-{uuid.uuid4().hex}?vfs=memdb"
    keeper = sqlite3.connect(name, uri=True, isolation_level=None, check_same_thread=False)
    _KEEPERS[engine] = keeper
    finalize(engine, keeper.close)

    def connect_there(dialect: Any, record: Any, arguments: Any, options: dict[str, Any]) -> None:
        arguments[:] = [name]
        options.update(uri=True, check_same_thread=False)

    event.listen(engine, "do_connect", connect_there)


def made_ready(engine: AsyncEngine, lock_seconds: float = LOCK_SECONDS) -> AsyncEngine:
    """Apply the settings to an engine of the caller; a second call changes nothing.

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
    """A connection that releases its locks when it is closed.

    SQLite keeps a closed connection and its transaction open while one of its cursors exists, for
    example in the traceback of a cancelled statement.
    """

    def close(self) -> None:
        """Roll back what is open, and close."""
        with suppress(sqlite3.Error):
            self.rollback()
        super().close()


def _close_completely(dialect: Any, record: Any, arguments: Any, options: dict[str, Any]) -> None:
    options.setdefault("factory", CompletelyClosed)
    if arguments and not options.get("uri") and arguments[0] not in ("", ":memory:"):
        # Only the owner may read payloads; SQLite gives its log the rights of the file.
        create_private(arguments[0])


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

# `sqlalchemy.event.contains` identifies engines by their address: it would report a new engine
# at the address of a freed one as having the listener already.
_LISTENING: Final[WeakKeyDictionary[Engine, set[Listener]]] = WeakKeyDictionary()


def listen_once(
    engine: AsyncEngine, name: str, listener: Callable[..., Any], **options: Any
) -> bool:
    """Register *listener* for event *name* of *engine*; False if it is registered already.

    Engines that differ only in their execution options count as one: they share their
    connections.
    """
    inside = inner_engine(engine.sync_engine)
    known = _LISTENING.setdefault(inside, set())
    if (name, listener) in known:
        return False
    event.listen(inside, name, listener, **options)
    known.add((name, listener))
    return True


def inner_engine(engine: Engine) -> Engine:
    """Return the engine without execution options: the same one for all that share connections."""
    while (proxied := getattr(engine, "_proxied", None)) is not None:
        engine = proxied
    return engine
