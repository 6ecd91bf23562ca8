"""What is being handled right now, for the parts that derive ids from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from semel.message import Message


@dataclass(frozen=True, slots=True)
class Handling:
    """One call of a handler."""

    consumer: str
    message: Message
    sent: Counter[str] = field(default_factory=Counter)
    """How many messages it has sent so far, by destination."""

    def next_ordinal(self, destination: str) -> int:
        """Count a message to *destination*; a handler that runs again counts the same way."""
        self.sent[destination] += 1
        return self.sent[destination] - 1


_HANDLING: ContextVar[Handling | None] = ContextVar("semel_handling", default=None)


def handling_now() -> Handling | None:
    """Return the call of a handler that this code runs in; None outside of handlers."""
    return _HANDLING.get()


@contextmanager
def handling(consumer: str, message: Message) -> Iterator[Handling]:
    """Say that the block handles *message*."""
    now = Handling(consumer, message)
    token = _HANDLING.set(now)
    try:
        yield now
    finally:
        _HANDLING.reset(token)
