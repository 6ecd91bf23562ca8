"""The session that handlers get, and the connection below it: neither can end the transaction.

    commit, rollback, close                    of session and connection: refused, nothing is lost
    COMMIT, ROLLBACK, BEGIN … as a statement   refused before it is sent
    SET without LOCAL, set_config(…, false)    refused: it would apply to the next transaction, too
    statements that name our savepoints        refused: other messages depend on them
    everything else that ends it               found by the driver's state: `TransactionEnded`,
                                               before the next statement, the next message,
                                               or the commit
    a failed statement, caught by the handler  found before the savepoint or the transaction ends

In a batch, a handler's COMMIT would make the claims of messages durable that are not handled yet:
they would be lost.  Its ROLLBACK would undo the messages handled before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final, NoReturn
from weakref import WeakKeyDictionary

from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]
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
from semel.messaging.handle.thread import BlockingCall
from semel.messaging.redact import sqlstate
from semel.sql.engine import listen_once
from semel.sql.tables import processed_message

FAILED: Final = "semel_failed"
"""The key in a connection's ``info``: a statement failed since the last successful check."""

ABORTED_STATE: Final = "25P02"
NUMBER: Final = text("SELECT txid_current()")

# The first two words of a statement, after blanks and comments.
_WORDS: Final = re.compile(r"(?:\s|--[^\n]*|/\*.*?\*/)*(\w+)\W*(\w*)", re.DOTALL)
_ENDING: Final = frozenset({"commit", "end", "abort", "rollback", "begin", "start"})
_OF_THIS_TRANSACTION: Final = frozenset({"local", "constraints", "transaction"})
# SQLAlchemy names all its savepoints like this, including those of a batch.
_OUR_SAVEPOINTS: Final = "sa_savepoint_"


