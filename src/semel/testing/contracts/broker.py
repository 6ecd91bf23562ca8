"""The contract of a broker, executable: of a subscription, a publisher and a reader.

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

import asyncio

import pytest

from semel.errors import NeedsOperator, Permanent, Retryable
from semel.message import Partition, Record, headers_from, pairs_of
from semel.messaging.receive.broker import Outgoing, Subscription
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


class FetchRules(BrokerWorld):
    """What one member fetches, and when."""

    @in_world
    async def test_records_of_a_partition_come_in_the_order_of_their_offsets(self) -> None:
        topic = await self.topic()
        sent = [f"v{number}" for number in range(50)]
        await self.fill(topic, *sent)
        member = await self.member(self.group(), topic)

        found: list[Record] = []
        while len(found) < 50:
            found += await self.take(member, min(7, 50 - len(found)))

        assert values(found) == sent
        assert offsets(found) == sorted(set(offsets(found)))

    @in_world
    async def test_a_record_arrives_as_it_was_published(self) -> None:
        topic = await self.topic()
        await self.publish(
            Outgoing(topic, b"\x00\xff", "schlüssel".encode(), {"id": b"1", "empty": b""}),
            Outgoing(topic, None, b"k"),
            Outgoing(topic, b"", None),
        )

        first, second, third = await self.take(await self.member(self.group(), topic), 3)

        assert (first.value, first.key) == (b"\x00\xff", "schlüssel".encode())
        assert dict(first.headers) == {"id": b"1", "empty": b""}
        assert (second.value, second.key, dict(second.headers)) == (None, b"k", {})
        assert (third.value, third.key) == (b"", None)
        assert first.at.place == Partition(topic, 0)
        assert 1_500_000_000 < first.timestamp < 100_000_000_000

    @in_world
    async def test_every_header_pair_comes_as_it_was_sent(self) -> None:
        """A name may repeat, a value may be any bytes, and null is not empty."""
        topic = await self.topic()
        pairs = (("h", b"\xff"), ("h", None), ("empty", b""), ("h", b"last"))
        await self.publish(Outgoing(topic, b"1", headers=headers_from(pairs)))

        (record,) = await self.take(await self.member(self.group(), topic), 1)

        assert pairs_of(record.headers) == pairs
        assert dict(record.headers) == {"h": b"last", "empty": b""}

    @in_world
    async def test_a_fetch_returns_no_more_than_it_was_asked_for(self) -> None:
        topic = await self.topic(3)
        await self.spread(topic, 30)
        member = await self.member(self.group(), topic)

        sizes: list[int] = []
        while sum(sizes) < 30:
            sizes.append(len(await member.fetch(4, self.patience_seconds)))

        assert max(sizes) <= 4
        assert sum(sizes) == 30

    @in_world
    async def test_a_waiting_fetch_wakes_when_a_record_is_published(self) -> None:
        topic = await self.topic()
        member = await self.alone(self.group(), topic)
        loop = asyncio.get_running_loop()

        waiting = asyncio.create_task(member.fetch(10, self.patience_seconds))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        began = loop.time()
        await self.fill(topic, "a")

        assert values(await waiting) == ["a"]
        assert loop.time() - began < self.patience_seconds / 2

    @in_world
    async def test_a_fetch_that_finds_nothing_ends_when_its_time_is_over(self) -> None:
        topic = await self.topic()
        member = await self.alone(self.group(), topic)
        loop = asyncio.get_running_loop()

        began = loop.time()
        found = await member.fetch(10, self.quiet_seconds)
        took = loop.time() - began

        assert list(found) == []
        assert self.quiet_seconds * 0.8 < took < self.quiet_seconds + self.patience_seconds / 2

    @in_world
    async def test_fetching_moves_on_and_commits_nothing(self) -> None:
        topic = await self.topic()
        await self.fill(topic, "a", "b", "c")
        member = await self.member(self.group(), topic)

        assert values(await self.take(member, 1)) == ["a"]
        assert values(await self.take(member, 2)) == ["b", "c"]

        await self.nothing_comes(member)
        assert await member.committed(Partition(topic, 0)) == 0

    @in_world
    async def test_a_seek_back_delivers_again_and_a_seek_on_leaves_out(self) -> None:
        topic = await self.topic()
        await self.fill(topic, "a", "b", "c", "d")
        member = await self.member(self.group(), topic)
        found = await self.take(member, 3)

        member.seek(Partition(topic, 0), found[1].at.offset)
        assert values(await self.take(member, 3)) == ["b", "c", "d"]

        member.seek(Partition(topic, 0), found[2].at.offset)
        assert values(await self.take(member, 2)) == ["c", "d"]
        await self.nothing_comes(member)

    @in_world
    async def test_a_seek_under_load_is_followed_by_the_record_it_names(self) -> None:
        """Nothing of the old position comes, even if the client has fetched ahead."""
        topic = await self.topic()
        await self.fill(topic, *(f"v{number}" for number in range(3_000)))
        member = await self.member(self.group(), topic)

        due = 0
        for back in (300, 1, 500, 7, 120):
            for record in await self.take(member, 600):
                assert record.at.offset == due
                due += 1
            due -= back
            member.seek(Partition(topic, 0), due)

        assert offsets(await self.take(member, 100)) == list(range(due, due + 100))

    @in_world
    async def test_a_paused_partition_is_left_out_and_the_others_go_on(self) -> None:
        topic = await self.topic(2)
        await self.spread(topic, 20)
        member = await self.member(self.group(), topic)
        (first,) = await self.take(member, 1)
        paused = first.at.place

        member.pause(paused)
        others = await self._drained(member)
        member.resume(paused)
        rest = await self._drained(member)

        assert others
        assert {record.at.place for record in others}.isdisjoint({paused})
        assert {record.at.place for record in rest} == {paused}
        assert len(others) + len(rest) == 19
        assert offsets(rest) == sorted(offsets(rest))
        assert first.at.offset not in offsets(rest)

    @in_world
    async def test_a_seek_of_a_paused_partition_counts_when_it_is_resumed(self) -> None:
        topic = await self.topic()
        await self.fill(topic, "a", "b", "c")
        member = await self.member(self.group(), topic)
        found = await self.take(member, 3)

        member.pause(Partition(topic, 0))
        member.seek(Partition(topic, 0), found[1].at.offset)
        await self.nothing_comes(member)
        member.resume(Partition(topic, 0))

        assert values(await self.take(member, 2)) == ["b", "c"]

    @in_world
    async def test_partitions_of_others_can_be_sought_paused_and_resumed_without_effect(
        self,
    ) -> None:
        topic, foreign = await self.topic(), await self.topic()
        await self.fill(foreign, "x")
        member = await self.alone(self.group(), topic)

        member.seek(Partition(foreign, 0), 0)
        member.pause(Partition(foreign, 0))
        member.resume(Partition(foreign, 0))

        assert member.assignment == {Partition(topic, 0)}
        await self.nothing_comes(member)

    @in_world
    async def test_the_end_is_the_offset_that_the_next_record_gets(self) -> None:
        topic = await self.topic()
        member = await self.alone(self.group(), topic)

        ends = [await member.end(Partition(topic, 0))]
        for value in ("a", "b"):
            await self.fill(topic, value)
            ends.append(await member.end(Partition(topic, 0)))

        assert ends[:2] == offsets(await self.take(member, 2))
        assert ends == sorted(set(ends))

    @in_world
    async def test_offsets_can_be_asked_for_while_a_fetch_waits(self) -> None:
        topic = await self.topic()
        member = await self.alone(self.group(), topic)
        place = Partition(topic, 0)
        before = [await member.end(place), await member.committed(place)]

        waiting = asyncio.create_task(member.fetch(10, self.patience_seconds))
        await asyncio.sleep(0)
        found = [await member.end(place), await member.committed(place)]
        was_waiting = not waiting.done()
        await self.fill(topic, "a")

        assert was_waiting
        assert found == before
        assert values(await waiting) == ["a"]

    @in_world
    async def test_holes_between_offsets_are_passed_over(self) -> None:
        self.needs(BrokerAbility.LEAVE_HOLES)
        topic, group = await self.topic(), self.group()
        place = Partition(topic, 0)
        await self.fill(topic, "a")
        await self.leave_hole(place)
        await self.fill(topic, "b")
        await self.leave_hole(place)

        member = await self.member(group, topic)
        first, second = await self.take(member, 2)
        await member.commit({place: first.at.offset + 1})
        await member.close()

        assert [first.value, second.value] == [b"a", b"b"]
        assert second.at.offset > first.at.offset + 1
        successor = await self.member(group, topic)
        assert values(await self.take(successor, 1)) == ["b"]
        await self.nothing_comes(successor)
        # Whether the hole behind it counts is left to the broker.
        assert await successor.end(place) >= second.at.offset + 1

    @in_world
    async def test_a_group_without_commits_starts_at_the_first_record_there_is(self) -> None:
        self.needs(BrokerAbility.TRIM)
        topic = await self.topic()
        await self.fill(topic, "a", "b", "c")
        await self.trim(Partition(topic, 0), 2)

        member = await self.member(self.group(), topic)

        assert values(await self.take(member, 1)) == ["c"]
        assert await member.committed(Partition(topic, 0)) == 2

    @in_world
    async def test_records_that_are_gone_are_never_passed_over_silently(self) -> None:
        self.needs(BrokerAbility.TRIM)
        topic, group = await self.topic(), self.group()
        await self.fill(topic, "a", "b", "c", "d")
        member = await self.member(group, topic)
        await self.take(member, 1)
        await member.commit({Partition(topic, 0): 1})
        await member.close()
        await self.trim(Partition(topic, 0), 3)

        successor = await self.member(group, topic)

        with pytest.raises(NeedsOperator):
            await self.take(successor, 1)

    @in_world
    async def test_an_outage_delays_records_and_loses_none(self) -> None:
        self.needs(BrokerAbility.BE_AWAY)
        topic = await self.topic()
        await self.fill(topic, "a", "b", "c")
        member = await self.member(self.group(), topic)
        assert values(await self.take(member, 1)) == ["a"]

        async with self.outage():
            try:
                found = list(await member.fetch(10, self.quiet_seconds))
            except Retryable:
                found = []
        while len(found) < 2:
            found += await self.take(member, 2 - len(found))

        assert values(found) == ["b", "c"]

    async def _drained(self, member: Subscription) -> list[Record]:
        """Fetch until nothing comes any more."""
        drained: list[Record] = []
        while found := await member.fetch(10, self.quiet_seconds):
            drained += found
        return drained


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


class BrokerContract(
    FetchRules, CommitRules, SharingRules, RevokingRules, FencingRules, PublishRules, ReadRules
):
    """Everything that semel asks of a broker; derive a test class from it."""
