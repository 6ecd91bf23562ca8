"""The world of a test of the messaging half: an empty database, a loop, and a deadline."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, TypeVar

from semel.messaging.database import Database
from semel.messaging.handle.claims import Locked

Answer = TypeVar("Answer")
Arguments = ParamSpec("Arguments")

# Long enough for a loaded machine; a test that hangs says so itself instead of being killed.
DEADLINE_SECONDS: Final = 60.0


def run(coroutine: Coroutine[Any, Any, Answer], seconds: float = DEADLINE_SECONDS) -> Answer:
    """Run *coroutine* on a loop of its own and return what it returns.

    Raises:
        TimeoutError: it did not end in time.
    """

    async def in_time() -> Answer:
        async with asyncio.timeout(seconds):
            return await coroutine

    return asyncio.run(in_time())


def asynchronous(
    test: Callable[Arguments, Coroutine[Any, Any, Answer]],
) -> Callable[Arguments, Answer]:
    """Make an ordinary function of an asynchronous test; fixtures keep their names."""

    @functools.wraps(test)
    def synchronous(*arguments: Arguments.args, **named: Arguments.kwargs) -> Answer:
        return run(test(*arguments, **named))

    return synchronous


Result = TypeVar("Result")


async def patiently(ask: Callable[[], Awaitable[Result]]) -> Result:
    """Repeat a whole transaction until the lock timeout does not end it."""
    while True:
        try:
            return await ask()
        except Locked:
            continue


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
