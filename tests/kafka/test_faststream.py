"""A FastStream service on a real broker: each effect once, whatever comes and whatever fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import uuid
from collections.abc import Callable
from typing import Annotated, Any

import pytest

pytest.importorskip("faststream")

from confluent_kafka import ConsumerGroupType
from confluent_kafka.admin import NewPartitions
from faststream import Depends, FastStream, confluent
from faststream import kafka as theirs
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from semel import Message, RetryableMessageError, SqlDatabase
from semel.errors import NeedsOperator
from semel.kafka.client import kafka
from semel.message import headers_from, pairs_of
from semel.messaging import (
    ConsumerSettings,
    FromHeader,
    KafkaBroker,
    Mode,
    Outgoing,
    Partition,
    RetryPolicy,
    RunnerSettings,
    Semel,
)

pytestmark = pytest.mark.kafka

INSERT = text("INSERT INTO payments VALUES (:id, :amount)")
DEADLINE_SECONDS = 60.0


class Paid(BaseModel):
    id: str
    amount: int


class World:
    """A topic of its own, a database that outlives services, and what it must hold at the end."""

    def __init__(self, server, folder, partitions=2, client=theirs):
        self.server = server
        self.client = client
        self.topic = f"payments-{uuid.uuid4().hex[:8]}"
        self.group = f"billing-{uuid.uuid4().hex[:8]}"
        self.path = folder / "shop.db"
        self.url = f"sqlite:///{self.path}"
        self.partitions = partitions
        server.create_topic(self.topic, partitions)
        self.ours = KafkaBroker(
            # aiokafka reads lz4 only with a package that it does not bring along.
            server.bootstrap,
            config={"compression.type": "none"},
        )

    async def prepare(self):
        database = SqlDatabase(self.url)
        await database.create_tables()
        async with database.engine.begin() as connection:
            await connection.execute(text("CREATE TABLE payments (id TEXT, amount INTEGER)"))
        await database.close()

    def from_the_end(self, semel):
        """Declare a subscriber whose group begins at the end of the topic."""

        @semel.subscriber(
            self.topic, consumer="billing", group_id=self.group, auto_offset_reset="latest"
        )
        async def on_paid(event: Paid, session: AsyncSession) -> None:
            await session.execute(INSERT, event.model_dump())

    async def publish(self, *values, headers=()):
        publisher = self.ours.publisher()
        batch = [Outgoing(self.topic, value, key, headers_from(headers)) for key, value in values]
        assert list(await publisher.publish(batch)) == [None] * len(batch)
        await publisher.close()

    async def rows(self, statement="SELECT id FROM payments ORDER BY id"):
        # Without a lock: a service that is looked at must not wait, nor the test for its batches.
        with contextlib.closing(sqlite3.connect(self.path)) as connection:
            return [row[0] for row in connection.execute(statement)]

    async def is_at_the_end(self):
        """Return whether the group's offsets are the ends of the partitions."""

        def ask():
            client = kafka.Consumer(
                {"bootstrap.servers": self.server.bootstrap, "group.id": self.group}
            )
            try:
                places = [kafka.TopicPartition(self.topic, n) for n in range(self.partitions)]
                ends = [client.get_watermark_offsets(place, timeout=10)[1] for place in places]
                at = [place.offset for place in client.committed(places, timeout=10)]
                return all(end in (0, done) for end, done in zip(ends, at, strict=True))
            finally:
                client.close()

        return await asyncio.to_thread(ask)

    def service(self, function: Callable[[Semel], Any], **options):
        broker = self.client.KafkaBroker(self.server.bootstrap, **options)
        semel = Semel(broker, database=self.url)
        function(semel)
        return broker


async def until(met):
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not await met():
            await asyncio.sleep(0.05)


def encoded(number, **more):
    value = json.dumps({"id": f"p{number:03}", "amount": number, **more}).encode()
    return f"k{number % 7}".encode(), value


