"""The session that handlers get, and the connection below it: neither can end the transaction.

    commit, rollback, close                    of session and connection: refused, nothing is lost
    COMMIT, ROLLBACK, BEGIN … as a statement   refused before it is sent
    SET without LOCAL, set_config(…, false)    refused: it would hold for the next transaction
    statements that name our savepoints        refused: other messages are in them
    everything else that ends it               the driver knows: `TransactionEnded`, before the
                                               next statement, the next message, or the commit
    a failed statement, caught by the handler  noticed before savepoint or transaction end

A handler's COMMIT would make claims of messages durable that are not handled yet, which loses
them; its ROLLBACK would undo its neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final, NoReturn
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, text
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    AsyncSessionTransaction,
    AsyncTransaction,
)
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.pool import PoolProxiedConnection
from sqlalchemy.sql.elements import ReleaseSavepointClause, RollbackToSavepointClause

from semel.errors import Misuse
from semel.messaging.database import TransactionEnded
from semel.messaging.handle.attempt import Handling, handling_now, refuse_if_late
from semel.messaging.redact import sqlstate
from semel.sql.engine import listen_once
from semel.sql.tables import processed_message

FAILED: Final = "semel_failed"
"""Where a connection says that a statement failed since it was last known to be well."""

ABORTED_STATE: Final = "25P02"
NUMBER: Final = text("SELECT txid_current()")

# The first two words of a statement, behind blanks and comments.
_WORDS: Final = re.compile(r"(?:\s|--[^\n]*|/\*.*?\*/)*(\w+)\W*(\w*)", re.DOTALL)
_ENDING: Final = frozenset({"commit", "end", "abort", "rollback", "begin", "start"})
_OF_THIS_TRANSACTION: Final = frozenset({"local", "constraints", "transaction"})
# SQLAlchemy gives this name to all savepoints that it makes, those of a batch included.
_OUR_SAVEPOINTS: Final = "sa_savepoint_"


def refuse(what: str) -> NoReturn:
    """Say why a handler must not do *what*.

    Raises:
        Misuse: always.
    """
    raise Misuse(_must_not(what))


def _must_not(what: str) -> str:
    return (
        f"a handler must not {what} its session: claims of other messages are in the same "
        f"transaction. Return to have it committed, raise to have it rolled back; "
        f"session.begin_nested() makes a savepoint"
    )


class GuardedSession(Session):
    """The synchronous inside of a `HandlerSession`.

    Messages that share it find what a session of their own would give them: rows as the
    database has them, what their neighbours wrote included.
    """

    guarded = False
    opened_in: Handling | None = None
    unsent = False
    """Earlier messages have added rows that the database has not got yet."""

    def begin_message(self) -> None:
        """Let go of whatever earlier messages have read or changed, as a closed session does.

        Objects of theirs that are still alive would hide what the database has by now.  Rows
        that they only added may wait, and are sent many at a time.
        """
        self.flush()
        super().expunge_all()
        self.unsent = False

    @property
    def has_objects(self) -> bool:
        """Earlier messages have left more behind than rows that they added."""
        return bool(self.identity_map or self._deleted or (self._new and not self.autoflush))

    def send_unsent(self) -> None:
        """Send what earlier messages have added, before this one asks the database."""
        if self.unsent:
            self.unsent = False
            self.flush()

    def execute(self, *arguments: Any, **named: Any) -> Any:
        """Execute a statement, behind what earlier messages have added."""
        self.send_unsent()
        return super().execute(*arguments, **named)

    def scalar(self, *arguments: Any, **named: Any) -> Any:
        """Execute a statement, behind what earlier messages have added."""
        self.send_unsent()
        return super().scalar(*arguments, **named)

    def scalars(self, *arguments: Any, **named: Any) -> Any:
        """Execute a statement, behind what earlier messages have added."""
        self.send_unsent()
        return super().scalars(*arguments, **named)

    def add(self, instance: object, *, _warn: bool = True) -> None:
        """Add an object, unless the handler has ended."""
        refuse_if_late(self.opened_in)
        super().add(instance, _warn=_warn)

    def commit(self) -> None:
        """Refuse."""
        refuse("commit")

    def rollback(self) -> None:
        """Refuse."""
        refuse("rollback")

    def close(self) -> None:
        """Refuse, until the consumer itself is done with the session."""
        if self.guarded:
            refuse("close")
        super().close()

    def invalidate(self) -> None:
        """Refuse."""
        refuse("invalidate")

    def reset(self) -> None:
        """Refuse."""
        refuse("reset")

    def expunge_all(self) -> None:
        """Forget all objects, unless some wait for the next flush."""
        self._refuse_if("expunge_all()", self.new or self.deleted or self.dirty)
        super().expunge_all()

    def expire_all(self) -> None:
        """Read all objects again, unless some wait for the next flush."""
        self._refuse_if("expire_all()", self.new or self.deleted or self.dirty)
        super().expire_all()

    def expunge(self, instance: object) -> None:
        """Forget an object, unless it has changed; a new one is its maker's to forget."""
        self._refuse_if("expunge()", instance in self.dirty or instance in self.deleted)
        super().expunge(instance)

    def expire(self, instance: object, attribute_names: Iterable[str] | None = None) -> None:
        """Read an object again, unless it has changed."""
        self._refuse_if("expire()", instance in self.dirty)
        super().expire(instance, attribute_names)

    def _refuse_if(self, what: str, changed: object) -> None:
        """See that no changes are thrown away: they may be those of other messages."""
        if self.guarded and changed:
            raise Misuse(
                f"{what} of a handler's session would throw away changes that were not sent yet, "
                f"and may be those of other messages: flush before"
            )


