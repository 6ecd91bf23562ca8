"""After an unclean stop: which records are handled one at a time, and for how long.

A process that dies cannot say which message killed it.  Its row says which
partitions it worked on and how many records it had; whoever gets such a
partition handles that many records alone (`semel.messaging.suspects`).  In
normal operation this costs one small transaction per start.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from semel.crashpoints import CrashPoint, reach
from semel.lease import Owner
from semel.message import Coordinates, Partition
from semel.messaging.broker import Subscription
from semel.messaging.consumer import Consumer
from semel.messaging.database import Database
from semel.messaging.members import Member
from semel.messaging.notes import is_gone

log = logging.getLogger("semel.messaging")


class Membership:
    """This process's row, and the partitions on which it is careful."""

    def __init__(
        self,
        consumer: Consumer,
        subscription: Subscription,
        database: Database,
        owner: Owner,
        in_flight: int,
        seconds: float,
    ) -> None:
        self._consumer = consumer
        self._subscription = subscription
        self._database = database
        self._owner = owner
        self._in_flight = in_flight
        self._seconds = seconds
        self._entered: frozenset[Partition] = frozenset()
        self._suspects: dict[Partition, _Suspects] = {}

    async def work_on(self, partitions: frozenset[Partition]) -> None:
        """Write which partitions this process works on, before it handles anything of them.

        Returns at once where nothing changed.
        """
        if partitions == self._entered:
            return
        before = self._entered
        await self._enter(partitions)
        for partition in before - partitions:
            self._suspects.pop(partition, None)
        await self._look_for_crashes(partitions - before)
        self._entered = partitions

    async def give_up(self, partitions: Collection[Partition]) -> None:
        """Take partitions off the row that nothing is in flight of any more."""
        left = self._entered - frozenset(partitions)
        if left != self._entered:
            await self._enter(left)
            self._entered = left
        for partition in partitions:
            self._suspects.pop(partition, None)

    async def renew(self) -> None:
        """Make the row last."""
        if self._entered:
            await self._enter(self._entered)

    async def _enter(self, partitions: frozenset[Partition]) -> None:
        member = Member(
            self._consumer.name,
            self._owner.instance,
            json.dumps(self._owner.to_json()),
            partitions,
            self._in_flight,
        )
        async with self._database.begin() as unit:
            if partitions:
                await unit.members.enter(member, self._seconds)
                await unit.members.forget_expired(member.consumer)
            else:
                # Nothing can be in flight: a row would only be left behind.
                await unit.members.leave(member.consumer, member.name)
        reach(CrashPoint.MEMBER_ENTER_AFTER, self._consumer.name)

    async def _look_for_crashes(self, partitions: frozenset[Partition]) -> None:
        if not partitions:
            return
        async with self._database.begin() as unit:
            others = await unit.members.others(
                self._consumer.name, self._owner.instance, partitions
            )
        for partition in partitions:
            accused = [other for other in others if partition in other.partitions]
            if accused:
                await self._suspect(partition, accused)

    async def _suspect(self, partition: Partition, others: Sequence[Member]) -> None:
        """Be careful with whatever others may have had of a partition."""
        at_most = max(other.in_flight for other in others)
        start = await self._subscription.committed(partition)
        # What came behind this was never delivered to any of them.
        end = await self._subscription.end(partition)
        self._suspects[partition] = _Suspects(at_most, end, others)
        if start >= end:
            await self._clear(partition)
            return
        log.warning(
            "unclean stop found: one message at a time",
            extra={
                "consumer": self._consumer.name,
                "partition": str(partition),
                "records": min(at_most, end - start),
            },
        )

    async def is_careful(self, at: Coordinates) -> bool:
        """Tell whether a record is handled alone; the first one that is not ends it."""
        suspects = self._suspects.get(at.place)
        if suspects is None:
            return False
        if at.offset >= suspects.end:
            await self._clear(at.place)
            return False
        return True

    async def outlived(self, at: Coordinates) -> None:
        """Count a record that was handled alone; the last one clears the other process's row."""
        suspects = self._suspects.get(at.place)
        if suspects is None:
            return
        suspects.left -= 1
        if suspects.left <= 0 or at.offset + 1 >= suspects.end:
            await self._clear(at.place)

    async def _clear(self, partition: Partition) -> None:
        """Work on a partition as usual again: nothing that was in flight is left."""
        me, name = self._owner.instance, self._consumer.name
        async with self._database.begin() as unit:
            for other in self._suspects[partition].of:
                await unit.members.release(name, other.name, partition)
                elsewhere = await unit.members.others(name, me, other.partitions - {partition})
                named = {member.name for member in elsewhere}
                if other.name not in named and is_gone(other):
                    await unit.members.leave(name, other.name)
        self._suspects.pop(partition, None)

    async def leave(self) -> None:
        """Remove the row: the process ends cleanly."""
        reach(CrashPoint.MEMBER_LEAVE_BEFORE, self._consumer.name)
        async with self._database.begin() as unit:
            await unit.members.leave(self._consumer.name, self._owner.instance)
        self._entered = frozenset()


@dataclass(slots=True)
class _Suspects:
    """What may have killed a process, in one partition."""

    left: int
    """How many records it may have had that were not handled alone yet."""

    end: int
    """Behind the last record that it can have had."""

    of: Sequence[Member]
    """Whose rows name the partition."""
