"""The broker contract, second part: what a group shares, and what passes from hand to hand."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest

from semel.errors import Fenced, Retryable
from semel.message import Partition
from semel.testing.contracts.broker_world import (
    BrokerAbility,
    BrokerWorld,
    Pump,
    in_world,
    offsets,
    values,
)


class CommitRules(BrokerWorld):
    """The committed offset is the next one to read, and nothing else decides what comes again."""

    @in_world
    async def test_what_was_not_committed_is_delivered_again(self) -> None:
        topic, group = await self.topic(), self.group()
        await self.fill(topic, "a", "b")
        member = await self.member(group, topic)
        await self.take(member, 2)
        await member.close()

        successor = await self.member(group, topic)

        assert values(await self.take(successor, 2)) == ["a", "b"]

    @in_world
    async def test_a_successor_begins_at_the_committed_offset_wherever_the_position_was(
        self,
    ) -> None:
        topic, group = await self.topic(), self.group()
        place = Partition(topic, 0)
        await self.fill(topic, "a", "b", "c", "d")
        member = await self.member(group, topic)
        found = await self.take(member, 4)
        await member.commit({place: found[2].at.offset})
        assert await member.committed(place) == found[2].at.offset
        await member.close()

        successor = await self.member(group, topic)

        assert values(await self.take(successor, 2)) == ["c", "d"]
        assert await successor.committed(place) == found[2].at.offset

    @in_world
    async def test_a_commit_moves_no_position(self) -> None:
        topic = await self.topic()
        await self.fill(topic, "a", "b", "c")
        member = await self.member(self.group(), topic)
        await self.take(member, 2)

        await member.commit({Partition(topic, 0): 1})

        assert values(await self.take(member, 1)) == ["c"]

    @in_world
    async def test_a_commit_of_one_partition_leaves_the_others(self) -> None:
        topic = await self.topic(2)
        member = await self.alone(self.group(), topic)
        await self.spread(topic, 20)
        await self.take(member, 20)

        await member.commit({Partition(topic, 0): 2})

        assert await member.committed(Partition(topic, 0)) == 2
        assert await member.committed(Partition(topic, 1)) == 0

    @in_world
    async def test_a_commit_may_be_repeated(self) -> None:
        topic = await self.topic()
        await self.fill(topic, "a", "b")
        member = await self.member(self.group(), topic)
        await self.take(member, 2)

        for _ in range(3):
            await member.commit({Partition(topic, 0): 2})

        assert await member.committed(Partition(topic, 0)) == 2

    @in_world
    async def test_groups_do_not_touch_each_other(self) -> None:
        topic = await self.topic()
        await self.fill(topic, "a", "b")
        first = await self.member(self.group(), topic)
        await self.take(first, 2)
        await first.commit({Partition(topic, 0): 2})

        second = await self.member(self.group(), topic)

        assert await second.committed(Partition(topic, 0)) == 0
        assert values(await self.take(second, 2)) == ["a", "b"]
        assert second.group != first.group


class SharingRules(BrokerWorld):
    """Every partition has one owner, and passes to the next from the committed offset."""

    @in_world
    async def test_members_share_the_partitions_and_none_sees_another_ones(self) -> None:
        topic, group = await self.topic(4), self.group()
        pumps = [self.pump(await self.member(group, topic)) for _ in range(2)]
        await self.shared(topic, *pumps)

        sent = await self.spread(topic, 40)
        await self.until(lambda: pumps[0].values | pumps[1].values == sent, "not all came")

        for pump in pumps:
            assert {record.at.place for record in pump.seen} <= pump.member.assignment
            assert len(pump.seen) == len(pump.values)

    @in_world
    async def test_a_new_member_gets_records_from_the_committed_offset_on(self) -> None:
        topic, group = await self.topic(2), self.group()
        first = self.pump(await self.member(group, topic))
        sent = await self.spread(topic, 20)
        await self.until(lambda: first.values == sent, "not all came")
        await first.member.commit({Partition(topic, number): 1 for number in (0, 1)})

        second = self.pump(await self.member(group, topic))
        await self.shared(topic, first, second)

        (moved,) = second.member.assignment
        expected = [r.at.offset for r in first.seen if r.at.place == moved][1:]
        await self.until(lambda: len(second.seen) >= len(expected), "not all came")
        assert offsets(second.seen) == expected

    @in_world
    async def test_a_member_that_leaves_hands_its_partitions_over(self) -> None:
        topic, group = await self.topic(2), self.group()
        first = self.pump(await self.member(group, topic))
        second = self.pump(await self.member(group, topic))
        await self.shared(topic, first, second)

        await first.stop()
        await first.member.close()
        await self.shared(topic, second)
        sent = await self.spread(topic, 10)

        await self.until(lambda: second.values == sent, "not all came")
        assert first.member.assignment == frozenset()

    @in_world
    async def test_a_member_too_many_waits_for_its_turn(self) -> None:
        topic, group = await self.topic(), self.group()
        pumps = [self.pump(await self.member(group, topic)) for _ in range(2)]
        await self.shared(topic, *pumps)
        owner, idle = sorted(pumps, key=lambda pump: not pump.member.assignment)
        await self.fill(topic, "a")
        await self.until(lambda: owner.values == {"a"}, "it did not come")
        assert idle.seen == []

        await owner.stop()
        await owner.member.close()

        await self.until(lambda: idle.values == {"a"}, "it did not come again")

    @in_world
    async def test_a_closed_member_commits_nothing(self) -> None:
        topic, group = await self.topic(), self.group()
        await self.fill(topic, "a")
        member = await self.member(group, topic)
        await self.take(member, 1)
        await member.close()
        await member.close()

        with pytest.raises(Fenced):
            await member.commit({Partition(topic, 0): 1})

        successor = await self.member(group, topic)
        assert await successor.committed(Partition(topic, 0)) == 0

    @in_world
    async def test_members_that_come_and_go_lose_no_record(self) -> None:
        topic, group = await self.topic(3), self.group()
        pumps: list[Pump] = []
        sent: set[str] = set()

        for number in range(6):
            pumps.append(self.pump(await self.member(group, topic)))
            sent |= await self.spread(topic, 20)
            if number % 2:
                leaver = pumps.pop(0)
                await leaver.stop()
                sent -= leaver.values
                await self._commit_what_came(leaver)
                await leaver.member.close()

        await self.until(lambda: sent <= set().union(*(p.values for p in pumps)), "some are lost")

    async def _commit_what_came(self, pump: Pump) -> None:
        """Commit behind the last record of each partition that is still the member's."""
        ends = {record.at.place: record.at.offset + 1 for record in pump.seen}
        mine = {p: end for p, end in ends.items() if p in pump.member.assignment}
        try:
            await pump.member.commit(mine)
        except (Fenced, Retryable):
            return


