"""The messaging half's database in PostgreSQL or SQLite: all stores in one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, inspect, select, text
from sqlalchemy.exc import InterfaceError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncTransaction
from sqlalchemy.pool import QueuePool

from semel.errors import Misuse
from semel.messaging.failure import Classification
from semel.messaging.handle.claims import Locked
from semel.messaging.tables import checked, split_schema
from semel.operate.stores import RowChange
from semel.secrets import masked
from semel.sql.bookkeeping import SqlMembers, SqlOutcomeStore, SqlVersions
from semel.sql.claims import SqlAlchemyProcessedMessageStore
from semel.sql.deadletters import SqlDeadLetters, SqlFailedAttempts
from semel.sql.dryrun import watching
from semel.sql.engine import LOCK_SECONDS, READY, is_in_memory, made_ready, open_engine, read_url
from semel.sql.faults import (
    SQL_CLASSIFICATION,
    CommitInDoubt,
    code_of,
    is_unknown_savepoint,
    opening,
    translated,
    translated_error,
)
from semel.sql.inbox import SqlInboxStore
from semel.sql.operators import SqlApprovals, SqlAuditTrail, SqlReplays, SqlRevisions
from semel.sql.outbox import SqlOutboxStore
from semel.sql.schema import create, find, naming, require_version
from semel.sql.session import (
    FAILED,
    HandlerSession,
    UnitConnection,
    guard_transactions,
    has_failed,
    refuse_if_aborted,
)
from semel.sql.tables import metadata
from semel.sql.types import now_us, to_seconds
from semel.sql.waiting import SqlWaitingStore


class SqlUnit:
    """One open transaction on one connection."""

    def __init__(self, session: HandlerSession, connection: UnitConnection) -> None:
        self.session = session
        self._connection = connection
        self.claims = SqlAlchemyProcessedMessageStore(session)
        self.attempts = SqlFailedAttempts(session)
        self.dead_letters = SqlDeadLetters(session)
        self.waiting = SqlWaitingStore(session)
        self.audit = SqlAuditTrail(session)
        self.revisions = SqlRevisions(session)
        self.approvals = SqlApprovals(session)
        self.replays = SqlReplays(session)
        self.outbox = SqlOutboxStore(session)
        self.inbox = SqlInboxStore(session)
        self.members = SqlMembers(session)
        self.outcomes = SqlOutcomeStore(session)
        self.versions = SqlVersions(session)

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """Undo what the block did if it raises, including the session's pending objects."""
        inside: Exception | None = None
        failed = False
        try:
            async with self.session.begin_nested() as nested:
                try:
                    yield
                    await self.session.flush()
                    await refuse_if_aborted(nested, self._connection)
                    self.session.refuse_if_nested(nested)
                    await self._connection.refuse_if_ended()
                except Exception as error:
                    inside, failed = error, has_failed(self._connection)
                    if not failed:
                        self._connection.refuse_if_idle()
                    raise
        except Exception as error:
            # The block and its checks succeeded, and ending the savepoint failed: it no longer
            # exists, so the transaction around it was ended, too.
            if error is not inside and is_unknown_savepoint(error, after_a_failure=failed):
                self._connection.savepoint_is_gone()
            raise

    async def begin_message(self) -> None:
        """Prepare the session for the next handler, as if it were a new session."""
        if not has_failed(self._connection):
            # Here, so that the error names the message before, and not the last of the batch.
            await self._connection.refuse_if_ended()
        await self.session.begin_message()

    def watching(self) -> AbstractAsyncContextManager[list[RowChange]]:
        """Collect what the block changes outside of semel's own tables."""
        return watching(self.session)

    async def now(self) -> float:
        """Return the database's time."""
        return to_seconds((await self.session.execute(select(now_us()))).scalar_one())


