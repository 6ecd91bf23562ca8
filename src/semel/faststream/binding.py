"""What a FastStream service opens: subscribers with a runner in place of FastStream's loop.

    start ─▶ runner ─▶ claim ─▶ FastStream: middlewares, Depends, handler ─▶ commit ─▶ settle
    stop  ─▶ the runner finishes what runs ─▶ FastStream stops the consumer

FastStream never sees a message outside of the runner's transaction, and never acknowledges one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, Literal, TypeVar

from aiokafka import AIOKafkaConsumer, ConsumerRecord
from faststream._internal.broker.registrator import Registrator
from faststream.kafka.broker.registrator import KafkaRegistrator
from faststream.kafka.subscriber.usecase import DefaultSubscriber
from faststream.message import AckStatus, StreamMessage

from semel.codec import Codec, FromPayload, Place, Reading
from semel.errors import Misuse
from semel.faststream.delivery import PUBLISHER, RUNNER_OPTIONS, OnRunner, taken_apart, through
from semel.faststream.subscription import ConsumerSubscription, record_of
from semel.memory.broker import MemoryBroker
from semel.message import Coordinates, Message, pairs_of, raw_of, value_of
from semel.messaging.consumer import Consumer
from semel.messaging.consumer import consumer as make_consumer
from semel.messaging.failure import FailureClass, Rule
from semel.messaging.settings import ConsumerSettings, RunnerSettings, settings_of
from semel.policy.model import Policy
from semel.policy.vocabulary import RetryMode
from semel.sql.database import SqlDatabase

rabbit: Any = import_module("semel.faststream.rabbit") if find_spec("aio_pika") else None
confluent: Any = None
if find_spec("confluent_kafka"):
    confluent = import_module("semel.faststream.confluent")

Function = TypeVar("Function", bound=Callable[..., Any])

REFUSED: Final[Mapping[str, str]] = {
    "ack_policy": "offsets are committed after the database; FastStream acknowledges nothing",
    "batch": "use runner=RunnerSettings(mode=Mode.BATCHED); the function stays as it is",
    "max_workers": "use runner=RunnerSettings(concurrency=…), which keeps the order of a key",
    "max_records": "use runner=RunnerSettings(max_records=…)",
    "batch_timeout_ms": "use runner=RunnerSettings(wait_seconds=…)",
    "pattern": "name the topics: a new topic would move partitions between running members",
    "partitions": "without a group, two processes would handle the same partition",
    "listener": "semel listens itself, to commit before partitions are revoked",
    "parser": "use reading= or codec=; headers and tombstones arrive as they were sent",
    "decoder": "use reading= or codec=",
    "value_deserializer": "use reading= or codec=",
    "key_deserializer": "use reading= with key_from",
    "no_reply": f"semel never replies: {PUBLISHER}",
    "auto_commit_interval_ms": "offsets are committed after the database, never by a timer",
}
"""FastStream's options that a user may not give, and why."""

# aiokafka leaves the group if nothing was fetched for so long; but a slow handler is not a dead
# one, and a dead process sends no heartbeats.
NEVER_MS: Final = 2**31 - 1

MARGIN_SECONDS: Final = 10.0
"""How much longer the group waits for a member than the member for its handlers."""


