"""Notes of another worker, which ran when the message was handled, and may die afterwards.

A partition moves while its owner is at a message: whoever gets it passes the message, and
nobody comes back to it who could take the note of a death back.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from semel.message import Coordinates, Message, Record
from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
from semel.messaging.handle.attempt import handle_message, handle_unreadable
from semel.messaging.handle.claims import ClaimRequest
from semel.messaging.handle.lease import handle_leased
from semel.messaging.handler import Consumer, consumer
from semel.messaging.outcome import DeadLettered, Handled, Outcome
from semel.messaging.receive.crash import handle_record
from semel.messaging.settings import ConsumerSettings
from tests.messaging.deaths import IN_TABLE, POLICY
from tests.messaging.places import InPostgres, InSqlite
from tests.messaging.processes import gone, running
from tests.stores.world import in_world

UNREAD = "unreadable:payments/0/7"


def record(value: bytes = b"{}") -> Record:
    return Record(Coordinates("payments", 0, 7), None, value, {"message-id": b"m1"}, 0.0)


def failing_with(error: Exception | None, policy: ConsumerSettings = POLICY) -> Consumer:
    @consumer("billing", policy=policy)
    async def handle(message: Message, session: Any) -> None:
        if error is not None:
            raise error

    return handle


async def carefully(handle: Consumer, database: Any, given: Record) -> Outcome:
    async def handled(arrival: Any) -> Outcome:
        if isinstance(arrival, Message):
            return await handle_message(handle, database, arrival)
        return await handle_unreadable(handle, database, arrival)

    return await handle_record(handle, database, given, handled)


async def noted_by(database: Any) -> dict[str, str]:
    async with database.begin() as unit:
        found = await unit.members.notes("billing", ["m1", UNREAD])
    return {id: note.writer for id, note in found.items()}


class Anothers:
    @pytest.fixture(autouse=True)
    def _somebody(self) -> None:
        self.somebody = running()
        assert json.loads(self.somebody)

    async def noted(self, world: Any) -> None:
        async with world.database.begin() as unit:
            await unit.members.note("billing", ["m1", UNREAD], self.somebody)

    @in_world
    async def test_of_a_message_that_was_handled_no_note_stays(self, world):
        await self.noted(world)

        await carefully(failing_with(None), world.database, record())

        assert await noted_by(world.database) == {}

    @in_world
    async def test_of_a_message_that_is_a_dead_letter_no_note_stays(self, world):
        await self.noted(world)

        await carefully(failing_with(NonRetryableMessageError("no")), world.database, record())

        assert await noted_by(world.database) == {}

    @in_world
    async def test_of_a_record_that_cannot_be_read_no_note_stays(self, world):
        async with world.database.begin() as unit:
            await unit.members.note("billing", [UNREAD], self.somebody)

        await carefully(failing_with(None), world.database, record(b"\xff"))

        assert await noted_by(world.database) == {}

    @in_world
    async def test_of_a_message_that_was_handled_before_no_note_stays(self, world):
        handle, given = failing_with(None), record()
        async with world.database.begin() as unit:
            await unit.claims.try_claim("billing", ClaimRequest("m1", ""))
        await self.noted(world)

        await carefully(handle, world.database, given)

        assert await noted_by(world.database) == {}

    @in_world
    async def test_of_a_message_that_is_taken_out_of_the_room_no_note_stays(self, world):
        """A worker died that had taken it there, and another delivery made a dead letter of it."""
        later = failing_with(RetryableMessageError("later"), IN_TABLE)
        never = failing_with(NonRetryableMessageError("no"), IN_TABLE)
        delivered = Message("m1", {}, b"{}")
        await handle_message(later, world.database, delivered)
        async with world.database.begin() as unit:
            await unit.members.note("billing", ["m1"], gone())
        await world.age(3600)

        outcome = await handle_message(never, world.database, delivered)

        assert isinstance(outcome, DeadLettered)
        assert await noted_by(world.database) == {}

    @in_world
    async def test_of_a_message_whose_lease_ended_just_then_no_note_stays(self, world):
        """Its worker died, and the lease ran out behind the look whether it may be tried."""
        async with world.database.begin() as unit:
            await unit.claims.lease("billing", ClaimRequest("m1", ""), owner="x", seconds=60)
            await unit.members.note("billing", ["m1"], gone())

        async def handled(arrival: Any) -> Outcome:
            await world.age(61)
            return await handle_leased(handle, world.database, arrival, "y")

        handle = failing_with(None)
        outcome = await handle_record(handle, world.database, record(), handled)

        assert isinstance(outcome, Handled)
        assert await noted_by(world.database) == {}

    @in_world
    async def test_of_a_message_that_comes_back_the_others_note_stays(self, world):
        """Its writer may die of it, and is counted then."""
        await self.noted(world)

        await carefully(failing_with(RetryableMessageError("later")), world.database, record())

        assert await noted_by(world.database) == {"m1": self.somebody}


class TestInSqlite(InSqlite, Anothers):
    pass


@pytest.mark.postgres
class TestInPostgres(InPostgres, Anothers):
    pass
