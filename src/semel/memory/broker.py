"""A broker in memory that behaves like Kafka, for tests of services and for trying things out.

    broker = MemoryBroker({"payments": 2})
    member = await broker.subscribe("billing", ["payments"])

It has partitions with offsets, groups with generations and eager rebalances,
redelivery from the committed offset, holes and retention, and controls for tests:
kill a member, lose an answer, deliver again.

    joined ──▶ assigned ──a rebalance──▶ revoking ──▶ joined
                  │                         ▲
                  └──no heartbeat, removed──┘

Each member has a task of its own that sends heartbeats, calls the listeners when
partitions are revoked, and takes over new ones.  It runs beside the handlers, as
in aiokafka; a listener that must wait for the handlers does so itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

from semel.clock import SYSTEM_CLOCK, Clock
from semel.errors import Fenced, Misuse, Permanent, Retryable
from semel.memory.broker_groups import Group, GroupMember, Patience
from semel.memory.broker_store import BrokerStore, Entry
from semel.message import Coordinates, Partition, Record
from semel.messaging.receive.broker import Outgoing, Revoked

# Kafka's default for message.max.bytes.
MAX_MESSAGE_BYTES: Final = 1_048_588

# As a part of the session timeout, so that one late heartbeat does not end the membership.
HEARTBEATS_PER_SESSION: Final = 10


class MemoryBroker:
    """Topics, consumer groups, and controls for tests.

    A member belongs to the loop on which it subscribed; members may be on different loops and
    threads.  Call `kill` and `revive` on the member's own loop, all other methods on any.
    """

    tick_seconds: ClassVar[float] = 0.05
    """How often a waiting member checks whether another one's time has run out."""

    def __init__(
        self,
        topics: Mapping[str, int] | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        patience: Patience | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        store: BrokerStore | None = None,
    ) -> None:
        """Create a broker with *topics*, each with its number of partitions."""
        self.clock = clock
        self.patience = patience or Patience()
        self.max_message_bytes = max_message_bytes
        self.store = store or BrokerStore()
        self.failures = Failures()
        self.bell = Bell()
        self._members: list[MemorySubscription] = []
        for topic, partitions in (topics or {}).items():
            self.create_topic(topic, partitions)

    def __reduce__(self) -> Any:
        raise Misuse(
            "a MemoryBroker belongs to one process and cannot be sent to another; "
            "for several processes use semel.testing.FileBroker"
        )

    # What a service uses.

    async def subscribe(self, group: str, topics: Sequence[str]) -> MemorySubscription:
        """Join *group*; its partitions are assigned when the other members have given up theirs.

        Raises:
            Misuse: one of the topics does not exist.
        """
        missing = [topic for topic in topics if topic not in self.store.topics()]
        if missing:
            raise Misuse(f"group {group}: there is no topic {missing[0]!r}; create it first")
        member = MemorySubscription(self, group, topics)
        self._members.append(member)
        member.enter()
        return member

    def publisher(self) -> MemoryPublisher:
        """Return a new publisher."""
        return MemoryPublisher(self)

    def reader(self) -> MemoryReader:
        """Return a new reader."""
        return MemoryReader(self)

    # What a test looks at.

    def partitions(self, topic: str) -> Sequence[Partition]:
        """Return the partitions of *topic*."""
        return [Partition(topic, number) for number in range(self.store.topics().get(topic, 0))]

    def records(self, topic: str) -> Sequence[Record]:
        """Return all records of *topic*, partition by partition."""
        found: list[Record] = []
        for partition in self.partitions(topic):
            start, end = self.store.bounds(partition)
            found += self.store.read(partition, start, end, end - start)
        return found

    def committed(self, group: str) -> Mapping[Partition, int]:
        """Return a group's committed offsets, by partition."""
        return dict(self.store.peek(group).committed)

    def lag(self, group: str, topic: str) -> int:
        """Count the records of *topic* that a group has not committed."""
        committed = self.committed(group)
        return sum(
            record.at.offset >= committed.get(record.at.place, 0) for record in self.records(topic)
        )

    async def settled(self, group: str, seconds: float = 10.0) -> None:
        """Wait until no rebalance is running, and every member here has its partitions.

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
                raise Retryable(f"group {group}: a rebalance has not ended after {seconds} s")
            await self.bell.wait(number, self.tick_seconds)

    # What a test does.

    def create_topic(self, topic: str, partitions: int = 1) -> None:
        """Create a topic, or add partitions to it, which its groups then share."""
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
        """Append one record, to *partition* if given, and return its coordinates."""
        partitions = self.store.topics().get(topic, 1)
        place = Partition(topic, partition or 0)
        if partition is None and key is not None:
            place = partition_of(topic, key, partitions)
        message = Outgoing(topic, value, key, headers or {})
        (at,) = self.append([Entry(place, message, self.clock.now(), uuid.uuid4().hex, 0)])
        return at

    def kill(self, member: MemorySubscription) -> None:
        """Stop the heartbeats of *member*: the group removes it after the session timeout.

        Its object can still be used, like a process that was stopped: a zombie.
        """
        member.kill()

    def revive(self, member: MemorySubscription) -> None:
        """Continue a killed *member*: it finds out what it has lost, and joins again."""
        member.revive()

    def rebalance(self, group: str) -> None:
        """Make every member of *group* give up its partitions, and assign them again."""
        with self.changing(group) as found:
            found.rebalance(self.clock.monotonic(), self.patience)

    def redeliver(self, group: str, partition: Partition, offset: int) -> None:
        """Deliver from *offset* on again, by a rebalance that sets the committed offset."""
        with self.changing(group) as found:
            found.rewinds[partition] = offset
            found.rebalance(self.clock.monotonic(), self.patience)

    def skip(self, partition: Partition, offsets: int = 1) -> None:
        """Leave a hole in the offsets, as transaction markers do."""
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
        """Remove the records before *up_to*, as retention does; reading them raises then."""
        self.store.trim(partition, up_to)
        self.bell.ring()

    def fail(self, *failures: BrokerFailure) -> None:
        """Make calls of this broker's members and publishers fail."""
        self.failures.plan(*failures)

    def heal(self) -> None:
        """End all planned failures."""
        self.failures.clear()

    async def close(self) -> None:
        """Make every member here leave its group."""
        for member in list(self._members):
            await member.close()
        self.store.close()

    # What members and publishers use.

    def append(self, entries: Sequence[Entry]) -> Sequence[Coordinates]:
        """Append to the logs, and wake the members that wait for records."""
        appended = self.store.append(entries)
        self.bell.ring()
        return appended

    @contextmanager
    def changing(self, name: str) -> Iterator[Group]:
        """Change a group; timeouts and rebalances that are due are handled before and after."""
        with self.store.group(name) as group:
            before = _shape(group)
            self._advance(group)
            yield group
            self._advance(group)
            after = _shape(group)
        if after != before:
            self.bell.ring()

    def hear(self, member: MemorySubscription) -> Group:
        """Send the heartbeats of the members here; return the group after what is due."""
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
        """Return a name for a new member."""
        return f"{group}-{uuid.uuid4().hex[:8]}"

    def _heard_of(self, group: str) -> Iterator[MemorySubscription]:
        return (
            member for member in list(self._members) if member.group == group and member.is_heard
        )

    def _advance(self, group: Group) -> None:
        now = self.clock.monotonic()
        # A member of this process is alive, even if its loop was busy for a long time.
        group.hear([member.member for member in self._heard_of(group.name)], now)
        group.advance(now, self.store.topics(), self.patience)


