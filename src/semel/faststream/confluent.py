"""FastStream's confluent broker: semel's own member of the group fetches for its subscribers.

FastStream's consumer is never made: it can neither seek nor commit while a rebalance waits.  What
its subscribers would set, `KafkaBroker(config=…)` of FastStream sets for the whole broker.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from faststream._internal.endpoint.subscriber import SubscriberUsecase
from faststream.confluent.broker.registrator import KafkaRegistrator
from faststream.confluent.subscriber.usecase import DefaultSubscriber
from faststream.confluent.testing import MockConfluentMessage
from faststream.message import AckStatus, StreamMessage

from semel.errors import Misuse
from semel.faststream.delivery import RUNNER_OPTIONS, OnRunner
from semel.kafka.broker import KafkaBroker
from semel.kafka.client import Start, kafka
from semel.kafka.subscription import record_of
from semel.message import Coordinates, Message, pairs_of, raw_of, value_of

TAKEN: Final = frozenset({"dependencies", "title", "description", "include_in_schema"})
"""FastStream's options that have a meaning without its consumer."""


def fits(broker: object) -> bool:
    """Return whether this is FastStream's confluent broker, or a router of it."""
    return isinstance(broker, KafkaRegistrator)


def make_subscriber(
    broker: Any, topics: tuple[Any, ...], group_id: str, **options: Any
) -> ConfluentSubscriber:
    """Register a subscriber; its attributes and its function are still to be set.

    Raises:
        Misuse: an option is one of FastStream's consumer.
    """
    for name in sorted(options.keys() - TAKEN):
        raise Misuse(
            f"{name}= is refused: semel's own consumer fetches; use the broker's config=, with "
            f"librdkafka's names"
        )
    named = [str(getattr(topic, "name", topic)) for topic in topics]
    subscriber = broker.subscriber(
        *named, group_id=group_id, parser=_parse, **RUNNER_OPTIONS, **options
    )
    subscriber.__class__ = ConfluentSubscriber
    assert isinstance(subscriber, ConfluentSubscriber)
    return subscriber


class ConfluentSubscriber(OnRunner, DefaultSubscriber):
    """A subscriber of FastStream whose messages a runner fetches and handles."""

    read = staticmethod(record_of)

    async def start(self) -> None:
        """Join the group, and start the runner."""
        await self.semel.open()
        await SubscriberUsecase.start(self)
        settings = dict(self._outer_config.connection_config.consumer_config)
        start = Start.END if self.begins == "latest" else Start.BEGINNING
        broker = KafkaBroker(settings.pop("bootstrap.servers"), start=start, config=settings)
        member = await broker.subscribe(self.group_id or "", self.topic_names)
        self._post_start()
        self.add_task(self.run, (member,))

    def incoming(self, message: Message) -> Any:
        """Return the message as one of confluent_kafka, which belongs to no consumer."""
        at = message.source or Coordinates("", 0, 0)
        value = value_of(message.raw, message.digest)
        key = None if message.key is None else raw_of(message.key)
        pairs = list(pairs_of(message.headers))
        return _message(at, value, key, pairs, round(message.timestamp * 1_000))


def _message(at: Any, value: Any, key: Any, pairs: Any, time_ms: int) -> Any:
    return MockConfluentMessage(
        value, at.topic, key, pairs, at.offset, at.partition, kafka.TIMESTAMP_CREATE_TIME, time_ms
    )


async def _parse(
    raw: Any, original: Callable[[Any], Awaitable[StreamMessage[Any]]]
) -> StreamMessage[Any]:
    """Let FastStream see headers as text: its parser fails on other bytes, and on null."""
    record = record_of(raw)
    pairs = pairs_of(record.headers)
    texts = [(n, (v or b"").decode(errors="replace").encode()) for n, v in pairs]
    time_ms = round(record.timestamp * 1_000)
    message = await original(_message(record.at, record.value, record.key, texts, time_ms))
    message.raw_message = raw
    message.committed = AckStatus.ACKED
    return message
