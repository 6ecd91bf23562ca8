"""A clock that a test owns: waiting takes no time and is written down."""

from __future__ import annotations

import threading


class SimulatedClock:
    """A `semel.clock.Clock` whose time passes only when somebody sleeps or says so."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._epoch_seconds = now
        self._passed_seconds = 0.0
        self._lock = threading.Lock()
        self.slept: list[float] = []
        """Every wait that the code under test asked for, in order."""

    def now(self) -> float:
        """Return seconds since 1970 (UTC)."""
        return self._epoch_seconds + self._passed_seconds

    def monotonic(self) -> float:
        """Return seconds since this clock was made."""
        return self._passed_seconds

    def sleep(self, seconds: float) -> None:
        """Let *seconds* pass at once, and remember that somebody waited."""
        self.slept.append(seconds)
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Let *seconds* pass at once."""
        with self._lock:
            self._passed_seconds += seconds
