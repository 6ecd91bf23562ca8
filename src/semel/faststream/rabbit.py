"""RabbitMQ's subscriber: one delivery, one transaction, then its acknowledgement.

    delivery ─▶ claim ─▶ FastStream: middlewares, Depends, handler ─▶ commit ─▶ ack
        │          └─ failed ─▶ retry table or dead letter, durable ─▶ ack
        └─ nothing durable: it is held and tried again here; a stop returns it to the queue

Nothing is requeued to be tried again: RabbitMQ has no delay, and would turn it into a hot loop.
A redelivered message may have killed a process: it is handled alone, with a note of the try.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import uuid
from collections.abc import Mapping
from typing import Any, Final

from aio_pika import IncomingMessage
from aiormq.abc import DeliveredMessage
from faststream.message import AckStatus, StreamMessage
from faststream.rabbit import Channel, RabbitQueue
from faststream.rabbit.broker.registrator import RabbitRegistrator
from faststream.rabbit.subscriber.usecase import RabbitSubscriber
from faststream.response import Response, ensure_response
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from semel.clock import SYSTEM_CLOCK
from semel.codec import FromCoordinates, Reading, Unreadable
from semel.errors import InDoubt, Misuse, Retryable
from semel.faststream.delivery import PUBLISHER, Delivering, Parser, registered
from semel.lease import Owner
from semel.message import Coordinates, Message, Record, headers_from, pairs_of, value_of
from semel.messaging.database import is_refusal
from semel.messaging.failed.retries import RetryWorker
from semel.messaging.handle.attempt import handle_message, handle_unreadable
from semel.messaging.handle.cancel import end, rung
from semel.messaging.handle.lease import handle_leased
from semel.messaging.outcome import Nack, Outcome, RetryLater, settlement, tell, tell_received
from semel.messaging.receive.crash import TURNS, Writer, handle_record, noting_as
from semel.messaging.records import WaitingMessage
from semel.messaging.settings import ConsumerSettings, Order, RetryPolicy, RunnerSettings
from semel.policy.model import Policy
from semel.policy.vocabulary import Mode, RetryMode

log = logging.getLogger("semel.faststream")

REFUSED: Final[Mapping[str, str]] = {
    "ack_policy": "each message is acknowledged after the database's commit",
    "channel": "semel sets the prefetch count; use runner=RunnerSettings(concurrency=…)",
    "parser": "use reading= or codec=; headers arrive as they were sent",
    "decoder": "use reading= or codec=",
    "no_reply": f"semel never replies: {PUBLISHER}",
    "group_id": "RabbitMQ has no groups; each consumer of a message needs a queue of its own",
    "auto_offset_reset": "a queue has no offsets; bind it before the first message is sent",
}
"""FastStream's options that a user may not give, and why."""

PROPERTIES: Final = ("message_id", "correlation_id", "content_type", "type", "timestamp")
"""AMQP properties that become headers: ``amqp-message-id`` …"""

CHANGING: Final = frozenset({"x-delivery-count", "x-acquired-count"})
"""Headers that RabbitMQ changes when it delivers a message again."""


def fits(broker: object) -> bool:
    """Return whether this is FastStream's RabbitMQ broker, or a router of it."""
    return isinstance(broker, RabbitRegistrator)


def checked(
    consumer: str,
    policy: ConsumerSettings | Policy | None,
    settings: RunnerSettings,
    *places: Any,
) -> ConsumerSettings | Policy:
    """Return the policy to use: without one, failed messages wait in the retry table.

    Raises:
        Misuse: RabbitMQ cannot give what was asked for.
    """
    for place in places:
        if isinstance(place.id_from if isinstance(place, Reading) else place, FromCoordinates):
            raise Misuse(f"consumer {consumer}: RabbitMQ has no offsets; take the id from a field")
    if settings.mode is Mode.BATCHED:
        raise Misuse(f"consumer {consumer}: RabbitMQ delivers messages one by one, not batched")
    if policy is None:
        retry = RetryPolicy(mode=RetryMode.RETRY_TABLE)
        order = Order.KEY if settings.concurrency == 1 else Order.NONE
        return ConsumerSettings(retry=retry, order=order)
    ordered = isinstance(policy, Policy) or policy.order is not Order.NONE
    if settings.concurrency > 1 and ordered:
        raise Misuse(
            f"consumer {consumer}: a queue keeps its order only with concurrency=1; use that, or "
            f"ConsumerSettings(order=Order.NONE)"
        )
    return policy


