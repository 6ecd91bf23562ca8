"""Databases that are there already: asking never makes one."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect

from semel.errors import Misuse
from semel.secrets import masked
from semel.sqlalchemy.database import SqlDatabase
from semel.sqlalchemy.faults import opening
from semel.sqlalchemy.tables import metadata
from semel.sqlalchemy.urls import read_url


async def open_existing(url: str) -> SqlDatabase:
    """Open a database with semel's messaging tables in it.

    Raises:
        Misuse: there is no database at *url*, its server does not know the role or the
            password, or it has no such tables.
        Permanent: what is there is no database.
        Retryable: it does not answer.
    """
    parsed = read_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").is_file():
        raise Misuse(f"there is no file {parsed.database or ':memory:'}")
    database = SqlDatabase(url)
    try:
        async with opening(f"database {masked(url)}"), database.engine.connect() as connection:
            missing = await connection.run_sync(_missing_tables)
    except BaseException:
        await database.close()
        raise
    if missing:
        await database.close()
        raise Misuse(
            f"database {masked(url)} lacks the table {missing[0]}"
            f"{f' and {len(missing) - 1} more' if missing[1:] else ''}; make them with `semel db "
            f"create`, or say which database the consumers use"
        )
    return database


def _missing_tables(connection: Connection) -> list[str]:
    return sorted(set(metadata.tables) - set(inspect(connection).get_table_names()))
