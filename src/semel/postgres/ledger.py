"""The ledger in PostgreSQL: for owners on several hosts."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NoReturn

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus
from psycopg.rows import dict_row

from semel.errors import (
    LedgerUnavailable,
    LedgerUnusable,
    Misuse,
    NeedsOperator,
    Retryable,
    SemelError,
)
from semel.lease import Owner, Takeover
from semel.ledger.database import LedgerDatabase, Row, Session, TransactionMode
from semel.ledger.ledger import SqlLedger
from semel.pipeline import rules
from semel.pipeline.ledger import ScopeLease
from semel.pipeline.txn import Scope
from semel.postgres.connect import LOCK_NOT_AVAILABLE, PLAIN, TRUSTED, Address, Connection, words
from semel.secrets import HIDDEN, Password, masked, scrubbed

FAULTS: Final[Mapping[str, tuple[type[LedgerUnavailable | LedgerUnusable], str]]] = {
    # SQLSTATE, or its class   what to raise       what to say
    "0A": (LedgerUnusable, "the server does not support a feature that a ledger needs"),
    "25006": (LedgerUnusable, "the database is read-only; use the primary server"),
    "28": (LedgerUnusable, "the server refuses the login"),
    "3D": (LedgerUnusable, "the database does not exist; create it"),
    "3F": (LedgerUnusable, "there is no such schema, or this user may not use it; grant it"),
    "42501": (LedgerUnusable, "this user may not do that; grant it"),
    "42": (LedgerUnusable, "the ledger's tables are not as semel created them"),
    "53100": (LedgerUnusable, "the disk is full; no decision was taken; make room"),
    "54": (LedgerUnusable, "a limit of the server is reached"),
    "55P03": (LedgerUnavailable, "another session holds the scope's lock"),
    "XX": (LedgerUnusable, "the database is damaged; restore a backup of it"),
}
"""Errors that recur until a person acts; after any other the ledger is unavailable now."""

# pg_stat_activity shows the names of this user's sessions; the lock distinguishes the ledger's
# sessions from those of sinks in the same database.  The last argument is in milliseconds.
_END_HOLDERS: Final = """
    SELECT pid, pg_terminate_backend(pid, 5000) AS ended
      FROM pg_stat_activity
     WHERE datname = current_database() AND pid <> pg_backend_pid() AND usename = session_user
       AND application_name LIKE %(names)s
       AND CASE WHEN split_part(application_name, ':', 3) ~ '^[0-9]+$'
                THEN split_part(application_name, ':', 3)::bigint <= %(epoch)s ELSE true END
       AND EXISTS (SELECT FROM pg_locks
                    WHERE pg_locks.pid = pg_stat_activity.pid AND granted
                      AND relation = to_regclass('semel_scope'))
"""

# The session that sent a commit without an answer.  Its name is set per transaction, so a
# reused session does not match.
_END_LOST: Final = """
    SELECT pg_terminate_backend(pid, 5000)
      FROM pg_stat_activity
     WHERE datname = current_database() AND pid = %(pid)s AND application_name = %(name)s
       AND usename = session_user
"""


_OWNED: Final = f"""
    SELECT {TRUSTED} AS is_trusted, {PLAIN} AS is_plain
      FROM pg_class c WHERE c.oid = to_regclass(%(name)s)
"""

_TRY_SCHEMA: Final = "SELECT pg_try_advisory_xact_lock(hashtext('semel_ledger')) AS locked"
_POLL_SECONDS: Final = 0.02


class _RolledBack(psycopg.errors.TransactionRollback):
    """The server answered COMMIT by rolling back."""


class ScopeLocked(LedgerUnavailable):
    """Another session held the scope's lock for longer than the lock timeout."""


