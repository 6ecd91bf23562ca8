"""What is being handled right now, for the parts that derive ids from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from semel.message import Message


@dataclass(frozen=True, slots=True)
class Handling:
    """One call of a handler."""

    consumer: str
    message: Message
    """What is handled; of a whole batch, the first."""

    ids: frozenset[str]
    """Of everything that is handled."""

    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How many messages it has sent so far, by the id of the cause and by destination."""

    def handles(self, message: Message) -> bool:
        """Tell whether this call handles *message*."""
        return message.id in self.ids

    def next_ordinal(self, cause: Message, destination: str) -> int:
        """Count a message to *destination*; a handler that runs again counts the same way."""
        self.sent[cause.id, destination] += 1
        return self.sent[cause.id, destination] - 1


_HANDLING: ContextVar[Handling | None] = ContextVar("semel_handling", default=None)


def handling_now() -> Handling | None:
    """Return the call of a handler that this code runs in; None outside of handlers."""
    return _HANDLING.get()


@contextmanager
def handling(consumer: str, message: Message, batch: Sequence[Message] = ()) -> Iterator[Handling]:
    """Say that the block handles *message*, and with it the rest of its *batch*."""
    now = Handling(consumer, message, frozenset(one.id for one in batch or (message,)))
    token = _HANDLING.set(now)
    try:
        yield now
    finally:
        _HANDLING.reset(token)
