"""A Kafka broker, and what benchmarks ask it with a client of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any, Final

from confluent_kafka import Consumer, Producer, TopicPartition

from semel.testing.services import KafkaServer

PARTITIONS: Final = 4
WAIT_SECONDS: Final = 120.0


@contextmanager
def kafka() -> Iterator[Cluster]:
    """Start a broker."""
    with KafkaServer().start() as server:
        yield Cluster(server)


class Cluster:
    """One broker, and a new topic for each round."""

    def __init__(self, server: KafkaServer) -> None:
        self._server = server
        self._topics = 0
        self.bootstrap = server.bootstrap

    def new_topic(self) -> str:
        """Make a topic with a new name."""
        self._topics += 1
        name = f"payments-{self._topics}"
        self._server.create_topic(name, PARTITIONS)
        return name

    def fill(self, topic: str, records: Iterable[tuple[str, bytes]]) -> None:
        """Write keys and values into a topic."""
        producer = Producer({"bootstrap.servers": self.bootstrap, "linger.ms": 5})
        for key, value in records:
            while True:
                try:
                    producer.produce(topic, value, key)
                    break
                except BufferError:
                    producer.poll(0.1)
        if producer.flush(WAIT_SECONDS):
            raise TimeoutError("the broker did not take the messages")

    def ends(self, topic: str) -> list[int]:
        """Return the offset of the next record of each partition."""
        with self._client("bench-ends") as client:
            return [client.get_watermark_offsets(place)[1] for place in _places(topic)]

    @contextmanager
    def watch(self, group: str, topic: str) -> Iterator[Callable[[], None]]:
        """Yield a function that waits until a group has committed all that a topic has.

        It raises TimeoutError if that takes too long.
        """
        ends = self.ends(topic)
        with self._client(group) as client:

            def is_committed() -> bool:
                return [place.offset for place in client.committed(_places(topic))] == ends

            def wait() -> None:
                until = time.monotonic() + WAIT_SECONDS
                while not is_committed():
                    if time.monotonic() > until:
                        raise TimeoutError(f"group {group} has not committed {ends}")
                    time.sleep(0.005)

            is_committed()  # it connects now, not on the clock's time
            yield wait

    def read(self, topic: str) -> list[tuple[bytes | None, bytes]]:
        """Read a whole topic, partition by partition."""
        left = sum(self.ends(topic))
        found: list[Any] = []
        until = time.monotonic() + WAIT_SECONDS
        with self._client("bench-reader") as client:
            client.assign([TopicPartition(topic, p.partition, 0) for p in _places(topic)])
            while len(found) < left and time.monotonic() < until:
                found += [one for one in client.consume(10_000, 0.5) if one.error() is None]
        if len(found) < left:
            raise TimeoutError(f"{topic}: {len(found)} of {left} records can be read")
        found.sort(key=lambda one: (one.partition(), one.offset()))
        return [(one.key(), one.value() or b"") for one in found]

    def _client(self, group: str) -> closing[Any]:
        settings = {
            "bootstrap.servers": self.bootstrap,
            "group.id": group,
            "enable.auto.commit": False,
        }
        return closing(Consumer(settings))


def _places(topic: str) -> list[TopicPartition]:
    return [TopicPartition(topic, number) for number in range(PARTITIONS)]
