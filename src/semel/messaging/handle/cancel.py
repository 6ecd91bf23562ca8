"""Cancellation of tasks: who cancelled, and how to end cancelled work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Coroutine
from contextlib import suppress
from time import monotonic
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from semel.messaging.failure import RetryableMessageError

Result = TypeVar("Result")
Work = asyncio.Task[Any]


_OWNERS: Final[WeakKeyDictionary[Work, Work]] = WeakKeyDictionary()
_ENDED: Final[WeakSet[Work]] = WeakSet()


def owned(work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """Start work that belongs to the current task, which cancels it only through `end`.

    That distinguishes a handler that cancels its own task from the code that ends the task.
    """
    task = asyncio.create_task(work)
    owner = asyncio.current_task()
    if owner is not None:
        _OWNERS[task] = owner
    return task


async def called(call: Awaitable[Result]) -> Result:
    """Await code of the consumer; a cancellation that does not come from `end` is a failure.

    Raises:
        RetryableMessageError: what it waited for was cancelled, or it cancelled its own task.
    """
    task = asyncio.current_task()
    try:
        result = await call
        if task is not None and task.cancelling() and not _is_ending(task):
            # If the handler cancelled its own task and returned, the cancellation is raised at the
            # next await: here, and not in the commit.
            await asyncio.sleep(0)
            _forgive(task)
    except asyncio.CancelledError as error:
        if task is None or _is_ending(task):
            raise
        _forgive(task)
        why = "what the handler waited for was cancelled"
        raise RetryableMessageError(why, "HANDLER_CANCELLED") from error
    return result


def _is_ending(task: Work) -> bool:
    """Return whether a task was cancelled by other code than the code that runs in it."""
    if not task.cancelling():
        return False
    owner = _OWNERS.get(task)
    return owner is None or task in _ENDED or owner.done() or owner.cancelling() > 0


def _forgive(task: Work) -> None:
    while task.cancelling():
        task.uncancel()


async def rung(bell: asyncio.Event, seconds: float) -> bool:
    """Wait for *bell*, at most *seconds*; return whether it rang.

    Not with `asyncio.wait_for`: in Python 3.11 it loses a cancellation that arrives together
    with the event.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await bell.wait()
    return bell.is_set()


async def end(tasks: Collection[Work], seconds: float | None = None) -> bool:
    """Cancel what still runs, and wait until it has ended; False if *seconds* were not enough.

    If the caller is cancelled meanwhile, it raises that only after the wait: no task continues
    unnoticed.
    """
    running = {task for task in tasks if not task.done()}
    for task in running:
        _ENDED.add(task)
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
    """Fetch its exception, now or when it ends: asyncio logs exceptions that are not fetched."""
    if not task.done():
        task.add_done_callback(_forget)
    elif not task.cancelled():
        task.exception()
