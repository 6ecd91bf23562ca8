"""What a database's error means: by SQLSTATE or the driver's code, never by its text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from semel.errors import InDoubt, Misuse, Permanent, Retryable, SemelError
from semel.messaging.failure import CLASSIFICATION, Classification
from semel.messaging.handle.claims import Locked
from semel.messaging.redact import SYNTAX_ERROR, VALUE_CLASS, reason_of, sqlite_code, sqlstate

LOCK_STATES: Final = frozenset({"55P03"})
CONFLICT_STATES: Final = frozenset({"40001", "40P01"})
TIMEOUT_STATES: Final = frozenset({"57014"})
# 25006 (read-only transaction): after a failover a standby answers that is not the primary.
OUTAGE_STATES: Final = frozenset({"57P01", "57P02", "57P03", "57P04", "57P05", "25006", "25P03"})
# 08: no connection.  53: out of disk, memory or connections.  58: an error of the system.
OUTAGE_CLASSES: Final = frozenset({"08", "53", "58"})
NO_SUCH_DATABASE: Final = "3D000"
REFUSED_CLASS: Final = "28"
NO_RIGHT: Final = "42501"
# No such table, column or schema.
UNKNOWN_STATES: Final = frozenset({"42P01", "42703", "3F000"})
# What RELEASE and ROLLBACK TO answer: no such savepoint; no transaction.
NO_SAVEPOINT_STATES: Final = frozenset({"3B001", "25P01"})

# The stdlib's primary result codes, https://sqlite.org/rescode.html.
SQLITE_ERROR: Final = 1
SQLITE_BUSY: Final = 5
SQLITE_LOCKED: Final = 6
SQLITE_READONLY: Final = 8
SQLITE_CORRUPT: Final = 11
SQLITE_CANTOPEN: Final = 14
SQLITE_NOTADB: Final = 26
SQLITE_CONSTRAINT: Final = 19
SQLITE_IOERR: Final = 10
SQLITE_FULL: Final = 13
SQLITE_LOCKS: Final = frozenset({SQLITE_BUSY, SQLITE_LOCKED})
SQLITE_CODES: Final[Mapping[int, str]] = {
    SQLITE_BUSY: "DATABASE_TIMEOUT",
    SQLITE_LOCKED: "DATABASE_TIMEOUT",
    # As PostgreSQL's classes 53 and 58.
    SQLITE_IOERR: "CONNECTION_LOST",
    SQLITE_FULL: "CONNECTION_LOST",
}


class DatabaseConflict(Retryable):
    """A serialization failure or a deadlock: run the whole transaction again."""


class DatabaseUnavailable(Retryable):
    """The database does not answer, or ended the connection; nothing was committed."""


class DatabaseNotThere(Misuse):
    """The URL names a database, a role or a password that its server does not know."""


class DatabaseUnusable(Permanent):
    """The file at the URL is not a database, or cannot be read as one."""


class RightMissing(Misuse):
    """The role of the URL lacks a right on semel's tables."""


class TablesMissing(Misuse):
    """The database has no tables of semel, or those of another version."""


class DatabaseRefused(Permanent):
    """The database refuses a statement that works if semel's tables are unchanged."""


class CommitInDoubt(InDoubt):
    """The commit was sent, and the connection ended before the answer."""


def code_of(error: BaseException) -> str | None:
    """Return the failure code of a database error; None if no code describes it."""
    state = sqlstate(error)
    if state in CONFLICT_STATES:
        return "DATABASE_CONFLICT"
    if state in LOCK_STATES | TIMEOUT_STATES:
        return "DATABASE_TIMEOUT"
    if state in OUTAGE_STATES or state[:2] in OUTAGE_CLASSES or _is_disconnect(error):
        return "CONNECTION_LOST"
    if state[:2] == "23" or isinstance(error, IntegrityError):
        return "CONSTRAINT_VIOLATED"
    if state[:2] == "28" or state == NO_RIGHT:
        return "AUTHORIZATION_FAILED"
    return SQLITE_CODES.get(sqlite_code(error) or 0)


def _is_disconnect(error: BaseException) -> bool:
    if isinstance(error, DBAPIError):
        return error.connection_invalidated or isinstance(error, InterfaceError)
    return isinstance(error, OSError | PoolTimeout)


def is_unknown_savepoint(error: BaseException, *, after_a_failure: bool) -> bool:
    """Return whether a savepoint could not be ended because it no longer exists.

    After some failures, for example a full disk, SQLite itself rolls the transaction back.
    PostgreSQL never does.
    """
    if sqlite_code(error) == SQLITE_ERROR:
        return not after_a_failure
    return sqlstate(error) in NO_SAVEPOINT_STATES


