"""The schema of the messaging half: create the tables, compare them, check their version.

    nothing ───────────create──▶ version 1
    tables of Alembic ─create──▶ version 1, if nothing is missing

Every function refuses tables of a newer version, because this code may misread their rows.  It
also refuses tables with our names that semel did not create.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from sqlalchemy import Column, Connection, Index, MetaData, Table, insert, inspect, select, text
from sqlalchemy.engine import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.schema import CreateColumn, CreateIndex, CreateTable

from semel.errors import Permanent, reason_of
from semel.operate.stores import SchemaChange, SchemaProblem
from semel.secrets import masked
from semel.sql.engine import made_ready
from semel.sql.faults import opening
from semel.sql.tables import metadata

VERSION: Final = 1
"""The version of the tables that this code reads and writes."""

VERSION_TABLE: Final = "semel_messaging"
MAKE: Final = "semel db create"
CHECK: Final = "semel db check"

# The advisory lock that lets one process at a time create the tables; "semel" in ASCII.
_LOCK: Final = 0x73656D656C
# A process waits for this lock only when it starts, so the wait may be long.
_WAIT_SECONDS: Final = 60

# Two names of one type, without a difference for any statement.
_SAME_TYPES: Final = {"VARCHAR": "TEXT"}


class SchemaUnusable(Permanent):
    """The tables are missing, of another version, or not semel's; nothing was changed."""

    def __init__(self, database: str, reason: str) -> None:
        super().__init__(database, reason)
        self.database = database
        self.reason = reason

    def __str__(self) -> str:
        return f"database {self.database}: {self.reason}"


async def create(engine: AsyncEngine) -> SchemaChange:
    """Create the tables; a second call changes nothing.  Two processes may call it at once.

    Raises:
        SchemaUnusable: there are tables of a newer version, or tables that are not semel's.
        Misuse: the role may not create tables.
        Retryable: the database does not answer, or another process holds the lock for too long.
    """

    def make(connection: Connection) -> SchemaChange:
        before = _version(connection)
        if before is None:
            _refuse_strangers(connection)
            metadata.create_all(connection)
            _write_version(connection)
        elif before == 0:
            _adopt(connection)
        return SchemaChange(before, VERSION)

    return await _changed(engine, make)


async def upgrade(engine: AsyncEngine) -> SchemaChange:
    """Bring the tables to this version; create them if there are none.

    Version 1 is the first, so there is nothing to migrate from.  The step to a second
    version belongs here, in the transaction that writes its number.

    Raises:
        SchemaUnusable: there are tables of a newer version, or tables that are not semel's.
        Misuse: the role may not create tables.
        Retryable: the database does not answer, or another process holds the lock for too long.
    """
    return await create(engine)


async def check(engine: AsyncEngine) -> Sequence[SchemaProblem]:
    """Return how the tables differ from what this code needs; empty if they do not.

    Raises:
        Retryable: the database does not answer.
    """

    def compare(connection: Connection) -> Sequence[SchemaProblem]:
        version = _version_there(connection)
        if version is None:
            strangers = _present(connection)
            return [_stranger(name) for name in strangers] or [_MISSING]
        if version > VERSION:
            return [_newer(version)]
        found = list(differences(connection, metadata))
        if version == 0 and not found:
            found = [SchemaProblem("the tables have no version", f"write it: {MAKE}")]
        return found

    async with _connected(engine) as ready, ready.connect() as connection:
        return await connection.run_sync(compare)


async def require_version(engine: AsyncEngine) -> None:
    """Raise if the tables do not have the version of this code; for the start of a service.

    It reads only the version; `check` compares the tables themselves.

    Raises:
        SchemaUnusable: they are missing or newer.
        Misuse: the role may not read them.
        Retryable: the database does not answer.
    """

    def look(connection: Connection) -> None:
        if _version(connection) is None:
            raise _unusable(connection, _MISSING)

    async with _connected(engine) as ready, ready.connect() as connection:
        await connection.run_sync(look)


async def _changed(
    engine: AsyncEngine, change: Callable[[Connection], SchemaChange]
) -> SchemaChange:
    async with _connected(engine) as ready, ready.begin() as connection:
        if ready.dialect.name == "postgresql":
            # On SQLite, BEGIN IMMEDIATE has locked the whole database already.
            await connection.execute(text(f"SET LOCAL lock_timeout = '{_WAIT_SECONDS}s'"))
            await connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
            # A statement that waits for a table lock blocks all later statements on the table,
            # so table locks get the short default timeout again.
            await connection.execute(text("SET LOCAL lock_timeout TO DEFAULT"))
        return await connection.run_sync(change)


@asynccontextmanager
async def _connected(engine: AsyncEngine) -> AsyncIterator[AsyncEngine]:
    name = _name(engine.sync_engine)
    try:
        async with opening(f"database {name}"):
            yield made_ready(engine)
    except DBAPIError as error:
        # For example an event trigger of the database refuses: trying again does not help.
        raise SchemaUnusable(name, reason_of(error.orig or error)) from error


def _version(connection: Connection) -> int | None:
    """Return the version of the tables; None: there are none, 0: no version is written.

    Raises:
        SchemaUnusable: it is newer than this code.
    """
    version = _version_there(connection)
    if version is not None and version > VERSION:
        raise _unusable(connection, _newer(version))
    return version


def _version_there(connection: Connection) -> int | None:
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.execute(select(metadata.tables[VERSION_TABLE].c.version)).scalar() or 0


