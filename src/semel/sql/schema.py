"""The schema of the messaging half: create the tables, compare them, check their version.

    nothing ───────────create──▶ version 1
    tables of Alembic ─create──▶ version 1, if nothing is missing

Every function refuses tables of a newer version, because this code may misread their rows.  It
also refuses tables with our names that semel did not create.

On PostgreSQL the tables are in a schema (`semel.messaging.tables`), and every statement names it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final
from weakref import WeakKeyDictionary

from sqlalchemy import Column, Connection, Index, MetaData, Table, insert, inspect, select, text
from sqlalchemy.engine import Dialect, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.schema import CreateColumn, CreateIndex, CreateSchema, CreateTable

from semel.errors import Misuse, Permanent, reason_of
from semel.messaging.tables import FIND, Tables, found
from semel.operate.stores import SchemaChange, SchemaProblem
from semel.secrets import masked
from semel.sql.engine import inner_engine, made_ready
from semel.sql.faults import TablesMissing, opening
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


def find(connection: Connection, schema: str | None = None) -> Tables | None:
    """Return where the tables are, on PostgreSQL; None on SQLite, which has no schemas.

    Raises:
        Misuse: a schema is named on SQLite, or there are two that may be meant.
    """
    if connection.dialect.name != "postgresql":
        if schema is not None:
            raise Misuse(
                f"{connection.dialect.name} has no schemas: leave out schema={schema!r}, or name "
                f"another file"
            )
        return None
    return found(map(tuple, connection.execute(text(FIND))), schema or _translated(connection))


def _translated(connection: Connection) -> str | None:
    """Return the schema that an engine or session has for all tables without one, if any.

    Services with tenants have one engine or session for each, on the same connections.
    """
    name: str | None = connection.get_execution_options().get("schema_translate_map", {}).get(None)
    return name


def naming(tables: Tables | None) -> dict[str, Any]:
    """Return the execution options with which a statement names the schema of the tables."""
    return {} if tables is None else {"schema_translate_map": {None: tables.schema}}


_KNOWN: Final[WeakKeyDictionary[Engine, dict[str | None, dict[str, Any]]]] = WeakKeyDictionary()


def learn_naming(connection: Connection, schema: str | None = None) -> dict[str, Any]:
    """Return the options for statements in a transaction of the user's own, as `naming` does.

    The database is asked once per engine and schema.  Tables that the search path has are not
    named, because a pool's next transaction may set another path.

    Raises:
        TablesMissing: there are no tables.
        Misuse: as `find`.
    """
    schema = schema or _translated(connection)
    of_engine = _KNOWN.setdefault(inner_engine(connection.engine), {})
    if schema not in of_engine:
        tables = find(connection, schema)
        if tables is not None and not tables.are_there:
            raise no_tables(f"database {_name(connection.engine)}", tables)
        of_engine[schema] = {} if tables is not None and tables.by_search_path else naming(tables)
    return of_engine[schema]


def no_tables(what: str, tables: Tables) -> TablesMissing:
    """Return the error for a schema without tables."""
    there = f"schema {tables.schema} has no tables of semel"
    return TablesMissing(
        f"{what}: {there}; create them with `{MAKE}`, or say which schema has them"
    )


async def create(engine: AsyncEngine, schema: str | None = None) -> SchemaChange:
    """Create the tables; a second call changes nothing.  Two processes may call it at once.

    On PostgreSQL they are made in *schema*, and the schema with them; by default in the schema
    ``semel``, unless the search path has them already.

    Raises:
        SchemaUnusable: there are tables of a newer version, or tables that are not semel's.
        Misuse: the role may not create tables, or a schema is named on SQLite.
        Retryable: the database does not answer, or another process holds the lock for too long.
    """

    def make(connection: Connection) -> SchemaChange:
        space = _enter(connection, schema)
        before = _version(connection, space)
        if before is None:
            _refuse_strangers(connection, space)
            if space is not None and not inspect(connection).has_schema(space):
                connection.execute(CreateSchema(space))
            metadata.create_all(connection)
            _write_version(connection)
        elif before == 0:
            _adopt(connection, space)
        return SchemaChange(before, VERSION, space)

    return await _changed(engine, make)


async def upgrade(engine: AsyncEngine, schema: str | None = None) -> SchemaChange:
    """Bring the tables to this version; create them if there are none.

    Version 1 is the first, so there is nothing to migrate from.  The step to a second
    version belongs here, in the transaction that writes its number.

    Raises:
        SchemaUnusable: there are tables of a newer version, or tables that are not semel's.
        Misuse: the role may not create tables.
        Retryable: the database does not answer, or another process holds the lock for too long.
    """
    return await create(engine, schema)


async def check(engine: AsyncEngine, schema: str | None = None) -> Sequence[SchemaProblem]:
    """Return how the tables differ from what this code needs; empty if they do not.

    Raises:
        Misuse: a schema is named on SQLite, or there are two that may be meant.
        Retryable: the database does not answer.
    """

    def compare(connection: Connection) -> Sequence[SchemaProblem]:
        space = _enter(connection, schema)
        version = _version_there(connection, space)
        if version is None:
            strangers = _present(connection, space)
            return [_stranger(name) for name in strangers] or [_MISSING]
        if version > VERSION:
            return [_newer(version)]
        different = list(differences(connection, metadata, space))
        if version == 0 and not different:
            different = [SchemaProblem("the tables have no version", f"write it: {MAKE}")]
        return different

    async with _connected(engine) as ready, ready.connect() as connection:
        return await connection.run_sync(compare)


async def require_version(engine: AsyncEngine, schema: str | None = None) -> Tables | None:
    """Raise if the tables do not have the version of this code; for the start of a service.

    It reads only the version; `check` compares the tables themselves.  Returns where they are.

    Raises:
        SchemaUnusable: they are missing or newer.
        Misuse: the role may not read them, a schema is named on SQLite, or there are two that
            may be meant.
        Retryable: the database does not answer.
    """

    def look(connection: Connection) -> Tables | None:
        space = _enter(connection, schema)
        if _version(connection, space) is None:
            raise _unusable(connection, _MISSING)
        return None if space is None else Tables(space)

    async with _connected(engine) as ready, ready.connect() as connection:
        return await connection.run_sync(look)


def _enter(connection: Connection, schema: str | None) -> str | None:
    """Find the tables, and let statements on this connection name their schema; return it."""
    tables = find(connection, schema)
    connection.execution_options(**naming(tables))
    return None if tables is None else tables.schema


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


def _version(connection: Connection, space: str | None) -> int | None:
    """Return the version of the tables; None: there are none, 0: no version is written.

    Raises:
        SchemaUnusable: it is newer than this code.
    """
    version = _version_there(connection, space)
    if version is not None and version > VERSION:
        raise _unusable(connection, _newer(version))
    return version


def _version_there(connection: Connection, space: str | None) -> int | None:
    if not inspect(connection).has_table(VERSION_TABLE, schema=space):
        return None
    return connection.execute(select(metadata.tables[VERSION_TABLE].c.version)).scalar() or 0


def _write_version(connection: Connection) -> None:
    connection.execute(insert(metadata.tables[VERSION_TABLE]).values(only_row=1, version=VERSION))


def _adopt(connection: Connection, space: str | None) -> None:
    """Write the version of tables that another tool created, if they are complete."""
    problems = list(differences(connection, metadata, space))
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


def _present(connection: Connection, space: str | None) -> list[str]:
    there = set(inspect(connection).get_table_names(schema=space))
    return [name for name in metadata.tables if name in there]


def _stranger(name: str) -> SchemaProblem:
    return SchemaProblem(
        f"there is a table {name} that semel did not make",
        f"rename it, then: {MAKE} (its rows can be taken over: docs/howto/"
        f"migrate-processed-messages.md)",
    )


def _refuse_strangers(connection: Connection, space: str | None) -> None:
    problems = [_stranger(name) for name in _present(connection, space)]
    if problems:
        what = f"{problems[0].what}{_and_more(problems)}"
        raise _unusable(connection, SchemaProblem(what, problems[0].way_out))


def _and_more(problems: Sequence[SchemaProblem]) -> str:
    return f", and {len(problems) - 1} more" if len(problems) > 1 else ""


def _unusable(connection: Connection, why: SchemaProblem) -> SchemaUnusable:
    return SchemaUnusable(_name(connection.engine), str(why))


def _name(engine: Engine) -> str:
    return masked(engine.url.render_as_string(hide_password=True))


def differences(
    connection: Connection, needed: MetaData, space: str | None = None
) -> Iterator[SchemaProblem]:
    """Compare the tables of a schema with *needed*; yield every difference that matters."""
    there = MetaData()
    there.reflect(connection, schema=space, only=_present(connection, space))
    by_name = {table.name: table for table in there.tables.values()}
    for table in needed.sorted_tables:
        found = by_name.get(table.name)
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
        table = _qualified(connection, column.table.name)
        yield SchemaProblem(f"{name} is missing", f"ALTER TABLE {table} ADD COLUMN {definition}")
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
            f"DROP INDEX {_qualified(connection, str(index.name))}, then {make}",
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
    names = connection.get_execution_options().get("schema_translate_map")
    compiled = statement.compile(
        dialect=connection.dialect, schema_translate_map=names, render_schema_translate=bool(names)
    )
    return " ".join(str(compiled).split())


def _qualified(connection: Connection, name: str) -> str:
    return qualified(name, connection.dialect, connection.get_execution_options())


def qualified(name: str, dialect: Dialect, names: Mapping[str, Any]) -> str:
    """Return the name of a table with its schema, for a statement that is text."""
    space = names.get("schema_translate_map", {}).get(None)
    return name if space is None else f"{dialect.identifier_preparer.quote(space)}.{name}"
