"""Coroutines in tests that are ordinary functions: a loop for each, and a deadline."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, Final, ParamSpec, TypeVar

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
