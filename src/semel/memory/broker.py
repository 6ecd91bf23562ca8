"""A broker in memory that behaves like Kafka, for tests of services and for trying things out.

    broker = MemoryBroker({"payments": 2})
    member = await broker.subscribe("billing", ["payments"])

Partitions with offsets, groups with generations and eager rebalances, redelivery
from the committed offset, holes, retention; and levers that a real broker does
not have: kill a member, lose an answer, deliver again.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Final, NoReturn

from semel.clock import SYSTEM_CLOCK, Clock
from semel.errors import Misuse, Retryable
from semel.memory.broker_bell import Bell
from semel.memory.broker_failures import Call, Failing, Failure, Failures
from semel.memory.broker_groups import Group, Patience
from semel.memory.broker_member import MemorySubscription
from semel.memory.broker_publisher import MemoryPublisher, MemoryReader, partition_of
from semel.memory.broker_store import BrokerStore, Entry, MemoryBrokerStore
from semel.message import Coordinates, Partition, Record
from semel.messaging.broker import Outgoing

__all__ = ["MAX_MESSAGE_BYTES", "Call", "Failing", "Failure", "MemoryBroker", "Patience"]

# What Kafka allows unless it is told otherwise (message.max.bytes).
MAX_MESSAGE_BYTES: Final = 1_048_588

# Of the time after which a member is taken for dead, so that one late heartbeat is no death.
HEARTBEATS_PER_SESSION: Final = 10


class MemoryBroker:
    """Topics, groups and levers.

    Members belong to the loop on which they subscribed, and may be on different loops and
    threads; `kill` and `revive` are for the member's own loop, everything else for any.
    """

    tick_seconds: ClassVar[float] = 0.05
    """How often a waiting member looks whether time has passed for somebody else."""

    def __init__(
        self,
        topics: Mapping[str, int] | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        patience: Patience | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        store: BrokerStore | None = None,
    ) -> None:
        """Make a broker with *topics*, each with its number of partitions."""
        self.clock = clock
        self.patience = patience or Patience()
        self.max_message_bytes = max_message_bytes
        self.store: BrokerStore = store or MemoryBrokerStore()
        self.failures = Failures()
        self.bell = Bell()
        self._members: list[MemorySubscription] = []
        for topic, partitions in (topics or {}).items():
            self.create_topic(topic, partitions)

    def __reduce__(self) -> Any:
        _refuse_to_travel()

    # What a service uses.

    async def subscribe(self, group: str, topics: Sequence[str]) -> MemorySubscription:
        """Join *group*; the partitions come when the other members have given up theirs.

        Raises:
            Misuse: one of the topics does not exist.
        """
        missing = [topic for topic in topics if topic not in self.store.topics()]
        if missing:
            raise Misuse(f"group {group}: there is no topic {missing[0]!r}; make it first")
        member = MemorySubscription(self, group, topics)
        self._members.append(member)
        member.enter()
        return member

    def publisher(self) -> MemoryPublisher:
        """Make a publisher."""
        return MemoryPublisher(self)

    def reader(self) -> MemoryReader:
        """Make a reader."""
        return MemoryReader(self)

    # What a test looks at.

    def partitions(self, topic: str) -> Sequence[Partition]:
        """Name the partitions of *topic*."""
        return [Partition(topic, number) for number in range(self.store.topics().get(topic, 0))]

    def records(self, topic: str) -> Sequence[Record]:
        """Return whatever is in the logs of *topic*, partition by partition."""
        found: list[Record] = []
        for partition in self.partitions(topic):
            start, end = self.store.bounds(partition)
            found += self.store.read(partition, start, end, end - start)
        return found

    def committed(self, group: str) -> Mapping[Partition, int]:
        """Return what a group has committed, by partition."""
        return dict(self.store.peek(group).committed)

    def lag(self, group: str, topic: str) -> int:
        """Count the records of *topic* that a group has not committed."""
        committed = self.committed(group)
        return sum(
            record.at.offset >= committed.get(record.at.place, 0) for record in self.records(topic)
        )

    async def settled(self, group: str, seconds: float = 10.0) -> None:
        """Wait until no rebalance is under way, and every member here has its partitions.

        Raises:
            Retryable: that took too long.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            number = self.bell.number
            with self.changing(group) as found:
                generation, is_stable = found.generation, not found.is_rebalancing
            if is_stable and all(
                member.generation == generation for member in self._heard_of(group)
            ):
                return
            if asyncio.get_running_loop().time() >= deadline:
                raise Retryable(f"group {group}: a rebalance is not over after {seconds} s")
            await self.bell.wait(number, self.tick_seconds)

    # What a test does.

    def create_topic(self, topic: str, partitions: int = 1) -> None:
        """Make a topic, or give it more partitions, which its groups then share."""
        if self.store.topics().get(topic) == partitions:
            return
        self.store.create(topic, partitions)
        for name in self.store.groups():
            if any(topic in member.topics for member in self.store.peek(name).members.values()):
                self.rebalance(name)

    def put(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        headers: Mapping[str, bytes] | None = None,
        partition: int | None = None,
    ) -> Coordinates:
        """Append one record, to *partition* where it is said, and return where it is."""
        partitions = self.store.topics().get(topic, 1)
        place = Partition(topic, partition or 0)
        if partition is None and key is not None:
            place = partition_of(topic, key, partitions)
        message = Outgoing(topic, value, key, headers or {})
        (at,) = self.append([Entry(place, message, self.clock.now(), uuid.uuid4().hex, 0)])
        return at

    def kill(self, member: MemorySubscription) -> None:
        """Let nothing be heard of *member* any more: it leaves when its session has run out.

        Its object can still be used, as by a process that slept: a zombie.
        """
        member.kill()

    def revive(self, member: MemorySubscription) -> None:
        """Let *member* wake up: it finds out what it has lost, and joins again."""
        member.revive()

    def rebalance(self, group: str) -> None:
        """Make every member of *group* give up its partitions, and share them anew."""
        with self.changing(group) as found:
            found.rebalance(self.clock.monotonic(), self.patience)

    def redeliver(self, group: str, partition: Partition, offset: int) -> None:
        """Deliver from *offset* on again: a rebalance after which *offset* is committed."""
        with self.changing(group) as found:
            found.rewinds[partition] = offset
            found.rebalance(self.clock.monotonic(), self.patience)

    def skip(self, partition: Partition, offsets: int = 1) -> None:
        """Leave a hole, as the markers of transactions do."""
        self.store.skip(partition, offsets)
        self.bell.ring()

    def compact(self, topic: str) -> None:
        """Keep the last record of each key only; records without a key stay."""
        for partition in self.partitions(topic):
            start, end = self.store.bounds(partition)
            by_key: defaultdict[bytes | None, list[int]] = defaultdict(list)
            for record in self.store.read(partition, start, end, end - start):
                by_key[record.key].append(record.at.offset)
            by_key.pop(None, None)
            self.store.drop(partition, [o for offsets in by_key.values() for o in offsets[:-1]])

    def trim(self, partition: Partition, up_to: int) -> None:
        """Remove what is before *up_to*, as retention does; whoever still wants it is refused."""
        self.store.trim(partition, up_to)
        self.bell.ring()

    def fail(self, *failures: Failure) -> None:
        """Let calls of this object's members and publishers fail."""
        self.failures.plan(*failures)

    def heal(self) -> None:
        """Let no call fail any more."""
        self.failures.clear()

    async def close(self) -> None:
        """Let every member here leave its group."""
        for member in list(self._members):
            await member.close()
        self.store.close()

    # What members and publishers use.

    def append(self, entries: Sequence[Entry]) -> Sequence[Coordinates]:
        """Append to the logs, and wake whoever waits for records."""
        appended = self.store.append(entries)
        self.bell.ring()
        return appended

    @contextmanager
    def changing(self, name: str) -> Iterator[Group]:
        """Change a group, before and after which is done whatever is due in it."""
        with self.store.group(name) as group:
            before = _shape(group)
            self._advance(group)
            yield group
            self._advance(group)
            after = _shape(group)
        if after != before:
            self.bell.ring()

    def hear(self, member: MemorySubscription) -> Group:
        """Let the group hear of its members here; return it, with everything done that is due."""
        group = self.store.peek(member.group)
        now = self.clock.monotonic()
        me = group.members.get(member.member)
        heartbeat_seconds = self.patience.session_seconds / HEARTBEATS_PER_SESSION
        is_heard = me is not None and now - me.heard_at < heartbeat_seconds
        if is_heard and not group.overdue(now, self.patience):
            return group
        with self.changing(member.group) as changed:
            return changed

    def forget(self, member: MemorySubscription) -> None:
        """Drop a member that has left."""
        self._members.remove(member)

    def name_member(self, group: str) -> str:
        """Make up a name for a new member."""
        return f"{group}-{uuid.uuid4().hex[:8]}"

    def _heard_of(self, group: str) -> Iterator[MemorySubscription]:
        return (
            member for member in list(self._members) if member.group == group and member.is_heard
        )

    def _advance(self, group: Group) -> None:
        now = self.clock.monotonic()
        # Whoever lives in this process is alive, however long its loop was busy.
        group.hear([member.member for member in self._heard_of(group.name)], now)
        group.advance(now, self.store.topics(), self.patience)


def _shape(group: Group) -> tuple[object, ...]:
    """Return that of a group which others wait for."""
    ready = [(name, member.is_ready) for name, member in group.members.items()]
    return (group.generation, group.is_rebalancing, ready)


def _refuse_to_travel() -> NoReturn:
    raise Misuse(
        "a MemoryBroker lives in one process and cannot be sent to another; "
        "for several processes use semel.testing.filebroker.FileBroker"
    )
