"""FastStream's Kafka broker on aiokafka: its consumer is a member of the group for a runner.

    FastStream   makes, starts and stops the consumer
    the runner   fetches, seeks, pauses and commits through this object

Everything happens on the event loop, and aiokafka keeps the records: there is no second buffer,
so nothing of an old position can come after a seek.  aiokafka's rebalances are eager: every
partition is revoked, and comes back at its committed offset.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, ConsumerRecord, TopicPartition
from aiokafka import errors as kafka
from aiokafka.structs import OffsetAndMetadata
from faststream.kafka.broker.registrator import KafkaRegistrator
from faststream.kafka.subscriber.usecase import DefaultSubscriber

from semel.errors import Fenced, NeedsOperator, Permanent, Retryable, SemelError
from semel.faststream.delivery import NOT_ON_KAFKA, OnRunner, parser_of, registered
from semel.message import Coordinates, Partition, Record, headers_from, pairs_of
from semel.messaging.handle.cancel import rung
from semel.messaging.receive.broker import Revoked
from semel.messaging.settings import RunnerSettings

log = logging.getLogger("semel.faststream")

Answer = TypeVar("Answer")

CALL_SECONDS: Final = 10.0
"""How long the broker may take to answer a question; aiokafka itself would ask for ever."""

REFUSED: Final = NOT_ON_KAFKA

# aiokafka leaves the group if nothing was fetched for so long; but a slow handler is not a dead
# one, and a dead process sends no heartbeats.
NEVER_MS: Final = 2**31 - 1

MARGIN_SECONDS: Final = 10.0
"""How much longer the group waits for a member than the member for its handlers."""

NOT_ALLOWED: Final = (
    kafka.TopicAuthorizationFailedError,
    kafka.GroupAuthorizationFailedError,
    kafka.SaslAuthenticationFailed,
    kafka.AuthenticationFailedError,
)


class ConsumerSubscription(ConsumerRebalanceListener):  # type: ignore[misc]
    """A member of *group*; `consumer` returns FastStream's consumer once it exists.

    It listens to the consumer's rebalances, which therefore needs it as its listener and
    `auto_offset_reset="none"`: a partition that has no committed offset begins at *start*, and
    an offset that is out of range later can only mean that records are gone.
    """

    def __init__(
        self, group: str, start: str, consumer: Callable[[], AIOKafkaConsumer | None]
    ) -> None:
        self._group = group
        self._start = start
        self._consumer = consumer
        self._listeners: list[Revoked] = []
        self._owned: frozenset[Partition] = frozenset()
        self._not_begun: set[Partition] = set()
        self._firsts: dict[Partition, int] = {}
        self._may_fetch = asyncio.Event()
        self._closed = False
        self._error: SemelError | None = None

    @property
    def group(self) -> str:
        """The consumer group."""
        return self._group

    @property
    def assignment(self) -> frozenset[Partition]:
        """The partitions that this member owns now."""
        return self._owned

    def on_revoked(self, listener: Revoked) -> None:
        """Call *listener* before partitions are revoked; its commits are still accepted."""
        self._listeners.append(listener)

    async def fetch(self, max_records: int, wait_seconds: float) -> Sequence[Record]:
        """Return the next records; wait for the first one at most *wait_seconds*."""
        until = time.monotonic() + wait_seconds
        while True:
            if self._error is not None:
                raise self._error
            left = max(until - time.monotonic(), 0.0)
            found: list[Record] = []
            if await rung(self._may_fetch, left):
                found = await self._fetch(max_records, max(until - time.monotonic(), 0.0))
            if found or not left or self._closed:
                return found

    async def _fetch(self, max_records: int, wait_seconds: float) -> list[Record]:
        client = self._client()
        try:
            # aiokafka's own limit does not count while it waits for the end of a rebalance.
            async with asyncio.timeout(wait_seconds + CALL_SECONDS):
                await self._begin(client)
                found = await client.getmany(
                    timeout_ms=wait_seconds * 1_000, max_records=max_records
                )
        except (TimeoutError, kafka.NoOffsetForPartitionError):
            return []  # the second was noted before `_begin` set the position
        except kafka.OffsetOutOfRangeError as error:
            await self._records_are_gone(client, error)
            return []
        except (kafka.KafkaError, kafka.ConsumerStoppedError) as error:
            raise self._meaning(error) from error
        if not self._may_fetch.is_set():
            return []  # revoked meanwhile: they come again, from the committed offset
        return [record_of(record) for records in found.values() for record in records]

    async def _begin(self, client: AIOKafkaConsumer) -> None:
        """Set the position of new partitions, which may have no committed offset.

        Not in aiokafka's callback: it swallows errors, and sends no heartbeats meanwhile.
        """
        for partition in sorted(self._not_begun):
            if self._start == "latest":
                await self._commit_ends(client, partition.topic)
            client.seek(_place(partition), await self.committed(partition))
            self._not_begun.discard(partition)

    async def _commit_ends(self, client: AIOKafkaConsumer, topic: str) -> None:
        """Commit the ends of a topic of which the group has committed nothing.

        Those of all partitions, also of other members' ones: a partition without a commit is then
        one that was added to the topic, or whose offset has expired, and nothing of it is skipped.
        """
        places = [TopicPartition(topic, n) for n in client.partitions_for_topic(topic) or ()]
        for place in places:
            if await client.committed(place) is not None:
                return
        ends = await client.end_offsets(places)
        offsets = {place: OffsetAndMetadata(end, "") for place, end in ends.items()}
        # `commit` takes no partition of another member.
        await client._coordinator.commit_offsets(None, offsets)

    async def _first(self, client: AIOKafkaConsumer, partition: Partition) -> int:
        """Return where a partition without a committed offset begins."""
        # Asked once: the answer waits behind a fetch that waits for records.
        if partition not in self._firsts:
            found = await client.beginning_offsets([_place(partition)])
            self._firsts[partition] = found[_place(partition)]
        return self._firsts[partition]

    async def _records_are_gone(self, client: AIOKafkaConsumer, error: Any) -> None:
        ((place, offset),) = error.args[0].items()
        partition = Partition(place.topic, place.partition)
        if partition not in self._owned or await client.position(place) != offset:
            return  # the error is of a position before a seek
        self._error = NeedsOperator(
            f"group {self._group}: {partition} has no record {offset} any more: retention deleted "
            f"it before it was handled, or the topic was made again; nothing is skipped. Reset "
            f"the group's offsets with kafka-consumer-groups.sh --reset-offsets, then start again"
        )

    async def commit(self, offsets: Mapping[Partition, int]) -> None:
        """Commit the next offset to read of each partition."""
        foreign = sorted(offsets.keys() - self._owned)
        if foreign:
            # The broker would accept it: it checks the member's generation, not its partitions.
            raise Fenced(f"group {self._group}: {foreign[0]} is no longer this member's")
        if offsets:
            await self._ask(self._client().commit({_place(p): at for p, at in offsets.items()}))

    async def committed(self, partition: Partition) -> int:
        """Return the committed offset; without one, where the partition begins."""
        client = self._client()
        found: int | None = await self._ask(client.committed(_place(partition)))
        return await self._ask(self._first(client, partition)) if found is None else found

    async def end(self, partition: Partition) -> int:
        """Return the end of what can be read: the offset of the next record."""
        ends = await self._ask(self._client().end_offsets([_place(partition)]))
        return int(ends[_place(partition)])

    def seek(self, partition: Partition, offset: int) -> None:
        """Fetch from *offset* on, the next time."""
        if client := self._owner_of(partition):
            client.seek(_place(partition), offset)
            self._not_begun.discard(partition)

    def pause(self, partition: Partition) -> None:
        """Leave the partition out of fetches."""
        if client := self._owner_of(partition):
            client.pause(_place(partition))

    def resume(self, partition: Partition) -> None:
        """Fetch from a paused partition again; ignored if it is no longer assigned."""
        if client := self._owner_of(partition):
            client.resume(_place(partition))

    async def close(self) -> None:
        """Call the listeners; FastStream stops the consumer, which then leaves the group.

        aiokafka does not call them when it stops.
        """
        if not self._closed:
            self._closed = True
            await self._give_up()

    # aiokafka calls these in a rebalance.

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Wait for the listeners; every partition is revoked, even if this member gets it again."""
        await self._give_up()

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Take the partitions over."""
        if self._closed:
            return
        self._owned = frozenset(Partition(place.topic, place.partition) for place in assigned)
        self._not_begun = set(self._owned)
        if self._owned:
            self._may_fetch.set()

    async def _give_up(self) -> None:
        self._may_fetch.clear()
        for listener in self._listeners if self._owned else ():
            try:
                await listener(self._owned)
            except Exception:
                log.exception("a revocation listener failed", extra={"group": self._group})
        self._owned = frozenset()
        self._not_begun.clear()
        self._firsts.clear()

    # The consumer's answers.

    def _client(self) -> AIOKafkaConsumer:
        client = self._consumer()
        if client is None:
            raise Fenced(f"group {self._group}: this member has left")
        return client

    def _owner_of(self, partition: Partition) -> AIOKafkaConsumer | None:
        return self._consumer() if partition in self._owned else None

    async def _ask(self, answer: Awaitable[Answer]) -> Answer:
        try:
            async with asyncio.timeout(CALL_SECONDS):
                return await answer
        except TimeoutError as error:
            raise Retryable(f"group {self._group}: the broker does not answer") from error
        except (kafka.KafkaError, kafka.ConsumerStoppedError) as error:
            raise self._meaning(error) from error

    def _meaning(self, error: Exception) -> SemelError:
        """Return the error of ours that says what to do next."""
        sentence = f"group {self._group}: {type(error).__name__}: {error}"
        if isinstance(error, kafka.UnsupportedCodecError):
            return Permanent(f"{sentence}; pip install 'aiokafka[all]'")
        if isinstance(error, NOT_ALLOWED):
            return Permanent(sentence)
        # In a rebalance the partitions are still this member's until it has joined again.
        is_rebalance = isinstance(error.__cause__, kafka.RebalanceInProgressError)
        if isinstance(error, kafka.CommitFailedError) and not is_rebalance:
            return Fenced(sentence)
        return Retryable(sentence)


def _place(partition: Partition) -> TopicPartition:
    return TopicPartition(partition.topic, partition.number)


def record_of(record: ConsumerRecord[Any, Any]) -> Record:
    """Make a record of one of aiokafka's."""
    return Record(
        Coordinates(record.topic, record.partition, record.offset),
        record.value,
        record.key,
        headers_from(record.headers),
        record.timestamp / 1_000,
    )


