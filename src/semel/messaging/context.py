"""What is being handled right now, for the parts that derive ids from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from semel.errors import Misuse
from semel.message import Message


@dataclass(slots=True)
class Handling:
    """One call of a handler."""

    consumer: str
    message: Message
    """What is handled; of a whole batch, the first."""

    ids: frozenset[str]
    """Of everything that is handled."""

    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How many messages it has sent so far, by the id of the cause and by destination."""

    is_over: bool = False
    """The handler has ended; a task that it began may go on."""

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


def refuse_if_late(opened_in: Handling | None) -> None:
    """See that no handler that has ended writes in a transaction, *opened_in* this call of one.

    What its task wrote would be its neighbours', and would happen again with its next attempt.

    Raises:
        Misuse: it has ended.
    """
    now = _HANDLING.get()
    if now is not None and now.is_over and now is not opened_in:
        raise Misuse(
            f"a task of the handler of message {now.message.id!r} wrote after the handler had "
            f"ended: nothing of it is kept. Await whatever is begun, best in a TaskGroup"
        )


@contextmanager
def handling(consumer: str, message: Message, batch: Sequence[Message] = ()) -> Iterator[Handling]:
    """Say that the block handles *message*, and with it the rest of its *batch*."""
    now = Handling(consumer, message, frozenset(one.id for one in batch or (message,)))
    token = _HANDLING.set(now)
    try:
        yield now
    finally:
        now.is_over = True
        _HANDLING.reset(token)
