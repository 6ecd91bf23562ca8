"""A FastStream service on a real RabbitMQ: each effect once, whatever comes and whatever fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

pytest.importorskip("aio_pika")

import aio_pika
from faststream import AckPolicy
from faststream.rabbit import RabbitBroker, RabbitQueue
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from semel import Message, RetryableMessageError, SqlDatabase
from semel.errors import Misuse, NeedsOperator
from semel.faststream import rabbit
from semel.messaging import (
    ConsumerSettings,
    FromCoordinates,
    FromHeader,
    Mode,
    RetryMode,
    RetryPolicy,
    RunnerSettings,
    Semel,
)
from semel.messaging.outcome import Handled
from semel.sql.faults import CommitInDoubt
from tests.rabbit.service import INSERT, Paid

DEADLINE_SECONDS = 30.0
ROOT = Path(__file__).parents[2]
RETRY = RetryPolicy(max_attempts=3, initial_delay_seconds=0.05, mode=RetryMode.RETRY_TABLE)


class World:
    """A queue of its own, a database that outlives services, and what it must hold at the end."""

    def __init__(self, server, folder):
        self.url = server.url
        self.queue = f"payments-{uuid.uuid4().hex[:8]}"
        self.path = folder / "shop.db"
        self.database = f"sqlite:///{self.path}"

    async def __aenter__(self):
        database = SqlDatabase(self.database)
        await database.create_tables()
        async with database.engine.begin() as connection:
            await connection.execute(text("CREATE TABLE payments (id TEXT, amount INTEGER)"))
        await database.close()
        self._connection = await aio_pika.connect(self.url)
        self._channel = await self._connection.channel()
        await self._channel.declare_queue(self.queue, durable=True)
        return self

    async def __aexit__(self, *error):
        await self._connection.close()

    async def publish(self, *bodies, **properties):
        for body in bodies:
            message = aio_pika.Message(body, **properties)
            await self._channel.default_exchange.publish(message, self.queue)

    async def left(self):
        """Return how many messages the queue holds that no consumer has."""
        declared = await self._channel.declare_queue(self.queue, durable=True, passive=True)
        return declared.declaration_result.message_count

    def rows(self, statement="SELECT id FROM payments ORDER BY rowid"):
        with contextlib.closing(sqlite3.connect(self.path)) as connection:
            return [row[0] for row in connection.execute(statement)]

    def service(self, declare):
        broker = RabbitBroker(self.url)
        declare(Semel(broker, database=self.database))
        return broker


async def until(met):
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not met():
            await asyncio.sleep(0.05)


def encoded(number, amount=1):
    return json.dumps({"id": f"p{number:03}", "amount": amount}).encode()


@pytest.mark.rabbit
def test_duplicates_poison_and_a_transient_failure_leave_each_effect_once_and_in_order(
    rabbit_server, tmp_path
):
    failed = []

    def declare(semel):
        @semel.subscriber(world.queue, consumer="billing", policy=ConsumerSettings(retry=RETRY))
        async def on_paid(event: Paid, session: AsyncSession) -> None:
            await session.execute(INSERT, event.model_dump())
            if event.id == "p013" and len(failed) < 2:
                failed.append(event.id)
                raise RetryableMessageError("the account is not there yet")
            if event.id == "p021":
                raise ValueError("this one is always wrong")

    world = World(rabbit_server, tmp_path)

    async def story():
        async with world:
            sent = [encoded(number) for number in range(40)]
            await world.publish(*sent[:30], *sent[5:15], b"{broken", b"{broken too", *sent[30:])
            broker = world.service(declare)
            await broker.start()
            await until(lambda: len(world.rows()) == 39)
            await until(lambda: len(world.rows("SELECT message_id FROM dead_letter")) == 3)
            await broker.stop()
            return await world.left()

    assert asyncio.run(story()) == 0
    rows = world.rows()
    assert sorted(rows) == [f"p{number:03}" for number in range(40) if number != 21]
    assert [row for row in rows if row != "p013"] == sorted(set(rows) - {"p013"})
    assert "p021" in world.rows("SELECT message_id FROM dead_letter")
    assert failed == ["p013"] * 2


@pytest.mark.rabbit
def test_headers_and_a_declared_message_id_arrive_as_they_were_sent(rabbit_server, tmp_path):
    seen = []

    def declare(semel):
        @semel.subscriber(world.queue, consumer="billing", id_from=FromHeader("amqp-message-id"))
        async def on_paid(event: Paid, message: Message) -> None:
            seen.append((message.id, message.headers["raw"], message.headers["n"]))

    world = World(rabbit_server, tmp_path)

    async def story():
        async with world:
            headers = {"raw": bytearray(b"\xff\x00"), "n": 7}
            for name in ("m1", "m1", "m2"):
                await world.publish(encoded(1), headers=headers, message_id=name)
            broker = world.service(declare)
            await broker.start()
            await until(lambda: len(seen) == 2)
            await broker.stop()
            return await world.left()

    assert asyncio.run(story()) == 0
    assert seen == [("m1", b"\xff\x00", b"7"), ("m2", b"\xff\x00", b"7")]


@pytest.mark.rabbit
def test_a_stop_finishes_what_runs_and_leaves_the_rest_in_the_queue(rabbit_server, tmp_path):
    begun = asyncio.Event()

    def declare(semel):
        @semel.subscriber(world.queue, consumer="billing")
        async def on_paid(event: Paid, session: AsyncSession) -> None:
            begun.set()
            await asyncio.sleep(0.5)
            await session.execute(INSERT, event.model_dump())

    world = World(rabbit_server, tmp_path)

    async def story():
        async with world:
            await world.publish(encoded(1), encoded(2))
            broker = world.service(declare)
            await broker.start()
            await begun.wait()
            await broker.stop()
            return await world.left()

    assert asyncio.run(story()) == 1
    assert world.rows() == ["p001"]


@pytest.mark.rabbit
@pytest.mark.kill
def test_killed_services_leave_each_effect_once_and_the_message_that_kills_is_parked(
    rabbit_server, tmp_path
):
    world = World(rabbit_server, tmp_path)

    def start(seconds):
        where = (world.url, world.queue, world.database, str(seconds))
        command = [sys.executable, "-m", "tests.rabbit.service", *where]
        return subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=ROOT)

    async def story():
        async with world:
            sent = [encoded(number) for number in range(20)]
            await world.publish(*sent[:10], encoded(99, amount=-1), *sent[10:], *sent[:3])
            first = start(0.1)
            try:
                await until(lambda: len(world.rows()) >= 3)
            finally:
                first.kill()
                first.wait()
            assert len(world.rows()) < 10
            deaths = 0
            while True:
                service = start(0.0)
                try:
                    await until(
                        lambda one=service: one.poll() is not None or len(world.rows()) == 20
                    )
                    if service.poll() is None:
                        break
                    deaths += 1
                    assert deaths < 10
                finally:
                    service.terminate()
                    await asyncio.to_thread(service.wait, 30)
            return deaths

    deaths = asyncio.run(story())

    assert 1 <= deaths <= 5
    assert world.rows() == [f"p{number:03}" for number in range(20)]
    parked = world.rows("SELECT message_id FROM waiting_message")
    assert parked + world.rows("SELECT message_id FROM dead_letter") == ["p099"]


class Delivered:
    """A delivery that came before, of a queue whose server the test does not need."""

    redelivered, body, headers, timestamp = True, encoded(1), {}, None
    message_id = correlation_id = content_type = type = exchange = routing_key = None
    acknowledged = False

    async def ack(self):
        self.acknowledged = True


@pytest.mark.parametrize(
    ("error", "acknowledged", "stopped"),
    [
        (CommitInDoubt("no answer"), True, False),
        (NeedsOperator("look first"), False, True),
    ],
)
def test_an_error_before_the_outcome_is_durable_is_tried_again_or_stops_the_service(
    monkeypatch, error, acknowledged, stopped
):
    semel = Semel(RabbitBroker(), database="sqlite://")
    quick = ConsumerSettings(held_retry_seconds=0.01)
    errors, exits = [error], []

    @semel.subscriber("payments", consumer="billing", policy=quick)
    async def on_paid(event: Paid) -> None: ...

    async def handled(*arguments):
        if errors:
            raise errors.pop()
        return Handled()

    monkeypatch.setattr(rabbit, "handle_record", handled)
    (subscriber,) = semel._subscribers
    monkeypatch.setattr(subscriber, "_exit", exits.append)
    delivery = Delivered()

    async def story():
        with contextlib.suppress(NeedsOperator):
            await subscriber.process_message(delivery)
        await semel.close()

    asyncio.run(story())

    assert (delivery.acknowledged, bool(exits)) == (acknowledged, stopped)


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("ack_policy", AckPolicy.ACK, "after the database's commit"),
        ("channel", None, "concurrency"),
        ("no_reply", True, "never replies"),
        ("group_id", "billing", "a queue of its own"),
        ("auto_offset_reset", "latest", "bind it before"),
        ("runner", RunnerSettings(mode=Mode.BATCHED), "one by one"),
        ("id_from", FromCoordinates(), "no offsets"),
    ],
)
def test_an_option_that_breaks_the_guarantee_is_refused_with_the_reason(option, value, why):
    semel = Semel(RabbitBroker(), database="sqlite://")

    with pytest.raises(Misuse, match=why):
        semel.subscriber(RabbitQueue("payments"), consumer="billing", **{option: value})


def test_several_messages_at_once_need_a_consumer_without_order():
    semel = Semel(RabbitBroker(), database="sqlite://")

    with pytest.raises(Misuse, match="keeps its order"):
        semel.subscriber(
            "payments",
            consumer="billing",
            policy=ConsumerSettings(),
            runner=RunnerSettings(concurrency=4),
        )
