"""What a contract of the messaging half asks of a database: to be opened, and to let time pass."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from semel.messaging.database import Database


@dataclass(frozen=True, slots=True)
class DatabaseWorld:
    """An empty database with semel's tables, for one test."""

    database: Database

    age: Callable[[float], Awaitable[None]]
    """Let so many seconds pass on the database's clock (or make every time so much older)."""

    waits_for_locks: bool = True
    """Two transactions can be open at once, and the second waits for the first's rows."""


class DatabaseContract:
    """A contract over a `Database`; an implementation says how one is opened."""

    def world(self) -> AbstractAsyncContextManager[DatabaseWorld]:
        """Open an empty database; entered on the event loop that the test runs on."""
        raise NotImplementedError


def in_world(test: Callable[[Any, DatabaseWorld], Awaitable[None]]) -> Callable[[Any], None]:
    """Run an asynchronous test on a loop of its own, with a world of its own."""

    @functools.wraps(test)
    def run(contract: DatabaseContract) -> None:
        async def whole() -> None:
            async with contract.world() as world:
                await test(contract, world)

        asyncio.run(whole())

    # pytest would take the parameter of the inner function for a fixture.
    del run.__wrapped__
    return run
