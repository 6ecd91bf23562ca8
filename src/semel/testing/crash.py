"""Crashes at named windows, in process: the cheapest kill there is.

    with crash_at(CrashPoint.COMMIT_TXN_AFTER), pytest.raises(Crash):
        driver.run_cycle(...)

A `Crash` is not an `Exception`, so no handler under test can swallow it, and
nothing runs after it that would not run after a kill.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from semel.crashpoints import CrashPoint, Hook, install


class Crash(BaseException):
    """The process is dead from here on."""


@dataclass(frozen=True, slots=True)
class CrashWindow:
    """One passage through one crash point: the *occurrence*-th since counting began."""

    point: CrashPoint
    sink: str | None = None
    occurrence: int = 1

    def __str__(self) -> str:
        return f"{self.point.at(self.sink)}#{self.occurrence}"


class WindowCounter:
    """Turns passages through crash points into windows."""

    def __init__(self) -> None:
        self._times: Counter[tuple[CrashPoint, str | None]] = Counter()

    def pass_through(self, point: CrashPoint, sink: str | None) -> CrashWindow:
        """Count one passage and name it."""
        self._times[point, sink] += 1
        return CrashWindow(point, sink, self._times[point, sink])


@contextmanager
def hooked(hook: Hook) -> Iterator[None]:
    """Call *hook* at every window within the block."""
    before = install(hook)
    try:
        yield
    finally:
        install(before)


@contextmanager
def crash_at(point: CrashPoint, sink: str | None = None, occurrence: int = 1) -> Iterator[None]:
    """Raise `Crash` when *point* is reached for the *occurrence*-th time within the block.

    Without a *sink*, every sink's passage through the point counts.
    """
    left = occurrence

    def hook(reached: CrashPoint, at_sink: str | None) -> None:
        nonlocal left
        if reached is point and sink in (None, at_sink):
            left -= 1
            if left == 0:
                raise Crash(f"at {reached.at(at_sink)}")

    with hooked(hook):
        yield


@contextmanager
def trace() -> Iterator[list[CrashWindow]]:
    """Collect every window that is passed within the block, in order."""
    counter = WindowCounter()
    windows: list[CrashWindow] = []
    with hooked(lambda point, sink: windows.append(counter.pass_through(point, sink))):
        yield windows
