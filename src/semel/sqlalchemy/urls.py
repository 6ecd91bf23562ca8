"""Databases' URLs, as people have them: with the settings of PostgreSQL's own clients.

    postgresql://db/shop?sslmode=require&application_name=billing

asyncpg takes such settings in a DSN and not one by one, so they are handed to it there.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlencode

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from semel.errors import Misuse
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
