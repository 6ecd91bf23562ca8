"""What is being handled right now, for the parts that derive ids from it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
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

    sent: dict[tuple[str, str], int] = field(default_factory=dict)
    """How many messages it has sent so far, by the id of the cause and by destination."""

    is_over: bool = False
    """The handler has ended; a task that it began may go on."""

    def handles(self, message: Message) -> bool:
        """Tell whether this call handles *message*."""
        return message.id in self.ids

    def next_ordinal(self, cause: Message, destination: str) -> int:
        """Count a message to *destination*; a handler that runs again counts the same way."""
        ordinal = self.sent.get((cause.id, destination), 0)
        self.sent[cause.id, destination] = ordinal + 1
        return ordinal


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


def handling(
    consumer: str, message: Message, batch: Sequence[Message] = ()
) -> AbstractContextManager[Handling]:
    """Say that the block handles *message*, and with it the rest of its *batch*."""
    return _Now(Handling(consumer, message, frozenset(one.id for one in batch or (message,))))


class _Now(AbstractContextManager[Handling]):
    """The time during which something is handled; no generator, for it stands around each call."""

    __slots__ = ("_handling", "_token")

    def __init__(self, handling: Handling) -> None:
        self._handling = handling
        self._token: Token[Handling | None] | None = None

    def __enter__(self) -> Handling:
        self._token = _HANDLING.set(self._handling)
        return self._handling

    def __exit__(self, *error: object) -> None:
        self._handling.is_over = True
        if self._token is not None:
            _HANDLING.reset(self._token)