class SqlDatabase:
    """A PostgreSQL or SQLite database with semel's tables in it.

    ``SqlDatabase("sqlite://")`` is a new database in memory, for tests and for trying things
    out.  It has one connection, so one unit waits for the other, and its data end with this
    object.  Create its tables with `create_tables`, as in any other database.

    On PostgreSQL the tables are in the *schema*, which a URL may name, too: ``?schema=billing``.
    Without one they are where the search path finds them, or else in the schema ``semel``.

    With a URL, *pool_size* connections are kept open, and ten more are opened when they are
    needed: a runner needs one for each of its lanes and two for itself.
    """

    def __init__(
        self,
        engine: AsyncEngine | str,
        *,
        pool_size: int | None = None,
        lock_seconds: float = LOCK_SECONDS,
        session_options: dict[str, Any] | None = None,
        schema: str | None = None,
    ) -> None:
        self._is_own = isinstance(engine, str)
        if isinstance(engine, str):
            engine, of_url = split_schema(engine)
            schema = of_url if schema is None else schema
            options = {} if pool_size is None else {"pool_size": pool_size}
            engine = open_engine(engine, lock_seconds, **options)
        elif pool_size is not None:
            raise Misuse("the engine has a pool already: give pool_size= to what made it")
        self.schema = None if schema is None else checked(schema)
        self.engine = made_ready(engine, lock_seconds)
        guard_transactions(self.engine)
        self.classification: Classification = SQL_CLASSIFICATION
        self._lock_seconds = lock_seconds
        self._session_options = session_options or {}
        self._naming: dict[str, Any] | None = None
        # A database in memory has one connection: only one unit may be open at a time.
        self._turns = asyncio.Lock() if is_in_memory(self.engine.url) else None
        self._options: dict[str, Any] = {}
        if self.is_postgres:
            # Do not use the engine's default: at a higher level the second of two claims
            # fails with 40001 instead of finding the first.
            self._options["isolation_level"] = "READ COMMITTED"

    @property
    def is_postgres(self) -> bool:
        """True for PostgreSQL, False for SQLite."""
        return self.engine.dialect.name == "postgresql"

    @property
    def most_connections(self) -> int | None:
        """How many units may be open at once; None: as many as there are."""
        pool = self.engine.sync_engine.pool
        if self._turns is not None or not isinstance(pool, QueuePool):
            return None
        # Private to SQLAlchemy, but nothing public shows it; -1 is no limit.
        overflow = pool._max_overflow
        return None if overflow < 0 else pool.size() + overflow

    async def create_tables(self) -> None:
        """Create semel's tables; a second call changes nothing.  `semel db create` does the same.

        Raises:
            SchemaUnusable: there are tables of a newer version, or tables that are not semel's.
            Misuse: the role may not create tables.
            Retryable: the database does not answer.
        """
        await create(self.engine, self.schema)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[SqlUnit]:
        """Open a transaction; committed when the block ends, rolled back when it raises.

        The first call checks that the tables have the version that this code knows.

        Raises:
            Locked: the database is in memory, and another unit was open for too long.
            Retryable: there is no connection, or the commit was refused for now.
            CommitInDoubt: the commit was sent and no answer came.
            SchemaUnusable: semel's tables are missing, older or newer.
        """
        async with self._turn():
            if self._naming is None:
                self._naming = naming(await require_version(self.engine, self.schema))
            async with self._unit(self._naming) as unit:
                yield unit

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait until no other unit is open, if all units share one connection."""
        if self._turns is None:
            yield
            return
        try:
            # Not with `asyncio.wait_for`: in Python 3.11 it loses a cancellation that arrives
            # together with the lock.
            async with asyncio.timeout(self._lock_seconds):
                await self._turns.acquire()
        except TimeoutError as error:
            raise Locked("the database in memory") from error
        try:
            yield
        finally:
            self._turns.release()

    @asynccontextmanager
    async def _unit(self, names: Mapping[str, Any]) -> AsyncIterator[SqlUnit]:
        connection = UnitConnection(self.engine)
        async with translated("the database"):
            await connection.start()
        try:
            await connection.execution_options(**self._options)
            async with translated("the database"):
                transaction = await connection.begin()
                connection.info.pop(FAILED, None)
                await self._limit_locks(connection)
            session = HandlerSession(connection, names, **self._session_options)
            # The session takes its connection now, so that SQLAlchemy itself refuses
            # `session.begin()` in a handler.
            await session.connection()
            connection.hold()
            try:
                yield SqlUnit(session, connection)
                session.refuse_if_nested()
                await session.flush()
                await refuse_if_aborted(transaction, connection)
                await connection.refuse_if_ended()
            finally:
                connection.allow_end()
                await session.release()
            await _committed(transaction, connection)
        except BaseException:
            # Also after a refused commit: SQLAlchemy then considers the transaction ended, the
            # pool does not reset the connection, and SQLite's transaction would stay open.
            await _rolled_back(connection)
            raise
        finally:
            await connection.close()

    async def _limit_locks(self, connection: AsyncConnection) -> None:
        if self.is_postgres and not self.engine.get_execution_options().get(READY):
            limit = round(self._lock_seconds * 1000)
            await connection.execute(text(f"SET LOCAL lock_timeout = {limit}"))

    async def close(self) -> None:
        """Close the connections, if this object created the engine."""
        if self._is_own:
            await self.engine.dispose()


async def _rolled_back(connection: UnitConnection) -> None:
    """Roll back; discard the connection if it may still be in its transaction.

    A handler may leave a statement running.  The driver then refuses to end the transaction, but
    SQLAlchemy considers it ended: the next user of the connection would be inside it.
    """
    with suppress(SQLAlchemyError, OSError):
        await connection.rollback()
    if not connection.closed and connection.is_in_transaction is not False:
        await connection.invalidate()


async def _committed(transaction: AsyncTransaction, connection: UnitConnection) -> None:
    try:
        await transaction.commit()
    except (SQLAlchemyError, OSError) as error:
        if isinstance(error, InterfaceError) and connection.is_in_transaction:
            # The driver refused, not the database: nothing was sent.
            raise Misuse(
                "a handler returned while a statement of its session was still running: the "
                "transaction was rolled back. Await everything that was started before returning"
            ) from error
        if code_of(error) == "CONNECTION_LOST":
            raise CommitInDoubt(
                "the commit was sent and the connection ended before the answer; "
                "the message comes back, and its claim says whether the commit succeeded"
            ) from error
        ours = translated_error(error, "the commit")
        if ours is None:
            raise
        raise ours from error


async def open_existing(url: str, pool_size: int | None = None) -> SqlDatabase:
    """Open a database with semel's messaging tables in it.

    Raises:
        Misuse: there is no database at *url*, its server does not know the role or the
            password, or it has no such tables.
        Permanent: the file is not a database.
        Retryable: it does not answer.
    """
    parsed = read_url(split_schema(url)[0])
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").is_file():
        raise Misuse(
            f"there is no file {parsed.database or ':memory:'}; `semel db create` makes it with "
            f"its tables, if the name is right"
        )
    database = SqlDatabase(url, pool_size=pool_size)
    try:
        async with opening(f"database {masked(url)}"), database.engine.connect() as connection:
            missing = await connection.run_sync(_missing_tables, database.schema)
    except BaseException:
        await database.close()
        raise
    if missing:
        await database.close()
        raise Misuse(
            f"database {masked(url)} lacks the table {missing[0]}"
            f"{f' and {len(missing) - 1} more' if missing[1:] else ''}; create them with "
            f"`semel db create`, or give the URL of the database that the consumers use"
        )
    return database


def _missing_tables(connection: Connection, schema: str | None) -> list[str]:
    tables = find(connection, schema)
    there = inspect(connection).get_table_names(schema=None if tables is None else tables.schema)
    return sorted(set(metadata.tables) - set(there))
