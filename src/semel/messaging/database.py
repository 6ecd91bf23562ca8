"""One database, one transaction: the stores of the messaging half, together.

    async with database.begin() as unit:
        answer = await unit.claims.try_claim("billing", request)
        …
                                            committed here, all of it, or none

`semel.memory` and `semel.sqlalchemy` implement it; the engine knows no other way in.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from semel.errors import Misuse
from semel.messaging.attempts import FailedAttempts
from semel.messaging.claim_store import ProcessedMessageStore
from semel.messaging.completeness import OutcomeStore
from semel.messaging.deadletters import DeadLetters
from semel.messaging.failure import Classification
from semel.messaging.inbox import InboxStore
from semel.messaging.members import Members
from semel.messaging.outbox import OutboxStore
from semel.messaging.sequence import Versions
from semel.messaging.waiting import WaitingRoom


class TransactionEnded(Misuse):
    """A handler ended the transaction of its unit, past every guard.

    Whatever had been done in it may be durable, claims of messages included that nobody has
    handled.  Nothing more is done in it, and no message of a batch is acknowledged.
    """

    def __init__(self, message_id: str = "") -> None:
        super().__init__(message_id)
        self.message_id = message_id
        """Of the message whose handler used the connection last; empty where none did."""

    def __str__(self) -> str:
        handler = f"the handler of message {self.message_id!r}" if self.message_id else "a handler"
        return (
            f"{handler} has ended the transaction of its messages, past every guard: claims of "
            f"messages that were not handled may be durable. Compare the claims with their "
            f"effects before these messages are acknowledged"
        )


class Unit(Protocol):
    """One open transaction; what is done through it becomes durable together or not at all."""

    @property
    def session(self) -> Any:
        """What handlers get: it can write, but not end the transaction."""
        ...

    @property
    def claims(self) -> ProcessedMessageStore:
        """The claims."""
        ...

    @property
    def attempts(self) -> FailedAttempts:
        """Each try that failed."""
        ...

    @property
    def dead_letters(self) -> DeadLetters:
        """The dead letters."""
        ...

    @property
    def waiting(self) -> WaitingRoom:
        """The waiting room: retries and parked messages."""
        ...

    @property
    def outbox(self) -> OutboxStore:
        """The outgoing messages."""
        ...

    @property
    def inbox(self) -> InboxStore:
        """The stored incoming messages."""
        ...

    @property
    def members(self) -> Members:
        """The running processes."""
        ...

    @property
    def outcomes(self) -> OutcomeStore:
        """What became of every offset."""
        ...

    @property
    def versions(self) -> Versions:
        """The applied versions of aggregates."""
        ...

    def savepoint(self) -> AbstractAsyncContextManager[None]:
        """Undo what the block did if it raises, and only that.

        Leaving the block sends the session's pending writes, so that their errors are the
        block's.
        """
        ...

    async def begin_message(self) -> None:
        """Let the next handler find the session as if no other had used it.

        It reads what the database has, what the messages before it wrote included.
        """
        ...

    async def now(self) -> float:
        """Return the database's time, in seconds since 1970."""
        ...


class Database(Protocol):
    """Where messages, claims and effects live."""

    @property
    def classification(self) -> Classification:
        """What this database's own exceptions mean."""
        ...

    def begin(self) -> AbstractAsyncContextManager[Unit]:
        """Open a transaction: committed when the block ends, rolled back when it raises.

        Isolation is READ COMMITTED, whatever the engine's default.

        Raises:
            Retryable: there is no connection, or the commit was refused for now (a
                serialization failure, a deadlock): the whole block may be run again.
            InDoubt: the commit was sent and no answer came back.
        """
        ...

    async def close(self) -> None:
        """Give the connections back."""
        ...