class HandlerSession(AsyncSession):
    """An `AsyncSession` inside a transaction that belongs to the consumer."""

    sync_session_class = GuardedSession

    def __init__(self, connection: AsyncConnection, **options: Any) -> None:
        # With "rollback_only", even a commit that got past the guard would not reach the
        # database: the connection's transaction is not the session's.
        super().__init__(
            connection,
            expire_on_commit=False,
            join_transaction_mode="rollback_only",
            **options,
        )
        self._inside.guarded = True
        self._inside.opened_in = handling_now()

    @property
    def _inside(self) -> GuardedSession:
        inside = self.sync_session
        if not isinstance(inside, GuardedSession):
            raise Misuse("a handler's session needs its own kind of synchronous session")
        return inside

    async def begin_message(self) -> None:
        """See that the next message finds the session as a new one would be."""
        inside = self._inside
        if inside.has_objects:
            await self.run_sync(lambda _: inside.begin_message())
        elif inside._new:
            inside.unsent = True

    async def connection(self, *arguments: Any, **named: Any) -> AsyncConnection:
        """Return the connection; what is asked there finds what earlier messages have added."""
        if self._inside.unsent and handling_now() is not None:
            await self.run_sync(lambda _: self._inside.send_unsent())
        return await super().connection(*arguments, **named)

    async def release(self) -> None:
        """Let go of the session: for the one who made it."""
        self._inside.guarded = False
        await super().close()

    def refuse_if_nested(self, within: AsyncSessionTransaction | None = None) -> None:
        """See that every savepoint inside of *within* has ended.

        Raises:
            Misuse: one is open, and would be undone with whatever was done in it.
        """
        open_one = self.get_nested_transaction()
        innermost = None if open_one is None else open_one.sync_transaction
        expected = None if within is None else within.sync_transaction
        if innermost is not expected:
            raise Misuse(
                "a handler returned with an open savepoint: what was done in it would have been "
                "undone. End it, best with `async with session.begin_nested():`"
            )

    def begin(self) -> AsyncSessionTransaction:
        """Refuse: the consumer has begun, and ends it."""
        refuse("begin a transaction of")

    async def commit(self) -> None:
        """Refuse."""
        refuse("commit")

    async def rollback(self) -> None:
        """Refuse."""
        refuse("rollback")

    async def close(self) -> None:
        """Refuse."""
        refuse("close")

    async def invalidate(self) -> None:
        """Refuse."""
        refuse("invalidate")

    async def reset(self) -> None:
        """Refuse."""
        refuse("reset")

    async def __aexit__(self, *_: object) -> None:
        """Do nothing: ``async with session:`` in a handler does not close it."""


