"""A Kafka cluster: its subscriptions, its publisher, and its reader for replays."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeVar

from semel.errors import NeedsOperator, Permanent, Retryable
from semel.kafka.client import (
    CALL_SECONDS,
    CONSUMER,
    PRODUCER,
    GroupProtocol,
    Start,
    bootstrap_of,
    kafka,
    make,
    meaning,
    member_of,
    settings_for,
)
from semel.kafka.subscription import KafkaSubscription, record_of
from semel.message import Partition, Record, pairs_of
from semel.messaging.receive.broker import Outgoing, Publisher, Reader

Answer = TypeVar("Answer")


class KafkaBroker:
    """A Kafka cluster.

    *bootstrap* is ``host:port,host:port`` or ``kafka://host:port?setting=value``.  *config* has
    further settings of the client, such as those of TLS and SASL, under librdkafka's names.
    """

    def __init__(
        self,
        bootstrap: str,
        *,
        start: Start | str = Start.BEGINNING,
        protocol: GroupProtocol | str = GroupProtocol.CONSUMER,
        instance_id: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Name a cluster; nothing is connected yet.

        *start*: where a group begins that has committed nothing, ``beginning`` or ``end``.
        *protocol*: ``consumer`` (Kafka 4.0 or newer; on an older broker, ``classic`` is used,
        though not by a static member).

        With *instance_id*, this process is a static member of its group: a restart within the
        session's time keeps its partitions without a rebalance.  The price: after a clean stop,
        no other member gets them until that time is over.

        A URL may say all three, and wins: ``kafka://host:port?start=end&instance_id=billing-1``.

        Raises:
            Misuse: a setting is unknown, or is one that only semel may choose.
        """
        self.bootstrap, given = bootstrap_of(bootstrap)
        self._start = member_of(Start, given.pop("start", start), "start")
        self._protocol = member_of(GroupProtocol, given.pop("protocol", protocol), "protocol")
        self._instance_id = given.pop("instance_id", instance_id)
        self._settings = settings_for(self.bootstrap, {**given, **(config or {})})

    async def subscribe(self, group: str, topics: Sequence[str]) -> KafkaSubscription:
        """Join a consumer group.

        Raises:
            Permanent: a topic does not exist.
            Retryable: no broker answers.
        """
        await asyncio.to_thread(self.topic_ids, topics)
        settings = {**CONSUMER, **self._settings}
        if self._instance_id is not None:
            settings["group.instance.id"] = self._instance_id
        return KafkaSubscription(
            settings, group, topics, self._protocol, self._start, self.topic_ids
        )

    def publisher(self) -> Publisher:
        """Make a publisher; its producer is idempotent."""
        return KafkaPublisher({**PRODUCER, **self._settings})

    def reader(self) -> Reader:
        """Make a reader of ranges, for replays."""
        return KafkaReader({**CONSUMER, **self._settings, "group.id": "semel-reader"})

    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str]:
        """Ask for the ids of topics: a topic that is deleted and made again gets another one.

        Raises:
            Permanent: a topic does not exist.
            Retryable: no broker answers.
        """
        # Held until the answers are there: without it, the client ends at once.
        admin = self._admin()
        named, found = kafka.TopicCollection(list(topics)), {}
        asked = admin.describe_topics(named, request_timeout=CALL_SECONDS)
        for topic, answer in asked.items():
            try:
                found[topic] = str(answer.result().topic_id)
            except kafka.KafkaException as error:
                if error.args[0].code() == kafka.KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise Permanent(
                        f"Kafka at {self.bootstrap} has no topic {topic}: create it first "
                        f"(kafka-topics.sh --create --topic {topic})"
                    ) from error
                raise meaning(error, f"no Kafka broker answers at {self.bootstrap}") from error
        return found

    def _admin(self) -> Any:
        # A new one each time: it is needed a few times in a day, and its threads would stay.
        return make("AdminClient", self._settings)


FLUSH_SECONDS: Final = 1.0