class RevokingRules(BrokerWorld):
    """The listener comes first: partitions move when it is done, and what it commits counts."""

    @in_world
    async def test_what_the_listener_commits_is_not_delivered_again(self) -> None:
        topic, group = await self.topic(2), self.group()
        first = self.pump(await self.member(group, topic))
        told: list[Partition] = []

        async def commit_everything(partitions: Collection[Partition]) -> None:
            told.extend(partitions)
            ends = {r.at.place: r.at.offset + 1 for r in first.seen if r.at.place in partitions}
            await first.member.commit(ends)

        first.member.on_revoked(commit_everything)
        sent = await self.spread(topic, 20)
        await self.until(lambda: first.values == sent, "not all came")

        second = self.pump(await self.member(group, topic))
        await self.shared(topic, first, second)
        later = await self.spread(topic, 20)
        await self.until(lambda: first.values | second.values == sent | later, "not all came")

        assert second.member.assignment <= set(told)
        assert len(first.seen) + len(second.seen) == 40

    @in_world
    async def test_partitions_stay_while_the_listener_works(self) -> None:
        topic, group = await self.topic(2), self.group()
        first = self.pump(await self.member(group, topic))
        await self.shared(topic, first)
        began, may_end = asyncio.Event(), asyncio.Event()
        revoked: set[Partition] = set()

        async def work(partitions: Collection[Partition]) -> None:
            revoked.update(partitions)
            began.set()
            await may_end.wait()

        first.member.on_revoked(work)
        second = self.pump(await self.member(group, topic))
        await asyncio.wait_for(began.wait(), self.patience_seconds)
        before = len(first.seen)
        await self.spread(topic, 20)
        await asyncio.sleep(self.quiet_seconds)
        moved = second.member.assignment | {record.at.place for record in second.seen}
        delivered = {record.at.place for record in first.seen[before:]}
        may_end.set()

        assert revoked.isdisjoint(moved), "they moved before the listener was done"
        assert revoked.isdisjoint(delivered), "they were delivered on"
        await self.shared(topic, first, second)

    @in_world
    async def test_closing_calls_the_listener_whose_commit_counts(self) -> None:
        topic, group = await self.topic(), self.group()
        await self.fill(topic, "a", "b")
        member = await self.member(group, topic)
        await self.take(member, 2)

        async def commit(partitions: Collection[Partition]) -> None:
            await member.commit(dict.fromkeys(partitions, 1))

        member.on_revoked(commit)
        await member.close()

        successor = await self.member(group, topic)
        assert values(await self.take(successor, 1)) == ["b"]


