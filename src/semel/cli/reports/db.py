"""The tables of the messaging half: what was made of them, what is wrong with them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from semel.errors import Misuse
from semel.secrets import masked

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TablesChange:
    """The answer to `semel db create` and `semel db upgrade`."""

    database: str
    before: int | None
    """The version that was there; null: no tables, 0: tables without a version."""

    after: int
    changed: bool

    @property
    def needs_attention(self) -> bool:
        """Tables that were made need none."""
        return False


@dataclass(frozen=True, slots=True)
class TablesProblem:
    """One thing that is wrong with the tables."""

    what: str
    way_out: str


@dataclass(frozen=True, slots=True)
class TablesCheck:
    """The answer to `semel db check`."""

    database: str
    version: int
    """The version that this semel needs."""

    problems: list[TablesProblem]

    @property
    def needs_attention(self) -> bool:
        """Tell whether anything is wrong."""
        return bool(self.problems)


def tables_created(url: str) -> TablesChange:
    """Make the tables.

    Raises:
        Misuse: a file cannot be made there, or nobody would ever see it.
        SchemaUnusable: there are tables of a newer version, or of somebody else's.
    """
    from semel.sql.schema import create

    change = _on_engine(url, _is_reachable, create)
    return TablesChange(masked(url), change.before, change.after, change.changed)


def tables_upgraded(url: str) -> TablesChange:
    """Bring the tables up to date, and make them where there are none.

    Raises:
        Misuse: there is no such file.
        SchemaUnusable: there are newer tables, or some of somebody else's.
    """
    from semel.sql.schema import upgrade

    change = _on_engine(url, _is_there, upgrade)
    return TablesChange(masked(url), change.before, change.after, change.changed)


def tables_checked(url: str) -> TablesCheck:
    """Compare the tables with what this semel needs.

    Raises:
        Misuse: there is no such file.
    """
    from semel.sql.schema import VERSION, check

    found = _on_engine(url, _is_there, check)
    problems = [TablesProblem(problem.what, problem.way_out) for problem in found]
    return TablesCheck(masked(url), VERSION, problems)


def _on_engine(
    url: str, look: Callable[[str], None], act: Callable[[Any], Awaitable[Result]]
) -> Result:
    from semel.sql.engine import open_engine

    async def whole() -> Result:
        engine = open_engine(url)
        try:
            if engine.dialect.name == "sqlite":
                look(engine.url.database or ":memory:")
            return await act(engine)
        finally:
            await engine.dispose()

    return asyncio.run(whole())


def _is_reachable(file: str) -> None:
    if file == ":memory:":
        raise Misuse("a database in memory is gone when this command ends: name a file")
    folder = Path(file).resolve().parent
    if not folder.is_dir():
        raise Misuse(f"there is no folder {folder} to make {Path(file).name} in")


def _is_there(file: str) -> None:
    """Look before asking: opening a file that is not there would make it."""
    if not Path(file).is_file():
        raise Misuse(f"there is no file {file}; make it with its tables: semel db create")
