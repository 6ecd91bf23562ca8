"""Notes that a database refused to take back: their worker owes them, and they do not stay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

import pytest

from semel.errors import InDoubt, Retryable
from semel.memory.broker import MemoryBroker
from semel.memory.broker_groups import Patience
from semel.message import Message, Partition
from semel.messaging.failed.retries import RetryWorker
from semel.messaging.failure import RetryableMessageError
from semel.messaging.handler import Consumer, consumer
from semel.messaging.receive import crash as notes
from semel.messaging.receive.broker import INBOX
from semel.messaging.receive.inbox import Inbox, InboxWorker
from semel.messaging.receive.runner import Runner
from semel.messaging.records import Member
from semel.messaging.settings import RunnerSettings
from tests.messaging.deaths import IN_TABLE, POLICY, wait
from tests.messaging.places import InSqlite
from tests.messaging.processes import gone, running
from tests.stores.world import in_world

QUICK = RunnerSettings(wait_seconds=0.01, stop_seconds=1.0)


class Falling:
    """A database that loses answers and connections, as one that is stopped and started again."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside
        self.classification = inside.classification
        self.keeps_notes = False
        """Whoever takes a note back finds no connection."""

        self.lost_answers = 0
        """So many transactions that note a try are committed, and nobody hears of it."""

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        async with self.inside.begin() as unit:
            unit.members = seen = _Members(unit.members, self.keeps_notes)
            yield unit
        if seen.has_noted and self.lost_answers:
            self.lost_answers -= 1
            raise InDoubt("the database did not answer")


class _Members:
    def __init__(self, inside: Any, keeps_notes: bool) -> None:
        self._inside = inside
        self._keeps_notes = keeps_notes
        self.has_noted = False

    async def note(self, consumer: str, ids: Collection[str], writer: str) -> Any:
        self.has_noted |= bool(ids)
        return await self._inside.note(consumer, ids, writer)

    async def clear_notes(self, consumer: str, ids: Collection[str], writer: str) -> None:
        if self._keeps_notes:
            raise Retryable("the connection was lost")
        await self._inside.clear_notes(consumer, ids, writer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inside, name)


async def noted(database: Any, *ids: str) -> list[str]:
    async with database.begin() as unit:
        return sorted(await unit.members.notes("billing", ids))


async def until(database: Any, nothing_of: tuple[str, ...]) -> None:
    async with asyncio.timeout(10):
        while await noted(database, *nothing_of):
            await asyncio.sleep(0.005)


async def somebody_died(database: Any, place: Partition) -> None:
    member = Member("billing", "dead", gone(), frozenset({place}), 3)
    async with database.begin() as unit:
        await unit.members.enter(member, 0.0)


