"""The same plan through an inbox: stored first, handled by a worker, and judged the same way."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import count, product

from semel.codec import JsonCodec
from semel.crashpoints import CrashPoint
from semel.lease import Owner
from semel.message import Coordinates, Message
from semel.messaging.failed.retries import retry_due
from semel.messaging.receive.inbox import Inbox, InboxWorker
from semel.messaging.records import DeadLetterFilter, WaitingFilter
from semel.testing.crash import crash_at
from tests.messaging.jury import EFFECTS, LAST, NAME, PLAN, TOPIC, Invariant, judge_effects
from tests.messaging.jury_world import MOST_PASSES, WAYS, World
from tests.messaging.worlds import close_all

_owners = count(1)
WINDOWS = (
    CrashPoint.HANDLE_AFTER,
    CrashPoint.MESSAGE_COMMIT_BEFORE,
    CrashPoint.MESSAGE_COMMIT_AFTER,
    CrashPoint.FAILURE_AFTER,
    CrashPoint.SETTLE_BEFORE,
    CrashPoint.SETTLE_AFTER,
)


class InboxWorld(World):
    """A service that stores what it is delivered, and acknowledges then."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.delivered = [
            Message(
                record.id,
                JsonCodec().decode(record.value, {}),
                record.value,
                record.key,
                source=Coordinates(TOPIC, 0, offset),
            )
            for offset, record in enumerate(PLAN)
            if record.id
        ]
        self.acknowledged = 0

    async def live(self, death: AbstractContextManager[None]) -> None:
        with death:
            await self._insist(self._store)
            await self._insist(self._work)

    async def _store(self) -> None:
        inbox = Inbox(self.consumer, self.database)
        while self.acknowledged < len(self.delivered):
            await inbox.store(self.delivered[self.acknowledged])
            self.acknowledged += 1

    async def _work(self) -> None:
        owner = replace(Owner.here(), started=f"made up {next(_owners)}")
        worker = InboxWorker(
            self.consumer, self.database, batch=4, poll_seconds=0.0, clock=self.clock
        )
        runner = worker._new_runner(owner)
        for _ in range(MOST_PASSES):
            runner._settling.resume_due()
            worked = await runner._pass()
            retried = await retry_due(worker.consumer, self.database)
            if not worked and not retried and await self._is_over():
                await runner._membership.leave()
                break
            self.clock.advance(1.0)
        else:
            self.convict(Invariant.BOUNDED, "messages are pending without end")

    async def _is_over(self) -> bool:
        async with self.database.begin() as unit:
            due = await unit.waiting.seconds_to_next(NAME)
            return due is None and not await unit.inbox.pending(NAME)


async def judge_inbox(world: InboxWorld) -> None:
    """Compare what is there with the plan."""
    judge_effects(world)
    async with world.database.begin() as unit:
        for message_id in {one.id for one in world.delivered}:
            row = await unit.inbox.get(NAME, message_id)
            is_handled = message_id != world.kills and any(
                message_id in ids for ids in EFFECTS.values()
            )
            if row is None or (row.processed_at is not None) != is_handled:
                world.convict(Invariant.FINAL, f"{message_id} is {row} and handled: {is_handled}")
        letters = await unit.dead_letters.find(DeadLetterFilter(NAME), 100)
        waiting = await unit.waiting.find(WaitingFilter(NAME), 100)
        notes = await unit.members.notes(NAME, [one.id for one in world.delivered])
        members = await unit.members.running(NAME)
    buried = Counter(letter.error_code for letter in letters)
    due = Counter(["REJECTED", "DEPENDENCY_UNAVAILABLE", "PAYLOAD_CONFLICT"])
    parked = [(one.message_id, one.error_code) for one in waiting]
    if parked != ([(world.kills, "CRASHED")] if world.kills else []):
        world.convict(Invariant.FINAL, f"{parked} wait for a person")
    if buried != due:
        world.convict(Invariant.FINAL, f"dead letters {dict(buried)} instead of {dict(due)}")
    if notes or members:
        world.convict(Invariant.NOTHING_LEFT, f"{[*notes]} are suspected, {members} run")


def inbox_histories() -> Iterator[tuple[InboxWorld, AbstractContextManager[None]]]:
    """Make every history, the undisturbed one first."""
    way = WAYS["one by one"]
    yield InboxWorld(way, "inbox, undisturbed"), nullcontext()
    for point, time in product(WINDOWS, (1, 3, 11)):
        yield InboxWorld(way, f"inbox, a death at {point}#{time}"), crash_at(point, None, time)
    yield InboxWorld(way, "inbox, a message that kills", kills=LAST), nullcontext()


def walk_inbox() -> int:
    """Live through every history and judge it; return how many there are.

    Raises:
        Violation: the first one that breaks an invariant.
    """

    async def whole(world: InboxWorld, death: AbstractContextManager[None]) -> None:
        try:
            await world.live(death)
            await judge_inbox(world)
        finally:
            await close_all()

    return sum(asyncio.run(whole(*history)) or 1 for history in inbox_histories())