def refuse(what: str) -> NoReturn:
    """Raise: a handler must not do *what*.

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


def _refused(what: str) -> Callable[..., Any]:
    """Return a method that refuses, before anything is awaited."""

    def method(self: object, *arguments: Any, **named: Any) -> NoReturn:
        refuse(what)

    return method


def _after_unsent(name: str) -> Callable[..., Any]:
    """Return a method of `Session` that first flushes what earlier messages added."""
    original = getattr(Session, name)

    def method(self: GuardedSession, *arguments: Any, **named: Any) -> Any:
        self.send_unsent()
        return original(self, *arguments, **named)

    return method


class GuardedSession(Session):
    """The synchronous inside of a `HandlerSession`.

    The messages of a batch share it.  Each reads the same rows as in a session of its own: those
    of the database, including what earlier messages of the batch wrote.
    """

    guarded = False
    opened_in: Handling | None = None
    unsent = False
    """Earlier messages have added rows that are not flushed yet."""

    of_handler: HandlerSession | None = None
    """Its asynchronous outside, while a handler that is a plain function has this session."""

    def begin_message(self) -> None:
        """Flush, and release every object of earlier messages, as closing a session does.

        An object that stayed in the session would hide newer values in the database.
        """
        self.flush()
        super().expunge_all()
        self.unsent = False

    @property
    def has_objects(self) -> bool:
        """Earlier messages have left objects that the next one must not find.

        Not if they only added rows: those may wait, and are flushed many at a time.
        """
        return bool(self.identity_map or self._deleted or (self._new and not self.autoflush))

    def send_unsent(self) -> None:
        """Flush the rows that earlier messages added, before this one reads the database."""
        if self.unsent:
            self.unsent = False
            self.flush()

    def connection(self, *arguments: Any, **named: Any) -> Connection:
        """Return the connection; for a plain function after a flush of earlier messages."""
        if self.of_handler is not None:
            self.send_unsent()
        return super().connection(*arguments, **named)

    execute = _after_unsent("execute")
    scalar = _after_unsent("scalar")
    scalars = _after_unsent("scalars")
    commit = _refused("commit")
    rollback = _refused("rollback")
    invalidate = _refused("invalidate")
    reset = _refused("reset")

    def add(self, instance: object, *, _warn: bool = True) -> None:
        """Add an object, unless the handler has ended."""
        refuse_if_late(self.opened_in)
        super().add(instance, _warn=_warn)

    def close(self) -> None:
        """Refuse, until the consumer itself releases the session."""
        if self.guarded:
            refuse("close")
        super().close()

    def expunge_all(self) -> None:
        """Remove all objects from the session; refuse if some wait for the next flush."""
        self._refuse_if("expunge_all()", self.new or self.deleted or self.dirty)
        super().expunge_all()

    def expire_all(self) -> None:
        """Read all objects again; refuse if some wait for the next flush."""
        self._refuse_if("expire_all()", self.new or self.deleted or self.dirty)
        super().expire_all()

    def expunge(self, instance: object) -> None:
        """Remove an object from the session; refuse if it has changed.  A new one may go."""
        self._refuse_if("expunge()", instance in self.dirty or instance in self.deleted)
        super().expunge(instance)

    def expire(self, instance: object, attribute_names: Iterable[str] | None = None) -> None:
        """Read an object again; refuse if it has changed."""
        self._refuse_if("expire()", instance in self.dirty)
        super().expire(instance, attribute_names)

    def _refuse_if(self, what: str, changed: object) -> None:
        """Raise if unsent changes would be lost: they may belong to other messages."""
        if self.guarded and changed:
            raise Misuse(
                f"{what} of a handler's session would throw away changes that were not sent yet, "
                f"and may belong to other messages: flush first"
            )


class _Blocking(greenlet):  # type: ignore[misc]
    """A call in which SQLAlchemy may await: it switches to the parent with what it awaits."""

    # The name by which SQLAlchemy recognises such a call.
    __sqlalchemy_greenlet_provider__ = True

    blocking: BlockingCall


class HandlerSession(AsyncSession):
    """An `AsyncSession` inside a transaction that belongs to the consumer."""

    sync_session_class = GuardedSession

    naming: Mapping[str, Any]
    """The execution options with which a statement names the schema of semel's tables."""

    def __init__(
        self, connection: AsyncConnection, naming: Mapping[str, Any], **options: Any
    ) -> None:
        # With "rollback_only", even a commit that got past the guard would not reach the
        # database: the connection's transaction is not the session's.
        super().__init__(
            connection,
            expire_on_commit=False,
            join_transaction_mode="rollback_only",
            **options,
        )
        self.naming = naming
        self._inside.guarded = True
        self._inside.opened_in = handling_now()

    @property
    def _inside(self) -> GuardedSession:
        inside = self.sync_session
        if not isinstance(inside, GuardedSession):
            raise Misuse("a handler's session needs its own kind of synchronous session")
        return inside

    async def begin_message(self) -> None:
        """Prepare the session for the next message, as if it were a new session."""
        inside = self._inside
        if inside.has_objects:
            await self.run_sync(lambda _: inside.begin_message())
        elif inside._new:
            inside.unsent = True

    async def connection(self, *arguments: Any, **named: Any) -> AsyncConnection:
        """Return the connection, after a flush of what earlier messages added."""
        if self._inside.unsent and handling_now() is not None:
            await self.run_sync(lambda _: self._inside.send_unsent())
        return await super().connection(*arguments, **named)

    def run_blocking(
        self, function: Callable[..., Any], message: object, blocking: BlockingCall
    ) -> Any:
        """Call *function* in this thread with a blocking `Session` in the same transaction."""
        inside = self._inside
        inside.of_handler = self
        call = _Blocking(function, getcurrent())
        call.blocking = blocking
        call.gr_context = getcurrent().gr_context
        try:
            found = call.switch(message, inside)
            while not call.dead:
                try:
                    value = blocking.wait(found)
                except BaseException as error:  # noqa: BLE001 - raised in the call
                    found = call.throw(error)
                else:
                    found = call.switch(value)
        finally:
            inside.of_handler = None
        return found

    async def release(self) -> None:
        """Close the session: for the code that created it."""
        self._inside.guarded = False
        await super().close()

    def refuse_if_nested(self, within: AsyncSessionTransaction | None = None) -> None:
        """Check that every savepoint inside of *within* has ended.

        Raises:
            Misuse: a savepoint is open: ending *within* would undo what was done in it.
        """
        open_one = self.get_nested_transaction()
        innermost = None if open_one is None else open_one.sync_transaction
        expected = None if within is None else within.sync_transaction
        if innermost is not expected:
            raise Misuse(
                "a handler returned with an open savepoint: what was done in it would be undone. "
                "End it, best with `async with session.begin_nested():`"
            )

    begin = _refused("begin a transaction of")
    commit = _refused("commit")
    rollback = _refused("rollback")
    close = _refused("close")
    invalidate = _refused("invalidate")
    reset = _refused("reset")

    async def __aexit__(self, *_: object) -> None:
        """Do nothing: ``async with session:`` in a handler does not close it."""