@dataclass(slots=True)
class _Hold:
    """What is known of a transaction that is held open."""

    has_begun: bool = False
    """A statement was sent: drivers begin with the first one."""

    has_ended: bool = False
    """It was ended, past every guard."""

    last: Handling | None = None
    """The call of a handler that used the connection last."""

    opened_in: Handling | None = None
    """The call of a handler that opened it; None for the consumer's own."""

    number: int | None = None
    """PostgreSQL's own number of it; asked for when a handler gets the driver's connection."""

    def refuse_if_idle(self, connection: Connection) -> None:
        """Raise `TransactionEnded` where the driver says that there is no transaction."""
        driver = connection.connection.driver_connection
        if self.has_ended or _is_in_transaction(driver) is False:
            self.raise_ended()

    def raise_ended(self) -> NoReturn:
        """Remember that the transaction has ended, and name the message that was at it."""
        self.has_ended = True
        raise TransactionEnded("" if self.last is None else self.last.message.id)


_HELD: Final[WeakKeyDictionary[Connection, _Hold]] = WeakKeyDictionary()


def guard_transactions(engine: AsyncEngine) -> None:
    """Refuse on every held connection of *engine* what would end its transaction."""
    listen_once(engine, "commit", _before_commit)
    listen_once(engine, "before_cursor_execute", _before_statement, retval=True)


def _before_commit(connection: Connection) -> None:
    if connection in _HELD:
        refuse("commit")


def _before_statement(
    connection: Connection,
    cursor: Any,
    statement: str,
    parameters: Any,
    context: Any,
    executemany: bool,
) -> tuple[str, Any]:
    hold = _HELD.get(connection)
    if hold is not None:
        refuse_if_late(hold.opened_in)
        why = _refusal_of(statement)
        if why and not _is_sqlalchemys(context):
            raise Misuse(why)
        # Before this one is sent: a driver would begin another transaction with it, or none.
        if hold.has_begun and FAILED not in connection.info:
            hold.refuse_if_idle(connection)
        hold.has_begun = True
        hold.last = handling_now() or hold.last
    return statement, parameters


def _is_sqlalchemys(context: Any) -> bool:
    """Tell whether SQLAlchemy ends a savepoint of its own, and it is no text of a handler."""
    return isinstance(
        getattr(context, "invoked_statement", None),
        RollbackToSavepointClause | ReleaseSavepointClause,
    )


# Handlers send the same few statements again and again.
@lru_cache(maxsize=1024)
def _refusal_of(statement: str) -> str:
    """Say why a handler must not send *statement*; empty where it may.

    What is not seen here (a COMMIT behind a semicolon, in a driver that takes several
    statements at once) is convicted by the driver's own state.
    """
    found = _WORDS.match(statement)
    if found is None:
        return ""
    first, second = found[1].lower(), found[2].lower()
    said = statement.lower()
    if first in _ENDING and not (first == "rollback" and "to" in said.split()):
        return _must_not(f"send {first.upper()} on")
    # A prepared transaction keeps its locks until somebody finds it.
    if (first, second) == ("prepare", "transaction"):
        return _must_not("send PREPARE TRANSACTION on")
    # The claims are outside of the savepoint: a message would be completed without its effect.
    if first in ("rollback", "release") and _OUR_SAVEPOINTS in said:
        return _must_not("end the savepoints of other messages in")
    is_set = first == "set" and second not in _OF_THIS_TRANSACTION
    if is_set or ("set_config" in said and ",false)" in "".join(said.split())):
        return (
            "a handler must not send SET on its session: it would hold for the next transaction "
            "on the connection. SET LOCAL, or set_config(…, true), ends with its own transaction"
        )
    return ""


