"""A bell that wakes whoever waits, on whichever loop and thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading


class Bell:
    """Rung after every change; counts, so that nobody who looked before it misses it.

    Note `number`, look, and where there is nothing to do, `wait` with the number.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[asyncio.Future[None]] = set()
        self.number = 0
        """How often it rang."""

    def ring(self) -> None:
        """Wake everybody."""
        with self._lock:
            self.number += 1
            waiting, self._waiting = self._waiting, set()
        for future in waiting:
            loop = future.get_loop()
            if loop is _running_loop():
                _wake(future)
            else:
                # A loop that was closed meanwhile has nobody left to wake.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(_wake, future)

    async def wait(self, number: int, seconds: float) -> None:
        """Wait until it rings for more than the *number*-th time, but no longer than *seconds*."""
        future = asyncio.get_running_loop().create_future()
        with self._lock:
            if self.number != number:
                return
            self._waiting.add(future)
        try:
            await asyncio.wait((future,), timeout=seconds)
        finally:
            with self._lock:
                self._waiting.discard(future)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
