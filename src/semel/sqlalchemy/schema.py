"""The tables' version: making them, bringing them up to date, refusing those of a newer semel.

    nothing ──create──▶ this version ◀──upgrade── an older version
                          ▲
    tables of Alembic ────┘ (upgrade or create, if nothing is missing)

A newer version is refused by everything: its rows may mean what this code does not
know.  So are tables that bear our names and are somebody else's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import Connection, MetaData, Table, insert, inspect, select, text, update
from sqlalchemy.engine import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from semel.errors import Permanent, reason_of
from semel.secrets import masked
from semel.sqlalchemy.engine import made_ready
from semel.sqlalchemy.faults import opening
from semel.sqlalchemy.schema_check import Problem, differences
from semel.sqlalchemy.tables import metadata

VERSION_TABLE: Final = "semel_messaging"

# What two processes that migrate at once both lock; "semel" in ASCII.
_LOCK: Final = 0x73656D656C
# A migration may take its time; whoever waits for it is at a start, not in a transaction.
_WAIT_SECONDS: Final = 60

MIGRATE: Final = "semel db upgrade"
MAKE: Final = "semel db create"

Migration = Callable[[Connection], None]
"""Brings tables of one version to the next, in the transaction that writes the new version."""


@dataclass(frozen=True, slots=True)
class Schema:
    """One version of the tables, and the ways to it from the older ones."""

    version: int
    metadata: MetaData
    migrations: Mapping[int, Migration] = field(default_factory=dict)
    """By the version that each leads to."""

    @property
    def table(self) -> Table:
        """The table that holds the version; it is the same in every version."""
        return self.metadata.tables[VERSION_TABLE]


MIGRATIONS: Final[Mapping[int, Migration]] = {}
"""None yet: version 1 is the first."""

CURRENT: Final = Schema(1, metadata, MIGRATIONS)
"""What this code reads and writes."""


@dataclass(frozen=True, slots=True)
class SchemaChange:
    """What `create` or `upgrade` did."""

    before: int | None
    """None: there were no tables; 0: there were, without a version."""

    after: int

    @property
    def changed(self) -> bool:
        """Tell whether anything was done."""
        return self.before != self.after


class SchemaUnusable(Permanent):
    """The tables are missing, of another version, or not semel's; nothing was changed."""

    def __init__(self, database: str, reason: str) -> None:
        super().__init__(database, reason)
        self.database = database
        self.reason = reason

    def __str__(self) -> str:
        return f"database {self.database}: {self.reason}"


async def create(engine: AsyncEngine, schema: Schema = CURRENT) -> SchemaChange:
    """Make the tables; doing so again changes nothing.  Two processes may do it at once.

    Raises:
        SchemaUnusable: there are tables of another version, or tables that are not semel's.
        Misuse: the role may not make tables.
        Retryable: the database does not answer, or another process migrates for long.
    """

    def make(connection: Connection) -> SchemaChange:
        before = _version(connection, schema)
        if before is None:
            _refuse_strangers(connection, schema)
            schema.metadata.create_all(connection)
            _write(connection, schema, None)
        elif before == 0:
            _adopt(connection, schema)
        elif before < schema.version:
            raise _unusable(connection, _older(before, schema))
        return SchemaChange(before, schema.version)

    return await _changed(engine, make)


async def upgrade(engine: AsyncEngine, schema: Schema = CURRENT) -> SchemaChange:
    """Bring the tables to this version.  Two processes may do it at once.

    Raises:
        SchemaUnusable: there are no tables, or newer ones, or some that are not semel's.
        Retryable: the database does not answer, or another process migrates for long.
    """

    def migrate(connection: Connection) -> SchemaChange:
        before = _version(connection, schema)
        if before is None:
            raise _unusable(connection, _MISSING)
        if before == 0:
            _adopt(connection, schema)
        elif before < schema.version:
            for version in range(before + 1, schema.version + 1):
                schema.migrations[version](connection)
            _write(connection, schema, before)
        return SchemaChange(before, schema.version)

    return await _changed(engine, migrate)


async def is_behind(engine: AsyncEngine, schema: Schema = CURRENT) -> bool:
    """Tell whether `upgrade` would change something.

    Raises:
        Retryable: the database does not answer.
    """

    def look(connection: Connection) -> bool:
        version = _version_there(connection, schema)
        return version is not None and version < schema.version

    async with _connected(engine) as ready, ready.connect() as connection:
        return await connection.run_sync(look)