def _shape(group: Group) -> tuple[object, ...]:
    """Return the part of a group whose change must wake waiting members."""
    ready = [(name, member.is_ready) for name, member in group.members.items()]
    return (group.generation, group.is_rebalancing, ready)


class FileBroker(MemoryBroker):
    """A `MemoryBroker` in a file that the processes of one machine share; pickles as its path.

    For tests that kill real processes.  A process that is killed sends no heartbeats, and the
    others get its partitions when its session has run out; a process that was stopped meanwhile
    is fenced when it continues.  All of them measure time by the machine's monotonic clock, so a
    change of the wall clock changes nothing.  Nothing is promised for a machine that goes down:
    the file is not synced.
    """

    tick_seconds: ClassVar[float] = 0.02
    """How often a waiting member looks what other processes have done."""

    def __init__(
        self, path: str | Path, topics: Mapping[str, int] | None = None, **settings: Any
    ) -> None:
        """Open the broker in the file at *path*, making it and its *topics* where missing.

        *settings* are those of a `MemoryBroker`.
        """
        self.path = Path(path).absolute()
        super().__init__(topics, store=BrokerStore(self.path), **settings)

    def __reduce__(self) -> Any:
        settings: dict[str, Any] = {
            "clock": self.clock,
            "patience": self.patience,
            "max_message_bytes": self.max_message_bytes,
        }
        return partial(FileBroker, **settings), (str(self.path),)


