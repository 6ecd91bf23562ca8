"""Sending to a memory broker, and reading its logs outside any group."""

from __future__ import annotations

import asyncio
import uuid
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from semel.errors import Misuse, Permanent, Retryable
from semel.memory.broker_failures import Call
from semel.memory.broker_store import Entry, check_readable
from semel.message import Partition, Record
from semel.messaging.broker import Outgoing

if TYPE_CHECKING:
    from semel.memory.broker import MemoryBroker

# A broker that loses more answers than this in a row is taken for one that is away.
APPEND_ATTEMPTS: Final = 5


def partition_of(topic: str, key: bytes, partitions: int) -> Partition:
    """Say where messages with *key* go: the same in every process and on every day."""
    return Partition(topic, zlib.crc32(key) % partitions)


class MemoryPublisher:
    """A `semel.messaging.broker.Publisher`; idempotent, as Kafka's producers are.

    What it repeats by itself is in the log once; what its caller sends again is there again.
    """

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self._name = uuid.uuid4().hex
        self._sequence = 0
        self._turns: Counter[str] = Counter()
        self._is_closed = False

    async def publish(self, batch: Sequence[Outgoing]) -> Sequence[Exception | None]:
        """Send a batch; say of each message whether it is in the log (None) or why not."""
        if self._is_closed:
            raise Misuse("the publisher is closed and sends nothing")
        await asyncio.sleep(0)
        lot = self._broker.failures.take(Call.PUBLISH)
        lot.before()
        answers = self._send(batch)
        lot.after()
        return answers

    async def close(self) -> None:
        """Send nothing more; what was handed over is in the log already."""
        self._is_closed = True

    def _send(self, batch: Sequence[Outgoing]) -> Sequence[Exception | None]:
        topics = self._broker.store.topics()
        answers: list[Exception | None] = []
        entries: list[Entry] = []
        failed: set[tuple[str, bytes | None]] = set()
        for message in batch:
            key = (message.topic, message.key)
            try:
                if message.key is not None and key in failed:
                    raise Retryable(  # noqa: TRY301  the answer about this message
                        f"topic {message.topic}: an earlier message of the key {message.key!r} "
                        f"failed, and this one was not sent"
                    )
                lot = self._broker.failures.take(Call.MESSAGE, *key)
                lot.before()
                entries.append(self._entry(message, topics))
                lot.after()
            except Exception as error:  # noqa: BLE001  the answer about this message
                failed.add(key)
                answers.append(error)
            else:
                answers.append(None)
        self._append(entries)
        return answers

    def _entry(self, message: Outgoing, topics: Mapping[str, int]) -> Entry:
        partitions = topics.get(message.topic)
        if partitions is None:
            raise Permanent(f"there is no topic {message.topic}; the message was not sent")
        size, limit = size_of(message), self._broker.max_message_bytes
        if size > limit:
            raise Permanent(
                f"topic {message.topic}: the message has {size} bytes and {limit} are allowed; "
                f"it was not sent"
            )
        if message.key is None:
            self._turns[message.topic] += 1
            partition = Partition(message.topic, self._turns[message.topic] % partitions)
        else:
            partition = partition_of(message.topic, message.key, partitions)
        self._sequence += 1
        return Entry(partition, message, self._broker.clock.now(), self._name, self._sequence)

    def _append(self, entries: Sequence[Entry]) -> None:
        """Append, repeating what is not answered: the log knows what it has already."""
        for attempt in range(1, APPEND_ATTEMPTS + 1):
            lot = self._broker.failures.take(Call.APPEND)
            try:
                lot.before()
                self._broker.append(entries)
                lot.after()
            except Retryable:
                if attempt == APPEND_ATTEMPTS:
                    raise
            else:
                return


def size_of(message: Outgoing) -> int:
    """Count the bytes of a message: key, value and headers."""
    headers = sum(len(name.encode()) + len(value) for name, value in message.headers.items())
    return len(message.value or b"") + len(message.key or b"") + headers


class MemoryReader:
    """A `semel.messaging.broker.Reader`."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker

    async def read(self, partition: Partition, first: int, last: int) -> Sequence[Record]:
        """Return the records with offsets from *first* to *last*, both included.

        Raises:
            NeedsOperator: the log does not go back to *first* any more.
        """
        await asyncio.sleep(0)
        self._broker.failures.take(Call.READ).read()
        start, end = self._broker.store.bounds(partition)
        check_readable(partition, start, end, first)
        return self._broker.store.read(partition, first, last, end - start)

    async def bounds(self, partition: Partition) -> tuple[int, int]:
        """Return the first offset that can be read, and the one that the next record will have."""
        await asyncio.sleep(0)
        self._broker.failures.take(Call.READ).read()
        return self._broker.store.bounds(partition)
