"""The broker contract, third part: what is sent, and what is read outside any group.

The executable contract of a broker: of a subscription, a publisher and a reader.

    fetch     what one member fetches, and when
    sharing   commits, groups, rebalances, fencing
    publish   what is sent, and what is read outside any group

An implementation says how to make the three, and how to do what tests cannot do
by themselves; what it cannot do either, it names in `cannot`:

    class TestMemoryBroker(BrokerContract):
        async def open(self): ...
        async def create_topic(self, topic, partitions): ...
        async def subscribe(self, group, topics): ...
        def make_publisher(self): ...
        def make_reader(self): ...
        async def kill(self, member): ...
"""

from __future__ import annotations

import pytest

from semel.errors import NeedsOperator, Permanent, Retryable
from semel.message import Partition
from semel.messaging.receive.broker import Outgoing
from semel.testing.contracts.broker_fetch import FetchRules
from semel.testing.contracts.broker_sharing import (
    CommitRules,
    FencingRules,
    RevokingRules,
    SharingRules,
)
from semel.testing.contracts.broker_world import (
    BrokerAbility,
    BrokerWorld,
    in_world,
    offsets,
    values,
)


class PublishRules(BrokerWorld):
    """Each message has its answer, and those of a key keep their order whatever fails."""

    @in_world
    async def test_each_message_is_answered_for_itself(self) -> None:
        topic = await self.topic()
        batch = [
            Outgoing(topic, b"a", b"1"),
            Outgoing(topic, self._too_large(), b"2"),
            Outgoing(topic, b"b", b"3"),
        ]

        first, second, third = await self.publisher().publish(batch)

        assert (first, third) == (None, None)
        assert isinstance(second, Permanent)
        assert await self._logged(topic, 2) == ["a", "b"]

    @in_world
    async def test_an_empty_batch_has_no_answers(self) -> None:
        assert list(await self.publisher().publish([])) == []

    @in_world
    async def test_messages_of_a_key_are_in_one_partition_in_their_order(self) -> None:
        topic = await self.topic(4)
        keys = [f"key-{number % 5}" for number in range(60)]
        await self.publish(
            *(Outgoing(topic, f"{n}".encode(), key.encode()) for n, key in enumerate(keys))
        )

        found = await self.take(await self.member(self.group(), topic), 60)

        for key in set(keys):
            of_key = [record for record in found if record.key == key.encode()]
            assert [int(value) for value in values(of_key)] == [
                n for n, k in enumerate(keys) if k == key
            ]
            assert len({record.at.place for record in of_key}) == 1
        assert len({record.at.place for record in found}) > 1

    @in_world
    async def test_behind_a_failure_nothing_of_its_key_is_sent(self) -> None:
        topic = await self.topic()
        publisher = self.publisher()

        answers = await publisher.publish(
            [
                Outgoing(topic, b"a", b"k"),
                Outgoing(topic, self._too_large(), b"k"),
                Outgoing(topic, b"b", b"k"),
                Outgoing(topic, b"c", b"other"),
                Outgoing(topic, b"d", b"k"),
            ]
        )

        assert [answer is None for answer in answers] == [True, False, False, True, False]
        assert await self._logged(topic, 2) == ["a", "c"]
        assert list(await publisher.publish([Outgoing(topic, b"e", b"k")])) == [None]
        assert await self._logged(topic, 3) == ["a", "c", "e"]

    @in_world
    async def test_a_failure_holds_up_neither_its_key_elsewhere_nor_messages_without_one(
        self,
    ) -> None:
        topic, other = await self.topic(), await self.topic()

        answers = await self.publisher().publish(
            [
                Outgoing(topic, self._too_large(), b"k"),
                Outgoing(other, b"a", b"k"),
                Outgoing(topic, self._too_large(), None),
                Outgoing(topic, b"b", None),
            ]
        )

        assert [answer is None for answer in answers] == [False, True, False, True]
        assert await self._logged(topic, 1) == ["b"]
        assert await self._logged(other, 1) == ["a"]

    @in_world
    async def test_a_broker_that_is_away_says_so_and_takes_the_messages_later(self) -> None:
        self.needs(BrokerAbility.BE_AWAY)
        topic = await self.topic()
        publisher = self.publisher()
        batch = [Outgoing(topic, b"a", b"k"), Outgoing(topic, b"b", b"k")]

        async with self.outage():
            try:
                answers = await publisher.publish(batch)
            except Retryable:
                answers = [Retryable("nothing is known")] * 2
        again = await publisher.publish(batch)

        assert all(isinstance(answer, Retryable) for answer in answers)
        assert list(again) == [None, None]
        assert (await self._logged(topic, 2))[-2:] == ["a", "b"]

    def _too_large(self) -> bytes:
        return b"x" * self.too_large_bytes

    async def _logged(self, topic: str, count: int) -> list[str]:
        """Return what is in the log, of which *count* records are waited for."""
        member = await self.member(self.group(), topic)
        found = await self.take(member, count)
        found += await member.fetch(10, self.quiet_seconds)
        return values(found)