def make_subscriber(
    broker: Any, place: tuple[Any, ...], group: str, settings: RunnerSettings, **options: Any
) -> DeliverySubscriber:
    """Register a subscriber; its attributes and its function are still to be set."""
    # No more deliveries than are handled at once: the others stay in the queue, in order.
    channel = Channel(prefetch_count=settings.concurrency)
    return registered(DeliverySubscriber, broker, place, parser=_parse, channel=channel, **options)


class DeliverySubscriber(Delivering, RabbitSubscriber):
    """A subscriber of FastStream that acknowledges what the database has committed."""

    queue: RabbitQueue
    begins = ""
    work: asyncio.Task[None] | None = None
    _retries: RetryWorker | None = None
    _stopping: asyncio.Event | None = None
    _running: set[asyncio.Task[Any]]

    async def start(self) -> None:
        """Start the retries, then consume."""
        await self.semel.open()
        self._stopping, self._running = asyncio.Event(), set()
        handle = self._leased if self.settings.mode is Mode.LEASED else None
        self._retries = RetryWorker(
            self.made, self.semel.database, handle=handle, group=self.queue.name
        )
        self.work = asyncio.create_task(self._retries.run())
        self.work.add_done_callback(self._ended)
        await super().start()

    async def stop(self) -> None:
        """Take no more deliveries, finish what runs, then stop; the rest stays in the queue."""
        self.running = False
        try:
            if self._queue_obj is not None and self._consumer_tag is not None:
                if not self._queue_obj.channel.is_closed:
                    await self._queue_obj.cancel(self._consumer_tag)
                self._consumer_tag = None
            if self._stopping is not None and self._retries is not None and self.work is not None:
                self._stopping.set()
                self._retries.stop()
                running = {*self._running, self.work}
                await asyncio.wait(running, timeout=self.settings.stop_seconds)
                await end(running, self.settings.cancel_seconds)
        finally:
            await super().stop()
            self.work = self._retries = self._stopping = None
            await self.semel.close()

    async def process_message(self, msg: IncomingMessage) -> Response:
        """Handle one delivery, and acknowledge it when its outcome is durable."""
        await self.semel.open()
        task = asyncio.current_task()
        running = self._running if self._stopping is not None else set()
        if task is not None:
            running.add(task)
        try:
            if await self._settles(msg):
                await msg.ack()
        finally:
            running.discard(task)
        return ensure_response(None)

    async def _settles(self, msg: IncomingMessage) -> bool:
        """Try until the outcome is durable; False if the stop came first."""
        record = record_of(self.queue.name, msg)
        is_suspect = bool(msg.redelivered)
        with noting_as(Writer(uuid.uuid4().hex)):
            while isinstance(how := settlement(await self._try(record, is_suspect)), Nack):
                if await rung(self._stopping or asyncio.Event(), how.seconds):
                    return False
        return True

    async def _try(self, record: Record, is_suspect: bool) -> Outcome:
        try:
            if is_suspect:
                return await handle_record(self.made, self.semel.database, record, self._one)
            async with TURNS.beside_others():
                return await self._one(self.made.reading.read(record))
        except Exception as error:
            is_known = isinstance(error, Retryable | InDoubt)
            if not is_known and not is_refusal(self.semel.database, self.made.name, error):
                # FastStream would swallow it, and the queue would stand still behind the message.
                self._exit(error)
                raise
            log.warning("consumer %s waits: %s", self.made.name, error)
            return RetryLater(self.made.settings.held_retry_seconds)

    async def _one(self, arrival: Message | Unreadable) -> Outcome:
        began = SYSTEM_CLOCK.monotonic()
        tell_received(arrival, self.queue.name)
        outcome = await self._handle(arrival)
        self.made.note(outcome)
        tell(arrival, outcome, self.queue.name, SYSTEM_CLOCK.monotonic() - began)
        return outcome

    async def _handle(self, arrival: Message | Unreadable) -> Outcome:
        if isinstance(arrival, Unreadable):
            return await handle_unreadable(self.made, self.semel.database, arrival)
        if self.settings.mode is Mode.LEASED:
            return await self._leased(arrival)
        return await handle_message(self.made, self.semel.database, arrival)

    async def _leased(self, message: Message, waiting: WaitingMessage | None = None) -> Outcome:
        owner = Owner.here().instance
        database = self.semel.database
        return await handle_leased(self.made, database, message, owner, SYSTEM_CLOCK, waiting)

    def _ended(self, work: asyncio.Task[None]) -> None:
        if not work.cancelled() and (error := work.exception()) is not None:
            self._exit(error)

    def _exit(self, error: BaseException) -> None:
        """Handle nothing more: a person must look first."""
        log.critical("consumer %s stops, and needs a person", self.made.name, exc_info=error)
        self.running = False
        if app := self._outer_config.context.get("app"):
            app.exit()

    def incoming(self, message: Message) -> IncomingMessage:
        """Return the message as one of aio-pika, which cannot be acknowledged."""
        texts = {name: _text(value) for name, value in pairs_of(message.headers)}
        known = {name: texts.pop(_header(name), None) for name in PROPERTIES}
        known["message_type"] = known.pop("type")
        known.pop("timestamp")
        delivery = Basic.Deliver(
            exchange=texts.pop("amqp-exchange", None) or "",
            routing_key=texts.pop("amqp-routing-key", None) or self.queue.name,
        )
        header = ContentHeader(properties=Basic.Properties(headers=texts, **known))
        body = value_of(message.raw, message.digest) or b""
        made = IncomingMessage(DeliveredMessage(delivery, header, body, None), no_ack=True)  # type: ignore[arg-type]
        made.lock()
        return made


