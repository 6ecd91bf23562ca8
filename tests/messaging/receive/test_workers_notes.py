"""Two workers of one process: each takes back the notes of its own tries, and no other's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from semel.message import Coordinates, Message
from semel.messaging.failed.retries import RetryWorker
from semel.messaging.failure import RetryableMessageError
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handler import consumer
from semel.messaging.receive import crash as notes
from semel.messaging.settings import ConsumerSettings, RetryPolicy
from semel.policy.vocabulary import RetryMode
from tests.messaging.places import InPostgres
from tests.messaging.processes import running
from tests.stores.world import in_world

AT_ONCE = RetryPolicy(
    initial_delay_seconds=0.0, max_delay_seconds=0.0, mode=RetryMode.RETRY_TABLE, jitter=False
)
POLICY = ConsumerSettings(retry=AT_ONCE, held_retry_seconds=0.01)


class Late:
    """A database whose user finds something due, and is slow to begin with it."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside
        self.classification = inside.classification
        self.has_taken, self.goes_on, self.has_tried = (asyncio.Event() for _ in range(3))
        self._begun = 0

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        self._begun += 1
        if self._begun == 2:
            self.has_taken.set()
            await self.goes_on.wait()
        async with self.inside.begin() as unit:
            yield unit
        # It takes and notes, tries, takes its note back, and looks again.
        if self._begun == 4:
            self.has_tried.set()


class TestInPostgres(InPostgres):
    @pytest.fixture(autouse=True)
    def _runs(self, monkeypatch):
        me = running()
        monkeypatch.setattr(notes, "this_process", lambda: me)

    @in_world
    async def test_a_worker_that_came_late_leaves_the_note_of_the_one_that_is_at_it(self, world):
        began, ends = asyncio.Event(), asyncio.Event()

        @consumer("billing", policy=POLICY)
        async def handle(message: Message, session: Any) -> None:
            if message.attempt == 1:
                raise RetryableMessageError("down")
            began.set()
            await ends.wait()

        async def noted() -> list[str]:
            async with world.database.begin() as unit:
                return list(await unit.members.notes("billing", ["m1"]))

        at, headers = Coordinates("payments", 0, 0), {"message-id": b"m1"}
        await handle_message(
            handle, world.database, Message("m1", {}, b"{}", None, "", headers, at)
        )
        late = Late(world.database)
        workers = [RetryWorker(handle, one, 0.05) for one in (late, world.database)]
        async with asyncio.timeout(10):
            tasks = [asyncio.create_task(workers[0].run())]
            await late.has_taken.wait()
            tasks.append(asyncio.create_task(workers[1].run()))
            await began.wait()
            late.goes_on.set()
            await late.has_tried.wait()
            during = await noted()
            ends.set()
            for worker in workers:
                worker.stop()
            await asyncio.gather(*tasks)

        assert during == ["m1"], "the process could die of it now"
        assert await noted() == []
