"""Cancellations: whose they are, and how work that is cancelled comes to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection
from time import monotonic
from typing import Any, TypeVar

from semel.messaging.failure import RetryableMessageError

Result = TypeVar("Result")
Work = asyncio.Task[Any]


async def called(call: Awaitable[Result]) -> Result:
    """Await code of a consumer's; a cancellation that nobody asked for is its failure.

    Raises:
        RetryableMessageError: what it waited for was cancelled, and not this task.
    """
    try:
        return await call
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        why = "what the handler waited for was cancelled"
        raise RetryableMessageError(why, "HANDLER_CANCELLED") from error


async def end(tasks: Collection[Work], seconds: float | None = None) -> bool:
    """Cancel what still runs, and wait until it has ended; False where *seconds* were not enough.

    It waits however often the caller is cancelled, and only then passes that on: nothing runs
    on behind the caller's back.
    """
    running = {task for task in tasks if not task.done()}
    for task in running:
        task.cancel()
    until = None if seconds is None else monotonic() + seconds
    cancelled: asyncio.CancelledError | None = None
    while running:
        left = None if until is None else max(until - monotonic(), 0.0)
        try:
            _, running = await asyncio.wait(running, timeout=left)
            if left is not None and left <= 0.0:
                break
        except asyncio.CancelledError as error:
            cancelled = error
            running = {task for task in running if not task.done()}
    for task in tasks:
        _forget(task)
    if cancelled is not None:
        raise cancelled
    return not running


def _forget(task: Work) -> None:
    """Fetch its exception, now or when it ends: one that nobody fetches is logged as forgotten."""
    if not task.done():
        task.add_done_callback(_forget)
    elif not task.cancelled():
        task.exception()