class UnitConnection(AsyncConnection):
    """A connection that can be held: then its transaction is its owner's to end."""

    __slots__ = ()

    def hold(self) -> None:
        """Refuse from now on whatever would end the transaction."""
        _HELD[self._inside] = _Hold(opened_in=handling_now())

    def let_go(self) -> None:
        """Allow the end of the transaction: for the code that began it."""
        _HELD.pop(self._inside, None)

    @property
    def _inside(self) -> Connection:
        inside = self.sync_connection
        if inside is None:
            raise TransactionEnded
        return inside

    @property
    def _hold(self) -> _Hold | None:
        return _HELD.get(self._inside)

    @property
    def is_in_transaction(self) -> bool | None:
        """What the driver says; None where it does not, or the connection is gone."""
        if self.invalidated or self.closed:
            return None
        return _is_in_transaction(self._inside.connection.driver_connection)

    def _refuse_while_held(self, what: str) -> None:
        if self._hold is not None:
            refuse(what)

    async def commit(self) -> None:
        """Commit, unless the transaction is held."""
        self._refuse_while_held("commit")
        await super().commit()

    async def rollback(self) -> None:
        """Roll back, unless the transaction is held."""
        self._refuse_while_held("rollback")
        await super().rollback()

    async def close(self) -> None:
        """Close, unless the transaction is held."""
        self._refuse_while_held("close")
        await super().close()

    async def invalidate(self, exception: BaseException | None = None) -> None:
        """Invalidate, unless the transaction is held."""
        self._refuse_while_held("invalidate")
        await super().invalidate(exception)

    async def get_raw_connection(self) -> PoolProxiedConnection:
        """Return the driver's connection, and remember which transaction it was given in.

        It is for what SQLAlchemy cannot say, as PostgreSQL's COPY.
        """
        hold = self._hold
        if hold is not None:
            hold.last = handling_now() or hold.last
        if hold is not None and hold.number is None and self.dialect.name == "postgresql":
            hold.number = (await self.execute(NUMBER)).scalar_one()
        return await super().get_raw_connection()

    def refuse_if_idle(self) -> None:
        """Check that there is a transaction at all; the driver knows, no statement is sent.

        Raises:
            TransactionEnded: it was ended, past every guard.
        """
        hold = self._hold
        if hold is not None and hold.has_begun and not (self.invalidated or self.closed):
            hold.refuse_if_idle(self._inside)

    async def refuse_if_ended(self) -> None:
        """Check that the transaction is still the one that was held.

        The database is asked only if the driver's connection was given away.

        Raises:
            TransactionEnded: it was ended, past every guard.
        """
        self.refuse_if_idle()
        hold = self._hold
        if hold is None or hold.number is None:
            return
        if (await self.execute(NUMBER)).scalar_one() != hold.number:
            hold.raise_ended()

    def savepoint_is_gone(self) -> None:
        """Say that the transaction has ended, where a savepoint of ours is not there any more."""
        hold = self._hold
        if hold is not None:
            hold.raise_ended()


def _is_in_transaction(driver: Any) -> bool | None:
    if hasattr(driver, "is_in_transaction"):  # asyncpg
        return None if driver.is_closed() else bool(driver.is_in_transaction())
    if hasattr(driver, "in_transaction"):  # aiosqlite
        return bool(driver.in_transaction)
    status = getattr(getattr(driver, "info", None), "transaction_status", None)  # psycopg
    name = getattr(status, "name", "UNKNOWN")
    return None if name == "UNKNOWN" else name != "IDLE"