class KafkaPublisher:
    """Sends messages, those of one key in order; `KafkaBroker.publisher` makes it."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = dict(settings)
        self._lock = threading.Lock()
        self._producer: Any = None
        self._is_closed = False

    async def publish(self, batch: Sequence[Outgoing]) -> Sequence[Exception | None]:
        """Send a batch and wait until the broker has answered for every message.

        A message that the client itself refuses holds up the rest of its key.  One that only the
        broker refuses may be followed by later messages of its key, which are on their way.
        """
        return await asyncio.to_thread(self._publish, batch)

    async def close(self) -> None:
        """Let a batch end that is being sent; a broker that is away is not waited for."""
        self._is_closed = True
        await asyncio.to_thread(self._close)

    def _publish(self, batch: Sequence[Outgoing]) -> list[Exception | None]:
        with self._lock:
            answers: list[Exception | None] = [None] * len(batch)
            failed: set[tuple[str, bytes | None]] = set()
            producer = self._producer = self._producer or make("Producer", self._settings)
            for number, message in enumerate(batch):
                if failed and (message.topic, message.key) in failed:
                    answers[number] = Retryable("an earlier message of its key was not sent")
                    continue
                error = self._send(producer, message, number, answers)
                if error is not None:
                    answers[number] = error
                    if message.key is not None:
                        failed.add((message.topic, message.key))
            while producer.flush(FLUSH_SECONDS):
                # Each message has its own deadline, message.timeout.ms; a stop comes before it.
                if self._is_closed:
                    producer.purge()
            if any(isinstance(answer, _Fatal) for answer in answers):
                # Order can no longer be kept by this producer; the next batch makes a new one.
                self._producer = None
            return answers

    def _send(
        self, producer: Any, message: Outgoing, number: int, answers: list[Exception | None]
    ) -> Exception | None:
        def failed(error: Any, _: object) -> None:
            answers[number] = _answer(error, message.topic)

        headers = message.headers
        pairs = headers if type(headers) is dict else list(pairs_of(headers))
        while True:
            try:
                producer.produce(
                    message.topic, message.value, message.key, headers=pairs, on_delivery=failed
                )
            except BufferError:
                producer.poll(0.05)  # the client's queue is full until some are delivered
            except kafka.KafkaException as error:
                return _answer(error.args[0], message.topic)
            else:
                return None  # `flush` serves the answers: a poll for each message costs a third

    def _close(self) -> None:
        with self._lock:
            self._producer = None


class _Fatal(Retryable):
    """The producer can send nothing more; a new one can."""


def _answer(error: Any, topic: str) -> Exception:
    return _Fatal(error.str()) if error.fatal() else meaning(error, f"topic {topic}")


class KafkaReader:
    """Reads ranges of a partition outside any group; `KafkaBroker.reader` makes it."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = dict(settings)

    async def read(self, partition: Partition, first: int, last: int) -> Sequence[Record]:
        """Return the records with offsets from *first* to *last*, both included.

        Raises:
            NeedsOperator: the beginning of the range is gone from the broker.
            Retryable: the broker does not answer.
        """
        return await asyncio.to_thread(self._ask, _range, partition, first, last)

    async def bounds(self, partition: Partition) -> tuple[int, int]:
        """Return the first offset that can be read, and the one that the next record will have."""
        return await asyncio.to_thread(self._ask, _bounds, partition)

    def _ask(self, question: Callable[..., Answer], partition: Partition, *more: int) -> Answer:
        client = make("Consumer", self._settings)
        until = time.monotonic() + CALL_SECONDS
        try:
            while True:
                try:
                    return question(client, partition, *more)
                except kafka.KafkaException as error:
                    found = meaning(error, f"reading {partition}")
                    # A partition that is new, or whose leader moves, answers a moment later.
                    if not isinstance(found, Retryable) or time.monotonic() > until:
                        raise found from error
                    time.sleep(0.1)
        finally:
            client.close()


def _bounds(client: Any, partition: Partition) -> tuple[int, int]:
    place = kafka.TopicPartition(partition.topic, partition.number)
    low, high = client.get_watermark_offsets(place, timeout=CALL_SECONDS)
    return low, high


def _range(client: Any, partition: Partition, first: int, last: int) -> list[Record]:
    low, high = _bounds(client, partition)
    if first < low:
        raise NeedsOperator(
            f"{partition}: the records from {first} to {low - 1} are gone from the broker"
        )
    if first > last or first >= high:
        return []
    client.assign([kafka.TopicPartition(partition.topic, partition.number, first)])
    found: list[Record] = []
    until = time.monotonic() + CALL_SECONDS
    while time.monotonic() < until:
        message = client.poll(1.0)
        if message is None:
            continue
        until = time.monotonic() + CALL_SECONDS
        if message.error() is not None:
            if message.error().code() == kafka.KafkaError._PARTITION_EOF:
                return found
            raise kafka.KafkaException(message.error())
        if message.offset() > last:
            return found
        found.append(record_of(message))
        if message.offset() == last:
            return found
    raise Retryable(f"reading {partition}: the broker does not answer")