def record_of(queue: str, msg: IncomingMessage) -> Record:
    """Make a record of a delivery; its offset is a fingerprint, the same for a redelivery."""
    pairs = [(name, _bytes(value)) for name, value in msg.headers.items() if name not in CHANGING]
    for name in PROPERTIES:
        if (found := getattr(msg, name)) is not None:
            pairs.append((_header(name), _bytes(found)))
    pairs.append(("amqp-exchange", _bytes(msg.exchange or "")))
    pairs.append(("amqp-routing-key", _bytes(msg.routing_key or "")))
    seen = hashlib.sha256(repr((sorted(pairs, key=repr), msg.body)).encode()).digest()
    offset = int.from_bytes(seen[:8], "big") >> 1
    sent = msg.timestamp.timestamp() if msg.timestamp is not None else 0.0
    return Record(Coordinates(queue, 0, offset), msg.body, None, headers_from(pairs), sent)


def _header(name: str) -> str:
    return f"amqp-{name.replace('_', '-')}"


def _bytes(value: Any) -> bytes | None:
    """Return an AMQP value as a header's bytes: text as UTF-8, numbers and tables as JSON."""
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, bytearray):
        return bytes(value)
    return (value if isinstance(value, str) else json.dumps(value, default=str)).encode()


def _text(value: bytes | None) -> Any:
    """Return a header for FastStream: text where it is text."""
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return value


async def _parse(msg: IncomingMessage, original: Parser) -> StreamMessage[Any]:
    message = await original(msg)
    message.committed = AckStatus.ACKED
    return message
