"""Ids that semel generates itself: no producer can use one, and every record is in one place."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from semel.codec import FromHeader, FromPayload
from semel.errors import Misuse
from semel.memory.broker import MemoryBroker
from semel.message import Coordinates, Message, Record, digest_of
from semel.messaging.classic import IdempotentConsumerBase
from semel.messaging.handle.attempt import handle_message, handle_unreadable
from semel.messaging.handle.batch import consume_many
from semel.messaging.handle.lease import handle_leased
from semel.messaging.handler import Consumer, consumer
from semel.messaging.outcome import Conflicted, DeadLettered
from semel.messaging.receive.inbox import Inbox
from semel.messaging.receive.runner import Runner
from semel.messaging.records import DeadLetterFilter, conflict_id
from semel.messaging.settings import RunnerSettings
from semel.sql.claims import SqlAlchemyProcessedMessageStore, claim_sync
from tests.messaging.worlds import memory_database

RESERVED = ["unreadable:t/0/1", conflict_id("m", digest_of(b"{}"))]


def billing() -> Consumer:
    @consumer("billing", id_from=FromPayload("id"))
    async def handle(message: Message, session: Any) -> None:
        pass

    return handle


def test_a_producers_id_never_replaces_another_records_dead_letter():
    def said(**fields: Any) -> bytes:
        return json.dumps(fields).encode()

    async def scenario() -> None:
        broker, database = MemoryBroker({"t": 1}), memory_database()
        again = said(id="m", n=2)
        values = [
            said(id="unreadable:t/0/1", n=0),
            b"not JSON",
            said(id=conflict_id("m", digest_of(again))),
            said(id="m", n=1),
            again,
            said(id="unreadable:t/0/6"),
            b"not JSON either",
            said(id=""),
        ]
        for value in values:
            broker.put("t", value)
        subscription = await broker.subscribe("billing", ["t"])
        await Runner(
            billing(), subscription, database, RunnerSettings(wait_seconds=0.0)
        ).run_until_idle()

        async with database.begin() as unit:
            letters = await unit.dead_letters.find(DeadLetterFilter(), 99)
            handled = await unit.claims.handled_from("billing", [Coordinates("t", 0, 3)])
        kept = sorted(letter.payload or b"" for letter in letters)
        assert kept == sorted(value for value in values if value != said(id="m", n=1))
        assert len(handled) == 1
        reserved = next(one for one in letters if one.payload == values[0])
        assert reserved.message_id == "unreadable:t/0/0"
        assert "only semel itself uses" in reserved.reason

    asyncio.run(scenario())


def test_other_bytes_at_the_same_coordinates_are_kept_beside_the_first():
    async def scenario() -> None:
        database, at = memory_database(), Coordinates("t", 0, 1)
        reading = billing().reading
        first, second = (reading.read(Record(at, raw)) for raw in (b"broken", b"also broken"))
        outcomes = [
            await handle_unreadable(billing(), database, one)  # type: ignore[arg-type]
            for one in (first, second, first)
        ]

        assert list(map(type, outcomes)) == [DeadLettered, Conflicted, DeadLettered]
        async with database.begin() as unit:
            letters = await unit.dead_letters.find(DeadLetterFilter(), 9)
        assert {letter.payload for letter in letters} == {b"broken", b"also broken"}

    asyncio.run(scenario())


@pytest.mark.parametrize("id", RESERVED)
def test_every_intake_refuses_a_reserved_id(id):
    class Classic(IdempotentConsumerBase[dict[str, Any]]):
        async def handle_event(self, message: dict[str, Any]) -> None:
            pass

    async def scenario() -> None:
        database, message = memory_database(), Message(id, {}, b"{}")

        async def by_class() -> Any:
            async with database.begin() as unit:
                store = SqlAlchemyProcessedMessageStore(unit.session)
                await Classic(store).consume({"event_id": id})

        async def by_store() -> Any:
            async with database.begin() as unit:
                store = SqlAlchemyProcessedMessageStore(unit.session)
                await store.claim(consumer_name="c", event_id=id)

        async def by_sync_claim() -> Any:
            claim_sync(None, consumer="c", message_id=id)

        ways = [
            handle_message(billing(), database, message),
            consume_many(billing(), database, [message]),
            handle_leased(billing(), database, message, "me"),
            Inbox(billing(), database).store(message),
            Inbox(billing(), database).store_and_handle(message),
            by_class(),
            by_store(),
            by_sync_claim(),
        ]
        for way in ways:
            with pytest.raises(Misuse, match="only semel itself uses"):
                await way

    asyncio.run(scenario())


def test_an_id_in_a_header_may_not_be_empty_or_reserved():
    from_header = consumer("c", id_from=FromHeader("id"))(billing().handler)
    for found in (b"", *map(str.encode, RESERVED)):
        read = from_header.reading.read(Record(Coordinates("t", 0, 7), b"{}", None, {"id": found}))
        assert not isinstance(read, Message)
        assert read.id == "unreadable:t/0/7"
