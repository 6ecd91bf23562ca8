"""Dry runs: what a session changes outside semel's tables, and whether its commit would fail.

    objects      from the session's flushes, with their old and new values
    statements   from the session's own connection, with parameters and row counts

A dry run is rolled back, so its commit never checks the deferred constraints.  They are checked
here instead: otherwise a dry run would report a message as handled whose commit would fail.
"""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from sqlalchemy import event, inspect, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import History, get_history

from semel.operate.stores import Change, RowChange, all_shown
from semel.sql.store import naming_in
from semel.sql.tables import metadata

IMMEDIATE: Final = text("SET CONSTRAINTS ALL IMMEDIATE")
IS_ON: Final = text("PRAGMA foreign_keys")
ORPHANS: Final = text("PRAGMA foreign_key_check")


async def _violations(session: AsyncSession) -> Counter[Any]:
    """Count rows of SQLite whose foreign key refers to no row; none if it does not check them."""
    if _is_postgres(session) or not (await session.execute(IS_ON)).scalar_one():
        return Counter()
    return Counter(map(tuple, await session.execute(ORPHANS)))


async def _check_deferred(session: AsyncSession, before: Counter[Any]) -> None:
    """Check the constraints that the commit would check.

    A commit of SQLite does not check the violations that were there *before*.

    Raises:
        IntegrityError: the commit would be refused.
    """
    if _is_postgres(session):
        await session.execute(IMMEDIATE)
    for table, _, parent, _ in await _violations(session) - before:
        cause = sqlite3.IntegrityError(
            f"FOREIGN KEY constraint failed: a row of {table} refers to no row of {parent}"
        )
        raise IntegrityError("COMMIT", None, cause)


def _is_postgres(session: AsyncSession) -> bool:
    return session.get_bind().dialect.name == "postgresql"


LONGEST_STATEMENT: Final = 300
_BEGINS: Final = re.compile(r"\s*(insert|update|delete|replace|merge|with)\b", re.IGNORECASE)

_CHANGES: Final = re.compile(
    r"(?<!for )\b(?P<verb>insert\s+into|update|delete\s+from|replace\s+into|merge\s+into)\s+"
    r"(?:only\s+)?(?P<table>[\w.\"]+)",
    re.IGNORECASE,
)

_LITERAL: Final = re.compile(r"'(?:[^']|'')*'")

_VERBS: Final = {
    "insert": Change.INSERT,
    "replace": Change.INSERT,
    "update": Change.UPDATE,
    "merge": Change.UPDATE,
    "delete": Change.DELETE,
}


@asynccontextmanager
async def watching(session: AsyncSession) -> AsyncIterator[list[RowChange]]:
    """Collect what the block changes; flush the session when the block ends.

    Raises:
        IntegrityError: the commit of what the block wrote would be refused.
    """
    before = await _violations(session)
    watcher = _Watcher(await naming_in(session))
    connection = (await session.connection()).sync_connection
    inside = session.sync_session
    listeners = (
        (inside, "before_flush", watcher.before_flush),
        (inside, "after_flush", watcher.after_flush),
        (connection, "after_cursor_execute", watcher.after_statement),
    )
    for target, name, listener in listeners:
        event.listen(target, name, listener)
    try:
        yield watcher.found
        await session.flush()
        await _check_deferred(session, before)
    finally:
        for target, name, listener in listeners:
            event.remove(target, name, listener)


class _Watcher:
    """Listens to one session and its connection."""

    def __init__(self, naming: Mapping[str, Any]) -> None:
        space = naming.get("schema_translate_map", {}).get(None)
        # A user may have tables of the same names in another schema.
        self._ours = {name if space is None else f"{space}.{name}" for name in metadata.tables}
        self.found: list[RowChange] = []
        self._is_flushing = False

    def before_flush(self, session: Session, context: Any, instances: Any) -> None:
        self._is_flushing = True

    def after_flush(self, session: Session, context: Any) -> None:
        self._is_flushing = False
        self.found += [_inserted(one) for one in session.new]
        self.found += [change for one in session.dirty for change in _updated(one)]
        self.found += [_deleted(one) for one in session.deleted]

    def after_statement(
        self,
        connection: Any,
        cursor: Any,
        statement: str,
        parameters: Any,
        context: Any,
        executemany: bool,
    ) -> None:
        if self._is_flushing:
            return  # `after_flush` reports these changes, with old and new values
        what = _what(statement)
        if what is None or what[1] in self._ours:
            return
        change, table = what[0], what[1].rpartition(".")[2]
        rows = cursor.rowcount
        compiled = getattr(context, "compiled_parameters", None) or []
        text = " ".join(_LITERAL.sub("'…'", statement).split())[:LONGEST_STATEMENT]
        count = rows if isinstance(rows, int) and rows >= 0 else None
        values = all_shown(_parameters(compiled, parameters))
        self.found.append(RowChange(change, table, after=values, rows=count, statement=text))


def _what(statement: str) -> tuple[Change, str] | None:
    """Return what a statement changes, and in which table; None if it only reads."""
    if not _BEGINS.match(statement):
        return None
    found = _CHANGES.search(" ".join(statement.split()))
    if found is None:
        return None
    return _VERBS[found["verb"].split()[0].lower()], found["table"].replace('"', "")


def _parameters(compiled: list[Mapping[str, Any]], raw: Any) -> dict[str, Any]:
    if len(compiled) == 1:
        return dict(compiled[0])
    if compiled:
        return {f"row {n}": dict(one) for n, one in enumerate(compiled, 1)}
    # Values are masked by their names: without names, none can be shown safely.
    return {"parameters": f"{len(raw)} without names"} if raw else {}


def _columns(instance: Any) -> Iterator[tuple[str, str]]:
    """Yield each attribute that is a column, with the column's name."""
    for attribute in inspect(instance).mapper.column_attrs:
        yield attribute.key, str(attribute.columns[0].name)


def _where(instance: Any) -> tuple[str, str]:
    mapper = inspect(instance).mapper
    keys = mapper.primary_key_from_instance(instance)
    return str(mapper.local_table), ", ".join(map(str, keys))


def _loaded(instance: Any) -> dict[str, Any]:
    loaded = inspect(instance).dict
    return all_shown({name: loaded[key] for key, name in _columns(instance) if key in loaded})


def _inserted(instance: Any) -> RowChange:
    return RowChange(Change.INSERT, *_where(instance), after=_loaded(instance))


def _deleted(instance: Any) -> RowChange:
    return RowChange(Change.DELETE, *_where(instance), before=_loaded(instance))


def _updated(instance: Any) -> Iterator[RowChange]:
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    for key, name in _columns(instance):
        history: History = get_history(instance, key)
        if history.has_changes():
            before[name] = history.deleted[0] if history.deleted else "?"
            after[name] = history.added[0] if history.added else None
    if after:
        yield RowChange(Change.UPDATE, *_where(instance), all_shown(before), all_shown(after))
