"""After an unclean stop: one message at a time, its try written first, the killer parked.

A process that dies cannot say which message killed it.  Its row says which
partitions it worked on and how many records it had; whoever gets such a
partition handles that many records alone.  In normal operation this costs one
small transaction per start.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable

from semel.crashpoints import CrashPoint, reach
from semel.lease import Owner
from semel.measures import MEASURES, Metric
from semel.message import Message, Partition
from semel.messaging.claims import ClaimState
from semel.messaging.consumer import Consumer
from semel.messaging.database import Database
from semel.messaging.failing import park_poison
from semel.messaging.failure import Classified, FailureClass
from semel.messaging.members import Member
from semel.messaging.outcome import Nack, Outcome, Skipped, settlement

log = logging.getLogger("semel.messaging")


class Membership:
    """This process's row, and the partitions on which it is careful."""

    def __init__(
        self, consumer: Consumer, database: Database, owner: Owner, in_flight: int, seconds: float
    ) -> None:
        self._consumer = consumer
        self._database = database
        self._owner = owner
        self._in_flight = in_flight
        self._seconds = seconds
        self._entered: frozenset[Partition] | None = None
        self._left: dict[Partition, int] = {}
        self._others: dict[Partition, list[str]] = {}

    async def work_on(self, partitions: frozenset[Partition]) -> None:
        """Write which partitions this process works on, before it handles anything of them.

        Returns at once where nothing changed.
        """
        if partitions == self._entered:
            return
        new = partitions - (self._entered or frozenset())
        await self._enter(partitions)
        for partition in (self._entered or frozenset()) - partitions:
            self._left.pop(partition, None)
        self._entered = partitions
        if new:
            await self._look_for_crashes(new)

    async def renew(self) -> None:
        """Make the row last."""
        if self._entered is not None:
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
            await unit.members.enter(member, self._seconds)
        reach(CrashPoint.MEMBER_ENTER_AFTER, self._consumer.name)

    async def _look_for_crashes(self, partitions: frozenset[Partition]) -> None:
        async with self._database.begin() as unit:
            others = await unit.members.others(
                self._consumer.name, self._owner.instance, partitions
            )
        for other in others:
            for partition in other.partitions & partitions:
                self._left[partition] = max(self._left.get(partition, 0), other.in_flight)
                self._others.setdefault(partition, []).append(other.name)
                log.warning(
                    "unclean stop found: one message at a time",
                    extra={
                        "consumer": self._consumer.name,
                        "partition": str(partition),
                        "records": other.in_flight,
                    },
                )

    def is_careful(self, partition: Partition) -> bool:
        """Tell whether records of the partition are handled alone."""
        return self._left.get(partition, 0) > 0

    async def outlived(self, partition: Partition) -> None:
        """Count a record that was handled alone; the last one clears the other process's row."""
        self._left[partition] -= 1
        if self._left[partition] <= 0:
            await self.cleared(partition)

    async def cleared(self, partition: Partition) -> None:
        """Work on a partition as usual again: nothing that was in flight is left."""
        self._left.pop(partition, None)
        async with self._database.begin() as unit:
            for name in self._others.pop(partition, []):
                await unit.members.release(self._consumer.name, name, partition)

    async def leave(self) -> None:
        """Remove the row: the process ends cleanly."""
        reach(CrashPoint.MEMBER_LEAVE_BEFORE, self._consumer.name)
        async with self._database.begin() as unit:
            await unit.members.leave(self._consumer.name, self._owner.instance)
        self._entered = None


async def handle_alone(
    consumer: Consumer,
    database: Database,
    message: Message,
    handle: Callable[[Message], Awaitable[Outcome]],
) -> Outcome:
    """Handle a message that may kill the process; park it if it did so too often."""
    limit = consumer.settings.poison_attempts
    async with database.begin() as unit:
        row = await unit.claims.look_up(consumer.name, message.id)
        is_done = row is not None and row.state is not ClaimState.FAILED_RETRYABLE
        tries = 0 if is_done else await unit.members.suspect(consumer.name, message.id)
        parked: Outcome | None = None
        if tries > limit:
            reason = f"the process died {limit} times while it handled this message alone"
            failure = Classified(FailureClass.POISON, "CRASHED", reason, "")
            found = await park_poison(unit, consumer, message.tried(limit), failure)
            parked = Skipped() if found is None else found
            await unit.members.acquit(consumer.name, message.id)
    reach(CrashPoint.CAREFUL_ATTEMPT_AFTER, consumer.name)
    if parked is not None:
        topic = message.source.topic if message.source else ""
        MEASURES.count(Metric.POISON, topic, message.type)
        log.error("poison message parked", extra={"consumer": consumer.name, "id": message.id})
        return parked
    outcome = await handle(message)
    if tries and not isinstance(settlement(outcome), Nack):
        async with database.begin() as unit:
            await unit.members.acquit(consumer.name, message.id)
    return outcome