class MemorySubscription:
    """A `Subscription`; belongs to the event loop on which it was created."""

    def __init__(self, broker: MemoryBroker, group: str, topics: Sequence[str]) -> None:
        """Use `MemoryBroker.subscribe`, which also joins the group."""
        self._broker = broker
        self._group = group
        self._topics = tuple(topics)
        self._member = ""
        self._generation = 0
        self._positions: dict[Partition, int] = {}
        self._paused: set[Partition] = set()
        self._turn = 0
        self._listeners: list[Revoked] = []
        self._keeper: asyncio.Task[None] | None = None
        self._revoking: asyncio.Task[None] | None = None
        self._trouble: Exception | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"MemorySubscription({self._group!r}, {self._member!r}, {sorted(self.assignment)})"

    @property
    def group(self) -> str:
        return self._group

    @property
    def member(self) -> str:
        """The member's name; it gets a new one after it was removed from the group."""
        return self._member

    @property
    def generation(self) -> int:
        """The generation of the group in which the partitions were assigned."""
        return self._generation

    @property
    def is_heard(self) -> bool:
        """Whether it runs and its heartbeats reach the group."""
        return self._keeper is not None and not self._keeper.done()

    @property
    def assignment(self) -> frozenset[Partition]:
        return frozenset(self._positions)

    def on_revoked(self, listener: Revoked) -> None:
        """Call *listener* before partitions are revoked; its commits are still accepted.

        It is also called when they are lost: then its commits are `Fenced`.  The next `fetch`
        raises any other error of a listener; the partitions are given up all the same.
        """
        self._listeners.append(listener)

    async def fetch(self, max_records: int, wait_seconds: float) -> Sequence[Record]:
        """Return the next records of partitions that are not paused, in order of offset each.

        Returns no records when a revocation begins.

        Raises:
            NeedsOperator: the position is not in the log; records are never skipped silently.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_seconds
        # Lets other tasks run, even if there is always a next record.
        await asyncio.sleep(0)
        self._raise_trouble()
        self._broker.failures.check(Call.FETCH)
        before = self._revoking
        while True:
            number = self._broker.bell.number
            found = self._take(max_records)
            left = deadline - loop.time()
            if found or left <= 0 or self._revoking not in (before, None):
                return found
            await self._broker.bell.wait(number, min(left, self._broker.tick_seconds))
            self._raise_trouble()

    async def commit(self, offsets: Mapping[Partition, int]) -> None:
        await asyncio.sleep(0)
        with (
            self._broker.failures.during(Call.COMMIT),
            self._broker.changing(self._group) as group,
        ):
            group.commit(self._member, offsets)

    async def committed(self, partition: Partition) -> int:
        self._broker.failures.check(Call.LOOK_UP)
        return self._position(self._broker.store.peek(self._group), partition)

    async def end(self, partition: Partition) -> int:
        self._broker.failures.check(Call.LOOK_UP)
        return self._broker.store.bounds(partition)[1]

    def seek(self, partition: Partition, offset: int) -> None:
        """Fetch from *offset* on; ignored if the partition is no longer assigned."""
        if partition in self._positions:
            self._positions[partition] = offset
            self._broker.bell.ring()

    def pause(self, partition: Partition) -> None:
        """Leave the partition out of fetches, until it is resumed or assigned again."""
        if partition in self._positions:
            self._paused.add(partition)

    def resume(self, partition: Partition) -> None:
        self._paused.discard(partition)
        self._broker.bell.ring()

    async def close(self) -> None:
        """Call the listeners, and leave the group."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.is_heard:
            self._revoking = self._revoking or asyncio.create_task(self._revoke())
            await self._revoking
        await self._end_keeper()
        self._positions.clear()
        with self._broker.changing(self._group) as group:
            group.leave(self._member, self._broker.clock.monotonic(), self._broker.patience)
        self._broker.forget(self)
        self._raise_trouble()

    # What the broker calls.

    def enter(self) -> None:
        """Join the group and start the heartbeats."""
        self._join()
        self.revive()

    def revive(self) -> None:
        """Start the heartbeats again; ignored if they run."""
        if not self._is_closed and not self.is_heard:
            self._sync()
            self._keeper = asyncio.get_running_loop().create_task(self._keep())

    def kill(self) -> None:
        """Stop the heartbeats at once, as a killed process would."""
        for task in (self._keeper, self._revoking):
            if task is not None:
                task.cancel()
        self._keeper = self._revoking = None

    # The keeper.

    async def _end_keeper(self) -> None:
        keeper = self._keeper
        self.kill()
        if keeper is not None:
            await asyncio.wait((keeper,))

    async def _keep(self) -> None:
        while True:
            number = self._broker.bell.number
            try:
                self._sync()
            except Exception as error:  # noqa: BLE001  the next fetch raises it
                self._trouble = error
            await self._broker.bell.wait(number, self._broker.tick_seconds)

    def _sync(self) -> None:
        """Send a heartbeat, read the state of the group, and react to it."""
        group = self._broker.hear(self)
        me = group.members.get(self._member)
        if self._revoking is not None or self._is_closed:
            return
        if me is None or (group.is_rebalancing and not me.is_ready):
            if self._positions:
                self._revoking = asyncio.get_running_loop().create_task(self._revoke())
            else:
                self._give_up()
        elif not group.is_rebalancing and group.generation != self._generation:
            self._take_over(group, me)

    async def _revoke(self) -> None:
        try:
            await self._tell()
            if not self._is_closed:
                self._give_up()
        except Exception as error:  # noqa: BLE001  the next fetch raises it
            self._trouble = error
        finally:
            # A killed member may have been revived before this runs.
            if self._revoking is asyncio.current_task():
                self._revoking = None

    async def _tell(self) -> None:
        """Wait for the listeners."""
        partitions = self.assignment
        for listener in self._listeners if partitions else ():
            try:
                await listener(partitions)
            except Fenced as error:
                # The partitions were lost before the listener could commit, as it may happen.
                if self._member in self._broker.store.peek(self._group).members:
                    self._trouble = error
            except Exception as error:  # noqa: BLE001  the next fetch raises it
                self._trouble = error

    def _give_up(self) -> None:
        """Give up the partitions; a member that was removed from the group joins it again."""
        self._positions.clear()
        self._paused.clear()
        if self._member in self._broker.store.peek(self._group).members:
            with self._broker.changing(self._group) as group:
                group.give_up(self._member)
        else:
            self._join()

    def _join(self) -> None:
        self._member = self._broker.name_member(self._group)
        with self._broker.changing(self._group) as group:
            now = self._broker.clock.monotonic()
            group.join(self._member, self._topics, now, self._broker.patience)

    def _take_over(self, group: Group, me: GroupMember) -> None:
        self._generation = group.generation
        self._positions = {p: self._position(group, p) for p in sorted(me.owned)}
        self._paused.clear()
        self._broker.bell.ring()

    def _position(self, group: Group, partition: Partition) -> int:
        start, _ = self._broker.store.bounds(partition)
        return group.committed.get(partition, start)

    def _take(self, max_records: int) -> list[Record]:
        """Return the next records; each call starts with another partition, for fairness."""
        if self._is_closed:
            raise Misuse(f"group {self._group}: the subscription is closed")
        me = self._broker.store.peek(self._group).members.get(self._member)
        if me is None or self._revoking is not None:
            return []
        mine = [p for p in self._positions if p in me.owned and p not in self._paused]
        self._turn += 1
        found: list[Record] = []
        for number in range(len(mine)):
            partition = mine[(number + self._turn) % len(mine)]
            position = self._positions[partition]
            start, end = self._broker.store.bounds(partition)
            if not start <= position <= end and found:
                break  # returns the records so far; the next call begins here and raises
            self._broker.store.check_readable(partition, position)
            limit = max_records - len(found)
            records = self._broker.store.read(partition, position, end - 1, limit)
            if records:
                self._positions[partition] = records[-1].at.offset + 1
                found += records
        return found

    def _raise_trouble(self) -> None:
        trouble, self._trouble = self._trouble, None
        if trouble is not None:
            raise trouble