async def check(engine: AsyncEngine, schema: Schema = CURRENT) -> Sequence[Problem]:
    """Compare the database with what this code needs; empty where nothing is wrong.

    Raises:
        Retryable: the database does not answer.
    """

    def compare(connection: Connection) -> Sequence[Problem]:
        version = _version_there(connection, schema)
        if version is None:
            strangers = _present(connection, schema)
            return [_stranger(name) for name in strangers] or [Problem(*_MISSING)]
        if version > schema.version:
            return [Problem(*_newer(version, schema))]
        if 0 < version < schema.version:
            return [Problem(*_older(version, schema))]
        found = list(differences(connection, schema.metadata))
        if version == 0 and not found:
            found = [Problem("the tables have no version", f"write it: {MIGRATE}")]
        return found

    async with _connected(engine) as ready, ready.connect() as connection:
        return await connection.run_sync(compare)


async def require_version(engine: AsyncEngine, schema: Schema = CURRENT) -> None:
    """See that the tables are of the version that this code knows; for the start of a service.

    One small read: what else may be wrong with the tables, `check` finds.

    Raises:
        SchemaUnusable: they are missing, older or newer.
        Misuse: the role may not read them.
        Retryable: the database does not answer.
    """

    def look(connection: Connection) -> None:
        version = _version(connection, schema)
        if version is None:
            raise _unusable(connection, _MISSING)
        if 0 < version < schema.version:
            raise _unusable(connection, _older(version, schema))

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
            # Whatever waits for a table lock makes everybody behind it wait, too.
            await connection.execute(text("SET LOCAL lock_timeout TO DEFAULT"))
        return await connection.run_sync(change)


@asynccontextmanager
async def _connected(engine: AsyncEngine) -> AsyncIterator[AsyncEngine]:
    name = _name(engine.sync_engine)
    try:
        async with opening(f"database {name}"):
            yield made_ready(engine)
    except DBAPIError as error:
        # Somebody's event trigger, for one: nothing that time can mend.
        raise SchemaUnusable(name, reason_of(error.orig or error)) from error


def _version(connection: Connection, schema: Schema) -> int | None:
    """Return the version of the tables; None: there are none, 0: nobody wrote it down.

    Raises:
        SchemaUnusable: it is newer than this code.
    """
    version = _version_there(connection, schema)
    if version is not None and version > schema.version:
        raise _unusable(connection, _newer(version, schema))
    return version


def _version_there(connection: Connection, schema: Schema) -> int | None:
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.execute(select(schema.table.c.version)).scalar() or 0


def _write(connection: Connection, schema: Schema, before: int | None) -> None:
    if before:
        connection.execute(update(schema.table).values(version=schema.version))
    else:
        connection.execute(insert(schema.table).values(only_row=1, version=schema.version))


def _adopt(connection: Connection, schema: Schema) -> None:
    """Write the version of tables that another tool made, such as Alembic, if they are whole."""
    problems = list(differences(connection, schema.metadata))
    if problems:
        raise _unusable(
            connection,
            (
                f"its tables have no version, and differ from what this semel needs: "
                f"{problems[0]}{_and_more(problems)}",
                f"mend them, or see all with: {CHECK}",
            ),
        )
    _write(connection, schema, None)


CHECK: Final = "semel db check"

_MISSING: Final = ("there are no tables of semel", f"make them: {MAKE}")


def _older(version: int, schema: Schema) -> tuple[str, str]:
    what = f"the tables have version {version}, and this semel needs version {schema.version}"
    return what, f"stop the consumers that run an older semel, then: {MIGRATE}"


def _newer(version: int, schema: Schema) -> tuple[str, str]:
    what = (
        f"the tables have version {version}, and this semel knows versions up to {schema.version}"
    )
    return what, "upgrade semel"


def _present(connection: Connection, schema: Schema) -> list[str]:
    there = set(inspect(connection).get_table_names())
    return [name for name in schema.metadata.tables if name in there]


def _stranger(name: str) -> Problem:
    return Problem(
        f"there is a table {name} that semel did not make",
        f"rename it, then: {MAKE} (its rows can be taken over: docs/howto/"
        f"migrate-processed-messages.md)",
    )


def _refuse_strangers(connection: Connection, schema: Schema) -> None:
    problems = [_stranger(name) for name in _present(connection, schema)]
    if problems:
        what = f"{problems[0].what}{_and_more(problems)}"
        raise _unusable(connection, (what, problems[0].way_out))


def _and_more(problems: Sequence[Problem]) -> str:
    return f", and {len(problems) - 1} more" if len(problems) > 1 else ""


def _unusable(connection: Connection, why: tuple[str, str]) -> SchemaUnusable:
    return SchemaUnusable(_name(connection.engine), "; ".join(why))


def _name(engine: Engine) -> str:
    return masked(engine.url.render_as_string(hide_password=True))