def _write_version(connection: Connection) -> None:
    connection.execute(insert(metadata.tables[VERSION_TABLE]).values(only_row=1, version=VERSION))


def _adopt(connection: Connection) -> None:
    """Write the version of tables that another tool created, if they are complete."""
    problems = list(differences(connection, metadata))
    if problems:
        what = (
            f"its tables have no version, and differ from what this semel needs: "
            f"{problems[0]}{_and_more(problems)}"
        )
        way_out = f"correct them, or list all differences: {CHECK}"
        raise _unusable(connection, SchemaProblem(what, way_out))
    _write_version(connection)


_MISSING: Final = SchemaProblem("there are no tables of semel", f"make them: {MAKE}")


def _newer(version: int) -> SchemaProblem:
    what = f"the tables have version {version}, and this semel knows versions up to {VERSION}"
    return SchemaProblem(what, "upgrade semel")


def _present(connection: Connection) -> list[str]:
    there = set(inspect(connection).get_table_names())
    return [name for name in metadata.tables if name in there]


def _stranger(name: str) -> SchemaProblem:
    return SchemaProblem(
        f"there is a table {name} that semel did not make",
        f"rename it, then: {MAKE} (its rows can be taken over: docs/howto/"
        f"migrate-processed-messages.md)",
    )


def _refuse_strangers(connection: Connection) -> None:
    problems = [_stranger(name) for name in _present(connection)]
    if problems:
        what = f"{problems[0].what}{_and_more(problems)}"
        raise _unusable(connection, SchemaProblem(what, problems[0].way_out))


def _and_more(problems: Sequence[SchemaProblem]) -> str:
    return f", and {len(problems) - 1} more" if len(problems) > 1 else ""


def _unusable(connection: Connection, why: SchemaProblem) -> SchemaUnusable:
    return SchemaUnusable(_name(connection.engine), str(why))


def _name(engine: Engine) -> str:
    return masked(engine.url.render_as_string(hide_password=True))


def differences(connection: Connection, needed: MetaData) -> Iterator[SchemaProblem]:
    """Compare the database's tables with *needed*; yield every difference that matters."""
    there = MetaData()
    there.reflect(connection, only=_present(connection))
    for table in needed.sorted_tables:
        found = there.tables.get(table.name)
        if found is not None:
            yield from _of_table(connection, table, found)
        else:
            make = _one_line(CreateTable(table), connection)
            yield SchemaProblem(
                f"table {table.name} is missing",
                f"restore it from a backup, or make it anew, empty: {make}",
            )
            yield from (_missing_index(connection, index) for index in _indexes(table))


def _of_table(connection: Connection, table: Table, found: Table) -> Iterator[SchemaProblem]:
    """Compare one table: columns, the primary key, indexes."""
    for column in table.columns:
        yield from _of_column(connection, column, found.columns.get(column.name))
    for column in found.columns:
        is_needed = column.server_default is None and not column.nullable
        if column.name not in table.columns and is_needed:
            yield SchemaProblem(
                f"column {column.name} of table {table.name} is not semel's, and every insert "
                f"fails without a value for it",
                "drop it, give it a default, or allow NULL",
            )
    has, wanted = ([column.name for column in one.primary_key] for one in (found, table))
    if has != wanted:
        yield SchemaProblem(
            f"the primary key of table {table.name} is ({', '.join(has)}), "
            f"not ({', '.join(wanted)})",
            "correct it: without this key, a message can be claimed twice",
        )
    known = {index.name: index for index in found.indexes}
    for index in _indexes(table):
        yield from _of_index(connection, index, known.get(index.name))


def _of_column(
    connection: Connection, column: Column[Any], found: Column[Any] | None
) -> Iterator[SchemaProblem]:
    name = f"column {column.name} of table {column.table.name}"
    if found is None:
        definition = _one_line(CreateColumn(column), connection)
        yield SchemaProblem(
            f"{name} is missing", f"ALTER TABLE {column.table.name} ADD COLUMN {definition}"
        )
        return
    wanted, has = (_type(one, connection) for one in (column, found))
    if wanted != has:
        yield SchemaProblem(
            f"{name} has the type {has}, not {wanted}", f"change its type to {wanted}"
        )
    if column.nullable and not found.nullable:
        yield SchemaProblem(f"{name} refuses NULL", "allow NULL: semel writes NULL there")


def _of_index(connection: Connection, index: Index, found: Index | None) -> Iterator[SchemaProblem]:
    if found is None:
        yield _missing_index(connection, index)
        return
    columns, has = ([column.name for column in one.columns] for one in (index, found))
    if has != columns or bool(found.unique) != bool(index.unique):
        make = _one_line(CreateIndex(index), connection)
        yield SchemaProblem(
            f"index {index.name} of table {_table_of(index)} differs from semel's",
            f"DROP INDEX {index.name}, then {make}",
        )


def _type(column: Column[Any], connection: Connection) -> str:
    name = str(column.type.compile(connection.dialect)).upper()
    return _SAME_TYPES.get(name, name)


def _indexes(table: Table) -> list[Index]:
    return sorted(table.indexes, key=lambda index: str(index.name))


def _missing_index(connection: Connection, index: Index) -> SchemaProblem:
    what = f"index {index.name} of table {_table_of(index)}"
    return SchemaProblem(f"{what} is missing", _one_line(CreateIndex(index), connection))


def _table_of(index: Index) -> str:
    return index.table.name if index.table is not None else ""


def _one_line(statement: Any, connection: Connection) -> str:
    return " ".join(str(statement.compile(dialect=connection.dialect)).split())