# After this many lost answers in a row the broker counts as unavailable.
APPEND_ATTEMPTS: Final = 5


def partition_of(topic: str, key: bytes, partitions: int) -> Partition:
    """Return the partition of *key*, which is the same in every process and at every time."""
    return Partition(topic, zlib.crc32(key) % partitions)


class MemoryPublisher:
    """A `semel.messaging.receive.broker.Publisher`; idempotent, as Kafka's producers are.

    Its own retries appear in the log once; a message that the caller sends again, twice.
    """

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self._name = uuid.uuid4().hex
        self._sequence = 0
        self._turns: Counter[str] = Counter()
        self._is_closed = False

    async def publish(self, batch: Sequence[Outgoing]) -> Sequence[Exception | None]:
        if self._is_closed:
            raise Misuse("the publisher is closed; nothing was sent")
        await asyncio.sleep(0)
        with self._broker.failures.during(Call.PUBLISH):
            return self._send(batch)

    async def close(self) -> None:
        """Refuse further messages; those of earlier calls are in the log already."""
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
                with self._broker.failures.during(Call.MESSAGE, *key):
                    entries.append(self._entry(message, topics))
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
        """Append, and repeat without an answer: the log recognises what it has already."""
        for attempt in range(1, APPEND_ATTEMPTS + 1):
            try:
                with self._broker.failures.during(Call.APPEND):
                    self._broker.append(entries)
                return
            except Retryable:
                if attempt == APPEND_ATTEMPTS:
                    raise


