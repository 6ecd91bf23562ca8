"""Transactions that were given up, and that their owner still believes in.

After a failed statement PostgreSQL refuses every other one, and answers COMMIT
with a rollback and without an error; after a failed flush, SQLAlchemy rolls the
innermost savepoint back, and leaves its block as if nothing had happened.  A
handler that catches the error and returns would have its message acknowledged,
and the messages that share its savepoint with it, and nothing kept.
"""

from __future__ import annotations

from typing import Final, NoReturn

from sqlalchemy import text
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSessionTransaction,
    AsyncTransaction,
)

from semel.errors import Misuse
from semel.messaging.reasons import sqlstate
from semel.sqlalchemy.listening import listen_once

FAILED: Final = "semel_failed"
"""Where a connection says that a statement failed since it was last known to be well."""

ABORTED_STATE: Final = "25P02"


def note_failures(engine: AsyncEngine) -> None:
    """Let every connection of *engine* remember that a statement failed; once is enough."""
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
    """See that a transaction or savepoint still stands, before it is ended as if it did.

    The database is asked only if a statement of the connection failed.

    Raises:
        Misuse: it does not stand; a handler has caught an error and gone on.
    """
    # A failed flush has rolled back the session's innermost transaction, whoever caught it.
    if not transaction.is_active:
        _refuse(None)
    if not has_failed(connection):
        return
    try:
        await connection.execute(text("SELECT 1"))
    except DBAPIError as error:
        if sqlstate(error) != ABORTED_STATE:
            raise
        _refuse(error)
    connection.info.pop(FAILED, None)


def _refuse(cause: BaseException | None) -> NoReturn:
    raise Misuse(
        "a handler caught a database error and went on, but the transaction had been given up: "
        "nothing of it would have been kept. Let the error out, or put what may fail into "
        "session.begin_nested()"
    ) from cause
