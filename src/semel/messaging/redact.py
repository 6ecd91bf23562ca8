"""The text of a failure in tables, logs and reports, without any value of a message.

    (sqlite3.IntegrityError) UNIQUE constraint failed: person.mail [parameters: ('ann@x',)]
    ──▶ IntegrityError: UNIQUE constraint failed: person.mail

    duplicate key value violates unique constraint "person_mail"  DETAIL:  Key (mail)=(ann@x) …
    ──▶ IntegrityError: 23505 duplicate key value violates unique constraint "person_mail"

A database error keeps its class, its SQLSTATE, the server's own sentence and the constraint.
Drivers are recognised by the names of their attributes, so none is imported here.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from typing import Final

from semel import errors

ERASED_REASON: Final = "its payload was erased"
"""Replaces the text of a failure, which may quote the erased payload."""

DRIVERS: Final = frozenset({"asyncpg", "psycopg", "psycopg2", "sqlite3", "aiosqlite"})

# What SQLAlchemy and PostgreSQL's drivers add to the server's sentence.
_SHOWN: Final = (
    r"\[SQL: ",
    r"\[parameters: ",
    r"\(Background on this error at: ",
    r"Original exception was: ",
    r"DETAIL:\s",
)
_QUOTES_A_ROW: Final = re.compile(rf"(?:^|\s)(?:{'|'.join(_SHOWN)}).*", re.DOTALL)
_ADDED: Final = re.compile(
    rf"(?:^|\s)(?:{'|'.join(_SHOWN)}|(?:HINT|CONTEXT|LINE \d+):\s).*", re.DOTALL
)

# "invalid input syntax for type uuid: "…"", and what a driver says of an argument.
VALUE_CLASS: Final = "22"
SYNTAX_ERROR: Final = "42601"
_QUOTED: Final = re.compile(r"[\"'`\[«»„“”‘’].*", re.DOTALL)
_QUOTED_OR_SHOWN: Final = re.compile(r"[\"'`\[«»„“”‘’:：].*", re.DOTALL)

SQLITE_ERROR: Final = 1


def reason_of(error: BaseException) -> str:
    """Return an exception's text in one line, without a statement, its parameters or a row.

    The text of a handler's own exception stays, except for a database error quoted in it.
    """
    if is_of_driver(error):
        return errors.cut(_told(error))
    text = errors.line_of(error)
    tellings: list[str] = []
    for cause in filter(is_of_driver, _causes(error)):
        told = _told(cause)
        if told not in text:
            quoted = map(_line, (cause, _orig(cause), _innermost(cause)))
            # An exception often quotes its cause: the longer text contains the shorter one.
            said = next((one for one in quoted if one and one in text), None)
            # SQLAlchemy's error already contains the driver's, which is its cause.
            if said is None or any(said in one for one in tellings):
                continue
            text = text.replace(said, told)
        tellings.append(told)
    # Cut last: a tail without the words before it could quote a row.
    return errors.cut(_QUOTES_A_ROW.sub("", text).rstrip(" :") or type(error).__name__)


def is_of_driver(error: BaseException) -> bool:
    """Return whether *error* is a database driver's, or SQLAlchemy's about a statement."""
    # SQLAlchemy's error holds the driver's error in `orig`, beside the statement.
    return (hasattr(error, "orig") and hasattr(error, "statement")) or any(
        kind.__module__.partition(".")[0] in DRIVERS for kind in type(error).__mro__
    )


def place_of(error: BaseException) -> str:
    """Return where an exception was raised, for logs: a traceback would quote its text."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def sqlstate(error: BaseException) -> str:
    """Return the five-character SQLSTATE of a PostgreSQL error, or an empty text."""
    orig = getattr(error, "orig", error)
    for found in (getattr(orig, "sqlstate", None), getattr(orig, "pgcode", None)):
        if isinstance(found, str):
            return found
    return ""


def sqlite_code(error: BaseException) -> int | None:
    """Return the primary result code of an SQLite error."""
    found = getattr(getattr(error, "orig", error), "sqlite_errorcode", None)
    return found & 0xFF if isinstance(found, int) else None


def _told(error: BaseException) -> str:
    inner = _innermost(error)
    state = sqlstate(error) or sqlstate(inner)
    said = _without_values(_primary(inner), state, sqlite_code(error), inner)
    constraint = _attribute(inner, "constraint_name")
    if constraint and constraint not in said:
        said = f"{said} (constraint {constraint})"
    # If the cause is not a driver's error, its class says more than "StatementError".
    kind = "" if is_of_driver(inner) or state else type(inner).__name__
    words = " ".join(filter(None, (kind, state, said)))
    name = type(error).__name__
    return f"{name}: {words}" if words and words != name else name


def _without_values(said: str, state: str, code: int | None, inner: BaseException) -> str:
    """Cut a sentence where it begins to quote a value; names of tables and columns stay."""
    is_data = any(kind.__name__ == "DataError" for kind in type(inner).__mro__)
    if state.startswith(VALUE_CLASS) or is_data:
        said = _QUOTED_OR_SHOWN.sub("", said)
    elif state == SYNTAX_ERROR or (not state and code in (None, SQLITE_ERROR)):
        said = _QUOTED.sub("", said)
    return said.rstrip(" :(,")


def _orig(error: BaseException) -> BaseException:
    orig = getattr(error, "orig", None)
    return orig if isinstance(orig, BaseException) else error


def _innermost(error: BaseException) -> BaseException:
    """Return the driver's own error, which has the sentence and the constraint as fields."""
    orig = _orig(error)
    cause = orig.__cause__
    return cause if cause is not None and is_of_driver(cause) else orig


def _primary(error: BaseException) -> str:
    """Return the server's sentence, without what a driver adds to it."""
    said = _attribute(error, "message_primary") or _attribute(error, "message")
    return " ".join((said or _ADDED.sub("", _line(error))).split())


def _attribute(error: BaseException, name: str) -> str:
    # asyncpg has the fields on the error itself, psycopg in its `diag`.
    for place in (getattr(error, "diag", None), error):
        found = getattr(place, name, None)
        if isinstance(found, str):
            return found
    return ""


def _line(error: BaseException) -> str:
    try:
        return " ".join(str(error).split())
    except Exception:  # noqa: BLE001  a broken __str__ must not hide the error
        return ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen = {id(error)}
    cause = error.__cause__ or error.__context__
    while cause is not None and id(cause) not in seen:
        yield cause
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