def size_of(message: Outgoing) -> int:
    """Count the bytes of a message: key, value and headers."""
    headers = sum(len(name.encode()) + len(value) for name, value in message.headers.items())
    return len(message.value or b"") + len(message.key or b"") + headers


class MemoryReader:
    """A `semel.messaging.receive.broker.Reader`."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker

    async def read(self, partition: Partition, first: int, last: int) -> Sequence[Record]:
        """Return the records with offsets from *first* to *last*, both included.

        Raises:
            NeedsOperator: the log begins after *first*.
        """
        await asyncio.sleep(0)
        self._broker.failures.check(Call.READ)
        start, end = self._broker.store.check_readable(partition, first)
        return self._broker.store.read(partition, first, last, end - start)

    async def bounds(self, partition: Partition) -> tuple[int, int]:
        await asyncio.sleep(0)
        self._broker.failures.check(Call.READ)
        return self._broker.store.bounds(partition)


class Call(StrEnum):
    """What can fail."""

    FETCH = "fetch"
    COMMIT = "commit"
    LOOK_UP = "look_up"
    """`Subscription.committed` and `Subscription.end`."""

    PUBLISH = "publish"
    """A whole batch: `Publisher.publish` raises."""

    MESSAGE = "message"
    """One message of a batch: the answer about it is the error."""

    APPEND = "append"
    """The request behind a batch; the idempotent publisher repeats it itself."""

    READ = "read"


class Failing(StrEnum):
    """What happens to the call, and to its answer."""

    REFUSED = "refused"
    """The call has no effect, and the answer says so."""

    LOST_REPLY = "lost_reply"
    """The call has its effect, and the answer is lost."""


@dataclass(slots=True)
class BrokerFailure:
    """Some calls that fail."""

    call: Call | str
    failing: Failing | str = Failing.REFUSED
    error: Exception = field(default_factory=lambda: Retryable("the broker does not answer"))
    """The exception: `Retryable` for an unavailable broker, `Permanent` for a refusal."""

    times: int | None = 1
    """How many calls fail; None: all of them, until `heal`."""

    after: int = 0
    """How many calls succeed first."""

    topic: str | None = None
    """Only messages of this topic; for `Call.MESSAGE`."""

    key: bytes | None = None
    """Only messages with this key; for `Call.MESSAGE`."""

    def __post_init__(self) -> None:
        self.call, self.failing = Call(self.call), Failing(self.failing)

    def strikes(self, call: Call, topic: str | None, key: bytes | None) -> bool:
        """Count a call, and return whether it fails."""
        if (
            call is not self.call
            or self.times == 0
            or self.topic not in (None, topic)
            or self.key not in (None, key)
        ):
            return False
        if self.after:
            self.after -= 1
            return False
        if self.times is not None:
            self.times -= 1
        return True


class Failures:
    """The planned failures; may be shared by threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._planned: list[BrokerFailure] = []

    def plan(self, *failures: BrokerFailure) -> None:
        """Make calls fail from now on."""
        with self._lock:
            self._planned.extend(failures)

    def clear(self) -> None:
        """End all planned failures."""
        with self._lock:
            self._planned.clear()

    def take(
        self, call: Call, topic: str | None = None, key: bytes | None = None
    ) -> BrokerFailure | None:
        """Count a call, and return the failure that it meets."""
        with self._lock:
            return next((f for f in self._planned if f.strikes(call, topic, key)), None)

    def check(self, call: Call) -> None:
        """Raise if a reading call fails in any way: one without an answer changes nothing."""
        if failure := self.take(call):
            raise failure.error

    @contextmanager
    def during(
        self, call: Call, topic: str | None = None, key: bytes | None = None
    ) -> Iterator[None]:
        """Raise before the block if the call is refused, after it if the answer is lost."""
        failure = self.take(call, topic, key)
        if failure and failure.failing is Failing.REFUSED:
            raise failure.error
        yield
        if failure:
            raise failure.error


class Bell:
    """Wakes waiting tasks after every change, on any loop and thread.

    It counts its changes, so that none is missed: read `number`, look for work, and if there
    is none, `wait` with that number.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[asyncio.Future[None]] = set()
        self.number = 0
        """How many changes there were."""

    def ring(self) -> None:
        """Wake every waiting task."""
        with self._lock:
            self.number += 1
            waiting, self._waiting = self._waiting, set()
        for future in waiting:
            loop = future.get_loop()
            if loop is _running_loop():
                _wake(future)
            else:
                # A loop that was closed meanwhile has no task left to wake.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(_wake, future)

    async def wait(self, number: int, seconds: float) -> None:
        """Wait for a change after number *number*, at most *seconds*."""
        future = asyncio.get_running_loop().create_future()
        with self._lock:
            if self.number != number:
                return
            self._waiting.add(future)
        try:
            await asyncio.wait((future,), timeout=seconds)
        finally:
            with self._lock:
                self._waiting.discard(future)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