class ReadRules(BrokerWorld):
    """A range of a partition can be read again, outside any group and without a position."""

    @in_world
    async def test_a_range_includes_its_first_and_its_last_record(self) -> None:
        topic = await self.topic()
        await self.fill(topic, "a", "b", "c", "d")
        reader = self.make_reader()

        assert values(await reader.read(Partition(topic, 0), 1, 2)) == ["b", "c"]
        assert values(await reader.read(Partition(topic, 0), 2, 2)) == ["c"]

    @in_world
    async def test_a_range_that_goes_beyond_the_end_ends_there(self) -> None:
        topic = await self.topic()
        await self.fill(topic, "a", "b")

        found = await self.make_reader().read(Partition(topic, 0), 1, 9)

        assert values(found) == ["b"]

    @in_world
    async def test_a_range_has_holes_where_the_log_has(self) -> None:
        self.needs(BrokerAbility.LEAVE_HOLES)
        topic = await self.topic()
        place = Partition(topic, 0)
        await self.fill(topic, "a")
        await self.leave_hole(place)
        await self.fill(topic, "b")
        member = await self.member(self.group(), topic)
        first, second = offsets(await self.take(member, 2))

        reader = self.make_reader()

        assert values(await reader.read(place, first, second)) == ["a", "b"]
        assert values(await reader.read(place, first + 1, second - 1)) == []

    @in_world
    async def test_reading_moves_nobodys_position(self) -> None:
        topic = await self.topic()
        await self.fill(topic, "a", "b")
        member = await self.member(self.group(), topic)
        assert values(await self.take(member, 1)) == ["a"]

        for _ in range(2):
            assert values(await self.make_reader().read(Partition(topic, 0), 0, 1)) == ["a", "b"]

        assert values(await self.take(member, 1)) == ["b"]
        assert await member.committed(Partition(topic, 0)) == 0

    @in_world
    async def test_a_range_whose_beginning_is_gone_is_refused(self) -> None:
        self.needs(BrokerAbility.TRIM)
        topic = await self.topic()
        await self.fill(topic, "a", "b", "c")
        await self.trim(Partition(topic, 0), 1)

        with pytest.raises(NeedsOperator):
            await self.make_reader().read(Partition(topic, 0), 0, 2)

    @in_world
    async def test_the_bounds_are_the_first_offset_and_the_next_one(self) -> None:
        topic = await self.topic()
        place = Partition(topic, 0)
        empty = await self.make_reader().bounds(place)
        await self.fill(topic, "a", "b", "c")

        assert empty == (0, 0)
        assert await self.make_reader().bounds(place) == (0, 3)

    @in_world
    async def test_the_bounds_begin_where_the_log_does(self) -> None:
        self.needs(BrokerAbility.TRIM)
        topic = await self.topic()
        await self.fill(topic, "a", "b", "c")
        await self.trim(Partition(topic, 0), 1)

        assert await self.make_reader().bounds(Partition(topic, 0)) == (1, 3)


__all__ = ["BrokerAbility", "BrokerContract", "rules"]


class BrokerContract(
    FetchRules, CommitRules, SharingRules, RevokingRules, FencingRules, PublishRules, ReadRules
):
    """Everything that semel asks of a broker; derive a test class from it."""


def rules(contract: type[BrokerContract] = BrokerContract) -> list[str]:
    """List the contract's tests by name."""
    return [name for name in dir(contract) if name.startswith("test_")]
