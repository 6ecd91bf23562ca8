"""One connection to the ledger's database, its transactions, and what their failures mean.

A driver knows one kind of database.  `LedgerDatabase` is the same for all of them:
one connection at a time, a new one after a fork or a loss, and the four ends of a
transaction.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import Any, Final, Protocol, TypeAlias

from semel.errors import InDoubt, LedgerUnusable, SemelError
from semel.ledger import schema

Row: TypeAlias = Any
"""One row; its values by column name."""

MICROSECONDS: Final = 1_000_000
"""In a second: times are stored as whole microseconds."""


class TransactionMode(StrEnum):
    """What a transaction is for."""

    READ = "read"
    """One snapshot; never waits for a lock."""

    WRITE = "write"
    """Reads committed data, and locks its rows against other writers."""


class Session(Protocol):
    """One connection."""

    def begin(self, name: str, mode: TransactionMode) -> None:
        """Start a transaction that other sessions see under *name*."""

    def run(self, statement: str, values: Mapping[str, Any] | None = None) -> list[Row]:
        """Execute a statement with ``:named`` parameters and return its rows."""

    def run_many(self, statement: str, many: Iterable[Mapping[str, Any]]) -> None:
        """Execute a statement once for each set of values."""

    def has_table(self, name: str) -> bool:
        """Return whether the table exists."""

    def lock_schema(self) -> None:
        """Keep other processes from changing the schema until the transaction ends."""

    def commit(self) -> None:
        """Make the transaction durable."""

    def rollback(self) -> None:
        """Roll the transaction back."""

    @property
    def is_lost(self) -> bool:
        """Whether the connection is lost, and with it the answer to a commit."""

    def close(self) -> None:
        """Close the connection."""


class LedgerDriver(Protocol):
    """How one kind of database is reached."""

    errors: tuple[type[Exception], ...]
    """The exceptions of its library."""

    words: Mapping[str, str]
    """The values of the statements' ``{placeholders}`` in its dialect."""

    @property
    def url(self) -> str:
        """The database's URL, without passwords."""

    def connect(self, known: str | None) -> Session:
        """Open a connection; *known* is the id of the ledger that was found before."""

    def fault(self, error: Exception) -> SemelError:
        """Translate an error of the library after which nothing was written."""

    def leaves_doubt(self, error: Exception, session: Session) -> bool:
        """Return whether a commit that failed with *error* may have happened."""


# A connection that a fork copied must neither be used nor closed: closing it would end the
# parent's connection.  The reference keeps the garbage collector from closing it, too.
_INHERITED: Final[list[Session]] = []


