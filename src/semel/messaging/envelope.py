"""A message with its acknowledgement, for adapters that settle one delivery at a time (S3-42)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from semel.clock import SYSTEM_CLOCK
from semel.errors import Misuse
from semel.message import Message
from semel.messaging.consumer import Consumer
from semel.messaging.database import Database
from semel.messaging.handling import handle_message
from semel.messaging.outcome import Ack, Nack, Outcome, Settlement, settlement
from semel.messaging.telling import tell, tell_received

Payload = TypeVar("Payload")


class Acknowledgement(Protocol):
    """How an adapter tells its broker; the mechanics stay there."""

    async def ack(self) -> None:
        """Say that the broker may forget the delivery."""
        ...

    async def nack(self, seconds: float) -> None:
        """Say that the delivery is to come back, not before *seconds* from now."""
        ...


@dataclass(slots=True)
class MessageEnvelope(Generic[Payload]):
    """One delivery: what came, and how to settle it, once."""

    message_id: str
    key: str | None
    payload: Payload
    acknowledgement: Acknowledgement
    context: Mapping[str, Any] = field(default_factory=dict)
    message: Message | None = None
    backoff_seconds: Callable[[BaseException], float] = field(default=lambda cause: 1.0)
    """How long a delivery stays away after *cause*."""

    settled: bool = False

    async def ack(self) -> None:
        """Settle the delivery: its effect, or its failure, is durable.

        Raises:
            Misuse: it was settled before.
        """
        await self.settle(Ack())

    async def nack_with_backoff(self, cause: BaseException) -> None:
        """Settle the delivery by bringing it back, later.

        Raises:
            Misuse: it was settled before.
        """
        await self.settle(Nack(self.backoff_seconds(cause)))

    async def settle(self, how: Settlement) -> None:
        """Tell the broker, once; one that could not be told may be told again.

        Raises:
            Misuse: it was settled before.
        """
        self.refuse_if_settled()
        self.settled = True
        try:
            match how:
                case Ack():
                    await self.acknowledgement.ack()
                case Nack(seconds):
                    await self.acknowledgement.nack(seconds)
        except BaseException:
            self.settled = False
            raise

    def refuse_if_settled(self) -> None:
        """Do nothing, unless the broker was told already.

        Raises:
            Misuse: it was settled before.
        """
        if self.settled:
            raise Misuse(f"the delivery of message {self.message_id!r} was settled before")


async def consume_envelope(
    consumer: Consumer, database: Database, envelope: MessageEnvelope[Any]
) -> Outcome:
    """Handle an envelope's message, commit, then settle the delivery.

    Raises:
        Misuse: the envelope carries no message, or was settled before.
    """
    envelope.refuse_if_settled()
    if envelope.message is None:
        raise Misuse(f"the envelope of {envelope.message_id!r} carries no message to handle")
    began = SYSTEM_CLOCK.monotonic()
    tell_received(envelope.message, consumer.name)
    outcome = await handle_message(consumer, database, envelope.message)
    tell(envelope.message, outcome, consumer.name, SYSTEM_CLOCK.monotonic() - began)
    await envelope.settle(settlement(outcome))
    return outcome