class FencingRules(BrokerWorld):
    """A member that has lost a partition commits nothing of it, and gets nothing of it."""

    @in_world
    async def test_a_commit_that_names_a_lost_partition_commits_nothing(self) -> None:
        topic, group = await self.topic(2), self.group()
        first = self.pump(await self.member(group, topic))
        await self.spread(topic, 20)
        await self.until(lambda: len(first.seen) == 20, "not all came")
        second = self.pump(await self.member(group, topic))
        await self.shared(topic, first, second)
        (kept,), (lost,) = first.member.assignment, second.member.assignment

        with pytest.raises(Fenced):
            await first.member.commit({kept: 1, lost: 1})

        assert await first.member.committed(kept) == 0
        assert await first.member.committed(lost) == 0
        await first.member.commit({kept: 1})
        assert await second.member.committed(kept) == 1

    @in_world
    async def test_a_dead_members_records_go_to_the_living(self) -> None:
        self.needs(BrokerAbility.KILL)
        topic, group = await self.topic(2), self.group()
        _, living, sent = await self._two_of_whom_one_dies(topic, group)

        await self.shared(topic, living)

        await self.until(lambda: living.values >= sent, "not all came again")

    @in_world
    async def test_a_zombie_commits_nothing(self) -> None:
        self.needs(BrokerAbility.KILL)
        topic, group = await self.topic(2), self.group()
        dead, living, _ = await self._two_of_whom_one_dies(topic, group)
        lost = {record.at.place for record in dead.seen}
        await self.shared(topic, living)

        with pytest.raises(Fenced):
            await dead.member.commit(dict.fromkeys(lost, 5))

        assert [await living.member.committed(partition) for partition in lost] == [0] * len(lost)

    @in_world
    async def test_a_zombie_fetches_nothing_of_what_it_lost(self) -> None:
        self.needs(BrokerAbility.KILL)
        topic, group = await self.topic(2), self.group()
        dead, living, _ = await self._two_of_whom_one_dies(topic, group)
        await self.shared(topic, living)
        sent = await self.spread(topic, 20)
        await self.until(lambda: living.values >= sent, "not all came")

        again = self.pump(dead.member)
        await asyncio.sleep(self.quiet_seconds)

        # It may have joined anew by now, and own partitions again like any other member.
        mine = dead.member.assignment - living.member.assignment
        assert {record.at.place for record in again.seen} <= mine

    async def _two_of_whom_one_dies(self, topic: str, group: str) -> tuple[Pump, Pump, set[str]]:
        dying = self.pump(await self.member(group, topic))
        living = self.pump(await self.member(group, topic))
        await self.shared(topic, dying, living)
        sent = await self.spread(topic, 20)
        await self.until(lambda: dying.values | living.values == sent, "not all came")
        await dying.stop()
        await self.kill(dying.member)
        return dying, living, sent
