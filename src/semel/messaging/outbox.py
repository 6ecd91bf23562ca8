"""The outbox: messages that become durable with the caller's transaction, and leave later.

An outgoing id is made of the consumer, the inbound message, the destination
and a counter: whoever handles the message again writes the same ids.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

NAMESPACE: Final = uuid.UUID("6f0d6c1e-8a55-5d0b-9d53-7a0d5e3a1c11")
"""What every outgoing id of ours is derived in; it never changes."""

MESSAGE_ID_HEADER: Final = "message-id"
CORRELATION_HEADER: Final = "correlation-id"
CAUSATION_HEADER: Final = "causation-id"


def outgoing_id(consumer: str, message_id: str, destination: str, ordinal: int) -> str:
    """Return the id of the *ordinal*-th message to *destination* that handling a message sends."""
    parts = (consumer, message_id, destination, str(ordinal))
    # Lengths in front of the parts, so that no two lists of parts give the same text.
    name = "".join(f"{len(part)}:{part}" for part in parts)
    return str(uuid.uuid5(NAMESPACE, name))


def idempotency_key(consumer: str, message_id: str) -> str:
    """Return the key under which an external provider recognises a repeated call."""
    return outgoing_id(consumer, message_id, "external", 0)


@dataclass(frozen=True, slots=True)
class OutboxEntry:
    """One message in the outbox."""

    message_id: str
    topic: str
    value: bytes | None
    key: str | None = None
    headers: Mapping[str, bytes] = field(default_factory=dict)
    place: int = 0
    """The order of writing; given by the outbox."""

    outbox: str = "outbox"
    """Which relay it belongs to."""

    created_at: float = 0.0
    attempts: int = 0
    parked_reason: str = ""
    parent: str = ""
    """The inbound message that caused it, as ``consumer/message id``; for explanations."""

    erased_at: float | None = None


@dataclass(frozen=True, slots=True)
class OutboxNumbers:
    """How full an outbox is."""

    pending: int
    parked: int
    oldest_seconds: float


@dataclass(frozen=True, slots=True)
class Leadership:
    """The right to relay one outbox, until it is taken away."""

    outbox: str
    owner: str
    epoch: int


class OutboxStore(Protocol):
    """The outbox, in one open transaction.

    The contract is executable: `semel.testing.contracts.OutboxContract`.
    """

    async def add(self, entries: Sequence[OutboxEntry]) -> None:
        """Write entries; an id that is there already is left as it is."""
        ...

    async def lead(self, outbox: str, owner: str, seconds: float) -> Leadership | None:
        """Take or keep the leadership; None while another owner's lease lives."""
        ...

    async def resign(self, leadership: Leadership) -> None:
        """Give the leadership up."""
        ...

    async def read(self, outbox: str, after_place: int, limit: int) -> Sequence[OutboxEntry]:
        """Return entries behind *after_place* that are not parked, in order."""
        ...

    async def delete(self, leadership: Leadership, places: Sequence[int]) -> int:
        """Delete exactly these entries, if the leadership still stands.

        Raises:
            Fenced: another leader took over; nothing was deleted.
        """
        ...

    async def park(self, leadership: Leadership, place: int, reason: str) -> None:
        """Set an entry aside that the broker will never take.

        Raises:
            Fenced: another leader took over.
        """
        ...

    async def unpark(self, outbox: str, message_id: str) -> bool:
        """Send a parked entry again; an operator's act."""
        ...

    async def drop(self, outbox: str, message_id: str) -> bool:
        """Take a parked entry out for good; an operator's act."""
        ...

    async def parked(self, outbox: str, limit: int) -> Sequence[OutboxEntry]:
        """Return the entries that were set aside, in order."""
        ...

    async def parked_keys(self, outbox: str) -> frozenset[tuple[str, str]]:
        """Return (topic, key) of parked entries: their later messages wait behind them."""
        ...

    async def children(self, parent: str) -> Sequence[OutboxEntry]:
        """Return entries that handling one message wrote and that are still here."""
        ...

    async def numbers(self, outbox: str) -> OutboxNumbers:
        """Count what is pending and say how old the oldest is."""
        ...

    async def erase(self, *, message_id: str | None = None, key: str | None = None) -> int:
        """Remove value and headers of matching entries."""
        ...
