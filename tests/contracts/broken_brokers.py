"""Brokers that are broken on purpose, each with the rules that convict it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace

from semel.errors import Fenced, Misuse, Permanent, Retryable
from semel.memory.broker import (
    Bell,
    Call,
    MemoryBroker,
    MemoryPublisher,
    MemoryReader,
    MemorySubscription,
)
from semel.memory.broker_store import BrokerStore
from semel.message import Partition

CONVICTED_BY = defaultdict(list)
"""By broken part: the rules that it breaks."""


def breaks(*rules):
    """Say which rules a broken part breaks."""

    def note(part):
        CONVICTED_BY[part] += [f"test_{rule}" for rule in rules]
        return part

    return note


def broker_with(part):
    """Make the class of a broker with one broken part."""

    class Broken(part if issubclass(part, MemoryBroker) else MemoryBroker):
        async def subscribe(self, group, topics):
            kind = part if issubclass(part, MemorySubscription) else MemorySubscription
            member = kind(self, group, topics)
            self._members.append(member)
            member.enter()
            return member

        def publisher(self):
            return (part if issubclass(part, MemoryPublisher) else MemoryPublisher)(self)

        def reader(self):
            return (part if issubclass(part, MemoryReader) else MemoryReader)(self)

    return Broken


@breaks("every_header_pair_comes_as_it_was_sent")
class LastHeaders(MemorySubscription):
    async def fetch(self, max_records, wait_seconds):
        records = await super().fetch(max_records, wait_seconds)
        return [replace(record, headers=dict(record.headers)) for record in records]


@breaks("records_of_a_partition_come_in_the_order_of_their_offsets")
class NewestFirst(MemorySubscription):
    async def fetch(self, max_records, wait_seconds):
        return (await super().fetch(max_records, wait_seconds))[::-1]


@breaks("a_record_arrives_as_it_was_published")
class ForgetsHeaders(MemorySubscription):
    async def fetch(self, max_records, wait_seconds):
        return [replace(r, headers={}) for r in await super().fetch(max_records, wait_seconds)]


@breaks("a_fetch_returns_no_more_than_it_was_asked_for")
class ReturnsAllThereIs(MemorySubscription):
    def _take(self, max_records):
        return super()._take(1000)


@breaks("a_waiting_fetch_wakes_when_a_record_is_published")
class LooksOnceAndSleeps(MemorySubscription):
    async def fetch(self, max_records, wait_seconds):
        if found := await super().fetch(max_records, 0):
            return found
        await Bell().wait(0, wait_seconds)
        return await super().fetch(max_records, 0)


@breaks("offsets_can_be_asked_for_while_a_fetch_waits")
class OneCallAtATime(MemorySubscription):
    def __init__(self, *parts):
        super().__init__(*parts)
        self._one_call = asyncio.Lock()

    async def fetch(self, max_records, wait_seconds):
        async with self._one_call:
            return await super().fetch(max_records, wait_seconds)

    async def end(self, partition):
        async with self._one_call:
            return await super().end(partition)


@breaks("a_fetch_that_finds_nothing_ends_when_its_time_is_over")
class NeverWaits(MemorySubscription):
    async def fetch(self, max_records, wait_seconds):
        return await super().fetch(max_records, 0)


@breaks("fetching_moves_on_and_commits_nothing", "what_was_not_committed_is_delivered_again")
class CommitsWhatItFetches(MemorySubscription):
    async def fetch(self, max_records, wait_seconds):
        found = await super().fetch(max_records, wait_seconds)
        await self.commit({r.at.place: r.at.offset + 1 for r in found})
        return found


@breaks(
    "a_seek_back_delivers_again_and_a_seek_on_leaves_out",
    "a_seek_of_a_paused_partition_counts_when_it_is_resumed",
)
class ForgetsToSeek(MemorySubscription):
    def seek(self, partition, offset):
        pass


@breaks("a_paused_partition_is_left_out_and_the_others_go_on")
class IgnoresPauses(MemorySubscription):
    def pause(self, partition):
        pass


@breaks("a_seek_under_load_is_followed_by_the_record_it_names")
class DeliversWhatItPrefetched(MemorySubscription):
    """After a seek, the record that was fetched ahead of it comes first."""

    ahead = ()

    def seek(self, partition, offset):
        if self._positions.get(partition, 0) > 1_000:
            self.ahead = tuple(super()._take(1))
        super().seek(partition, offset)

    def _take(self, max_records):
        ahead, self.ahead = self.ahead, ()
        return [*ahead, *super()._take(max_records - len(ahead))]


@breaks("partitions_of_others_can_be_sought_paused_and_resumed_without_effect")
class TakesWhatItSeeks(MemorySubscription):
    def seek(self, partition, offset):
        self._positions[partition] = offset


@breaks("the_end_is_the_offset_that_the_next_record_gets")
class NamesTheLastOffset(MemorySubscription):
    async def end(self, partition):
        return max(await super().end(partition) - 1, 0)


@breaks("holes_between_offsets_are_passed_over")
class StopsAtHoles(MemorySubscription):
    def _take(self, max_records):
        before = dict(self._positions)
        found = super()._take(1)
        if found and found[0].at.offset != before[found[0].at.place]:
            self._positions = before
            return []
        return found


@breaks("a_group_without_commits_starts_at_the_first_record_there_is")
class StartsAtZero(MemorySubscription):
    def _position(self, group, partition):
        return group.committed.get(partition, 0)


@breaks("records_that_are_gone_are_never_passed_over_silently")
class GoesOnWhereTheLogStarts(MemorySubscription):
    def _position(self, group, partition):
        return max(super()._position(group, partition), self._broker.store.bounds(partition)[0])


@breaks("an_outage_delays_records_and_loses_none")
class MovesOnBeforeItAnswers(MemorySubscription):
    async def fetch(self, max_records, wait_seconds):
        if self._broker.failures.take(Call.FETCH):
            self._take(max_records)
            raise Retryable("the answer was lost")
        return await super().fetch(max_records, wait_seconds)


@breaks("a_successor_begins_at_the_committed_offset_wherever_the_position_was")
class CommitsThePosition(MemorySubscription):
    async def commit(self, offsets):
        await super().commit({p: self._positions.get(p, o) for p, o in offsets.items()})


@breaks("a_commit_moves_no_position")
class GoesBackToWhatItCommits(MemorySubscription):
    async def commit(self, offsets):
        await super().commit(offsets)
        self._positions.update(offsets)


@breaks("a_commit_of_one_partition_leaves_the_others")
class CommitsAllPartitions(MemorySubscription):
    async def commit(self, offsets):
        await super().commit({**self._positions, **offsets})


@breaks("a_commit_may_be_repeated")
class TakesRepetitionForAnError(MemorySubscription):
    async def commit(self, offsets):
        if offsets and offsets.items() <= self._broker.committed(self.group).items():
            raise Misuse("committed already")
        await super().commit(offsets)


@breaks("groups_do_not_touch_each_other")
class MixesGroups(MemoryBroker):
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.store = OneGroup()


class OneGroup(BrokerStore):
    def __init__(self):
        super().__init__()
        self.offsets = {}

    def peek(self, name):
        return replace(super().peek(name), committed=dict(self.offsets))

    @contextmanager
    def group(self, name):
        with super().group(name) as group:
            yield group
        self.offsets = group.committed


@breaks("members_share_the_partitions_and_none_sees_another_ones")
class GivesAllToAll(MemorySubscription):
    def _take_over(self, group, me):
        everything = [p for topic in self._topics for p in self._broker.partitions(topic)]
        me.owned = frozenset(everything)
        super()._take_over(group, me)


@breaks("members_share_the_partitions_and_none_sees_another_ones")
class ReadsEverything(MemorySubscription):
    def _take(self, max_records):
        found = super()._take(max_records)
        for number in range(4):
            found += self._broker.store.read(Partition(self._topics[0], number), 0, 1000, 1000)
        return found


@breaks(
    "a_new_member_gets_records_from_the_committed_offset_on",
    "members_that_come_and_go_lose_no_record",
)
class StartsAtTheEnd(MemorySubscription):
    def _position(self, group, partition):
        return self._broker.store.bounds(partition)[1]


@breaks("a_member_that_leaves_hands_its_partitions_over", "a_member_too_many_waits_for_its_turn")
class LeavesWithoutAWord(MemorySubscription):
    async def close(self):
        await self._end_keeper()
        self._positions.clear()


@breaks("a_closed_member_commits_nothing", "a_zombie_commits_nothing")
class CommitsForAnybody(MemorySubscription):
    async def commit(self, offsets):
        with self._broker.store.group(self.group) as group:
            group.committed.update(offsets)


@breaks(
    "what_the_listener_commits_is_not_delivered_again",
    "closing_calls_the_listener_whose_commit_counts",
)
class CallsNoListener(MemorySubscription):
    def on_revoked(self, listener):
        pass


@breaks("partitions_stay_while_the_listener_works")
class GivesUpFirst(MemorySubscription):
    async def _tell(self):
        with self._broker.changing(self.group) as group:
            group.give_up(self.member)
        await super()._tell()


@breaks("a_commit_that_names_a_lost_partition_commits_nothing")
class CommitsItsOwnPart(MemorySubscription):
    async def commit(self, offsets):
        mine = {p: offset for p, offset in offsets.items() if p in self.assignment}
        await super().commit(mine)
        if len(mine) < len(offsets):
            raise Fenced("some of it was lost")


@breaks("a_dead_members_records_go_to_the_living")
class WaitsForTheDead(MemoryBroker):
    def _advance(self, group):
        group.hear(list(group.members), self.clock.monotonic())
        super()._advance(group)


@breaks("a_zombie_fetches_nothing_of_what_it_lost")
class ServesZombies(MemorySubscription):
    def _take(self, max_records):
        if self.is_heard:
            return super()._take(max_records)
        (lost,) = self._positions
        return self._broker.store.read(lost, self._positions[lost], 1000, max_records)


@breaks("each_message_is_answered_for_itself")
class SaysAllWasSent(MemoryPublisher):
    async def publish(self, batch):
        return [None for _ in await super().publish(batch)]


@breaks("an_empty_batch_has_no_answers")
class AnswersNobody(MemoryPublisher):
    async def publish(self, batch):
        return await super().publish(batch) or [None]


@breaks("messages_of_a_key_are_in_one_partition_in_their_order")
class SpreadsKeys(MemoryPublisher):
    def _entry(self, message, topics):
        entry = super()._entry(message, topics)
        number = entry.sequence % topics[message.topic]
        return replace(entry, partition=Partition(message.topic, number))


@breaks("behind_a_failure_nothing_of_its_key_is_sent")
class SendsBehindFailures(MemoryPublisher):
    async def publish(self, batch):
        answers = []
        for message in batch:
            answers += await super().publish([message])
        return answers


@breaks("a_failure_holds_up_neither_its_key_elsewhere_nor_messages_without_one")
class StopsAtTheFirstFailure(MemoryPublisher):
    async def publish(self, batch):
        answers = []
        for message in batch:
            if any(answers):
                answers.append(Retryable("behind a failure"))
            else:
                answers += await super().publish([message])
        return answers


@breaks("a_broker_that_is_away_says_so_and_takes_the_messages_later")
class TakesAnOutageForARefusal(MemoryPublisher):
    async def publish(self, batch):
        try:
            return await super().publish(batch)
        except Retryable:
            return [Permanent("it did not work") for _ in batch]


@breaks("a_range_includes_its_first_and_its_last_record")
class LeavesOutTheLast(MemoryReader):
    async def read(self, partition, first, last):
        return await super().read(partition, first, last - 1)


@breaks("a_range_that_goes_beyond_the_end_ends_there")
class RefusesWhatIsNotThereYet(MemoryReader):
    async def read(self, partition, first, last):
        if last >= self._broker.store.bounds(partition)[1]:
            raise Misuse("not there yet")
        return await super().read(partition, first, last)


@breaks("a_range_has_holes_where_the_log_has")
class CountsRecords(MemoryReader):
    async def read(self, partition, first, last):
        return self._broker.records(partition.topic)[first : last + 1]


@breaks("the_bounds_are_the_first_offset_and_the_next_one")
class EndsAtTheLastRecord(MemoryReader):
    async def bounds(self, partition):
        first, following = await super().bounds(partition)
        return first, max(first, following - 1)


@breaks("the_bounds_begin_where_the_log_does")
class BeginsAtZero(MemoryReader):
    async def bounds(self, partition):
        _, following = await super().bounds(partition)
        return 0, following


@breaks("reading_moves_nobodys_position")
class ReadsAsAMember(MemoryReader):
    async def read(self, partition, first, last):
        for member in self._broker._members:
            member.seek(partition, last + 1)
        return await super().read(partition, first, last)


@breaks("a_range_whose_beginning_is_gone_is_refused")
class ReadsWhatIsLeft(MemoryReader):
    async def read(self, partition, first, last):
        start, _ = self._broker.store.bounds(partition)
        return await super().read(partition, max(first, start), last)
