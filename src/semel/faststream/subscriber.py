"""FastStream's subscriber, with a runner in place of its loop.

    start ─▶ runner ─▶ claim ─▶ FastStream: middlewares, Depends, your function ─▶ commit ─▶ settle
    stop  ─▶ the runner finishes what runs ─▶ FastStream stops the consumer

FastStream never sees a message outside of the runner's transaction, and never acknowledges one.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from aiokafka import AIOKafkaConsumer, ConsumerRecord
from faststream import AckPolicy
from faststream._internal.broker import BrokerUsecase
from faststream.kafka.broker.registrator import KafkaRegistrator
from faststream.kafka.subscriber.usecase import DefaultSubscriber
from faststream.message import AckStatus, StreamMessage
from faststream.response import Response, ensure_response

from semel.errors import Misuse
from semel.faststream.subscription import ConsumerSubscription
from semel.memory.broker import MemoryBroker
from semel.message import Coordinates, Message, headers_from, pairs_of, raw_of, value_of
from semel.messaging.consumer import Consumer
from semel.messaging.failure import NonRetryableMessageError
from semel.messaging.receive.broker import Outgoing
from semel.messaging.receive.runner import Runner
from semel.messaging.settings import RunnerSettings
from semel.sql.database import SqlDatabase

log = logging.getLogger("semel.faststream")

# aiokafka leaves the group if nothing was fetched for so long; the runner's slow handler is not
# a dead one, and a dead process sends no heartbeats.
NEVER_MS: Final = 2**31 - 1

MARGIN_SECONDS: Final = 10.0


@dataclass
class Attempt:
    """One call of the user's function, on its way through FastStream."""

    message: Message
    second: Any
    """The session, or the lease."""

    was_called: bool = False
    error: BaseException | None = None


Parsed: TypeAlias = StreamMessage[Any]

ATTEMPT: Final[ContextVar[Attempt]] = ContextVar("semel.faststream.attempt")


@dataclass(eq=False)
class Delivery:
    """What a subscriber needs to deliver messages to one function."""

    consumer: Consumer
    database: SqlDatabase
    settings: RunnerSettings
    start: str
    """Where a partition without a committed offset begins: "earliest" or "latest"."""

    broker: KafkaRegistrator
    function: Callable[..., Any]
    opened: Callable[[], Awaitable[None]]
    """Called before the first message."""

    ended: Callable[[], Awaitable[None]]
    """Called after the last one."""

    runner: Runner | None = None
    running: asyncio.Task[None] | None = None
    memory: MemoryBroker = field(default_factory=MemoryBroker)
    """Where `TestKafkaBroker` publishes to."""

    in_memory: asyncio.Lock = field(default_factory=asyncio.Lock)


class RunnerSubscriber(DefaultSubscriber):
    """A subscriber of FastStream whose messages a runner fetches and handles."""

    semel: Delivery

    async def start(self) -> None:
        """Join the group, and start the runner."""
        await self.semel.opened()
        group, start = self.group_id or "", self.semel.start
        self._listener = ConsumerSubscription(group, start, lambda: self.consumer)
        await super().start()

    async def _run_consume_loop(self, consumer: AIOKafkaConsumer) -> None:
        """Run the runner; FastStream calls this in a task of its own."""
        semel = self.semel
        assert isinstance(self._listener, ConsumerSubscription)
        semel.runner = Runner(semel.consumer, self._listener, semel.database, semel.settings)
        semel.running = asyncio.create_task(semel.runner.run())
        # Not `await semel.running`: FastStream cancels this task, and the runner must drain.
        await asyncio.wait({semel.running})
        if semel.running.cancelled() or semel.running.exception() is None:
            return
        log.critical(
            "the consumer stops, and needs a person",
            exc_info=semel.running.exception(),
            extra={"consumer": semel.consumer.name},
        )
        # Otherwise this member would hold its partitions, and nobody would handle them.
        await consumer.stop()
        if app := self._outer_config.context.get("app"):
            app.exit()

    async def stop(self) -> None:
        """Let the runner finish what runs, then leave the group.

        Raises:
            NeedsOperator: that is why the runner had ended before.
        """
        semel = self.semel
        try:
            if semel.runner is not None and semel.running is not None:
                semel.runner.stop()
                await semel.running
        finally:
            semel.runner = semel.running = None
            await super().stop()
            await semel.ended()

    def _build_fastdepends_model(self) -> None:
        """Check what is known only when all decorators have been applied."""
        super()._build_fastdepends_model()
        name, config = self.semel.consumer.name, self._outer_config.fd_config
        needed = [
            option.field_name
            for call in self.calls
            if call.dependant is not None
            for option in call.dependant.flat_params
        ]
        if not config.use_fastdepends or config.get_dependent is not None:
            raise Misuse(
                f"consumer {name}: FastStream must inject the arguments itself; use a KafkaBroker "
                f"without apply_types=False, not FastAPI's router"
            )
        if len(needed) > 1:
            raise Misuse(
                f"consumer {name}: the message is one argument, not {', '.join(needed)}; a "
                f"dependency can take Context(), or other dependencies"
            )
        for publisher in self.semel.broker.publishers:
            if self.semel.function in publisher.specification.calls:
                raise Misuse(f"consumer {name}: {PUBLISHER}")

    # One message.

    async def deliver(self, message: Message, second: Any) -> None:
        """Handle one message as FastStream does: middlewares, dependencies, the function."""
        if self.calls[0].parser is None:
            # A replay, which needs no broker.
            if isinstance(self.semel.broker, BrokerUsecase):
                self.semel.broker._setup_logger()
            self._build_fastdepends_model()
        attempt = Attempt(message, second)
        token = ATTEMPT.set(attempt)
        try:
            await super().process_message(_record_from(message))
        finally:
            ATTEMPT.reset(token)
        # A middleware may have swallowed it; but what failed must not be committed.
        if attempt.error is not None:
            raise attempt.error
        if not attempt.was_called:
            raise NonRetryableMessageError(
                "a middleware of FastStream did not pass the message on to the function",
                "NOT_CALLED",
            )

    async def process_message(self, msg: ConsumerRecord[Any, Any]) -> Response:
        """Handle a record that `TestKafkaBroker` delivers, by a runner without Kafka."""
        semel = self.semel
        async with semel.in_memory:
            await semel.opened()
            if not semel.memory.partitions(msg.topic):
                semel.memory.create_topic(msg.topic)
            member = await semel.memory.subscribe(self.group_id or "", [msg.topic])
            # It is the only member: the partition is its own as soon as its task has run.
            while not member.assignment:
                await asyncio.sleep(0)
            record = Outgoing(msg.topic, msg.value, msg.key or None, headers_from(msg.headers))
            await semel.memory.publisher().publish([record])
            settings = replace(semel.settings, wait_seconds=0.0)
            runner = Runner(semel.consumer, member, semel.database, settings)
            await runner.run_until_idle()
            runner.stop()
            await runner.run()
        return ensure_response(None)


