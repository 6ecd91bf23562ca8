"""The retry topic on a real broker and PostgreSQL: a failed message comes back and counts once."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import uuid

import pytest
from sqlalchemy import text

from semel import RetryableMessageError, Runner, SqlDatabase, consumer
from semel.kafka.client import kafka
from semel.message import Headers, Partition, pairs_of
from semel.messaging import (
    ConsumerSettings,
    FromPayload,
    KafkaBroker,
    Mode,
    Outgoing,
    Relay,
    RetryMode,
    RetryPolicy,
    RunnerSettings,
)
from semel.operate.completeness import Standing, audit_completeness
from semel.testing.services import Child
from tests.kafka.kill_scene import shorten_sessions

pytestmark = pytest.mark.kafka

PAIRS = (
    ("trace", b"one"),
    ("trace", b"two"),
    ("null", None),
    ("empty", b""),
    ("message-id", b"the producer's"),
    ("semel-retry-due", b"not ours"),
)


class World:
    """A topic, its retry topic, a database, and what the handler saw."""

    def __init__(self, server, url, partitions=1, **settings):
        self.broker = KafkaBroker(server.bootstrap)
        self.topic = f"payments-{uuid.uuid4().hex[:8]}"
        self.database = SqlDatabase(url)
        self.seen = []
        retry = {"initial_delay_seconds": 0.3, "max_delay_seconds": 0.3, "jitter": False}
        retry |= settings.pop("retry", {})
        policy = ConsumerSettings(
            retry=RetryPolicy(mode=RetryMode.RETRY_TOPIC, **retry), **settings
        )

        @consumer("billing", id_from=FromPayload("id"), policy=policy)
        async def billing(message, session):
            self.seen.append((message, time.time()))
            if message.attempt <= message.payload.get("fails", 0):
                raise RetryableMessageError("the bank does not answer", "DEPENDENCY_UNAVAILABLE")
            await session.execute(text("INSERT INTO paid VALUES (:id)"), {"id": message.id})

        self.consumer = billing
        self.retry = billing.retry_topic(self.topic)
        for name in (self.topic, self.retry):
            server.create_topic(name, partitions)

    async def send(self, *payloads, headers=None, key=b"k"):
        publisher = self.broker.publisher()
        sent = [
            Outgoing(self.topic, json.dumps(payload).encode(), key, headers or {})
            for payload in payloads
        ]
        assert list(await publisher.publish(sent)) == [None] * len(sent)
        await publisher.close()

    async def __aenter__(self):
        await self.database.create_tables()
        async with self.database.engine.begin() as connection:
            await connection.execute(text("CREATE TABLE paid (id text)"))
        return self

    async def __aexit__(self, *_):
        await self.database.close()

    async def run_until(self, holds, **settings):
        """Run the consumer and the relay until *holds*, then stop both."""
        topics = self.consumer.topics(self.topic)
        subscription = await self.broker.subscribe(self.topic, topics)
        quick = RunnerSettings(wait_seconds=0.05, **settings)
        runner = Runner(self.consumer, subscription, self.database, quick)
        publisher = self.broker.publisher()
        relay = Relay(self.database, publisher)
        tasks = [asyncio.create_task(runner.run()), asyncio.create_task(relay.run())]
        try:
            async with asyncio.timeout(60):
                while not await holds():
                    for task in tasks:
                        assert not task.done(), task.result()
                    await asyncio.sleep(0.05)
        finally:
            runner.stop()
            relay.stop()
            await asyncio.gather(*tasks)
            await publisher.close()

    async def paid(self):
        async with self.database.begin() as unit:
            rows = await unit.session.execute(text("SELECT id FROM paid"))
            return sorted(rows.scalars())

    def has_paid(self, *ids):
        async def holds():
            return await self.paid() == sorted(ids)

        return holds

    async def records(self, topic, number=0):
        reader, place = self.broker.reader(), Partition(topic, number)
        first, end = await reader.bounds(place)
        return await reader.read(place, first, end - 1)

    async def committed(self, topic):
        settings = {"bootstrap.servers": self.broker.bootstrap, "group.id": self.topic}

        def ask():
            client = kafka.Consumer(settings)
            (found,) = client.committed([kafka.TopicPartition(topic, 0)], timeout=10)
            client.close()
            return found.offset

        return await asyncio.to_thread(ask)

    async def letter(self, message_id):
        async with self.database.begin() as unit:
            return await unit.dead_letters.get("billing", message_id)


@pytest.mark.parametrize("mode", [Mode.TRANSACTIONAL, Mode.BATCHED])
def test_a_transient_failure_travels_through_the_topic_and_is_handled_once(
    kafka_server, postgres_url, mode
):
    async def scenario():
        async with World(kafka_server, postgres_url) as world:
            await world.send({"id": "p1", "fails": 2}, headers=Headers(PAIRS))
            await world.send({"id": "p2"}, key=b"other")
            await world.run_until(world.has_paid("p1", "p2"), mode=mode)

            tries = [(m, at) for m, at in world.seen if m.id == "p1"]
            assert [m.attempt for m, _ in tries] == [1, 2, 3]
            for message, _ in tries:
                assert pairs_of(message.headers) == PAIRS
                assert message.source == tries[0][0].source
                assert (message.key, message.raw) == ("k", tries[0][0].raw)
            first, second = await world.records(world.retry)
            said = first.headers
            assert said["semel-retry-topic"] == world.topic.encode()
            assert (said["semel-retry-partition"], said["semel-retry-offset"]) == (b"0", b"0")
            assert said["semel-retry-message-id"] == b"p1"
            assert said["semel-retry-reason"] == b"the bank does not answer"
            assert [r.headers["semel-retry-attempt"] for r in (first, second)] == [b"1", b"2"]
            for record, (_, at) in zip((first, second), tries[1:], strict=True):
                assert int(record.headers["semel-retry-due"]) / 1_000 <= at

            async with world.database.begin() as unit:
                assert await unit.waiting.get("billing", "p1") is None
            audits = await audit_completeness(
                world.database, "billing", reader=world.broker.reader()
            )
            counts = {
                audit.partition.topic: {found: n for found, n in audit.counts.items() if n}
                for audit in audits
            }
            assert not any(audit.lost or audit.unknown for audit in audits)
            assert counts[world.topic] == {Standing.HANDLED: 2}
            assert counts[world.retry] == {Standing.HANDLED: 1, Standing.REFUSED: 1}

    asyncio.run(scenario())


def test_a_record_that_is_not_due_holds_its_partition_while_the_others_go_on(
    kafka_server, postgres_url
):
    async def scenario():
        quick = {"initial_delay_seconds": 4.0, "max_delay_seconds": 4.0}
        async with World(kafka_server, postgres_url, retry=quick) as world:
            await world.send({"id": "p1", "fails": 1})
            began = time.time()
            sent = []

            async def all_paid():
                if not sent and await world.records(world.retry):
                    sent.append(time.time())
                    await world.send(*({"id": f"q{n}"} for n in range(3)), key=b"another")
                return await world.paid() == ["p1", "q0", "q1", "q2"]

            await world.run_until(all_paid)

            at = {message.id: at for message, at in world.seen}
            assert all(at[f"q{n}"] < began + 4.0 <= at["p1"] for n in range(3))
            assert [m.attempt for m, _ in world.seen if m.id == "p1"] == [1, 2]

    asyncio.run(scenario())


def test_with_order_per_key_the_later_messages_of_the_key_wait_for_the_retry(
    kafka_server, postgres_url
):
    async def scenario():
        async with World(kafka_server, postgres_url) as world:
            await world.send({"id": "p1", "fails": 1}, {"id": "p2"}, {"id": "p3"})
            await world.run_until(world.has_paid("p1", "p2", "p3"))

            assert [m.id for m, _ in world.seen] == ["p1", "p1", "p2", "p3"]

    asyncio.run(scenario())


def test_after_the_last_attempt_it_is_a_dead_letter_with_its_first_coordinates(
    kafka_server, postgres_url
):
    async def scenario():
        dead = f"dead-{uuid.uuid4().hex[:8]}"
        kafka_server.create_topic(dead)
        twice = {"retry": {"max_attempts": 2}, "dead_letter_topic": dead}
        async with World(kafka_server, postgres_url, **twice) as world:
            await world.send({"id": "p1", "fails": 9}, headers=Headers(PAIRS))

            async def is_published():
                return await world.records(dead)

            await world.run_until(is_published)

            letter = await world.letter("p1")
            assert (letter.attempts, letter.error_code) == (2, "DEPENDENCY_UNAVAILABLE")
            assert (letter.topic, letter.offset) == (world.topic, 0)
            assert pairs_of(letter.headers) == PAIRS
            (record,) = await world.records(dead)
            (original,) = await world.records(world.topic)
            assert (record.value, record.key) == (original.value, original.key)
            said = said_about(record, world)
            assert said["outcome"] == b"dlq"
            assert said["reason"] == b"the bank does not answer"
            audits = await audit_completeness(
                world.database, "billing", reader=world.broker.reader()
            )
            assert not any(audit.lost or audit.unknown for audit in audits)
            assert await world.paid() == []

    asyncio.run(scenario())


def said_about(record, world):
    """Return the headers of a dead letter's record; check its first place and all it came with."""
    renamed = "dead-letter-header-message-id"
    theirs = [(renamed if name == "message-id" else name, value) for name, value in PAIRS]
    assert [pair for pair in pairs_of(record.headers) if pair in theirs] == theirs
    said = {name.removeprefix("dead-letter-"): value for name, value in record.headers.items()}
    place = (said["topic"], said["partition"], said["offset"])
    assert place == (world.topic.encode(), b"0", b"0")
    return said


