"""The class that people know: claim, then `handle_event`, in the caller's transaction.

    async with session_factory() as session:
        consumer = Billing(SqlAlchemyProcessedMessageStore(session))
        if await consumer.consume(message):
            await session.commit()
        else:
            await session.rollback()
    # only now is the broker told

Whoever creates the session ends it.  `semel.messaging.runner` does all of this
by itself, with retries and dead letters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

from semel.errors import Misuse
from semel.message import Message
from semel.messaging.claim_store import ProcessedMessageStore
from semel.messaging.claims import (
    Claimed,
    ClaimRequest,
    Duplicate,
    NotClaimable,
)
from semel.messaging.context import handling

AnyMessage = TypeVar("AnyMessage")


class IdempotentConsumerBase(Generic[AnyMessage]):
    """Handles each message once, in the transaction of whoever calls `consume`."""

    consumer_name: ClassVar[str] = ""
    """The name of the claims; the class's own name where none is given."""

    def __init__(self, store: ProcessedMessageStore) -> None:
        self.store = store

    @property
    def session(self) -> Any:
        """The session of the transaction that the claim is in: write the effect with it."""
        return getattr(self.store, "session", None)

    @property
    def name(self) -> str:
        """The name that this consumer's claims carry."""
        return self.consumer_name or type(self).__name__

    async def consume(self, message: AnyMessage) -> bool:
        """Claim and handle; True: handled now, False: handled before.

        Commits nothing: the caller commits after True, and tells the broker after the commit.

        Raises:
            NotClaimable: another owner has it, or it is parked or dead; do not acknowledge it.
            Exception: whatever `handle_event` raises; roll back, and do not acknowledge it.
        """
        message_id = self.event_id(message)
        digest = message.digest if isinstance(message, Message) else ""
        answer = await self.store.try_claim(self.name, ClaimRequest(message_id, digest))
        match answer:
            case Claimed(attempt=attempt):
                known = message if isinstance(message, Message) else Message(message_id, message)
                with handling(self.name, known.tried(attempt)):
                    await self.handle_event(message)
                return True
            case Duplicate():
                return False
            case _:
                raise NotClaimable(self.name, message_id, answer)

    async def handle_event(self, message: AnyMessage) -> None:
        """Do what the message asks for, in `session`; never commit, roll back or close it."""
        raise NotImplementedError(f"{type(self).__name__} must say how it handles a message")

    def event_id(self, message: AnyMessage) -> str:
        """Return the producer's id: a `Message`'s own, or the field ``event_id`` of a dict.

        Raises:
            Misuse: there is none.
        """
        if isinstance(message, Message):
            return message.id
        found = message.get("event_id") if isinstance(message, Mapping) else None
        if not isinstance(found, str) or not found:
            raise Misuse(
                f"{type(self).__name__} found no 'event_id' in the message; override event_id() "
                f"to say where the producer's own id is"
            )
        return found
