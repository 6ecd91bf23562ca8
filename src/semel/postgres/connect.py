"""Connections to PostgreSQL: a few per process, reused, closed when idle.

The ``application_name`` of every session is ``semel:<scope>:<epoch>``, so that a
newer owner can end the sessions of older ones: a stopped process may hold locks.

What the server's errors mean is decided by their SQLSTATE, never by their text:

    Retryable   the connection, the server's state, locks, deadlocks, resources
    Permanent   constraints, values, names, types, privileges

Any other error is unknown, and the call is repeated.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import random
import select
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, TypeAlias

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import Conninfo, PGconn, Ping, TransactionStatus

from semel.errors import Misuse, Permanent, Retryable, SemelError, servers_words
from semel.pipeline.sink import SinkFatal, SinkOutcome, SinkRetryable
from semel.pipeline.txn import Scope
from semel.secrets import Password, is_ambiguous, masked, resolve, scrubbed

Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]

MOST_CONNECTIONS: Final = 16
"""Per process and database, unless the sink says otherwise."""


class Purpose(Enum):
    """What a connection is lent for."""

    WORK = "work"
    """Any number of statements; the caller holds no other connection."""

    STATEMENT = "statement"
    """One statement beside a held transaction: it may exceed the limit by one, because a wait
    for the other holders, who wait as well, would never end."""


IDLE_SECONDS: Final = 60.0
_WAIT_SECONDS: Final = 30.0
_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 3.0

_DEFAULTS: Final[Mapping[str, Any]] = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
}

# A held transaction waits for the decision, even if that takes long; its rows must be durable
# when it commits; and times are written and read in UTC.  transaction_timeout is new in 17.
#
# Names and operators that other roles create must not be found instead of the server's own, so
# the search path is pinned; `OWN_PATH` is for statements that find or fire what users wrote.
# It is pinned first, because the second statement has an operator.
_SESSION: Final = """
SET search_path TO pg_catalog, pg_temp;
SELECT pg_catalog.set_config(name, wanted, false)
  FROM pg_catalog.pg_settings JOIN (VALUES
       ('idle_in_transaction_session_timeout', '0'),
       ('idle_session_timeout', '0'), ('statement_timeout', '0'), ('transaction_timeout', '0'),
       ('default_transaction_isolation', 'read committed'),
       ('default_transaction_read_only', 'off'), ('TimeZone', 'UTC'),
       ('synchronous_commit', CASE pg_catalog.current_setting('synchronous_commit')
                              WHEN 'off' THEN 'on'
                              ELSE pg_catalog.current_setting('synchronous_commit') END)
       ) AS ours (setting_name, wanted) ON name = setting_name
"""


PINNED_PATH: Final = "SET LOCAL search_path TO pg_catalog, pg_temp"

OWN_PATH: Final = "SET LOCAL search_path TO DEFAULT"
"""The role's own search path, for a table without its schema, and for triggers."""


# The owner of a table decides which functions run when somebody writes to it, with the writer's
# rights: in a trigger, a default, a check.  To read a plain table runs none.
TRUSTED: Final = """coalesce(pg_has_role(c.relowner, 'MEMBER') OR
    (SELECT rolsuper FROM pg_catalog.pg_roles WHERE oid = c.relowner), true)"""
"""Whether relation *c* is this role's own, that of a role of which it is a member, or absent."""

PLAIN: Final = "c.relkind = 'r' AND NOT c.relrowsecurity"
"""Whether relation *c* is a table without row security."""