@pytest.mark.parametrize(
    ("client", "mode"),
    [(theirs, Mode.TRANSACTIONAL), (theirs, Mode.BATCHED), (confluent, Mode.BATCHED)],
)
def test_duplicates_poison_a_transient_failure_and_a_restart_leave_each_effect_once(
    kafka_server, tmp_path, client, mode
):
    world = World(kafka_server, tmp_path, client=client)
    failed: list[str] = []
    resolved: list[int] = []

    def rate() -> int:
        resolved.append(1)
        return 2

    def declare(semel):
        @semel.subscriber(
            world.topic,
            consumer="billing",
            group_id=world.group,
            policy=ConsumerSettings(retry=RetryPolicy(max_attempts=3, initial_delay_seconds=0.05)),
            runner=RunnerSettings(mode=mode, concurrency=4, max_records=50, wait_seconds=0.1),
        )
        async def on_paid(
            event: Paid, session: AsyncSession, rate: Annotated[int, Depends(rate)]
        ) -> None:
            await session.execute(INSERT, {"id": event.id, "amount": event.amount * rate})
            if event.id == "p013" and len(failed) < 2:
                failed.append(event.id)
                raise RetryableMessageError("the account is not there yet")
            if event.id == "p021":
                raise ValueError("this one is always wrong")

    async def story():
        await world.prepare()
        sent = [encoded(number) for number in range(100)]
        await world.publish(*sent[:60], *sent[10:20], (b"k1", b"{broken"), (b"k2", b'{"id": 1}'))
        first = world.service(declare)
        await first.start()
        await until(lambda: some_rows(20))
        await first.stop()
        await world.publish(*sent[50:], *sent[:5])
        second = world.service(declare)
        await second.start()
        await until(world.is_at_the_end)
        await second.stop()
        rows = await world.rows()
        letters = await world.rows("SELECT message_id FROM dead_letter ORDER BY 1")
        members = await world.rows("SELECT consumer FROM consumer_member")
        return rows, letters, members

    async def some_rows(count):
        return len(await world.rows()) >= count

    rows, letters, members = asyncio.run(story())

    assert rows == [f"p{number:03}" for number in range(100) if number != 21]
    assert "p021" in letters
    assert len(letters) == 3
    assert failed == ["p013"] * 2
    assert members == [], "a clean stop leaves no row behind"
    assert len(resolved) >= 100


@pytest.mark.parametrize("client", [theirs, confluent])
def test_headers_and_tombstones_arrive_as_they_were_sent(kafka_server, tmp_path, client):
    world = World(kafka_server, tmp_path, partitions=1, client=client)
    pairs = (("message-id", b"m1"), ("h", b"\xff"), ("h", None), ("empty", b""), ("h", b"last"))
    seen = []

    def declare(semel):
        @semel.subscriber(
            world.topic,
            consumer="billing",
            group_id=world.group,
            id_from=FromHeader("message-id"),
        )
        async def on_paid(event: Paid | None, message: Message) -> None:
            seen.append((event, pairs_of(message.headers), message.key))

    async def story():
        await world.prepare()
        await world.publish((b"a", None), headers=pairs)
        await world.publish((b"\xfe", encoded(1)[1]), headers=[("message-id", b"m2")])
        broker = world.service(declare)
        await broker.start()
        await until(world.is_at_the_end)
        await broker.stop()

    asyncio.run(story())

    assert seen == [
        (None, pairs, "a"),
        (Paid(id="p001", amount=1), (("message-id", b"m2"),), "\udcfe"),
    ]


def test_the_config_of_the_confluent_broker_says_how_its_members_share_partitions(
    kafka_server, tmp_path
):
    world = World(kafka_server, tmp_path, partitions=1, client=confluent)

    def declare(semel):
        @semel.subscriber(world.topic, consumer="billing", group_id=world.group)
        async def on_paid(event: Paid, session: AsyncSession) -> None:
            await session.execute(INSERT, event.model_dump())

    async def story():
        await world.prepare()
        await world.publish(encoded(1))
        own = {
            "group.protocol": "classic",
            "session.timeout.ms": 10_000,
            "group.instance.id": "billing-1",
        }
        service = world.service(declare, config=own)
        await service.start()
        await until(world.rows)
        admin = world.ours._admin()
        group = admin.describe_consumer_groups([world.group])[world.group].result(30)
        await service.stop()
        return group.type, [one.group_instance_id for one in group.members]

    assert asyncio.run(story()) == (ConsumerGroupType.CLASSIC, ["billing-1"])