def note_failures(engine: AsyncEngine) -> None:
    """Make every connection of *engine* remember that a statement failed."""
    listen_once(engine, "handle_error", _note)


def _note(context: ExceptionContext) -> None:
    connection = context.connection
    if connection is not None and not connection.invalidated and not connection.closed:
        connection.info[FAILED] = True


def has_failed(connection: AsyncConnection) -> bool:
    """Tell whether a statement of a living connection failed since it was known to be well."""
    return not (connection.invalidated or connection.closed) and FAILED in connection.info


async def refuse_if_aborted(
    transaction: AsyncTransaction | AsyncSessionTransaction, connection: AsyncConnection
) -> None:
    """Check that a transaction or savepoint still stands, before it is ended as if it did.

    After a failed statement PostgreSQL refuses every other one, and answers COMMIT with a
    rollback and without an error; after a failed flush, SQLAlchemy rolls the innermost
    savepoint back, and leaves its block as if nothing had happened.  A handler that catches
    the error and returns would have its message acknowledged, and nothing kept.

    The database is asked only if a statement of the connection failed.

    Raises:
        Misuse: it does not stand; a handler has caught an error and gone on.
    """
    # A failed flush has rolled back the session's innermost transaction, whoever caught it.
    if not transaction.is_active:
        _refuse_swallowed(None)
    if not has_failed(connection):
        return
    try:
        await connection.execute(text("SELECT 1"))
    except DBAPIError as error:
        if sqlstate(error) != ABORTED_STATE:
            raise
        _refuse_swallowed(error)
    connection.info.pop(FAILED, None)


def _refuse_swallowed(cause: BaseException | None) -> NoReturn:
    raise Misuse(
        "a handler caught a database error and went on, but the transaction had been given up: "
        "nothing of it would have been kept. Let the error out, or put what may fail into "
        "session.begin_nested()"
    ) from cause


class Beginning:
    """The begin of the transaction that *session* is in, before each statement about a claim."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session
        self._checked: SessionTransaction | None = None

    @cached_property
    def is_postgres(self) -> bool:
        """Tell whether the claims are in PostgreSQL."""
        return self._session.get_bind(clause=processed_message).dialect.name == "postgresql"

    async def begin(self) -> None:
        """Begin the transaction as READ COMMITTED, where it is ours to begin.

        At a higher level, the second of two claims fails instead of finding the first.
        """
        if not self.is_postgres:
            return
        if self._has_connection():
            self._refuse_autocommit()
        else:
            await self._session.connection(
                bind_arguments={"clause": processed_message},
                execution_options={"isolation_level": "READ COMMITTED"},
            )

    def _has_connection(self) -> bool:
        begun = self._session.sync_session.get_transaction()
        # `session.begin()` takes no connection yet, and nothing else in SQLAlchemy tells.
        if begun is not None and begun._connections:
            return True
        # A connection of the caller's keeps its level beyond this transaction: theirs to choose.
        return isinstance(self._session.get_bind(clause=processed_message), Connection)

    def _refuse_autocommit(self) -> None:
        """See that the claim can be taken back: a message whose handler fails would be lost."""
        begun = self._session.sync_session.get_transaction()
        if begun is not None and begun is self._checked:
            return
        known = begun._connections.values() if begun is not None else ()
        used: list[Engine | Connection] = [one[0] for one in known]
        for one in used or [self._session.get_bind(clause=processed_message)]:
            driver: Any = one.connection.dbapi_connection if isinstance(one, Connection) else None
            # As SQLAlchemy's wrapper of asyncpg says it, and as psycopg does.
            level = getattr(driver, "isolation_level", None)
            if level == "autocommit" or getattr(driver, "autocommit", False):
                raise Misuse(
                    "the session's connection is in AUTOCOMMIT: a claim would be durable before "
                    "its message is handled. Claim first, or use an engine with transactions"
                )
        self._checked = begun