class PostgresLedger(SqlLedger):
    """A ledger in one schema of a database; pickles as its URL and connects when first used.

    A lock on the scope's row lets one writer of a scope in at a time.  Times are the server's.
    """

    def __init__(
        self,
        url: str,
        schema: str = "semel",
        *,
        password: Password = None,
        lock_seconds: float = 5.0,
    ) -> None:
        self._given = (url, schema, password, lock_seconds)
        super().__init__(LedgerDatabase(PostgresDriver(url, schema, password, lock_seconds)))

    def __reduce__(self) -> Any:
        url, schema, password, lock_seconds = self._given
        made = partial(PostgresLedger, password=password, lock_seconds=lock_seconds)
        return made, (url, schema)

    def acquire(
        self, scope: Scope, owner: Owner, seconds: float, takeover: Takeover = Takeover.WAIT
    ) -> ScopeLease:
        """Become the owner of *scope* and raise its epoch.

        A predecessor that was stopped inside a transaction holds the scope's lock: its
        session is ended, if the scope may be taken.
        """
        try:
            return super().acquire(scope, owner, seconds, takeover)
        except ScopeLocked:
            record = self.scope_record(scope)
            holder, left = (record.owner, record.lease_left_seconds) if record else (None, 0.0)
            rules.check_takeover(scope, holder, left, owner, takeover)
            self._end_holders(scope, record.epoch if record else 0)
            return super().acquire(scope, owner, seconds, takeover)

    def backup(self, destination: str | Path) -> NoReturn:
        """Raise an error with the `pg_dump` command that copies the ledger.

        It names only the ledger's tables: sinks and consumers may have theirs in the same schema,
        and those must not be restored with the ledger.

        Raises:
            Misuse: always.
        """
        url, schema, *_ = self._given
        place = masked(url).replace(f":{HIDDEN}@", "@")
        raise Misuse(
            f"copy a ledger in PostgreSQL with: pg_dump --format=custom "
            f"--table='{schema}.semel_*' --exclude-table='{schema}.semel_messaging' "
            f"--file={shlex.quote(str(destination))} "
            f"--dbname={shlex.quote(place)}"
        )

    def _end_holders(self, scope: Scope, epoch: int) -> None:
        """End the ledger's sessions of *scope* up to *epoch* that are inside a transaction."""
        values = {"names": f"semel:{scope.slug}:%", "epoch": epoch}
        with self._database.transaction("semel:takeover", TransactionMode.READ) as session:
            session.run(_END_HOLDERS, values)


class PostgresDriver:
    """PostgreSQL, by psycopg."""

    errors: tuple[type[Exception], ...] = (psycopg.Error,)
    words: Mapping[str, str] = {
        "now": "CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)",
        "for_update": "FOR UPDATE",
    }

    def __init__(self, url: str, schema: str, password: Password, lock_seconds: float) -> None:
        Address.of(url, "", {})  # refuses a URL of another kind here, not at the first use
        self._url = url
        self._schema = schema
        self._password = password
        self._lock_seconds = lock_seconds
        self._secret_url = url
        self._lost: tuple[int, str] | None = None

    @property
    def url(self) -> str:
        return masked(self._url)

    def connect(self, known: str | None) -> Session:
        """Open a connection; first end a lost session, whose COMMIT could still arrive."""
        address = Address.of(self._url, self._password, {})
        self._secret_url = address.url
        try:
            connection = address.connect("semel")
        except Retryable as error:
            raise LedgerUnavailable(self.url, str(error)) from error
        if self._lost is not None:
            pid, name = self._lost
            connection.execute(_END_LOST, {"pid": pid, "name": name})
            self._lost = None
        return PostgresSession(connection, self._schema, self._lock_seconds, self.url)

    def fault(self, error: Exception) -> SemelError:
        """Translate by SQLSTATE; without one the connection failed."""
        assert isinstance(error, psycopg.Error)
        state = error.sqlstate or ""
        told = scrubbed(words(error), self._secret_url)
        if state.startswith("23"):
            return NeedsOperator(f"ledger {self.url}: its own constraints refused a write: {told}")
        if state == LOCK_NOT_AVAILABLE:
            return ScopeLocked(self.url, f"another session holds the scope's lock ({told})")
        otherwise = (LedgerUnavailable, "the server does not answer now")
        kind, meaning = FAULTS.get(state) or FAULTS.get(state[:2]) or otherwise
        return kind(self.url, f"{meaning} ({state + ': ' if state else ''}{told})")

    def leaves_doubt(self, error: Exception, session: Session) -> bool:
        """Return whether the outcome is unknown: only an error from the server means no commit."""
        assert isinstance(error, psycopg.Error)
        if error.diag.severity_nonlocalized == "ERROR" or isinstance(error, _RolledBack):
            return False
        if isinstance(session, PostgresSession):
            self._lost = (session.backend, session.name)
        return True