class LedgerDatabase:
    """A database with a ledger in it; a lock lets one thread in at a time."""

    def __init__(self, driver: LedgerDriver) -> None:
        self.driver = driver
        self._lock = threading.RLock()
        self._session: Session | None = None
        self._pid = os.getpid()
        self._ledger_id: str | None = None

    @property
    def ledger_id(self) -> str:
        """The id that the ledger got when it was created."""
        if self._ledger_id is None:
            with self._lock, self.translated():
                self._connected()
        assert self._ledger_id is not None
        return self._ledger_id

    def exists(self) -> bool:
        with self._lock, self.translated():
            session = self.driver.connect(None)
            try:
                session.begin("semel:read", TransactionMode.READ)
                try:
                    return session.has_table("semel_ledger_meta")
                finally:
                    session.rollback()
            finally:
                session.close()

    @contextmanager
    def transaction(self, name: str, mode: TransactionMode) -> Iterator[Session]:
        """Run the block in one transaction: committed if it returns, rolled back if it raises.

        Raises:
            LedgerUnavailable: nothing was written; try again later.
            LedgerUnusable: nothing was written, and waiting will not help.
            InDoubt: the commit was sent, and its answer was lost.
        """
        with self._lock:
            with self.translated():
                session = self._begun(name, mode)
            try:
                with self.translated():
                    yield session
            except BaseException:
                self._roll_back(session)
                raise
            self._commit(session)

    def close(self) -> None:
        """Close the connection; the next transaction opens another."""
        with self._lock:
            session, self._session = self._session, None
            if session is None:
                return
            if self._pid != os.getpid():
                _INHERITED.append(session)
                return
            with suppress(*self.driver.errors):
                session.close()

    def __del__(self) -> None:
        if getattr(self, "_session", None) is not None:
            self.close()

    def _begun(self, name: str, mode: TransactionMode) -> Session:
        session = self._connected()
        try:
            session.begin(name, mode)
        except self.driver.errors:
            if not session.is_lost:
                self._roll_back(session)
                raise
            # The server restarted while the connection was idle.  A retry is safe, because
            # the transaction has not begun.
            self.close()
            session = self._connected()
            session.begin(name, mode)
        return session

    def _connected(self) -> Session:
        if self._session is not None and (self._pid != os.getpid() or self._session.is_lost):
            self.close()
        if self._session is None:
            session = self.driver.connect(self._ledger_id)
            try:
                found = _prepare(session, self.driver.url)
                self._check_same(found)
            except BaseException:
                session.close()
                raise
            self._session, self._pid, self._ledger_id = session, os.getpid(), found
        return self._session

    def _check_same(self, found: str) -> None:
        if self._ledger_id not in (None, found):
            raise LedgerUnusable(
                self.driver.url,
                f"the ledger was replaced while in use: it was {self._ledger_id}, "
                f"now it is {found}; restart this process",
            )

    def _commit(self, session: Session) -> None:
        try:
            session.commit()
        except self.driver.errors as error:
            if self.driver.leaves_doubt(error, session):
                # The next transaction must use a new connection: on this one the COMMIT may
                # still arrive.
                self.close()
                words = f"ledger {self.driver.url}: the answer to a commit was lost"
                raise InDoubt(words) from error
            self._roll_back(session)
            raise self.driver.fault(error) from error
        except BaseException:
            self.close()
            raise

    def _roll_back(self, session: Session) -> None:
        try:
            session.rollback()
        except self.driver.errors:
            self.close()

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Translate the library's errors into semel's."""
        try:
            yield
        except self.driver.errors as error:
            raise self.driver.fault(error) from error


def _prepare(session: Session, url: str) -> str:
    """Create the tables unless they exist; return the ledger's id.

    Two processes may do it at once.  Version 1 is the first: the migration to a second one
    belongs here, in the transaction that holds the schema's lock.

    Raises:
        LedgerUnusable: the tables are of another version than this code.
    """
    session.begin("semel:schema", TransactionMode.READ)
    try:
        ledger_id = _find(session, url)
    finally:
        session.rollback()
    if ledger_id is not None:
        return ledger_id
    session.begin("semel:schema", TransactionMode.WRITE)
    try:
        session.lock_schema()
        # Another process may have created the tables since the first look.
        ledger_id = _find(session, url)
        if ledger_id is None:
            for statement in (*schema.TABLES.values(), *schema.INDEXES):
                session.run(statement)
            ledger_id = str(uuid.uuid4())
            session.run(_MAKE, {"version": schema.VERSION, "id": ledger_id})
        session.commit()
    except BaseException:
        session.rollback()
        raise
    return ledger_id


def _find(session: Session, url: str) -> str | None:
    """Return the id of the existing ledger; None if there is none."""
    if not session.has_table("semel_ledger_meta"):
        return None
    (meta,) = session.run("SELECT version, ledger_id FROM semel_ledger_meta")
    if meta["version"] != schema.VERSION:
        raise LedgerUnusable(
            url,
            f"it has schema version {meta['version']}, and this semel supports version "
            f"{schema.VERSION}; upgrade semel, or restore a backup made before the upgrade",
        )
    ledger_id: str = meta["ledger_id"]
    return ledger_id


_MAKE: Final = (
    "INSERT INTO semel_ledger_meta (only_row, version, ledger_id) VALUES (1, :version, :id)"
)