def test_what_cannot_be_decoded_is_published_to_its_own_topic_as_it_came(
    kafka_server, postgres_url
):
    async def scenario():
        names = [f"unreadable-{uuid.uuid4().hex[:8]}", f"dead-{uuid.uuid4().hex[:8]}"]
        for name in names:
            kafka_server.create_topic(name)
        topics = dict(zip(("unreadable_topic", "dead_letter_topic"), names, strict=True))
        async with World(kafka_server, postgres_url, **topics) as world:
            publisher = world.broker.publisher()
            raw = Outgoing(world.topic, b"\x00\xff not JSON", b"k", Headers(PAIRS))
            assert list(await publisher.publish([raw])) == [None]
            await publisher.close()

            async def is_published():
                return await world.records(names[0])

            await world.run_until(is_published)

            (record,) = await world.records(names[0])
            assert (record.value, record.key) == (raw.value, b"k")
            said = said_about(record, world)
            assert said["outcome"] == b"deserialization_failure"
            assert b"not JSON" in said["reason"]
            assert not await world.records(names[1])

    asyncio.run(scenario())


@pytest.mark.kill
@pytest.mark.parametrize(
    "window",
    [
        "failure:after#1",  # the failure is committed, its record is in the outbox
        "relay_publish:after#1",  # at the broker, and still in the outbox: it comes twice
        *(
            pytest.param(window, marks=pytest.mark.soak)
            for window in (
                "message_commit:after#2",  # handled, its offset not committed
                "relay_publish:before#1",
                "relay_delete:after#1",  # at the broker alone, not handled
                "claim:after#3",  # the retry is claimed, not handled
                "message_commit:before#2",
            )
        ),
    ],
)
def test_a_service_that_is_killed_on_the_way_of_a_retry_has_one_effect(
    kafka_server, postgres_url, tmp_path, window
):
    async def scenario():
        async with World(kafka_server, postgres_url) as world:
            shorten_sessions(world.broker._admin(), world.topic)
            await world.send({"id": "p1", "fails": 1})
            # The other message is the first commit; with another key, it waits for nothing.
            await world.send({"id": "p2"}, key=b"other")
            killed = service(world, postgres_url, kafka_server, tmp_path, DIE_AT=window)
            async with asyncio.timeout(60):
                while killed.is_alive():
                    await asyncio.sleep(0.05)
            assert killed.exit_code == -9, killed.last_lines()
            killed.end()

            again = service(world, postgres_url, kafka_server, tmp_path)

            async def is_settled():
                assert again.is_alive(), again.last_lines()
                ends = [len(await world.records(topic)) for topic in (world.topic, world.retry)]
                return ends == [await world.committed(t) for t in (world.topic, world.retry)]

            async with asyncio.timeout(60):
                while await world.paid() != ["p1", "p2"] or not await is_settled():
                    await asyncio.sleep(0.1)
            again.end()
            assert again.exit_code == 0, again.last_lines()

            assert await world.paid() == ["p1", "p2"]
            copies = {r.headers["message-id"] for r in await world.records(world.retry)}
            assert len(copies) == 1
            audits = await audit_completeness(
                world.database, "billing", reader=world.broker.reader()
            )
            assert len(audits) == 2
            assert not any(audit.lost or audit.unknown for audit in audits)

    asyncio.run(scenario())


def service(world, url, server, folder, **environment):
    return Child(
        [
            *(sys.executable, "-m", "semel", "run", "tests.kafka.retry_shop:billing", "--relay"),
            *("--topic", world.topic, "--group", world.topic),
        ],
        folder / f"{uuid.uuid4().hex}.log",
        {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "SEMEL_BROKER": f"kafka://{server.bootstrap}",
            "SEMEL_DATABASE": url,
            **environment,
        },
    )
