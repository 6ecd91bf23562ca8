"""A handler of whole batches says which message each outgoing one follows from."""

from __future__ import annotations

from typing import Any

import pytest

from semel.codec import FromHeader
from semel.errors import Misuse
from semel.message import Message
from semel.messaging.handle.attempt import handling
from semel.messaging.handle.batch import consume_many
from semel.messaging.handler import consumer
from semel.messaging.outcome import Handled
from semel.messaging.send.outbox import outgoing_id
from semel.operate.explain import explain_message
from semel.outboxes import Outbox
from tests.messaging.outgoing import pending
from tests.messaging.places import InPostgres, InSqlite
from tests.stores.world import in_world

BATCH = [Message(f"m{n}", {}, b"{}", correlation_id=f"visit-{n}") for n in (1, 2, 3)]
outbox = Outbox()


@consumer("billing", batches=True, id_from=FromHeader("message-id"))
async def invoices(messages: list[Message], session: Any) -> None:
    for message in messages:
        await outbox.add(session, "invoices", {"for": message.id}, cause=message)
        await outbox.add(session, "invoices", {"copy": message.id}, cause=message)
    await outbox.add(session, "invoices", {"sum": len(messages)})


class Causes:
    """What holds on every database."""

    @in_world
    async def test_every_message_has_its_own_children(self, world):
        outcomes = await consume_many(invoices, world.database, BATCH)

        assert outcomes == [Handled()] * 3
        for message, copies in zip(BATCH, (3, 2, 2), strict=True):
            [story] = (await explain_message(world.database, message.id)).stories
            sent = [moment for moment in story.moments if moment.what == "child"]
            assert len(sent) == copies, story

    @in_world
    async def test_ids_causation_and_correlation_come_from_the_cause(self, world):
        await consume_many(invoices, world.database, BATCH)

        *caused, summed = await pending(world)
        expected = [(m.id, n) for m in BATCH for n in (0, 1)]
        assert [e.message_id for e in caused] == [
            outgoing_id("billing", cause, "invoices", n) for cause, n in expected
        ]
        assert [e.headers["causation-id"].decode() for e in caused] == [c for c, _ in expected]
        assert [e.headers["correlation-id"] for e in caused[::2]] == [
            b"visit-1",
            b"visit-2",
            b"visit-3",
        ]
        assert summed.message_id == outgoing_id("billing", "m1", "invoices", 2)

    @in_world
    async def test_one_by_one_the_ids_are_the_same(self, world):
        is_first = True

        @consumer("billing", batches=True, id_from=FromHeader("message-id"))
        async def fails_together(messages: list[Message], session: Any) -> None:
            nonlocal is_first
            for message in messages:
                await outbox.add(session, "invoices", {"for": message.id}, cause=message)
            if is_first:
                is_first = False
                raise ZeroDivisionError

        assert await consume_many(fails_together, world.database, BATCH) == [Handled()] * 3

        assert [e.message_id for e in await pending(world)] == [
            outgoing_id("billing", message.id, "invoices", 0) for message in BATCH
        ]

    @in_world
    async def test_a_message_that_is_not_handled_now_causes_nothing(self, world):
        async with world.database.begin() as unit:
            with handling("billing", BATCH[0]), pytest.raises(Misuse, match="does not handle 'm2'"):
                await outbox.add(unit.session, "invoices", b"", cause=BATCH[1])

        assert await pending(world) == []

    @in_world
    async def test_outside_of_handlers_a_cause_gives_its_headers(self, world):
        async with world.database.begin() as unit:
            await outbox.add(unit.session, "invoices", b"", message_id="i1", cause=BATCH[1])

        [found] = await pending(world)
        assert (found.message_id, found.parent) == ("i1", "")
        assert found.headers == {"correlation-id": b"visit-2", "causation-id": b"m2"}


class TestCausesInSqlite(InSqlite, Causes):
    """In SQLite."""


class TestCausesInPostgres(InPostgres, Causes):
    """In PostgreSQL."""