@dataclass(slots=True)
class _Hold:
    """The state of a transaction that a handler must not end."""

    has_begun: bool = False
    """A statement was sent: drivers begin the transaction with the first one."""

    has_ended: bool = False
    """It was ended, past every guard."""

    last: Handling | None = None
    """The call of a handler that used the connection last."""

    opened_in: Handling | None = None
    """The call of a handler that opened it; None for the consumer's own."""

    number: int | None = None
    """PostgreSQL's transaction id; read when a handler gets the driver's connection."""

    def refuse_if_idle(self, connection: Connection) -> None:
        """Raise `TransactionEnded` if the driver reports no open transaction."""
        driver = connection.connection.driver_connection
        if self.has_ended or _is_in_transaction(driver) is False:
            self.raise_ended()

    def raise_ended(self) -> NoReturn:
        """Record that the transaction has ended, and raise with the message that used it last."""
        self.has_ended = True
        raise TransactionEnded("" if self.last is None else self.last.message.id)


_HELD: Final[WeakKeyDictionary[Connection, _Hold]] = WeakKeyDictionary()


def guard_transactions(engine: AsyncEngine) -> None:
    """Refuse statements that would end the transaction, on held connections of *engine*.

    Record on every connection that a statement failed.
    """
    listen_once(engine, "commit", _before_commit)
    listen_once(engine, "before_cursor_execute", _before_statement, retval=True)
    listen_once(engine, "handle_error", _note_failure)


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
    call = getcurrent()
    if isinstance(call, _Blocking):
        call.blocking.refuse_if_cancelled()
    hold = _HELD.get(connection)
    if hold is not None:
        refuse_if_late(hold.opened_in)
        why = _refusal_of(statement)
        if why and not _is_sqlalchemys(context):
            raise Misuse(why)
        # Check before the statement is sent: it would begin a new transaction, or run in none.
        # A failed statement leaves SQLite without a transaction, too, so that says nothing.
        if hold.has_ended or (hold.has_begun and FAILED not in connection.info):
            hold.refuse_if_idle(connection)
        hold.has_begun = True
        hold.last = handling_now() or hold.last
    return statement, parameters


def _is_sqlalchemys(context: Any) -> bool:
    """Return whether SQLAlchemy itself sends the statement, to end one of its savepoints."""
    return isinstance(
        getattr(context, "invoked_statement", None),
        RollbackToSavepointClause | ReleaseSavepointClause,
    )


_LITERAL: Final = re.compile(r"'[^']*'")

# ROLLBACK TO a savepoint of the handler's own ends nothing.
_ENDS_LATER: Final = re.compile(
    r";\s*(commit|rollback|abort|prepare\s+transaction)\b(?!\s+(?:(?:work|transaction)\s+)?to\b)"
)


# Cached, because handlers send the same few statements again and again.
@lru_cache(maxsize=1024)
def _refusal_of(statement: str) -> str:
    """Return why a handler must not send *statement*; empty if it may.

    psycopg accepts several statements at once, so a COMMIT after a semicolon counts, too.
    """
    found = _WORDS.match(statement)
    if found is None:
        return ""
    first, second = found[1].lower(), found[2].lower()
    said = statement.lower()
    if later := _ENDS_LATER.search(_LITERAL.sub("''", said)):
        return _must_not(f"send {later[1].upper()} on")
    if first in _ENDING and not (first == "rollback" and "to" in said.split()):
        return _must_not(f"send {first.upper()} on")
    # A prepared transaction keeps its locks until an operator ends it.
    if (first, second) == ("prepare", "transaction"):
        return _must_not("send PREPARE TRANSACTION on")
    # The claims are outside the savepoint: messages would be completed without their effects.
    if first in ("rollback", "release") and _OUR_SAVEPOINTS in said:
        return _must_not("end the savepoints of other messages in")
    is_set = first == "set" and second not in _OF_THIS_TRANSACTION
    if is_set or ("set_config" in said and ",false)" in "".join(said.split())):
        return (
            "a handler must not send SET on its session: it would also apply to the next "
            "transaction on the connection. Use SET LOCAL, or set_config(…, true)"
        )
    return ""


def _unless_held(name: str) -> Callable[..., Any]:
    """Return a method of `AsyncConnection` that refuses while the transaction is held."""
    original = getattr(AsyncConnection, name)

    async def method(self: UnitConnection, *arguments: Any, **named: Any) -> None:
        if self._hold is not None:
            refuse(name)
        await original(self, *arguments, **named)

    return method


