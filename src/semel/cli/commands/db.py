"""`semel db create | upgrade | check`: the tables of the messaging half."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from semel.cli.database import Books, asking
from semel.cli.preamble import command
from semel.cli.render import Field, Line, Shape, bold, red
from semel.errors import Misuse
from semel.messaging.tables import split_schema
from semel.operate.stores import SchemaChange, SchemaCheck

Result = TypeVar("Result")

Shape(SchemaChange, Field("changed"), whole=True)


@command("db create", asking, SchemaChange)
def create(books: Books) -> None:
    """Make the tables that consumers, inboxes and outboxes need; a second call changes nothing.

    PostgreSQL gets them in the schema semel, or the one that the URL names with ?schema=NAME.
    Refuses to use a table of the same name which semel did not make.  Asks no confirmation: it
    changes no table that is already there.

    Example: semel db create --database postgresql://db/shop
    """
    from semel.sql.schema import create

    change = asyncio.run(on_engine(books.url, need_folder, create))
    books.reply(change, lambda done: _change_lines(books.database, done))


@command("db upgrade", asking, SchemaChange)
def upgrade(books: Books) -> None:
    """Make the tables where there are none, or say that they are up to date.

    For tables that Alembic made it writes the version.  Two processes may run it at once.

    Example: semel db upgrade --database postgresql://db/shop
    """
    from semel.sql.schema import upgrade

    change = asyncio.run(on_engine(books.url, _need_file, upgrade))
    books.reply(change, lambda done: _change_lines(books.database, done))


@command("db check", asking, SchemaCheck)
def check(books: Books) -> None:
    """Compare the tables with what this semel needs, and name what is missing or different.

    Each line ends with the way out.  Exit code 1: something is missing or different.

    Example: semel db check --database postgresql://db/shop
    """
    from semel.sql.schema import VERSION, check

    found = SchemaCheck(VERSION, asyncio.run(on_engine(books.url, _need_file, check)))
    books.reply(found, lambda check: _check_lines(books.database, check))


async def on_engine(
    url: str, look: Callable[[str], None], act: Callable[[Any, str | None], Awaitable[Result]]
) -> Result:
    """Open a database, check the path of a file with *look*, and do *act* with its engine.

    The second argument of *act* is the schema that the URL names.
    """
    from semel.sql.engine import open_engine

    engine = open_engine(url)
    try:
        if engine.dialect.name == "sqlite":
            look(engine.url.database or ":memory:")
        return await act(engine, split_schema(url)[1])
    finally:
        await engine.dispose()


def need_folder(file: str) -> None:
    """Check that a new database can be a file of this path.

    Raises:
        Misuse: it is in memory, or in a folder that does not exist.
    """
    if file == ":memory:":
        raise Misuse("a database in memory is gone when this command ends: name a file")
    folder = Path(file).resolve().parent
    if not folder.is_dir():
        raise Misuse(f"there is no folder {folder} to make {Path(file).name} in")


def _need_file(file: str) -> None:
    # Opening a file that is not there would make it.
    if not Path(file).is_file():
        raise Misuse(f"there is no file {file}; make it with its tables: semel db create")


def _change_lines(database: str, change: SchemaChange) -> Iterator[Line]:
    if not change.changed:
        done = f"the tables have version {change.after} already"
    elif change.before is None:
        where = f" in the schema {change.schema}" if change.schema else ""
        done = f"made the tables of version {change.after}{where}"
    else:
        done = f"the tables were there; wrote down that they have version {change.after}"
    yield f"{database}: {done}"


def _check_lines(database: str, found: SchemaCheck) -> Iterator[Line]:
    yield f"{database}: this semel needs version {found.version}"
    for problem in found.problems:
        yield red("wrong", f"  {problem.what}")
        yield f"       {problem.way_out}"
    if not found.problems:
        yield bold("nothing is missing", "green")