class Semel:
    """Subscribers of a FastStream broker whose effects happen once.

    *database* is a URL, whose tables are created at the start, or a `SqlDatabase` of your own.
    """

    def __init__(self, broker: Registrator[Any, Any], *, database: SqlDatabase | str) -> None:
        self._is_confluent = confluent is not None and confluent.fits(broker)
        self._is_kafka = self._is_confluent or isinstance(broker, KafkaRegistrator)
        if not self._is_kafka and not (rabbit and rabbit.fits(broker)):
            raise Misuse(
                f"semel needs a KafkaBroker of faststream.kafka, one of faststream.confluent and "
                f"pip install 'semel[kafka]', or a RabbitBroker and pip install 'semel[rabbit]', "
                f"got {type(broker).__module__}.{type(broker).__name__}"
            )
        self.broker = broker
        self._is_own = isinstance(database, str)
        self.database = SqlDatabase(database) if isinstance(database, str) else database
        self.consumers: dict[str, Consumer] = {}
        """By name: for replays, dry runs, and `semel replay --consumer`."""

        self.memory = MemoryBroker()
        """Where `TestKafkaBroker` publishes to."""

        self.memory_lock = asyncio.Lock()
        self._subscribers: list[Any] = []
        self._has_tables = False

    def subscriber(
        self,
        *topics: Any,
        consumer: str,
        group_id: str = "",
        policy: ConsumerSettings | Policy | None = None,
        runner: RunnerSettings | None = None,
        id_from: Place | None = None,
        codec: Codec | None = None,
        reading: Reading | None = None,
        rules: Mapping[type[BaseException], Rule] | None = None,
        codes: Mapping[str, FailureClass] | None = None,
        auto_offset_reset: Literal["earliest", "latest"] | None = None,
        **options: Any,
    ) -> Callable[[Function], Function]:
        """Handle each message of *topics* once; the decorator returns the function unchanged.

        The first argument is the message, as its annotation says; a message that does not fit
        becomes a dead letter.  Arguments of the types `AsyncSession`, `semel.Message` and
        `Lease` are given by semel, all others by FastStream, for each message anew.  Without
        *id_from*, *reading* or a policy file, the id is the payload's field ``id``.  *options*
        are FastStream's.  Without *auto_offset_reset*, a new group of Kafka begins at the earliest
        record.

        Raises:
            Misuse: an option or the function contradicts the guarantee; the error says why.
        """
        refused = REFUSED if rabbit is None or self._is_kafka else rabbit.REFUSED
        ours = {"group_id": group_id or None, "auto_offset_reset": auto_offset_reset}
        asked = options.keys() | {name for name, value in ours.items() if value is not None}
        for name in sorted(asked & refused.keys()):
            raise Misuse(f"consumer {consumer}: {name}= is refused: {refused[name]}")
        if consumer in self.consumers:
            raise Misuse(
                f"consumer {consumer}: a second subscriber has this name; their claims would be "
                f"the same, and each would skip what the other handled"
            )
        if not self._is_kafka:
            group_id = consumer
        begins = "earliest" if auto_offset_reset is None else auto_offset_reset
        if not topics or not group_id or begins not in ("earliest", "latest"):
            raise Misuse(
                f"consumer {consumer}: name its topics and its group_id; auto_offset_reset must be "
                f"'earliest' or 'latest', got {auto_offset_reset!r}"
            )
        if isinstance(policy, Policy):
            runner = runner or settings_of(policy, consumer)[1]
        elif reading is None:
            id_from = id_from or FromPayload("id")
        settings = runner or RunnerSettings()
        # A revocation waits for the running messages; the group must wait for it.
        patience = settings.stop_seconds + settings.cancel_seconds + MARGIN_SECONDS
        if self._is_kafka and not self._is_confluent:
            options.setdefault("rebalance_timeout_ms", round(patience * 1_000))
        elif rabbit is not None and not self._is_kafka:
            policy = rabbit.checked(consumer, policy, settings, id_from, reading)

        def decorate(function: Function) -> Function:
            given, seen, model = taken_apart(consumer, function, settings.mode)
            subscriber: Any
            if self._is_confluent:
                subscriber = confluent.make_subscriber(self.broker, topics, group_id, **options)
            elif self._is_kafka:
                subscriber = make_subscriber(self.broker, topics, group_id, **options)
            else:
                subscriber = rabbit.make_subscriber(self.broker, topics, settings, **options)
            made = make_consumer(
                consumer,
                policy=policy,
                id_from=id_from,
                codec=codec,
                reading=reading,
                rules=rules,
                codes=codes,
                mode=settings.mode,
            )(subscriber.deliver)
            if made.settings.retry.mode is RetryMode.RETRY_TOPIC:
                raise Misuse(
                    f"consumer {consumer}: its subscriber does not read the retry topic; use "
                    f"retry.mode: retry-table, or run it with `semel run`"
                )
            if made.reading.model is None and model is not None:
                made = replace(made, reading=replace(made.reading, model=model.validate_python))
            subscriber.semel, subscriber.made, subscriber.settings = self, made, settings
            subscriber.begins, subscriber.function = begins, function
            subscriber(through(function, given, seen))
            self.consumers[consumer] = made
            self._subscribers.append(subscriber)
            return function

        return decorate

    async def open(self) -> None:
        """Create the tables, if the database was given as a URL; a broker that starts does it."""
        if self._is_own and not self._has_tables:
            await self.database.create_tables()
            self._has_tables = True

    async def close(self) -> None:
        """Close the connections, unless a subscriber still runs or the database is your own.

        A broker that stops does it; `TestKafkaBroker` does not stop its broker.
        """
        if self._is_own and all(one.work is None for one in self._subscribers):
            await self.database.close()


class RunnerSubscriber(OnRunner, DefaultSubscriber):
    """A subscriber of FastStream whose messages a runner fetches and handles."""

    read = staticmethod(record_of)

    async def start(self) -> None:
        """Join the group, and start the runner."""
        await self.semel.open()
        group, begins = self.group_id or "", self.begins
        self._listener = ConsumerSubscription(group, begins, lambda: self.consumer)
        await super().start()

    async def _run_consume_loop(self, consumer: AIOKafkaConsumer) -> None:
        assert isinstance(self._listener, ConsumerSubscription)
        await self.run(self._listener)

    def incoming(self, message: Message) -> ConsumerRecord[Any, Any]:
        """Return the message as a record of aiokafka."""
        return _record_from(message)


def make_subscriber(
    broker: Any, topics: tuple[Any, ...], group_id: str, **options: Any
) -> RunnerSubscriber:
    """Register a subscriber; its attributes and its function are still to be set."""
    subscriber = broker.subscriber(
        *topics,
        group_id=group_id,
        parser=_parse,
        auto_offset_reset="none",
        **RUNNER_OPTIONS,
        **{"isolation_level": "read_committed", "max_poll_interval_ms": NEVER_MS, **options},
    )
    # FastStream has no way to register a class of one's own; start and stop must be ours, because
    # the runner drains while the consumer still runs.
    subscriber.__class__ = RunnerSubscriber
    assert isinstance(subscriber, RunnerSubscriber)
    return subscriber


async def _parse(
    record: ConsumerRecord[Any, Any], original: Callable[[Any], Awaitable[StreamMessage[Any]]]
) -> StreamMessage[Any]:
    """Let FastStream see headers as text: its parser fails on other bytes, and on null."""
    texts = [(n, (v or b"").decode(errors="replace").encode()) for n, v in record.headers]
    message = await original(replace(record, headers=texts))
    message.raw_message = record
    # `message.ack()` would commit the consumer's position, whatever is still running.
    message.committed = AckStatus.ACKED
    return message


def _record_from(message: Message) -> ConsumerRecord[Any, Any]:
    at = message.source or Coordinates("", 0, 0)
    value = value_of(message.raw, message.digest)
    key = None if message.key is None else raw_of(message.key)
    sizes = len(key or b""), len(value or b"")
    time_ms, headers = round(message.timestamp * 1_000), pairs_of(message.headers)
    return ConsumerRecord(
        at.topic, at.partition, at.offset, time_ms, 0, key, value, None, *sizes, headers
    )
