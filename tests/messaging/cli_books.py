"""A database in a file, and commands that are typed about it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from semel.cli.app import app
from semel.sql.database import SqlDatabase
from tests.messaging.worlds import make_older, make_tables
from tests.stores.world import DatabaseWorld


class CliBooks:
    """Semel's tables in an SQLite file, named by the environment."""

    def __init__(self, path: Path) -> None:
        self.url = f"sqlite:///{path}"
        make_tables(path)

    def fill(self, work: Callable[[DatabaseWorld], Awaitable[Any]]) -> Any:
        """Open the database, do *work*, and close it."""

        async def whole() -> Any:
            database = SqlDatabase(self.url)

            async def age(seconds: float) -> None:
                await make_older(database.engine, seconds)

            try:
                return await work(DatabaseWorld(database, age))
            finally:
                await database.close()

        return asyncio.run(whole())

    def ask(self, *arguments: object, code: int = 0, stdin: bytes | None = None) -> dict[str, Any]:
        """Type a command with --json; return the document."""
        done = CliRunner().invoke(app, [*map(str, arguments), "--json"], input=stdin)
        assert done.exit_code == code, done.output
        document: dict[str, Any] = json.loads(done.stdout)
        assert document["exit"] == code
        return document

    def act(self, *arguments: object, code: int = 0, who: str = "ann", **more: Any) -> Any:
        """Type a command that changes something, without being asked."""
        named = ("--actor", who, "--reason", "because", "--yes")
        return self.ask(*arguments, *named, code=code, **more)

    def read(self, *arguments: object, code: int = 0, answer: str | None = None) -> str:
        """Type a command; return what people read."""
        done = CliRunner().invoke(app, [*map(str, arguments)], input=answer)
        assert done.exit_code == code, done.output
        return done.output