def record_from(record: Record) -> ConsumerRecord[Any, Any]:
    """Make a record of aiokafka."""
    at, key, value = record.at, record.key, record.value
    sizes, time_ms = (len(key or b""), len(value or b"")), round(record.timestamp * 1_000)
    headers = pairs_of(record.headers)
    return ConsumerRecord(
        at.topic, at.partition, at.offset, time_ms, 0, key, value, None, *sizes, headers
    )


def fits(broker: object) -> bool:
    """Return whether this is FastStream's broker on aiokafka, or a router of it."""
    return isinstance(broker, KafkaRegistrator)


def make_subscriber(
    broker: Any, topics: tuple[Any, ...], group: str, settings: RunnerSettings, **options: Any
) -> RunnerSubscriber:
    """Register a subscriber; its attributes and its function are still to be set."""
    # A revocation waits for the running messages; the group must wait for it.
    patience = settings.stop_seconds + settings.cancel_seconds + MARGIN_SECONDS
    ours = {
        "isolation_level": "read_committed",
        "max_poll_interval_ms": NEVER_MS,
        "rebalance_timeout_ms": round(patience * 1_000),
        **options,
        "group_id": group,
        "parser": parser_of(RunnerSubscriber),
        "auto_offset_reset": "none",
    }
    return registered(RunnerSubscriber, broker, topics, **ours)


class RunnerSubscriber(OnRunner, DefaultSubscriber):
    """A subscriber of FastStream whose messages a runner fetches and handles."""

    read = staticmethod(record_of)
    write = staticmethod(record_from)

    async def start(self) -> None:
        """Join the group, and start the runner."""
        await self.semel.open()
        group, begins = self.group_id or "", self.begins
        self._listener = ConsumerSubscription(group, begins, lambda: self.consumer)
        await super().start()

    async def _run_consume_loop(self, consumer: AIOKafkaConsumer) -> None:
        assert isinstance(self._listener, ConsumerSubscription)
        await self.run(self._listener)
