"""Handling a message of the broker past its consumer's inbox, while the inbox may get it too.

    the replay   begin ─▶ take its place ─▶ claim, handle ─▶ give the place back ─▶ commit
    the inbox    begin ─▶ store: waits ……………………………………………………………………………▶ look at the claim

Whoever has the place first wins: the inbox finds the replay's claim, or the
replay finds the inbox's message.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from semel.errors import Retryable
from semel.messaging.database import Database, Unit
from semel.messaging.failure import Classification
from semel.messaging.inbox import InboxMessage
from semel.messaging.outcome import RetryLater, Skipped


@dataclass(slots=True)
class OutsideInbox:
    """A database in whose transactions no inbox can get one message of one consumer."""

    database: Database
    consumer: str
    message_id: str
    stored_instead: Skipped | RetryLater | None = None
    """What became of the message where the inbox had it first."""

    @property
    def classification(self) -> Classification:
        """What the database's own exceptions mean."""
        return self.database.classification

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Unit]:
        """Open a transaction that has the message's place in the inbox until it ends.

        Raises:
            Retryable: the inbox has the message; nothing was done.
        """
        async with self.database.begin() as unit:
            place = InboxMessage(self.consumer, self.message_id, "", None)
            if not await unit.inbox.store(place):
                known = await unit.inbox.get(self.consumer, self.message_id)
                is_over = known is not None and known.processed_at is not None
                self.stored_instead = Skipped("duplicate") if is_over else RetryLater(0.0)
                raise Retryable(f"consumer {self.consumer}: its inbox has {self.message_id!r}")
            yield unit
            await unit.inbox.withdraw(self.consumer, self.message_id)

    async def close(self) -> None:
        """Nothing to give back."""