def translated_error(error: BaseException, what: str) -> SemelError | None:
    """Return a transient error of the database as a `Retryable`; None for any other error."""
    code = code_of(error)
    if sqlstate(error) in LOCK_STATES or sqlite_code(error) in SQLITE_LOCKS:
        return Locked(what)
    if code == "DATABASE_CONFLICT":
        return DatabaseConflict(f"{what}: {reason_of(error)}")
    if code in ("CONNECTION_LOST", "DATABASE_TIMEOUT"):
        return DatabaseUnavailable(f"{what}: {reason_of(error)}")
    return None


def opening_error(error: BaseException, what: str) -> SemelError | None:
    """Return what is wrong with a URL, from the error of its first use; None if nothing is."""
    state, code, said = sqlstate(error), sqlite_code(error), reason_of(error)
    if state == NO_SUCH_DATABASE:
        return DatabaseNotThere(f"{what}: {said}; create it, or correct the URL")
    if state[:2] == REFUSED_CLASS:
        return DatabaseNotThere(f"{what}: {said}; correct the role and the password of the URL")
    if state == NO_RIGHT:
        return RightMissing(
            f"{what}: {said}; grant the role what is missing (commands use SELECT, INSERT, UPDATE "
            f"and DELETE on semel's tables), or use the URL of another role"
        )
    if code in (SQLITE_CANTOPEN, SQLITE_READONLY):
        return DatabaseNotThere(f"{what}: {said}; let this user read and write the file")
    if code in (SQLITE_NOTADB, SQLITE_CORRUPT):
        return DatabaseUnusable(f"{what}: {said}; name another file, or restore a backup of it")
    return None


def refusal_error(error: BaseException, what: str) -> SemelError | None:
    """Return why a database refuses a statement; None if the statement itself is wrong."""
    state = sqlstate(error)
    is_ours = state[:2] == VALUE_CLASS or state == SYNTAX_ERROR
    if (not state or is_ours) and sqlite_code(error) != SQLITE_CONSTRAINT:
        return None
    return DatabaseRefused(
        f"{what}: {reason_of(error)}; compare the tables with `semel db check`, and remove the "
        f"triggers, constraints and policies that were added to them"
    )


def translated(what: str) -> AbstractAsyncContextManager[None]:
    """Raise transient errors of every driver as `Retryable`."""
    return _meaning(what, translated_error)


def claiming(what: str) -> AbstractAsyncContextManager[None]:
    """Raise transient errors as `Retryable`, and missing tables with the way out."""
    return _meaning(what, translated_error, _tables_error)


def _tables_error(error: BaseException, what: str) -> SemelError | None:
    # A claim's statement is right: SQLite's general error means a missing table or column.
    if sqlstate(error) not in UNKNOWN_STATES and sqlite_code(error) != SQLITE_ERROR:
        return None
    return TablesMissing(
        f"{what}: {reason_of(error)}; create semel's tables with `semel db create`, or with "
        f"SqlDatabase.create_tables(), and compare them with `semel db check`"
    )


def opening(what: str) -> AbstractAsyncContextManager[None]:
    """Raise what is wrong with a URL as an error that names it; else as `translated`."""
    return _meaning(what, translated_error, opening_error)


def refusals(what: str) -> AbstractAsyncContextManager[None]:
    """Raise a refusal as an error that says what to do: for the commands of operators.

    A handler gets the driver's own error instead: the failure is classified by it.
    """
    return _meaning(what, translated_error, opening_error, refusal_error)


@asynccontextmanager
async def _meaning(
    what: str, *meanings: Callable[[BaseException, str], SemelError | None]
) -> AsyncIterator[None]:
    """Raise an error of the database as the first of *meanings* that knows it, or as it is."""
    try:
        yield
    except (SQLAlchemyError, OSError) as error:
        for meaning in meanings:
            if ours := meaning(error, what):
                raise ours from error
        raise


SQL_CLASSIFICATION: Final[Classification] = CLASSIFICATION.extended(
    {
        DBAPIError: code_of,
        PoolTimeout: "CONNECTION_LOST",
        DatabaseConflict: "DATABASE_CONFLICT",
        DatabaseUnavailable: "CONNECTION_LOST",
        Locked: "DATABASE_TIMEOUT",
    }
)
"""What the exceptions of Python, of the drivers and of SQLAlchemy mean."""
