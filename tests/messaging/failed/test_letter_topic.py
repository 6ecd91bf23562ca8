"""What a topic of dead letters gets never stands in the way of the dead letters themselves."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from semel.codec import FromHeader, Reading
from semel.errors import Misuse
from semel.memory.broker import MemoryBroker
from semel.message import Coordinates, Record, digest_of, headers_from, pairs_of, text_of
from semel.messaging.failed.deadletters import record_of
from semel.messaging.failure import NonRetryableMessageError
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handler import consumer
from semel.messaging.outcome import Conflicted, DeadLettered
from semel.messaging.receive.inbox import Inbox, InboxWorker
from semel.messaging.receive.runner import Runner
from semel.messaging.records import DeadLetterFilter
from semel.messaging.send.outbox import OutboxEntry
from semel.messaging.send.publish import outgoing_of
from semel.messaging.settings import ConsumerSettings, RunnerSettings
from tests.messaging.outgoing import pending
from tests.messaging.places import InPostgres, InSqlite
from tests.messaging.worlds import memory_database
from tests.stores.deadletters import LETTER
from tests.stores.world import DatabaseContract, in_world

DLQ = "payments.dlq"


@consumer(
    "billing",
    policy=ConsumerSettings(dead_letter_topic=DLQ),
    reading=Reading(FromHeader("message-id")),
)
async def billing(message, session):
    if message.id.startswith("bad"):
        raise NonRetryableMessageError("no such account")


def delivered(message_id, value, *, key="k1", offset=0):
    at = Coordinates("payments", 0, offset)
    record = Record(at, value, key.encode(), {"message-id": message_id.encode()})
    return billing.reading.read(record)


async def handle(world, *messages):
    return [await handle_message(billing, world.database, one) for one in messages]


async def letters(world):
    async with world.database.begin() as unit:
        return await unit.dead_letters.find(DeadLetterFilter(), 100)


class LetterTopic(DatabaseContract):
    @pytest.fixture(autouse=True)
    def _log(self, caplog):
        self.caplog = caplog

    @in_world
    async def test_a_conflict_that_comes_again_under_another_key_stops_nothing(self, world):
        outcomes = await handle(
            world,
            delivered("m1", b"1"),
            delivered("m1", b"2", offset=1),
            delivered("m1", b"2", key="k2", offset=2),
        )

        assert [type(outcome) for outcome in outcomes[1:]] == [Conflicted, Conflicted]
        sent = await pending(world)
        assert [(entry.key, entry.value) for entry in sent] == [("k1", b"2"), ("k2", b"2")]
        assert len({entry.message_id for entry in sent}) == 2

    @in_world
    async def test_a_conflict_that_is_delivered_again_has_one_record(self, world):
        conflict = delivered("m1", b"2", offset=1)

        await handle(world, delivered("m1", b"1"), conflict, conflict)

        assert len(await pending(world)) == 1
        assert len(await letters(world)) == 1

    @in_world
    async def test_a_letter_is_kept_where_its_record_has_the_id_of_another_message(self, world):
        conflict = delivered("m1", b"2", offset=1)
        await handle(world, delivered("m1", b"1"), conflict)
        [record] = await pending(world)
        async with world.database.begin() as unit:
            [letter] = await unit.dead_letters.find(DeadLetterFilter(), 10)
            await unit.dead_letters.remove("billing", letter.message_id)
            mine = await unit.outbox.lead("outbox", "me", 60.0)
            await unit.outbox.delete(mine, [record.place])
            await unit.outbox.add([OutboxEntry(record.message_id, "refunds", b"another")])

        [outcome] = await handle(world, conflict)

        assert isinstance(outcome, Conflicted)
        assert [one.message_id for one in await letters(world)] == [letter.message_id]
        assert [entry.topic for entry in await pending(world)] == ["refunds"]
        [told] = [r for r in self.caplog.records if r.getMessage().startswith("dead letter kept")]
        assert (told.consumer, told.id) == ("billing", letter.message_id)

    @in_world
    async def test_a_tombstone_goes_to_the_topic_as_a_tombstone(self, world):
        outcomes = await handle(
            world, delivered("bad-1", None), delivered("m1", b"1"), delivered("m1", None, offset=1)
        )
        await Inbox(billing, world.database).store(delivered("bad-2", None))
        await InboxWorker(billing, world.database).run_until_empty()

        assert [type(outcomes[0]), type(outcomes[2])] == [DeadLettered, Conflicted]
        assert [entry.value for entry in await pending(world)] == [None, None, None]

    @in_world
    async def test_every_header_pair_goes_to_the_topic_as_it_came(self, world):
        pairs = (("message-id", b"bad-1"), ("h", b"\xff"), ("h", None), ("h", b""))
        record = Record(Coordinates("payments", 0, 0), b"1", b"k1", headers_from(pairs))

        await handle(world, billing.reading.read(record))

        [letter] = await letters(world)
        assert pairs_of(letter.headers) == pairs
        [entry] = await pending(world)
        sent = pairs_of(outgoing_of(entry).headers)
        assert [pair for pair in sent if pair[0] == "h"] == [*pairs[1:]]
        assert [value for name, value in sent if name == "message-id"] == [
            entry.message_id.encode()
        ]

    @in_world
    async def test_an_empty_value_stays_an_empty_value(self, world):
        empty = replace(delivered("m1", b"1"), raw=b"", digest=digest_of(b""))
        await handle(world, delivered("m1", b"1"), empty)

        assert [entry.value for entry in await pending(world)] == [b""]

    @in_world
    async def test_a_key_of_any_bytes_goes_to_the_topic_as_it_came(self, world):
        keys = [b"\xff\x00k", b"base64:/w==", b"", None, "käse".encode()]
        for offset, key in enumerate(keys):
            found = {"message-id": f"bad-{offset}".encode()}
            record = Record(Coordinates("payments", 0, offset), b"1", key, found)
            await handle(world, billing.reading.read(record))

        assert [outgoing_of(entry).key for entry in await pending(world)] == keys
        async with world.database.begin() as unit:
            erased = await unit.outbox.erase(key=text_of(b"\xff\x00k"))
        assert erased == 1

    @in_world
    async def test_a_second_dead_lettering_keeps_where_the_message_came_from_first(self, world):
        await handle(world, delivered("bad-1", b"1", offset=7))
        [entry] = await pending(world)
        first = pairs_of(outgoing_of(entry).headers)
        for offset in (3, 4):
            again = Record(Coordinates(DLQ, 2, offset), b"1", b"k1", headers_from(first))
            read = replace(billing.reading.read(again), id=f"bad-again-{offset}")
            await handle(world, read)
            entry = (await pending(world))[-1]
            first = pairs_of(outgoing_of(entry).headers)

        def said(name):
            return [value for found, value in first if found == f"dead-letter-{name}"]

        assert said("topic") == [b"payments", DLQ.encode()]
        assert said("partition") == [b"0", b"2"]
        assert said("offset") == [b"7", b"4"], "the first, and its own"
        assert said("message-id") == [b"bad-1", b"bad-again-4"]
        assert said("header-message-id")[0] == b"bad-1"


def test_a_consumer_of_its_own_dead_letters_is_refused_by_the_runner():
    async def scenario() -> None:
        broker, database = MemoryBroker({"payments": 1, DLQ: 1}), memory_database()
        broker.put(DLQ, b"1", headers={"message-id": b"bad-1"})
        subscription = await broker.subscribe("billing", ["payments", DLQ])

        with pytest.raises(Misuse, match="the topic of its own dead letters"):
            await Runner(
                billing, subscription, database, RunnerSettings(wait_seconds=0.0)
            ).run_until_idle()

        async with database.begin() as unit:
            assert await unit.dead_letters.find(DeadLetterFilter(), 1) == []
            assert await unit.outbox.read("outbox", 0, 1) == []

    asyncio.run(scenario())


class TestInSqlite(InSqlite, LetterTopic):
    pass


class TestInPostgres(InPostgres, LetterTopic):
    pass


def id_of(letter, topic=DLQ):
    return record_of(letter, topic, "outbox").message_id


@pytest.mark.parametrize(
    "other",
    [
        {"key": "another"},
        {"key": None},
        {"key": "nul\0inside"},
        {"key": "\udcff"},
        {"offset": 4711},
        {"partition": None},
        {"payload": b"another"},
        {"last_failed_at": LETTER.last_failed_at + 1},
        {"message_id": "another"},
        {"consumer": "another"},
    ],
)
def test_another_record_or_another_failure_has_another_id(other):
    assert id_of(replace(LETTER, **other)) != id_of(LETTER)


def test_the_same_failure_has_the_same_id_and_another_topic_another():
    assert id_of(replace(LETTER, attempts=LETTER.attempts + 1)) == id_of(LETTER)
    assert id_of(LETTER, "other.dlq") != id_of(LETTER)