@dataclass(frozen=True, slots=True)
class Address:
    """The URL and login of a database.  Its repr has no password, but its pickle does."""

    url: str = field(repr=False)
    label: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    most_connections: int | None = None
    """Of this process; None for the default."""

    has_worked: bool = False
    """Whether this login has succeeded before, perhaps in another process."""

    @classmethod
    def of(
        cls,
        url: str,
        password: Password,
        options: Mapping[str, Any],
        most_connections: int | None = None,
    ) -> Address:
        """Resolve the password now, so that executors need no callable."""
        if not url.startswith(("postgresql://", "postgres://")):
            raise Misuse(f"{masked(url)!r} is not a URL such as postgresql://user@host/database")
        if is_ambiguous(url):
            raise Misuse(
                f"{masked(url)} can be read in two ways: in a password, write @ as %40 and / as %2F"
            )
        return cls(resolve(url, password), masked(url), dict(options), most_connections)

    @property
    def database(self) -> Hashable:
        """What is equal for two spellings of one server, database and login."""
        return database_of(self.url, self.options)

    @property
    def variant(self) -> str:
        """All settings but the password, which may change: sessions may differ in any of them."""
        try:
            told = conninfo_to_dict(self.url, **self.options) | {"password": ""}
        except psycopg.Error:
            told = {"url": self.label}
        return hashlib.sha256(repr(sorted(told.items())).encode()).hexdigest()

    def connect(self, application: str) -> Connection:
        """Open a session with semel's settings, in autocommit.

        Raises:
            Retryable: the server does not answer or refuses the login.
        """
        options = {**_DEFAULTS, **self.options, "application_name": application}
        try:
            connection = psycopg.connect(
                self.url, autocommit=True, prepare_threshold=None, **options
            )
        except psycopg.ProgrammingError:
            # The driver's text may quote the URL, and with it the password.
            raise Misuse(f"{self.label} is not a valid PostgreSQL URL") from None
        except psycopg.Error as error:
            reason = scrubbed(" ".join(str(error).split()), self.url)
            raise Retryable(f"{self.label}: {reason}") from None
        connection.execute(_SESSION)
        return connection

    def answers(self) -> bool:
        """Return whether the server accepts connections, even if it refuses this login."""
        told = make_conninfo(self.url, **{**_DEFAULTS, **self.options})
        return PGconn.ping(told.encode()) == Ping.OK


@dataclass(frozen=True, slots=True)
class Login:
    """A sink's settings for the login; its repr has no password."""

    url: str = field(repr=False)
    password: Password = field(repr=False)
    options: Mapping[str, Any] = field(repr=False)
    most_connections: int | None = None

    @property
    def label(self) -> str:
        """The URL without passwords."""
        return masked(self.url)

    def address(self) -> Address:
        """Resolve the current password."""
        return Address.of(self.url, self.password, self.options, self.most_connections)

    def key(self, schema: str) -> Hashable:
        """Return what is equal for sinks of one server, database, role and bookkeeping schema."""
        return database_of(self.url, self.options), schema


# What distinguishes two servers, databases or logins.  Other settings say how to connect, and a
# transaction that several sinks share uses those of the first one.
_IDENTIFYING: Final = ("hostaddr", "dbname", "user", "options", "service", "target_session_attrs")


def database_of(url: str, options: Mapping[str, Any]) -> Hashable:
    """Return what is equal for two spellings of one server, database and login."""
    try:
        found = conninfo_to_dict(url, **options)
    except psycopg.Error:
        return masked(url)  # the first connection explains what is wrong
    defaults = {o.keyword.decode(): o.val.decode() for o in Conninfo.get_defaults() if o.val}
    told = {name: str(value) for name, value in {**defaults, **found}.items() if value}
    told.setdefault("dbname", told.get("user", ""))
    host = told.get("host", "")
    host = host if "/" in host else host.lower()  # a socket's folder keeps its case
    # One port for all hosts may be written once, or for each.
    ports = [port or defaults["port"] for port in told["port"].split(",")]
    same = ports[:1] if len({*ports}) == 1 else ports
    return (host, *(told.get(name, "") for name in _IDENTIFYING), *same)


def application_name(scope: Scope | None, epoch: int = 0) -> str:
    """Return the name of the sessions of one owner."""
    return "semel" if scope is None else f"semel:{scope.slug}:{epoch}"


def epoch_of(application: str, scope: Scope) -> int | None:
    """Read the epoch from a session's name; None if it is not this scope's."""
    prefix = f"semel:{scope.slug}:"
    number = application.removeprefix(prefix)
    return int(number) if application.startswith(prefix) and number.isdecimal() else None


_Key: TypeAlias = tuple[Hashable, str, str]
"""Database, application and variant: sessions with equal ones are interchangeable."""


