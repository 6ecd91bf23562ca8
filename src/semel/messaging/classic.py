"""The classic interfaces: a base class for the caller's own session, and an envelope.

    async with session_factory() as session:
        consumer = Billing(SqlAlchemyProcessedMessageStore(session))
        if await consumer.consume(message):
            await session.commit()
        else:
            await session.rollback()
    # acknowledge to the broker only now

The caller owns the session and ends it.  `semel.messaging.receive.runner` does all
of this itself, with retries and dead letters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar
from uuid import UUID

from semel.clock import SYSTEM_CLOCK
from semel.errors import Misuse
from semel.message import Message, json_of, producer_id
from semel.messaging.database import Database, ProcessedMessageStore
from semel.messaging.handle.attempt import handle_message, handling
from semel.messaging.handle.claims import Claimed, ClaimRequest, Duplicate, NotClaimable
from semel.messaging.handler import Consumer
from semel.messaging.outcome import Ack, Nack, Outcome, Settlement, settlement, tell, tell_received

AnyMessage = TypeVar("AnyMessage")


class IdempotentConsumerBase(Generic[AnyMessage]):
    """Handles each message once, in the transaction of the caller of `consume`."""

    consumer_name: ClassVar[str] = ""
    """The name of its claims; the class's name by default."""

    store: ProcessedMessageStore

    def __new__(cls, *given: Any, **named: Any) -> Self:
        """Find the store among the arguments: a subclass need not call this class's `__init__`."""
        made = super().__new__(cls)
        for one in (*given, *named.values()):
            if hasattr(one, "try_claim"):
                made.store = one
        return made

    def __init__(self, store: ProcessedMessageStore) -> None:
        self.store = store

    @property
    def session(self) -> Any:
        """The session that holds the claim; write the effect with it."""
        return getattr(self.store, "session", None)

    @property
    def name(self) -> str:
        """The name that this consumer's claims carry."""
        return self.consumer_name or type(self).__name__

    async def consume(self, message: AnyMessage) -> bool:
        """Claim and handle; True: handled now, False: handled before.

        Commits nothing: the caller commits after True, and acknowledges after the commit.

        Raises:
            NotClaimable: another owner has it, it is parked or dead, or its id is known with
                another payload; do not acknowledge it.
            Exception: any error of `handle_event`; roll back, and do not acknowledge it.
        """
        if getattr(self, "store", None) is None:
            raise Misuse(
                f"{type(self).__name__} has no store to claim with; create it with the store of "
                f"this session: {type(self).__name__}(SqlAlchemyProcessedMessageStore(session))"
            )
        message_id = producer_id(self.event_id(message))
        known = message if isinstance(message, Message) else Message(message_id, message)
        answer = await self.store.try_claim(self.name, ClaimRequest(message_id, known.digest))
        match answer:
            case Claimed(attempt=attempt):
                with handling(self.name, known.tried(attempt)):
                    await self.handle_event(message)
                return True
            case Duplicate():
                return False
            case _:
                raise NotClaimable(self.name, message_id, answer)

    async def handle_event(self, message: AnyMessage) -> None:
        """Write the effect of the message with `session`; never commit, roll back or close it."""
        raise NotImplementedError(f"{type(self).__name__} must define handle_event()")

    def event_id(self, message: AnyMessage) -> str | int | UUID:
        """Return the producer's id: a `Message`'s own, or the field ``event_id`` of a dict.

        Whole numbers and UUIDs are kept as text.

        Raises:
            Misuse: the message has no id.
        """
        if isinstance(message, Message):
            return message.id
        found = message.get("event_id") if isinstance(message, Mapping) else None
        if found is None or found == "":
            raise Misuse(
                f"{type(self).__name__} found no 'event_id' in the message; override event_id() "
                f"to say where the producer's own id is"
            )
        return found  # type: ignore[no-any-return]


Payload = TypeVar("Payload")


class Acknowledgement(Protocol):
    """How an adapter settles a delivery with its broker."""

    async def ack(self) -> None:
        """Acknowledge the delivery: the broker does not deliver it again."""

    async def nack(self, seconds: float) -> None:
        """Return the delivery: the broker delivers it again, after *seconds* or later."""


@dataclass(slots=True)
class MessageEnvelope(Generic[Payload]):
    """One delivery with its acknowledgement, for adapters that settle one at a time (S3-42)."""

    message_id: str
    key: str | None
    payload: Payload
    context: Mapping[str, Any]
    acknowledgement: Acknowledgement
    message: Message | None = None
    """The message that the broker delivered; made of the fields above if there is none."""

    backoff_seconds: Callable[[BaseException], float] = field(default=lambda cause: 1.0)
    """Returns the seconds until the redelivery after *cause*."""

    settled: bool = False

    async def ack(self) -> None:
        """Settle the delivery: its effect, or its failure, is durable.

        Raises:
            Misuse: it was settled before.
        """
        await self.settle(Ack())

    async def nack_with_backoff(self, cause: BaseException) -> None:
        """Settle the delivery by returning it, for a later redelivery.

        Raises:
            Misuse: it was settled before.
        """
        await self.settle(Nack(self.backoff_seconds(cause)))

    async def settle(self, how: Settlement) -> None:
        """Send the settlement to the broker, once; after a failure it may be sent again.

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
        """Raise if the delivery was settled before.

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
        Misuse: the envelope was settled before, or its id is empty or begins like a generated one.
    """
    envelope.refuse_if_settled()
    message = envelope.message
    if message is None:
        payload, key = envelope.payload, envelope.key
        message = Message(envelope.message_id, payload, json_of(payload), key)
    began = SYSTEM_CLOCK.monotonic()
    tell_received(message, consumer.name)
    outcome = await handle_message(consumer, database, message)
    consumer.note(outcome)
    tell(message, outcome, consumer.name, SYSTEM_CLOCK.monotonic() - began)
    await envelope.settle(settlement(outcome))
    return outcome
