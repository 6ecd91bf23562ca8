"""How many messages of a batch share a savepoint.

A savepoint costs about as much as a message, and a failure lets half of those that
share one be handled again.  With one failure in *f* messages, √(2f) per savepoint is best.
"""

from __future__ import annotations

from math import isqrt


class Pace:
    """What a consumer has seen of late: the longer nothing fails, the fewer savepoints."""

    __slots__ = ("_since_failure",)

    def __init__(self) -> None:
        self._since_failure = 0

    def size(self, least: int) -> int:
        """Say how many messages to handle behind one savepoint, *least* or more."""
        return max(least, isqrt(2 * self._since_failure))

    def went_well(self, count: int) -> None:
        """Note that so many messages were handled without a failure."""
        self._since_failure += count

    def failed(self) -> None:
        """Note that a message failed: its neighbours may be next."""
        self._since_failure = 0
