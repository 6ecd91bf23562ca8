"""One attempt at a message, and how far it came."""

from __future__ import annotations

from dataclasses import dataclass, field

from semel.message import Message
from semel.messaging.sequence import Gap


@dataclass(slots=True)
class Try:
    """How far an attempt came before it failed."""

    message: Message
    began: bool = False
    """The handler was called: the failure counts as an attempt."""

    ended: bool = False
    """The handler returned: whatever fails now is not its doing."""

    from_waiting: bool = False
    """The message comes out of the waiting room, not from the broker."""

    overtakes: bool = False
    """Others of its key wait in the room for its version."""

    gap: Gap | None = field(default=None)
