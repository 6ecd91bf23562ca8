"""What PostgreSQL's errors mean, by their SQLSTATE and never by their text.

    Retryable   the connection, the server's state, locks, deadlocks, resources
    Permanent   constraints, values, names, types, privileges

Any other error is unknown, and the call is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import psycopg

from semel.errors import Permanent, Retryable, SemelError
from semel.pipeline.sink import SinkFatal, SinkOutcome, SinkRetryable

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

# After a failover a session may be on a read-only server; a new session finds the primary.
_READ_ONLY: Final = "25006"

_LONGEST_DETAIL: Final = 400


def is_permanent(error: psycopg.Error) -> bool:
    """Return whether the same statement would fail in the same way again."""
    state = error.sqlstate
    return state is not None and state != _READ_ONLY and state[:2] in _PERMANENT_CLASSES


def words(error: psycopg.Error) -> str:
    """Return the server's message in one line; its detail names the row's key."""
    diagnosis = error.diag
    text = diagnosis.message_primary or " ".join(str(error).split())
    if diagnosis.message_detail:
        detail = " ".join(diagnosis.message_detail.split())
        text = f"{text}: {detail[:_LONGEST_DETAIL]}"
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
        raise error_of(error, where) from error