PUBLISHER: Final = (
    "a publisher sends after the database's commit, so a crash between them loses the message; "
    "use semel.Outbox in the function"
)


def make_subscriber(
    broker: KafkaRegistrator, topics: tuple[Any, ...], group_id: str, **options: Any
) -> RunnerSubscriber:
    """Register a subscriber; its `semel` and its function are still to be set."""
    subscriber = broker.subscriber(
        *topics,
        group_id=group_id,
        ack_policy=AckPolicy.MANUAL,
        no_reply=True,
        parser=_parse,
        decoder=_decode,
        **{
            "isolation_level": "read_committed",
            "max_poll_interval_ms": NEVER_MS,
            **options,
            "auto_offset_reset": "none",
        },
    )
    # FastStream has no way to register a class of one's own; start and stop must be ours, because
    # the runner drains while the consumer still runs.
    subscriber.__class__ = RunnerSubscriber
    assert isinstance(subscriber, RunnerSubscriber)
    return subscriber


def through(function: Callable[..., Any], given: Mapping[str, str], seen: inspect.Signature) -> Any:
    """Return what FastStream calls: it takes *seen*, and passes on what is *given* to it.

    `given` has the attribute of `Attempt` for each argument that FastStream does not know.
    """

    async def call(*arguments: Any, **named: Any) -> None:
        attempt = ATTEMPT.get()
        attempt.was_called = True
        found = seen.bind(*arguments, **named).arguments
        try:
            await function(
                **found, **{name: getattr(attempt, source) for name, source in given.items()}
            )
        except BaseException as error:
            attempt.error = error
            raise

    call.__signature__ = seen  # type: ignore[attr-defined]
    call.__name__, call.__doc__ = function.__name__, function.__doc__
    call.__annotations__ = {p.name: p.annotation for p in seen.parameters.values()}
    return call


async def _parse(record: Any, original: Callable[[Any], Awaitable[Parsed]]) -> Parsed:
    """Let FastStream see headers as text: its parser fails on other bytes, and on null."""
    texts = [(n, (v or b"").decode(errors="replace").encode()) for n, v in record.headers]
    message = await original(replace(record, headers=texts))
    message.raw_message = record
    # `message.ack()` would commit the consumer's position, whatever is still running.
    message.committed = AckStatus.ACKED
    return message


async def _decode(message: Parsed, original: Any) -> Any:
    """Return the payload that the runner has read and checked already."""
    return ATTEMPT.get().message.payload


def _record_from(message: Message) -> ConsumerRecord[Any, Any]:
    at = message.source or Coordinates("", 0, 0)
    value = value_of(message.raw, message.digest)
    key = None if message.key is None else raw_of(message.key)
    sizes = len(key or b""), len(value or b"")
    time_ms = round(message.timestamp * 1_000)
    return ConsumerRecord(
        at.topic,
        at.partition,
        at.offset,
        time_ms,
        0,
        key,
        value,
        None,
        *sizes,
        pairs_of(message.headers),
    )
