"""Who may run in this process: all of its work at once, or one suspect alone.

A process dies with everything that runs in it, so a death says something about
one message only if nothing else ran.  Runners, retry workers and inbox workers
of a process share its turns, on whatever event loops and threads they run.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from typing import Final

from semel.errors import Misuse

PATIENCE_SECONDS: Final = 30.0
"""How long work waits for a suspect, and a suspect for work: one may need the other to end."""


_TRYING: Final[ContextVar[object | None]] = ContextVar("semel_trying", default=None)
"""The try within which this code runs; the tasks that it begins have it, too."""


class Turns:
    """The turns of one process.

    Work that nobody suspects pays for two entries under a lock, and waits for nothing as long
    as nobody is suspected.
    """

    def __init__(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._patience_seconds = patience_seconds
        self.forget()

    def forget(self) -> None:
        """Begin anew: in a process that was just forked, nothing runs."""
        self._lock = threading.Lock()
        self._running: set[object] = set()
        self._stuck: set[object] = set()
        """What of that no suspect waits for any more."""

        self._suspects = 0
        """How many wait for being alone, or are."""

        self._tried: object | None = None
        """The try of a suspect that is made now."""

        self._lets_pass = False
        """Work that was held back too long runs beside this suspect."""

        self._bells: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def beside_others(self) -> AsyncIterator[None]:
        """Run work that nobody suspects; waits while somebody else is tried alone."""
        work = object()
        if not await self._until(lambda: self._begin(work), self._patience_seconds):
            with self._lock:
                self._lets_pass = True
                self._running.add(work)
            self._ring()
        try:
            yield
        finally:
            with self._lock:
                self._running.discard(work)
                self._stuck.discard(work)
            self._ring()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Run a suspect while nothing else runs; new work is held back meanwhile.

        Two suspects never run at once.  Work that does not end within the patience is left
        running beside the suspect, and not waited for again.

        Raises:
            Misuse: whoever tries a suspect, or a task that it began, tries another one meanwhile,
                and would wait for itself.
        """
        if _TRYING.get() is self._tried is not None:
            raise Misuse("a suspect is tried alone: not within the try of another one")
        me, is_tried = object(), False
        _TRYING.set(me)
        with self._lock:
            self._suspects += 1
        try:
            is_tried = await self._until(lambda: self._try(me))
            if not await self._until(lambda: self._running <= self._stuck, self._patience_seconds):
                with self._lock:
                    self._stuck |= self._running
            yield
        finally:
            _TRYING.set(None)
            with self._lock:
                self._suspects -= 1
                if is_tried:
                    self._tried, self._lets_pass = None, False
            self._ring()

    def _begin(self, work: object) -> bool:
        if self._suspects and not self._lets_pass:
            return False
        self._running.add(work)
        return True

    def _try(self, by: object) -> bool:
        if self._tried is not None:
            return False
        self._tried = by
        return True

    async def _until(self, is_so: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until a condition, which may take what it finds, holds; False where it is late."""
        loop = asyncio.get_running_loop()
        by = None if seconds is None else loop.time() + seconds
        while True:
            with self._lock:
                if is_so():
                    return True
                bell = (loop, loop.create_future())
                self._bells.append(bell)
            try:
                async with asyncio.timeout_at(by):
                    await bell[1]
            except TimeoutError:
                return False
            finally:
                with self._lock, suppress(ValueError):
                    self._bells.remove(bell)

    def _ring(self) -> None:
        """Let whoever waits look again."""
        if not self._bells:
            return
        with self._lock:
            bells, self._bells = self._bells, []
        for loop, bell in bells:
            # A loop that was closed has nobody waiting any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_answer, bell)


def _answer(bell: asyncio.Future[None]) -> None:
    if not bell.done():
        bell.set_result(None)


TURNS: Final = Turns()
"""The turns of this process."""

os.register_at_fork(after_in_child=TURNS.forget)
