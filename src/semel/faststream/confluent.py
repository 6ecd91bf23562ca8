"""FastStream's confluent broker: semel's own member of the group fetches for its subscribers.

FastStream's consumer is never made: it can neither seek nor commit while a rebalance waits.  What
its subscribers would set, `KafkaBroker(config=…)` of FastStream sets for the whole broker.
"""

from __future__ import annotations

from typing import Any, Final, cast

from faststream._internal.endpoint.subscriber import SubscriberUsecase
from faststream.confluent.broker.registrator import KafkaRegistrator
from faststream.confluent.subscriber.usecase import DefaultSubscriber
from faststream.confluent.testing import MockConfluentMessage

from semel.errors import Misuse
from semel.faststream.delivery import NOT_ON_KAFKA, OnRunner, parser_of, registered
from semel.kafka.broker import KafkaBroker
from semel.kafka.client import GroupProtocol, Start, kafka
from semel.kafka.subscription import record_of
from semel.message import Record, pairs_of
from semel.messaging.settings import RunnerSettings

REFUSED: Final = NOT_ON_KAFKA

TAKEN: Final = frozenset({"dependencies", "title", "description", "include_in_schema"})
"""FastStream's options that have a meaning without its consumer."""


def message_from(record: Record) -> Any:
    """Make a message of confluent_kafka."""
    at = record.at
    # A real message may have no key, and pairs without a value.
    key = cast("bytes", record.key)
    pairs: Any = list(pairs_of(record.headers))
    stamp = kafka.TIMESTAMP_CREATE_TIME, round(record.timestamp * 1_000)
    return MockConfluentMessage(record.value, at.topic, key, pairs, at.offset, at.partition, *stamp)


def fits(broker: object) -> bool:
    """Return whether this is FastStream's confluent broker, or a router of it."""
    return isinstance(broker, KafkaRegistrator)


def make_subscriber(
    broker: Any, topics: tuple[Any, ...], group: str, settings: RunnerSettings, **options: Any
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
    named = tuple(str(getattr(topic, "name", topic)) for topic in topics)
    parser = parser_of(ConfluentSubscriber)
    return registered(ConfluentSubscriber, broker, named, group_id=group, parser=parser, **options)


class ConfluentSubscriber(OnRunner, DefaultSubscriber):
    """A subscriber of FastStream whose messages a runner fetches and handles."""

    read = staticmethod(record_of)
    write = staticmethod(message_from)

    async def start(self) -> None:
        """Join the group, and start the runner."""
        await self.semel.open()
        await SubscriberUsecase.start(self)
        settings = dict(self._outer_config.connection_config.consumer_config)
        broker = KafkaBroker(
            settings.pop("bootstrap.servers"),
            start=Start.END if self.begins == "latest" else Start.BEGINNING,
            protocol=settings.pop("group.protocol", GroupProtocol.CONSUMER),
            instance_id=settings.pop("group.instance.id", None),
            config=settings,
        )
        member = await broker.subscribe(self.group_id or "", self.topic_names)
        self._post_start()
        self.add_task(self.run, (member,))