@dataclass
class PostgresSession:
    """One connection.  Its settings are set per transaction, so that a pooler may be used."""

    connection: Connection
    schema: str
    lock_seconds: float
    url: str
    name: str = ""
    _is_trusted: bool = True
    """Whether nothing of another role runs when this one writes to the tables."""

    def __post_init__(self) -> None:
        self.backend = self.connection.info.backend_pid
        self._cursor = self.connection.cursor(row_factory=dict_row)

    @property
    def is_lost(self) -> bool:
        return self.connection.closed

    def begin(self, name: str, mode: TransactionMode) -> None:
        isolation = {
            TransactionMode.READ: "REPEATABLE READ READ ONLY",
            TransactionMode.WRITE: "READ COMMITTED READ WRITE",
        }
        self.name = name
        if mode is TransactionMode.WRITE and not self._is_trusted:
            raise self._foreign()
        begun = sql.SQL(
            "BEGIN ISOLATION LEVEL {isolation}; SET LOCAL application_name = {name}; "
            "SET LOCAL search_path = {schema}; SET LOCAL lock_timeout = {milliseconds}"
        ).format(
            isolation=sql.SQL(isolation[mode]),
            name=sql.Literal(name),
            schema=sql.Identifier(self.schema),
            milliseconds=sql.Literal(max(1, round(self.lock_seconds * 1000))),
        )
        self.connection.execute(begun)

    def run(self, statement: str, values: Mapping[str, Any] | None = None) -> list[Row]:
        self._cursor.execute(_worded(statement).encode(), values)
        return self._cursor.fetchall() if self._cursor.description else []

    def run_many(self, statement: str, many: Iterable[Mapping[str, Any]]) -> None:
        """Execute a statement once for each set of values, in one round trip."""
        self._cursor.executemany(_worded(statement).encode(), many)

    def has_table(self, name: str) -> bool:
        """Return whether the table exists in the ledger's schema."""
        found = self.run(_OWNED, {"name": name})
        if not found:
            return False
        self._is_trusted = found[0]["is_trusted"]
        if not (self._is_trusted or found[0]["is_plain"]):
            raise self._foreign()
        return True

    def _foreign(self) -> LedgerUnusable:
        return LedgerUnusable(
            self.url,
            f"its tables in schema {self.schema} belong to another role, which could make this one "
            f"run statements: make this role a member of that one, or use another schema",
        )

    def lock_schema(self) -> None:
        """Keep other processes from changing the tables meanwhile; create the schema."""
        # Making the tables takes a moment; a session that holds the lock for longer makes none,
        # and it may be that of a role without rights in this schema.
        deadline = time.monotonic() + self.lock_seconds
        while not self.run(_TRY_SCHEMA)[0]["locked"] and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        values = {"name": self.schema}
        if not self.run("SELECT 1 FROM pg_namespace WHERE nspname = %(name)s", values):
            self.connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(self.schema)))

    def commit(self) -> None:
        answer = self.connection.execute("COMMIT").statusmessage
        if answer != "COMMIT":
            raise _RolledBack(f"the server answered {answer} to COMMIT")

    def rollback(self) -> None:
        if self.connection.info.transaction_status is not TransactionStatus.IDLE:
            self.connection.execute("ROLLBACK")

    def close(self) -> None:
        self.connection.close()


@cache
def _worded(statement: str) -> str:
    """Return a statement of `semel.ledger` with psycopg's form of parameters."""
    return re.sub(r"(?<!:):([a-z_][a-z0-9_]*)", r"%(\1)s", statement)