class UnitConnection(AsyncConnection):
    """A connection that can be held: then only the code that holds it ends the transaction."""

    __slots__ = ()

    def hold(self) -> None:
        """Refuse from now on everything that would end the transaction."""
        _HELD[self._inside] = _Hold(opened_in=handling_now())

    def allow_end(self) -> None:
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
        """What the driver reports; None if it does not know, or the connection is closed."""
        if self.invalidated or self.closed:
            return None
        return _is_in_transaction(self._inside.connection.driver_connection)

    commit = _unless_held("commit")
    rollback = _unless_held("rollback")
    close = _unless_held("close")
    invalidate = _unless_held("invalidate")

    async def get_raw_connection(self) -> PoolProxiedConnection:
        """Return the driver's connection, for what SQLAlchemy does not offer, such as COPY.

        Read the transaction's id first: the driver's connection can commit and begin again,
        which only a new id shows.
        """
        hold = self._hold
        if hold is not None:
            hold.last = handling_now() or hold.last
        if hold is not None and hold.number is None and self.dialect.name == "postgresql":
            hold.number = (await self.execute(NUMBER)).scalar_one()
        return await super().get_raw_connection()

    def refuse_if_idle(self) -> None:
        """Check that a transaction is open; the driver knows, so no statement is sent.

        Raises:
            TransactionEnded: it was ended, past every guard.
        """
        hold = self._hold
        if hold is not None and hold.has_begun and not (self.invalidated or self.closed):
            hold.refuse_if_idle(self._inside)

    async def refuse_if_ended(self) -> None:
        """Check that the transaction is still the one that was held.

        The database is asked only if a handler got the driver's connection.

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
        """Raise `TransactionEnded`, because a savepoint of ours no longer exists."""
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


def _note_failure(context: ExceptionContext) -> None:
    if isinstance(getcurrent(), _Blocking):
        # A lost connection is closed on the event loop, when the transaction ends.
        context.is_disconnect = False
    connection = context.connection
    if connection is not None and not connection.invalidated and not connection.closed:
        connection.info[FAILED] = True


def has_failed(connection: AsyncConnection) -> bool:
    """Return whether a statement of an open connection failed since the last check."""
    return not (connection.invalidated or connection.closed) and FAILED in connection.info


async def refuse_if_aborted(
    transaction: AsyncTransaction | AsyncSessionTransaction, connection: AsyncConnection
) -> None:
    """Check that a transaction or savepoint can still be kept, before it is ended.

    After a failed statement PostgreSQL refuses every other one, and answers COMMIT with a
    rollback but without an error.  After a failed flush, SQLAlchemy rolls the innermost
    savepoint back, and its block ends without an error.  If a handler caught the error and
    returned, its message would be acknowledged although nothing was kept.

    The database is asked only if a statement of the connection failed.

    Raises:
        Misuse: it was rolled back: a handler caught an error and continued.
    """
    # A failed flush rolls the session's innermost transaction back, even if it was caught.
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
        "a handler caught a database error and continued, but the transaction was already rolled "
        "back: nothing would be kept. Let the error out, or put what may fail into "
        "session.begin_nested()"
    ) from cause


class Beginning:
    """Begins the transaction of *session*, if needed, before each statement about a claim."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session
        self._checked: SessionTransaction | None = None

    @cached_property
    def is_postgres(self) -> bool:
        """True if the claims are in PostgreSQL."""
        return self._session.get_bind(clause=processed_message).dialect.name == "postgresql"

    async def begin(self) -> None:
        """Begin the transaction as READ COMMITTED, if the caller has not begun it.

        At a higher level, the second of two claims fails instead of finding the first.
        """
        inside = self._session.sync_session
        if not inside.autobegin and not inside.in_transaction():
            await self._session.begin()
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
        # Private to SQLAlchemy, but nothing public shows whether the transaction has a
        # connection yet: `session.begin()` takes none.
        if begun is not None and begun._connections:
            return True
        # A connection of the caller keeps its isolation level after this transaction, so the
        # caller chooses it.
        return isinstance(self._session.get_bind(clause=processed_message), Connection)

    def _refuse_autocommit(self) -> None:
        """Raise in AUTOCOMMIT: a claim that cannot be rolled back loses a message that fails."""
        begun = self._session.sync_session.get_transaction()
        if begun is not None and begun is self._checked:
            return
        known = begun._connections.values() if begun is not None else ()
        used: list[Engine | Connection] = [one[0] for one in known]
        for one in used or [self._session.get_bind(clause=processed_message)]:
            driver: Any = one.connection.dbapi_connection if isinstance(one, Connection) else None
            # The first is an attribute of SQLAlchemy's wrapper of asyncpg, the second of psycopg.
            level = getattr(driver, "isolation_level", None)
            if level == "autocommit" or getattr(driver, "autocommit", False):
                raise Misuse(
                    "the session's connection is in AUTOCOMMIT: a claim would be durable before "
                    "its message is handled. Claim first, or use an engine with transactions"
                )
        self._checked = begun
