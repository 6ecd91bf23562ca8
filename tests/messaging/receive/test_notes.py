"""Notes of tries: whose may be taken back when a message is over."""

from __future__ import annotations

import asyncio

import pytest

from semel.messaging.receive import crash as notes
from tests.messaging.processes import gone, running
from tests.messaging.worlds import memory_database


@pytest.mark.parametrize(
    ("writer", "is_left"),
    [(lambda: notes.this_process(), False), (gone, False), (running, True)],
    ids=["one's own", "of a process that is gone", "of one that runs"],
)
def test_the_note_of_a_message_that_is_over_goes_unless_its_writer_may_be_at_it(writer, is_left):
    async def scenario() -> None:
        database = memory_database()
        async with database.begin() as unit:
            await unit.members.note("billing", ["m1"], writer())

            await notes.clear_note_left_behind(unit, "billing", "m1")

            assert bool(await unit.members.notes("billing", ["m1"])) is is_left

    asyncio.run(scenario())
