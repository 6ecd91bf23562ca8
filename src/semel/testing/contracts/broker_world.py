"""What a broker's author supplies to the contract, and the words its tests are written in."""

from __future__ import annotations

import asyncio
import functools
import unittest
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from typing import Any, ClassVar, Final

from semel.errors import Retryable
from semel.message import Partition, Record
from semel.messaging.receive.broker import Outgoing, Publisher, Reader, Subscription
from semel.testing.contracts.contract import Contract

# Long enough for a loaded machine.
DEADLINE_SECONDS: Final = 60.0


class BrokerAbility(StrEnum):
    """What not every test can make its broker do."""

    KILL = "kill"
    """End a member as SIGKILL does."""

    LEAVE_HOLES = "leave_holes"
    """Use up offsets without records, as transactions do."""

    TRIM = "trim"
    """Remove the beginning of a log, as retention does."""

    BE_AWAY = "be_away"
    """Not answer for a while."""


class BrokerWorld(Contract):
    """The hooks to override, and helpers.  A test gets a new instance."""

    cannot: ClassVar[Mapping[str, str]] = {}
    """What the test cannot make its broker do (a `BrokerAbility`), with its reason."""

    patience_seconds: ClassVar[float] = 10.0
    """How long to wait for what must come."""

    quiet_seconds: ClassVar[float] = 0.2
    """How long to wait before saying that nothing comes."""

    too_large_bytes: ClassVar[int] = 2_000_000
    """The size of a message that the broker always refuses."""

    async def open(self) -> None:
        """Be ready: the broker is there, and has nothing of an earlier test."""

    async def shut(self) -> None:
        """Give back what `open` took."""

    async def create_topic(self, topic: str, partitions: int) -> None:
        """Make a topic."""
        raise NotImplementedError

    async def subscribe(self, group: str, topics: Sequence[str]) -> Subscription:
        """Make a new member of *group*, as another process would."""
        raise NotImplementedError

    def make_publisher(self) -> Publisher:
        """Make a publisher."""
        raise NotImplementedError

    def make_reader(self) -> Reader:
        """Make a reader."""
        raise NotImplementedError

    async def kill(self, member: Any) -> None:
        """Let *member* die silently, and its session time out.

        The object stays usable: as the zombie that a stopped process is when it wakes up.
        """
        raise NotImplementedError

    async def leave_hole(self, partition: Partition) -> None:
        """Use up one or more offsets at the end of the log."""
        raise NotImplementedError

    async def trim(self, partition: Partition, up_to: int) -> None:
        """Remove every record before *up_to*."""
        raise NotImplementedError

    def outage(self) -> AbstractAsyncContextManager[None]:
        """Let the broker be away within the block."""
        raise NotImplementedError

    # The words of the tests.

    def needs(self, ability: BrokerAbility) -> None:
        """Skip the test where *ability* is missing."""
        if ability in self.cannot:
            raise unittest.SkipTest(self.cannot[ability])

    async def topic(self, partitions: int = 1) -> str:
        """Make a topic that no other test has."""
        name = f"topic-{uuid.uuid4().hex[:12]}"
        await self.create_topic(name, partitions)
        self.partitions_of[name] = partitions
        return name

    def group(self) -> str:
        """Name a group that no other test has."""
        return f"group-{uuid.uuid4().hex[:12]}"

    async def member(self, group: str, topic: str) -> Subscription:
        """Subscribe; the member is closed when the test ends."""
        member = await self.subscribe(group, [topic])
        self._kept("_members").append(member)
        return member

    async def alone(self, group: str, topic: str) -> Subscription:
        """Subscribe the only member of a group to an empty topic, until it has all of it."""
        member = await self.member(group, topic)
        async with asyncio.timeout(self.patience_seconds):
            while len(member.assignment) < self.partitions_of[topic]:
                assert not await member.fetch(1, 0.02), "a record of an empty topic"
        return member

    def publisher(self) -> Publisher:
        """Make a publisher that is closed when the test ends."""
        publisher = self.make_publisher()
        self._kept("_publishers").append(publisher)
        return publisher

    async def publish(self, *messages: Outgoing) -> None:
        """Publish, which must succeed."""
        answers = await self.publisher().publish(messages)
        assert list(answers) == [None] * len(messages), f"not sent: {answers}"

    async def fill(self, topic: str, *values: str, key: str | None = "k") -> None:
        """Publish values with one key, which must succeed."""
        raw = None if key is None else key.encode()
        await self.publish(*(Outgoing(topic, value.encode(), raw) for value in values))

    async def spread(self, topic: str, count: int) -> set[str]:
        """Publish so many values, each with its key; return them."""
        values = [f"{uuid.uuid4().hex[:8]}-{number}" for number in range(count)]
        await self.publish(*(Outgoing(topic, v.encode(), v.encode()) for v in values))
        return set(values)

    async def take(self, member: Subscription, count: int) -> list[Record]:
        """Fetch until *count* records have come."""
        found: list[Record] = []
        deadline = asyncio.get_running_loop().time() + self.patience_seconds
        while len(found) < count:
            found += await member.fetch(count - len(found), self.quiet_seconds)
            is_in_time = asyncio.get_running_loop().time() < deadline
            assert is_in_time or len(found) == count, f"of {count} records came {found}"
        return found

    async def nothing_comes(self, member: Subscription) -> None:
        """Assert that there is nothing to fetch."""
        found = await member.fetch(10, self.quiet_seconds)
        assert not found, f"came unexpectedly: {found}"

    def pump(self, member: Subscription) -> Pump:
        """Let a member fetch on and on, until the test ends."""
        pump = Pump(member)
        self._kept("_pumps").append(pump)
        return pump

    async def until(self, met: Callable[[], bool], otherwise: str) -> None:
        """Wait until a condition holds."""
        deadline = asyncio.get_running_loop().time() + self.patience_seconds
        while not met():
            assert asyncio.get_running_loop().time() < deadline, otherwise
            await asyncio.sleep(0.01)

    async def shared(self, topic: str, *pumps: Pump) -> None:
        """Wait until the members share all partitions of a topic, each of them in one's hands."""

        def is_shared() -> bool:
            shares = [pump.member.assignment for pump in pumps if pump.member.assignment]
            owned = [partition for share in shares for partition in share]
            return (
                len(shares) == min(len(pumps), partitions)
                and len(owned) == len(set(owned)) == partitions
            )

        partitions = self.partitions_of[topic]
        await self.until(is_shared, f"not shared: {[sorted(p.member.assignment) for p in pumps]}")

    @property
    def partitions_of(self) -> dict[str, int]:
        """How many partitions the topics of this test have."""
        found: dict[str, int] = self.__dict__.setdefault("_partitions", {})
        return found

    async def clean_up(self) -> None:
        """Close everything that the test opened."""
        for pump in self._kept("_pumps"):
            await pump.stop()
        for member in self._kept("_members"):
            await member.close()
        for publisher in self._kept("_publishers"):
            await publisher.close()
        await self.shut()

    def _kept(self, kind: str) -> list[Any]:
        kept: list[Any] = self.__dict__.setdefault(kind, [])
        return kept


