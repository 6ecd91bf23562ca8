"""The inbox: messages stored with us first, and handled now or later (S4-8, S4-9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from semel.message import Coordinates, Message
from semel.messaging.sweep import Sweep


@dataclass(frozen=True, slots=True)
class InboxMessage:
    """One message of the inbox; one per consumer and message id."""

    consumer: str
    message_id: str
    message_type: str
    payload: bytes | None
    key: str | None = None
    headers: Mapping[str, bytes] = field(default_factory=dict)
    source: Coordinates | None = None
    timestamp: float = 0.0
    payload_hash: str = ""
    correlation_id: str = ""
    schema_version: str = ""
    place: int = 0
    received_at: float = 0.0
    processed_at: float | None = None
    due_at: float | None = 0.0
    """When it may be tried; None: never again."""

    attempts: int = 0
    error: str = ""
    result: str | None = None
    erased_at: float | None = None

    @classmethod
    def of(cls, consumer: str, message: Message) -> InboxMessage:
        """Put *message* into words of the inbox."""
        return cls(
            consumer,
            message.id,
            message.type,
            message.raw,
            message.key,
            message.headers,
            message.source,
            message.timestamp,
            message.digest,
            message.correlation_id,
            message.schema_version,
        )

    @property
    def topic(self) -> str:
        """The original topic; empty where it came from none."""
        return "" if self.source is None else self.source.topic

    @property
    def partition(self) -> int | None:
        """Of the original record."""
        return None if self.source is None else self.source.partition

    @property
    def offset(self) -> int | None:
        """Of the original record."""
        return None if self.source is None else self.source.offset


class InboxStore(Protocol):
    """The inbox, in one open transaction.

    The contract is executable: `semel.testing.contracts.InboxContract`.
    """

    async def store(self, message: InboxMessage) -> bool:
        """Write a message that is due at once; False where its id is there already.

        Waits for another transaction that is writing the same id.

        Raises:
            Locked: that transaction did not end in time.
        """
        ...

    async def withdraw(self, consumer: str, message_id: str) -> None:
        """Remove a message that *this* transaction stored, as if it had never come.

        Whoever waits to store the same id stores it when the transaction has ended.
        """
        ...

    async def take_due(self, consumer: str, limit: int) -> Sequence[InboxMessage]:
        """Lock and return unprocessed messages that are due, in order of arrival.

        Of each key only the first, and none whose key another transaction has locked.  One
        that waits for its next attempt holds back its key; one that is not tried any more
        does not.
        """
        ...

    async def done(self, consumer: str, message_id: str, result: str | None = None) -> None:
        """Mark a message as processed in this transaction, and count the attempt."""
        ...

    async def failed(
        self, consumer: str, message_id: str, error: str, delay_seconds: float | None
    ) -> int:
        """Write a failed attempt and when it is due again (None: never); return the attempts.

        A processed message stays as it is.  An erased one is never due again, and of the
        error nothing is written.
        """
        ...

    async def try_again(self, consumer: str, message_id: str) -> bool:
        """Make a message that is not tried any more due now, its attempts forgotten.

        False, and nothing changed, in every other state; an erased one is never tried again.
        """
        ...

    async def close(self, consumer: str, message_id: str, word: str) -> bool:
        """Mark a message as processed without an effect, by a person's *word*; an operator's act.

        The word is its error from then on.  False, and nothing changed, where it is processed.
        """
        ...

    async def get(self, consumer: str, message_id: str) -> InboxMessage | None:
        """Return one message."""
        ...

    async def consumers_of(self, message_id: str) -> Sequence[str]:
        """Name the consumers for which a message is stored, in order."""
        ...

    async def pending(self, consumer: str) -> int:
        """Count what is not processed yet and will be tried."""
        ...

    async def delete_processed(
        self, consumer: str, older_than_seconds: float, limit: int, sweep: Sweep | None = None
    ) -> int:
        """Delete at most *limit* messages that were processed so long ago.

        Those stay whose outgoing messages are still here: `semel.messaging.erase` finds them so.
        With a *sweep*: only behind what it reached.
        """
        ...

    async def erase(
        self,
        *,
        message_id: str | None = None,
        key: str | None = None,
        consumer: str | None = None,
    ) -> int:
        """Remove payload, headers and result of matching messages; what waited is not tried.

        What was not processed has the error ``ERASED`` instead of an exception's words.  Where
        it has no dead letter it is closed: nothing is left of it that a person could act on.

        Waits for transactions that hold one of them.

        Raises:
            Misuse: neither an id nor a key is given.
        """
        ...