def test_two_services_share_a_group_while_one_comes_and_goes(kafka_server, tmp_path):
    world = World(kafka_server, tmp_path, partitions=4)
    by: list[str] = []

    def declare(name):
        def on(semel):
            @semel.subscriber(
                world.topic,
                consumer="billing",
                group_id=world.group,
                heartbeat_interval_ms=300,
                runner=RunnerSettings(mode=Mode.BATCHED, max_records=20, wait_seconds=0.1),
            )
            async def on_paid(event: Paid, session: AsyncSession) -> None:
                by.append(name)
                await session.execute(INSERT, event.model_dump())

        return on

    async def story():
        await world.prepare()
        first, second = world.service(declare("first")), world.service(declare("second"))
        await world.publish(*map(encoded, range(200)))
        await first.start()
        joining = asyncio.create_task(second.start())
        await world.publish(*map(encoded, range(200, 400)))
        await joining
        await world.publish(*map(encoded, range(400, 600)))
        await first.stop()
        await until(world.is_at_the_end)
        await second.stop()
        return await world.rows()

    rows = asyncio.run(story())

    assert rows == [f"p{number:03}" for number in range(600)]
    assert set(by) == {"first", "second"}


def test_a_stop_finishes_what_runs_and_commits_it(kafka_server, tmp_path):
    world = World(kafka_server, tmp_path, partitions=1)
    begun = asyncio.Event()

    def declare(semel):
        @semel.subscriber(world.topic, consumer="billing", group_id=world.group)
        async def on_paid(event: Paid, session: AsyncSession) -> None:
            begun.set()
            await asyncio.sleep(1.0)
            await session.execute(INSERT, event.model_dump())

    async def story():
        await world.prepare()
        await world.publish(encoded(1))
        # FastStream's own patience is shorter than the handler.
        broker = world.service(declare, graceful_timeout=0.1)
        await broker.start()
        await begun.wait()
        await broker.stop()
        return await world.rows(), await world.is_at_the_end()

    assert asyncio.run(story()) == (["p001"], True)


def test_a_group_that_begins_at_the_end_misses_nothing_after_its_first_start(
    kafka_server, tmp_path
):
    world = World(kafka_server, tmp_path, partitions=1)

    async def story():
        await world.prepare()
        await world.publish(encoded(1))
        first = world.service(world.from_the_end)
        await first.start()
        await until(world.is_at_the_end)
        await first.stop()
        await world.publish(encoded(2))
        second = world.service(world.from_the_end)
        await second.start()
        await until(world.is_at_the_end)
        await second.stop()
        return await world.rows()

    assert asyncio.run(story()) == ["p002"]


def test_a_group_that_starts_at_the_end_misses_nothing_of_a_partition_that_is_added(
    kafka_server, tmp_path
):
    world = World(kafka_server, tmp_path, partitions=1)

    async def story():
        await world.prepare()
        await world.publish(encoded(1))
        service = world.service(world.from_the_end, metadata_max_age_ms=500)
        await service.start()
        await until(world.is_at_the_end)
        admin = world.ours._admin()
        admin.create_partitions([NewPartitions(world.topic, 2)])[world.topic].result(30)
        producer = kafka.Producer({"bootstrap.servers": kafka_server.bootstrap})
        _, value = encoded(2)
        producer.produce(world.topic, value, partition=1)
        assert not producer.flush(30)
        world.partitions = 2
        await until(world.is_at_the_end)
        await service.stop()
        return await world.rows()

    assert asyncio.run(story()) == ["p002"]


def test_records_that_are_gone_stop_the_application_and_say_so(kafka_server, tmp_path):
    world = World(kafka_server, tmp_path, partitions=1)

    def declare(semel):
        @semel.subscriber(world.topic, consumer="billing", group_id=world.group)
        async def on_paid(event: Paid, session: AsyncSession) -> None:
            await session.execute(INSERT, event.model_dump())

    def trim():
        place = kafka.TopicPartition(world.topic, 0, 3)
        admin = world.ours._admin()
        for answer in admin.delete_records([place]).values():
            answer.result(30)

    async def story():
        await world.prepare()
        await world.publish(encoded(1))
        first = world.service(declare)
        await first.start()
        await until(world.is_at_the_end)
        await first.stop()
        await world.publish(*map(encoded, range(2, 6)))
        await asyncio.to_thread(trim)
        async with asyncio.timeout(DEADLINE_SECONDS):
            await FastStream(world.service(declare)).run()

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(story())

    assert caught.group_contains(NeedsOperator, match=str(Partition(world.topic, 0)))