class Pool:
    """The connections of one process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._changed = threading.Condition()
        self._idle: dict[_Key, list[tuple[float, Connection]]] = defaultdict(list)
        self._lent: dict[int, tuple[_Key, Connection]] = {}
        self._opening: Counter[Hashable] = Counter()
        self._worked: set[Hashable] = set()
        """The databases and logins that have answered."""

        self._reaper: threading.Timer | None = None

    def take(
        self, address: Address, application: str, purpose: Purpose = Purpose.WORK
    ) -> Connection:
        """Lend a connection that was open a moment ago.

        Raises:
            Retryable: all are lent, or the server does not answer.
        """
        database, most = address.database, address.most_connections or MOST_CONNECTIONS
        key = (database, application, address.variant)
        with self._changed:
            deadline = time.monotonic() + _WAIT_SECONDS
            spare = purpose is Purpose.STATEMENT
            while self._count_lent(database) >= most + spare:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise Retryable(
                        f"{address.label}: all {most} connections of this process are in use; "
                        f"give the sinks a higher connections="
                    )
            while self._idle[key]:
                _, connection = self._idle[key].pop()
                if _is_alive(connection):
                    self._lent[id(connection)] = (key, connection)
                    return connection
                connection.close()
            self._make_room(database, most + spare)
            self._opening[database] += 1  # counts now, so that two threads respect the limit
        try:
            connection = self._open(address, application, deadline)
            with self._changed:
                self._lent[id(connection)] = (key, connection)
                self._worked.add(database)
            return connection
        finally:
            with self._changed:
                self._opening[database] -= 1
                self._changed.notify_all()

    def _make_room(self, database: Hashable, most: int) -> None:
        """Close the oldest idle connections of other owners in this process, beyond the limit."""
        idle = [
            (at, key) for key, found in self._idle.items() if key[0] == database for at, _ in found
        ]
        for _, key in sorted(idle)[: max(0, self._count_lent(database) + len(idle) + 1 - most)]:
            self._idle[key].pop(0)[1].close()

    def _open(self, address: Address, application: str, deadline: float) -> Connection:
        """Open a connection; wait while the server has none left.

        libpq hides the SQLSTATE of a refused login (53300: too many clients).  But a login that
        has worked, refused by a server that accepts connections, can only have met a limit.
        """
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return address.connect(application)
            except Retryable:
                worked = address.has_worked or address.database in self._worked
                if not worked or time.monotonic() + pause > deadline or not address.answers():
                    raise
            self.close_idle(database=address.database)
            time.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def give_back(self, connection: Connection) -> None:
        """Take a connection back; one that is not idle, or is broken, is closed."""
        with self._changed:
            key, _ = self._lent.pop(id(connection), (None, None))
            if key is not None and _is_alive(connection):
                self._idle[key].append((time.monotonic(), connection))
                self._arm()
            else:
                connection.close()
            self._changed.notify_all()

    def close_idle(self, older_than_seconds: float = 0.0, database: Hashable = None) -> None:
        """Close connections that were not used for a while."""
        now = time.monotonic()
        with self._changed:
            for key, waiting in self._idle.items():
                if database not in (None, key[0]):
                    continue
                for entry in [e for e in waiting if now - e[0] >= older_than_seconds]:
                    waiting.remove(entry)
                    entry[1].close()

    def close_all(self) -> None:
        """Close everything, lent or not, as the end of the process would."""
        with self._changed:
            for _, connection in [*self._lent.values()]:
                connection.close()
            self._lent.clear()
        self.close_idle()

    def _count_lent(self, database: Hashable) -> int:
        """Count the lent connections that the server has not ended, and those being opened."""
        return self._opening[database] + sum(
            key[0] == database and not connection.closed and not _has_ended(connection)
            for key, connection in self._lent.values()
        )

    def _arm(self) -> None:
        if self._reaper is None or not self._reaper.is_alive():
            self._reaper = threading.Timer(IDLE_SECONDS, self._reap)
            self._reaper.daemon = True
            self._reaper.start()

    def _reap(self) -> None:
        self.close_idle(IDLE_SECONDS / 2)
        with self._changed:
            self._reaper = None
            if any(self._idle.values()):
                self._arm()


def pool() -> Pool:
    """Return this process's pool; a fork gets its own and never uses its parent's sockets."""
    global _pool
    if _pool.pid != os.getpid():
        _inherited.append(
            _pool
        )  # garbage collection would close the parent's session over the shared socket
        _pool = Pool()
    return _pool


@contextmanager
def session(
    address: Address, application: str, purpose: Purpose = Purpose.WORK
) -> Iterator[Connection]:
    """Lend a connection for a block; it comes back only if the block left no transaction open."""
    lender = pool()
    connection = lender.take(address, application, purpose)
    try:
        yield connection
    finally:
        lender.give_back(connection)


def _is_alive(connection: Connection) -> bool:
    """Return whether a connection is idle and still open, without a round trip."""
    if connection.closed or connection.info.transaction_status is not TransactionStatus.IDLE:
        return False
    return not _has(connection, select.POLLIN | select.POLLHUP)


def _has_ended(connection: Connection) -> bool:
    """Return whether the server has closed the connection; unread data does not count."""
    return _has(connection, getattr(select, "POLLRDHUP", select.POLLHUP))


def _has(connection: Connection, events: int) -> bool:
    poll = select.poll()
    try:
        poll.register(connection.fileno(), events)
    except psycopg.Error:  # closed by another thread a moment ago
        return True
    return bool(poll.poll(0))


@atexit.register
def _close_all() -> None:
    pool().close_all()


_pool = Pool()
_inherited: list[Pool] = []


LOCK_NOT_AVAILABLE: Final = "55P03"
UNDEFINED_OBJECT: Final = "42704"
TWO_ROWS_FOR_ONE_KEY: Final = "21000"

# Classes of SQLSTATE that recur until the rows, the table or the rights change.
# https://www.postgresql.org/docs/current/errcodes-appendix.html
_PERMANENT_CLASSES: Final = frozenset(
    {
        "0A",  # feature not supported
        "21",  # cardinality: one statement touches a row twice
        "22",  # a value does not fit
        "23",  # a constraint
        "28",  # not allowed to log in
        "2F",  # a routine refused
        "39",  # a trigger's protocol
        "3D",  # no such database
        "3F",  # no such schema
        "42",  # no such name, wrong type, not permitted
        "44",  # a view's check option
        "P0",  # a trigger raised
    }
)

# Of these, the classes that a row can cause; the others are about the set-up, and come with every
# row of every batch.
_ROW_CLASSES: Final = frozenset({"22", "23", "44", "P0"})

# After a failover a session may be on a read-only server; a new session finds the primary.
_READ_ONLY: Final = "25006"


def is_permanent(error: psycopg.Error) -> bool:
    """Return whether the same statement would fail in the same way again."""
    state = error.sqlstate
    return state is not None and state != _READ_ONLY and state[:2] in _PERMANENT_CLASSES


def is_of_a_row(error: psycopg.Error) -> bool:
    """Return whether a row is the cause: without it, the statement may succeed."""
    return (error.sqlstate or "")[:2] in _ROW_CLASSES


def words(error: psycopg.Error) -> str:
    """Return the server's message in one line, without its detail, which quotes rows."""
    text = " ".join((servers_words(error) or str(error)).split())
    if error.sqlstate == LOCK_NOT_AVAILABLE:
        text = f"{text}; another transaction holds the row or the table"
    return text


def outcome_of(error: psycopg.Error, where: str) -> SinkOutcome:
    """Translate for a method that answers with an outcome."""
    reason = f"{where}: {words(error)}"
    return SinkFatal(reason) if is_permanent(error) else SinkRetryable(reason)


def error_of(error: psycopg.Error, where: str) -> SemelError:
    """Translate for a method that raises."""
    reason = f"{where}: {words(error)}"
    return Permanent(reason) if is_permanent(error) else Retryable(reason)


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Translate PostgreSQL's errors into semel's."""
    try:
        yield
    except psycopg.Error as error:
        # Without its cause: a traceback would quote the detail, and with it a row.
        raise error_of(error, where) from None