class Pump:
    """A member that fetches on and on."""

    def __init__(self, member: Subscription) -> None:
        self.member = member
        self.seen: list[Record] = []
        """Everything that was delivered, in order, repetitions included."""

        self._task = asyncio.create_task(self._run())

    @property
    def values(self) -> set[str]:
        """What was delivered."""
        return {(record.value or b"").decode() for record in self.seen}

    async def stop(self) -> None:
        """Fetch no more; an error that ended the fetching is raised."""
        self._task.cancel()
        await asyncio.wait((self._task,))
        if not self._task.cancelled():
            self._task.result()

    async def _run(self) -> None:
        while True:
            try:
                self.seen += await self.member.fetch(10, 0.05)
            except Retryable:
                await asyncio.sleep(0.01)


def in_world(test: Callable[[Any], Coroutine[Any, Any, None]]) -> Callable[[Any], None]:
    """Run an asynchronous test between `BrokerWorld.open` and `BrokerWorld.shut`."""

    @functools.wraps(test)
    def synchronous(world: BrokerWorld) -> None:
        async def whole() -> None:
            # A test that hangs says so itself instead of being killed.
            async with asyncio.timeout(DEADLINE_SECONDS):
                await world.open()
                try:
                    await test(world)
                finally:
                    await world.clean_up()

        asyncio.run(whole())

    return synchronous


def values(records: Sequence[Record]) -> list[str]:
    """Return the records' values as texts."""
    return [(record.value or b"").decode() for record in records]


def offsets(records: Sequence[Record]) -> list[int]:
    """Return the records' offsets."""
    return [record.at.offset for record in records]
