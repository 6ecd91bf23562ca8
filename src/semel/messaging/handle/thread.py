"""Calls a handler that is a plain function: in a thread, while the event loop goes on.

    the thread      runs the function; each statement of its session waits for the event loop
    the event loop  runs the statement, on the connection of the transaction

A thread cannot be stopped.  After a cancellation the caller waits until the function has ended,
and its next statement raises: nothing of it is written into a transaction that has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from typing import Any, Final

from semel.errors import Misuse
from semel.messaging.failure import RetryableMessageError

# More handlers than this wait for a thread.  A handler that waits for a service uses no CPU.
MOST_THREADS: Final = 64


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS, "semel-handler")


class BlockingCall:
    """One call of a plain function; its fields belong to the thread of the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waits_for: asyncio.Task[Any] | None = None
        self._is_cancelled = False

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run *function* in a thread, with the caller's context; return what it returns."""
        cancelled: asyncio.CancelledError | None = None
        work = copy_context().run
        running = self._loop.run_in_executor(_pool(), work, _returned, function, *arguments)
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError as error:
                cancelled = error
                self._cancel()
        if cancelled is not None:
            running.exception()  # asyncio logs exceptions that are not fetched
            raise cancelled
        return running.result()

    def wait(self, awaitable: Awaitable[Any]) -> Any:
        """Let the event loop run *awaitable*; called in the thread, which waits for the result.

        Raises:
            RetryableMessageError: it was cancelled.  An ordinary exception: SQLAlchemy would close
                the connection for another one, which it can do on the event loop only.
        """
        answer: Future[Any] = Future()
        self._loop.call_soon_threadsafe(self._begin, awaitable, answer)
        return answer.result()

    def _begin(self, awaitable: Awaitable[Any], answer: Future[Any]) -> None:
        async def whole() -> Any:
            return await awaitable

        def end(task: asyncio.Task[Any]) -> None:
            self._waits_for = None
            error = _cancelled() if task.cancelled() else task.exception()
            if error is None:
                answer.set_result(task.result())
            else:
                answer.set_exception(error)

        self._waits_for = self._loop.create_task(whole())
        self._waits_for.add_done_callback(end)

    def refuse_if_cancelled(self) -> None:
        """Raise before a statement of a call that was cancelled.

        Raises:
            RetryableMessageError: it was.
        """
        if self._is_cancelled:
            raise _cancelled()

    def _cancel(self) -> None:
        self._is_cancelled = True
        if self._waits_for is not None:
            self._waits_for.cancel()


def _cancelled() -> RetryableMessageError:
    return RetryableMessageError("the handler was cancelled", "HANDLER_CANCELLED")


def _returned(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        result = function(*arguments)
    except StopIteration as error:
        # asyncio does not pass it on, and the caller would wait for ever.
        raise RuntimeError("a handler raised StopIteration") from error
    if asyncio.iscoroutine(result):
        result.close()
        raise Misuse("a handler that is a plain function returned a coroutine: write `async def`")
    return result


async def call_plain(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a handler that is a plain function, with a blocking session for its session.

    Raises:
        Misuse: it takes a lease, whose methods a plain function cannot await.
    """
    call = BlockingCall()
    message, *second = arguments
    if not second:
        return await call.run(function, message)
    run_blocking = getattr(second[0], "run_blocking", None)
    if run_blocking is None:
        raise Misuse("a handler that takes a lease must be an async function")
    return await call.run(run_blocking, function, message, call)