class Owed:
    @pytest.fixture(autouse=True)
    def _runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The writers of the notes run on, all the time."""
        me = running()
        monkeypatch.setattr(notes, "this_process", lambda: me)

    @in_world
    async def test_a_record_that_is_a_dead_letter_already_leaves_no_note(self, world):
        """Of its reading: nothing ever comes back by which it could be taken back."""
        falling, service = Falling(world.database), Service(world.database)
        service.send(b"\xff")
        falling.keeps_notes = True
        runner = await service.runner(falling)
        task = asyncio.create_task(runner.run())
        async with asyncio.timeout(10):
            while service.broker.lag("billing", "payments"):
                await asyncio.sleep(0.005)
        left = await noted(world.database, UNREAD)

        falling.keeps_notes = False
        await until(world.database, (UNREAD,))
        runner.stop()
        await asyncio.wait_for(task, 10)

        assert left == [UNREAD], "the database was away when it was cleared"

    @in_world
    async def test_a_runner_that_stops_leaves_no_note_of_what_another_one_handled(self, world):
        falling, service = Falling(world.database), Service(world.database)
        service.send(b"{}")
        falling.lost_answers = 1
        falling.keeps_notes = True
        first = await service.runner(falling)
        task = asyncio.create_task(first.run_until_idle())
        async with asyncio.timeout(10):
            while not first._writer.uncleared:
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        service.broker.kill(first.subscription)
        second = await service.runner(world.database)
        await asyncio.wait_for(second.run_until_idle(), 10)
        left = await noted(world.database, UNREAD, "m0")

        falling.keeps_notes = False
        first.stop()
        await asyncio.wait_for(first.run(), 10)

        assert left == [], "the first may die before it takes them back"
        assert await noted(world.database, UNREAD, "m0") == []

    @in_world
    async def test_a_note_whose_commit_was_not_answered_is_taken_back(self, world):
        for lost in (1, 2):
            falling, service = Falling(world.database), Service(world.database)
            service.send(b"{}")
            falling.lost_answers = lost
            await somebody_died(world.database, Partition("payments", 0))
            runner = await service.runner(falling)
            records = await runner.subscription.fetch(1, 0.1)
            await runner._membership.work_on(runner.subscription.assignment)
            for _ in range(lost):
                with pytest.raises(InDoubt):
                    await runner._carefully(records, {})

            assert await noted(world.database, UNREAD, "m0") == []

    @in_world
    async def test_a_retry_worker_leaves_no_note_of_what_another_one_handled(self, world):
        for ids in (("m1",), ("m2", "m3")):
            falling = Falling(world.database)
            failing = asyncio.Event()
            failing.set()

            @consumer("billing", policy=IN_TABLE)
            async def handle(message: Message, session: Any, down=failing) -> None:
                if down.is_set():
                    raise RetryableMessageError("down")

            await wait(handle, world.database, *ids)
            falling.lost_answers = 1
            falling.keeps_notes = True
            worker = RetryWorker(handle, falling, 60)
            task = asyncio.create_task(worker.run())
            async with asyncio.timeout(10):
                while not worker._writer.uncleared:
                    await asyncio.sleep(0)
            failing.clear()
            other = RetryWorker(handle, world.database, 0.01)
            others_task = asyncio.create_task(other.run())
            async with asyncio.timeout(10):
                while await _waits(world.database):
                    await asyncio.sleep(0.01)
            left = await noted(world.database, *ids)

            falling.keeps_notes = False
            for one in (worker, other):
                one.stop()
            await asyncio.wait_for(asyncio.gather(task, others_task), 10)

            assert left == [], "the first may die before it takes them back"
            assert await noted(world.database, *ids) == []

    @in_world
    async def test_an_inbox_worker_leaves_no_note(self, world):
        falling, ours = Falling(world.database), a_consumer()
        await Inbox(ours, world.database).store(Message("m1", {}, b"{}"))
        await somebody_died(world.database, INBOX)
        falling.lost_answers = 1
        falling.keeps_notes = True
        worker = InboxWorker(ours, falling, poll_seconds=60)
        task = asyncio.create_task(worker.run())
        async with asyncio.timeout(10):
            while worker._runner is None or not worker._runner._writer.uncleared:
                await asyncio.sleep(0)

        falling.keeps_notes = False
        worker.stop()
        await asyncio.wait_for(task, 10)

        assert await noted(world.database, "unreadable:(inbox)/0/1", "m1") == []


UNREAD = "unreadable:payments/0/0"


async def _waits(database: Any) -> bool:
    async with database.begin() as unit:
        return await unit.waiting.seconds_to_next("billing") is not None


def a_consumer() -> Consumer:
    @consumer("billing", policy=POLICY)
    async def handle(message: Message, session: Any) -> None:
        pass

    return handle


class Service:
    """A topic whose last reader left its row behind."""

    def __init__(self, database: Any) -> None:
        self.database = database
        self.broker = MemoryBroker({"payments": 1}, patience=Patience(session_seconds=0.05))

    def send(self, raw: bytes) -> None:
        self.broker.put("payments", raw, headers={"message-id": b"m0"})

    async def runner(self, database: Any) -> Runner:
        await somebody_died(self.database, Partition("payments", 0))
        subscription = await self.broker.subscribe("billing", ["payments"])
        await self.broker.settled("billing")
        return Runner(a_consumer(), subscription, database, QUICK)


class TestOwedInSqlite(InSqlite, Owed):
    pass
