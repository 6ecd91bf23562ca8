"""The connection of a unit: whoever opened its transaction ends it, and nobody else.

    commit, rollback, close of the connection      refused, the transaction stands
    a transaction's own commit                     refused, the transaction is given up
    COMMIT, ROLLBACK, BEGIN … as a statement       refused before it is sent
    SET without LOCAL, set_config(…, false)        refused: it would outlive the transaction
    ROLLBACK TO, RELEASE of our own savepoints     refused: they are other messages'
    whatever is said to the driver's connection    noticed before the unit ends

`session` guards a handler's session; this guards what is below it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NoReturn
from weakref import WeakKeyDictionary

from sqlalchemy import text
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.pool import PoolProxiedConnection
from sqlalchemy.sql.elements import ReleaseSavepointClause, RollbackToSavepointClause

from semel.errors import Misuse
from semel.messaging.context import Handling, handling_now, refuse_if_late
from semel.messaging.database import TransactionEnded
from semel.sqlalchemy.listening import listen_once
from semel.sqlalchemy.session import refuse

_BLANK: Final = r"(?:\s|--[^\n]*(?:\n|$)|/\*(?:[^*]|\*(?!/))*\*/)"
_ENDS: Final = re.compile(
    rf"{_BLANK}*(?P<verb>commit|end|abort|begin|start\s+transaction|prepare\s+transaction"
    rf"|rollback(?!{_BLANK}+(?:(?:work|transaction){_BLANK}+)?to\b))\b",
    re.IGNORECASE,
)
_COMMENT: Final = r"--[^\n]*|/\*.*?\*/"
_QUOTED: Final = re.compile(
    rf"{_COMMENT}|\be'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|\"[^\"]*\""
    r"|\$(?P<tag>\w*)\$.*?\$(?P=tag)\$",
    re.DOTALL | re.IGNORECASE,
)
_SETS: Final = re.compile(
    rf"{_BLANK}*set\b(?!{_BLANK}+(?:local|constraints|transaction)\b)", re.IGNORECASE
)
_CONFIGURES: Final = re.compile(
    r"\bset_config\b[^;]*,\s*(?:false|'f[a-z]*'|'0')\s*(?:::\s*bool\w*\s*)?\)", re.I
)
# Those of a batch have the names that SQLAlchemy gives.
_OUR_SAVEPOINT: Final = re.compile(
    rf"{_BLANK}*(?:rollback\b.*?\bto|release)\b.*\bsa_savepoint_\d", re.IGNORECASE | re.DOTALL
)
# A trigger's or a function's body has semicolons, and an END of its own.
_HAS_BODY: Final = re.compile(rf"{_BLANK}*create\b", re.IGNORECASE)

NUMBER: Final = text("SELECT txid_current()")


@dataclass(slots=True)
class _Hold:
    """What is known of a transaction that is held open."""

    has_begun: bool = False
    """A statement was sent: drivers begin with the first one."""

    has_ended: bool = False
    """Somebody ended it, past every guard."""

    opened_in: Handling | None = None
    """The call of a handler that opened it; None for the consumer's own."""

    number: int | None = None
    """PostgreSQL's own number of it; asked for when somebody gets the driver's connection."""


_HELD: Final[WeakKeyDictionary[Connection, _Hold]] = WeakKeyDictionary()


def guard_transactions(engine: AsyncEngine) -> None:
    """Let no connection of *engine* that is held end its transaction; once is enough."""
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
        if not _is_harmless(statement) and not _is_sqlalchemys(context):
            _refuse_statement(statement)
        hold.has_begun = True
    return statement, parameters


@lru_cache(maxsize=1024)
def _is_harmless(statement: str) -> bool:
    """Tell whether a statement may be sent; handlers send the same few again and again."""
    return (
        ending_in(statement) is None
        and not _SETS.match(statement)
        and not _CONFIGURES.search(statement)
        and not _OUR_SAVEPOINT.match(statement)
    )


def _is_sqlalchemys(context: Any) -> bool:
    """Tell whether SQLAlchemy ends a savepoint of its own, and not a text that somebody wrote."""
    return isinstance(
        getattr(context, "invoked_statement", None),
        RollbackToSavepointClause | ReleaseSavepointClause,
    )


def _refuse_statement(statement: str) -> NoReturn:
    verb = ending_in(statement)
    if verb is not None:
        refuse(f"send {verb} on")
    if _OUR_SAVEPOINT.match(statement):
        refuse("end the savepoints of other messages in")
    raise Misuse(
        "a handler must not send SET on its session: it would hold for whoever gets the "
        "connection next. SET LOCAL, or set_config(…, true), ends with the transaction"
    )


def ending_in(statement: str) -> str | None:
    """Return what in *statement* begins or ends a transaction; None where nothing does."""
    found = _ENDS.match(statement)
    if found is None and ";" in statement and not _HAS_BODY.match(statement):
        rest = _QUOTED.sub(" ", statement).split(";")
        found = next(filter(None, map(_ENDS.match, rest)), None)
    return None if found is None else " ".join(found["verb"].upper().split())


class UnitConnection(AsyncConnection):
    """A connection that can be held: then its transaction is its owner's to end."""

    __slots__ = ()

    def hold(self) -> None:
        """Refuse from now on whatever would end the transaction."""
        _HELD[self._inside] = _Hold(opened_in=handling_now())

    def let_go(self) -> None:
        """Let the transaction be ended: for the one who began it."""
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
    def has_ended(self) -> bool:
        """Whether somebody was noticed to have ended the transaction, past every guard."""
        hold = self._hold
        return hold is not None and hold.has_ended

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
        if hold is not None and hold.number is None and self.dialect.name == "postgresql":
            hold.number = (await self.execute(NUMBER)).scalar_one()
        return await super().get_raw_connection()

    def refuse_if_idle(self) -> None:
        """See that there is a transaction at all; the driver knows, nobody else is asked.

        Raises:
            TransactionEnded: somebody ended it, past every guard.
        """
        hold = self._hold
        if hold is None or not hold.has_begun or self.invalidated or self.closed:
            return
        if hold.has_ended or self.is_in_transaction is False:
            hold.has_ended = True
            raise TransactionEnded

    async def refuse_if_ended(self) -> None:
        """See that the transaction is still the one that was held.

        The database is asked only if the driver's connection was given away.

        Raises:
            TransactionEnded: somebody ended it, past every guard.
        """
        self.refuse_if_idle()
        hold = self._hold
        if hold is None or hold.number is None:
            return
        if (await self.execute(NUMBER)).scalar_one() != hold.number:
            hold.has_ended = True
            raise TransactionEnded


def _is_in_transaction(driver: Any) -> bool | None:
    if hasattr(driver, "is_in_transaction"):  # asyncpg
        return None if driver.is_closed() else bool(driver.is_in_transaction())
    if hasattr(driver, "in_transaction"):  # aiosqlite
        return bool(driver.in_transaction)
    status = getattr(getattr(driver, "info", None), "transaction_status", None)  # psycopg
    name = getattr(status, "name", "UNKNOWN")
    return None if name == "UNKNOWN" else name != "IDLE"
