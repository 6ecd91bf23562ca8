"""Records that few producers send: what is no text, and what has no value."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest

from semel.codec import Codec, FromHeader, FromPayload, JsonCodec, RawCodec, Reading
from semel.errors import Misuse
from semel.memory.broker import MemoryBroker
from semel.message import Coordinates, Message, Record
from semel.messaging.failed.retries import RetryWorker, retry_due
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.claims import ClaimState
from semel.messaging.handler import Consumer, consumer, message_of
from semel.messaging.outcome import (
    Conflicted,
    DeadLettered,
    Handled,
    ParkedAway,
    RetryStored,
    Skipped,
)
from semel.messaging.receive.runner import Runner
from semel.messaging.records import InboxMessage, Waits
from semel.messaging.settings import ConsumerSettings, RetryPolicy, RunnerSettings
from semel.outboxes import Outbox
from semel.policy.vocabulary import RetryMode
from tests.messaging.places import InPostgres, InSqlite
from tests.stores.world import DatabaseContract, DatabaseWorld, in_world

AT_ONCE = RetryPolicy(
    max_attempts=3, initial_delay_seconds=0, max_delay_seconds=0, mode=RetryMode.RETRY_TABLE
)
SETTINGS = ConsumerSettings(holds_keys=True, retry=AT_ONCE)
BY_PAYLOAD = Reading(FromHeader("id"), key_from=FromPayload("k"))


def record(
    value: bytes | None, message_id: bytes, offset: int = 0, key: bytes | None = None
) -> Record:
    return Record(Coordinates("t", 0, offset), value, key, {"id": message_id})


class Service:
    """A handler that fails as often as it is told, and writes down what it got."""

    def __init__(self, reading: Reading, settings: ConsumerSettings = SETTINGS) -> None:
        self.failures = 0
        self.got: list[Message] = []

        @consumer("c", reading=reading, policy=settings)
        async def handle(message: Message, session: Any) -> None:
            if self.failures:
                self.failures -= 1
                raise RuntimeError("not yet")
            self.got.append(message)

        self.consumer: Consumer = handle

    def read(self, given: Record) -> Message:
        found = self.consumer.reading.read(given)
        assert isinstance(found, Message), found
        return found


def raw_reading(codec: Codec | None = None) -> Reading:
    return Reading(FromHeader("id"), codec=codec or RawCodec())


class StrangeRecords(DatabaseContract):
    @in_world
    async def test_ids_that_differ_in_their_bytes_are_different_messages(
        self, world: DatabaseWorld
    ) -> None:
        service = Service(raw_reading())
        ids = [b"\xff", b"\\xff", b"\\udcff", b"\xed\xb3\xbf", b"\xff\xff"]

        outcomes = [
            await handle_message(
                service.consumer, world.database, service.read(record(b"same", one))
            )
            for one in ids
        ]
        again = await handle_message(
            service.consumer, world.database, service.read(record(b"same", b"\xff"))
        )

        assert [type(outcome) for outcome in outcomes] == [Handled] * len(ids)
        assert isinstance(again, Skipped)

    @in_world
    async def test_a_key_that_is_no_text_waits_holds_its_key_and_is_retried(
        self, world: DatabaseWorld
    ) -> None:
        service = Service(BY_PAYLOAD)
        service.failures = 1
        first, second = (
            service.read(record(b'{"k":"\\ud800"}', name, number))
            for number, name in enumerate((b"m1", b"m2"))
        )

        stored = await handle_message(service.consumer, world.database, first)
        behind = await handle_message(service.consumer, world.database, second)
        done = [*await retry_due(service.consumer, world.database)]
        done += await retry_due(service.consumer, world.database)

        assert (type(stored), type(behind)) == (RetryStored, ParkedAway)
        assert [message_id for message_id, _ in done] == ["m1", "m2"]
        assert [(message.id, message.key) for message in service.got] == [
            ("m1", "\ud800"),
            ("m2", "\ud800"),
        ]

    @in_world
    async def test_a_record_key_of_any_bytes_comes_out_of_the_room_as_it_came(
        self, world: DatabaseWorld
    ) -> None:
        service = Service(raw_reading())
        service.failures = 1
        message = service.read(record(b"x", b"m1", key=b"\xff\x00k"))

        await handle_message(service.consumer, world.database, message)
        await retry_due(service.consumer, world.database)

        assert [got.key for got in service.got] == [message.key]

    @in_world
    async def test_a_time_that_no_clock_shows_keeps_no_message_from_its_end(
        self, world: DatabaseWorld
    ) -> None:
        """A producer gave nanoseconds for milliseconds, say."""
        service = Service(raw_reading())
        once = Service(raw_reading(), ConsumerSettings(retry=RetryPolicy(max_attempts=1)))
        for number, strange in enumerate((1.7e15, -1.7e15, 1e300, math.inf, -math.inf, math.nan)):
            service.failures = once.failures = 1
            waits, dies = (
                replace(record(b"x", b"%s%d" % (name, number)), timestamp=strange)
                for name in (b"waits", b"dies")
            )

            stored = await handle_message(service.consumer, world.database, service.read(waits))
            buried = await handle_message(once.consumer, world.database, once.read(dies))
            ((_, handled),) = await retry_due(service.consumer, world.database)

            assert (type(stored), type(buried)) == (RetryStored, DeadLettered)
            assert isinstance(handled, Handled)

    @in_world
    async def test_a_strange_key_does_not_end_the_runner(self, world: DatabaseWorld) -> None:
        broker = MemoryBroker({"t": 1})
        broker.put("t", b'{"k":"\\ud800"}', headers={"id": b"bad"})
        broker.put("t", b'{"k":"ok"}', headers={"id": b"good"})
        service = Service(BY_PAYLOAD)
        service.failures = 1
        subscription = await broker.subscribe("g", ["t"])
        await broker.settled("g")
        runner = Runner(
            service.consumer, subscription, world.database, RunnerSettings(wait_seconds=0.02)
        )

        running = asyncio.create_task(runner.run())
        async with asyncio.timeout(20):
            while len(service.got) < 2:
                assert not running.done(), running.exception()
                await asyncio.sleep(0.01)
            runner.stop()
            await running

        assert sorted(message.id for message in service.got) == ["bad", "good"]

    @in_world
    async def test_what_nobody_expected_parks_its_message_and_no_other(
        self, world: DatabaseWorld
    ) -> None:
        service = Service(raw_reading(), ConsumerSettings(retry=AT_ONCE))
        service.failures = 3
        for number in range(3):
            message = service.read(record(b"x", b"m%d" % number, number))
            await handle_message(service.consumer, world.database, message)
        broken = Service(_broken_reading("m1"), ConsumerSettings(retry=AT_ONCE))

        done = dict(await retry_due(broken.consumer, world.database))

        assert [message.id for message in broken.got] == ["m0", "m2"]
        assert isinstance(done["m1"], ParkedAway)
        async with world.database.begin() as unit:
            waiting = await unit.waiting.get("c", "m1")
            claim = await unit.claims.look_up("c", "m1")
        assert waiting is not None
        assert claim is not None
        assert (waiting.waits, claim.state) == (Waits.PARKED, ClaimState.PARKED)
        assert "no such schema registry" in waiting.reason
        assert await retry_due(broken.consumer, world.database) == []

    @in_world
    async def test_the_worker_goes_on_behind_what_nobody_expected(
        self, world: DatabaseWorld
    ) -> None:
        service = Service(raw_reading(), ConsumerSettings(retry=AT_ONCE))
        service.failures = 2
        for number in range(2):
            message = service.read(record(b"x", b"m%d" % number, number))
            await handle_message(service.consumer, world.database, message)
        broken = Service(_broken_reading("m0"), ConsumerSettings(retry=AT_ONCE))
        worker = RetryWorker(broken.consumer, world.database, poll_seconds=0.01)

        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(20):
            while not broken.got:
                assert not running.done(), running.exception()
                await asyncio.sleep(0.01)
            worker.stop()
            await running

        assert [message.id for message in broken.got] == ["m1"]

    @in_world
    async def test_a_tombstone_reaches_the_handler_at_once_and_out_of_the_room(
        self, world: DatabaseWorld
    ) -> None:
        for codec in (JsonCodec(), RawCodec()):
            service = Service(raw_reading(codec))
            names = [f"{codec.name}-{number}".encode() for number in range(2)]
            at_once, later = (service.read(record(None, name, key=b"k")) for name in names)

            await handle_message(service.consumer, world.database, at_once)
            service.failures = 1
            await handle_message(service.consumer, world.database, later)
            await retry_due(service.consumer, world.database)

            assert [message.payload for message in service.got] == [None, None]
            assert [message.digest for message in service.got] == [at_once.digest] * 2

    @in_world
    async def test_a_tombstone_is_not_the_message_of_its_id_with_an_empty_value(
        self, world: DatabaseWorld
    ) -> None:
        service = Service(raw_reading())

        first, again, other = [
            await handle_message(
                service.consumer, world.database, service.read(record(value, b"m1"))
            )
            for value in (None, None, b"")
        ]

        assert (type(first), type(again), type(other)) == (Handled, Skipped, Conflicted)

    @in_world
    async def test_a_dead_letter_of_a_tombstone_is_read_as_one(self, world: DatabaseWorld) -> None:
        settings = ConsumerSettings(retry=RetryPolicy(max_attempts=1))
        service = Service(raw_reading(), settings)
        service.failures = 1
        await handle_message(service.consumer, world.database, service.read(record(None, b"m1")))

        async with world.database.begin() as unit:
            letter = await unit.dead_letters.get("c", "m1")

        assert letter is not None
        found = message_of(service.consumer, letter)
        assert isinstance(found, Message)
        assert found.payload is None

    @in_world
    async def test_a_tombstone_in_the_inbox_is_read_as_one(self, world: DatabaseWorld) -> None:
        service = Service(raw_reading())
        message = service.read(record(None, b"m1"))

        async with world.database.begin() as unit:
            await unit.inbox.store(InboxMessage.of("c", message))
        async with world.database.begin() as unit:
            stored = await unit.inbox.get("c", "m1")

        assert stored is not None
        found = message_of(service.consumer, stored)
        assert isinstance(found, Message)
        assert found.payload is None

    @in_world
    async def test_a_message_whose_id_is_no_text_can_send_messages(
        self, world: DatabaseWorld
    ) -> None:
        outbox = Outbox()

        @consumer("c", reading=raw_reading())
        async def handle(message: Message, session: Any) -> None:
            await outbox.add(session, "out", b"x", key="k")

        message = handle.reading.read(record(b"x", b"\xff", key=b"\xfe"))
        assert isinstance(message, Message)
        outcome = await handle_message(handle, world.database, message)

        assert isinstance(outcome, Handled), outcome


def _broken_reading(message_id: str) -> Reading:
    class Broken(RawCodec):
        def decode(self, raw: bytes, headers: Any) -> Any:
            if headers["id"] == message_id.encode():
                raise Misuse("no such schema registry")
            return raw

    return Reading(FromHeader("id"), codec=Broken())


class TestInSqlite(InSqlite, StrangeRecords):
    pass


@pytest.mark.postgres
class TestInPostgres(InPostgres, StrangeRecords):
    pass
