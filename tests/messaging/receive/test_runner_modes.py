"""A runner's retry worker: it works as the runner does, and never dies in silence."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from semel.codec import FromHeader
from semel.errors import Misuse
from semel.events import EVENTS, Measurement
from semel.memory.broker import MemoryBroker
from semel.message import Message
from semel.messaging.failure import RetryableMessageError
from semel.messaging.handle.claims import ClaimRequest
from semel.messaging.handle.lease import Lease
from semel.messaging.handler import Consumer, consumer
from semel.messaging.receive.runner import Runner
from semel.messaging.records import WaitingFilter
from semel.messaging.settings import ConsumerSettings, Order, RetryPolicy, RunnerSettings
from semel.policy.vocabulary import BatchPolicy, Mode, RetryMode, StalePolicy
from semel.sql.database import SqlDatabase
from semel.sql.engine import open_engine
from semel.sql.waiting import SqlWaitingStore
from tests.messaging.worlds import Effect, effects, memory_database

QUICK = RunnerSettings(wait_seconds=0.01, stop_seconds=1.0)
POLICY = RetryPolicy(
    initial_delay_seconds=0.02,
    max_delay_seconds=0.05,
    jitter=False,
    mode=RetryMode.RETRY_TABLE,
)


async def subscribed(broker: MemoryBroker, *numbers: int) -> Any:
    for number in numbers:
        headers = {"message-id": f"m{number}".encode()}
        broker.put("exports", b"{}", key=b"k", headers=headers)
    subscription = await broker.subscribe("exports", ["exports"])
    await broker.settled("exports")
    return subscription


async def until(condition: Any, running: asyncio.Task[None]) -> None:
    async with asyncio.timeout(10):
        while not running.done() and not await condition():
            await asyncio.sleep(0.01)


def leased(seen: list[str], **settings: Any) -> Consumer:
    chosen = ConsumerSettings(retry=POLICY, held_retry_seconds=0.01, **settings)

    @consumer("exports", policy=chosen, id_from=FromHeader("message-id"))
    async def handle(message: Message, lease: Any) -> None:
        assert isinstance(lease, Lease)
        if message.id == "m1" and message.attempt == 1:
            raise RetryableMessageError("down")
        async with lease.completing() as session:
            session.add(Effect("exported", message.id))
        seen.append(message.id)

    return handle


@pytest.mark.parametrize("order", [Order.NONE, Order.KEY])
def test_what_waits_is_handled_under_a_lease_by_a_leased_runner(order):
    async def scenario() -> None:
        seen: list[str] = []
        broker, database = MemoryBroker({"exports": 1}), memory_database()
        subscription = await subscribed(broker, 1, 2, 3)
        runner = Runner(
            leased(seen, order=order),
            subscription,
            database,
            replace(QUICK, mode=Mode.LEASED),
        )

        async def nothing_waits() -> bool:
            if broker.lag("exports", "exports"):
                return False
            async with database.begin() as unit:
                return not await unit.waiting.count(WaitingFilter())

        running = asyncio.create_task(runner.run())
        await until(nothing_waits, running)
        runner.stop()
        await running

        assert sorted(effects(database, "exported")) == ["m1", "m2", "m3"]
        assert seen == (["m1", "m2", "m3"] if order is Order.KEY else ["m2", "m3", "m1"])

    asyncio.run(scenario())


def test_a_retry_worker_that_dies_ends_its_runner(monkeypatch):
    async def take_due(*arguments: Any) -> Any:
        raise RuntimeError("no such column")

    monkeypatch.setattr(SqlWaitingStore, "take_due", take_due)

    async def scenario() -> None:
        broker = MemoryBroker({"exports": 1})
        subscription = await subscribed(broker)
        runner = Runner(
            leased([]), subscription, memory_database(), replace(QUICK, mode=Mode.LEASED)
        )

        with pytest.raises(RuntimeError, match="no such column"):
            await asyncio.wait_for(runner.run(), 10)

    asyncio.run(scenario())


def test_an_inspection_that_raises_does_not_end_the_runner():
    async def scenario() -> None:
        asked: list[str] = []

        async def inspect(message: Message) -> bool | None:
            asked.append(message.id)
            if len(asked) < 3:
                raise KeyError("the provider's answer has no status")
            return True

        chosen = ConsumerSettings(
            held_retry_seconds=0.01, lease_seconds=0.05, stale=StalePolicy.INSPECT
        )

        @consumer("exports", policy=chosen, id_from=FromHeader("message-id"), inspect=inspect)
        async def handle(message: Message, lease: Lease) -> None:
            raise AssertionError("its effect had happened")

        broker, database = MemoryBroker({"exports": 1}), memory_database()
        subscription = await subscribed(broker, 1)
        message = handle.reading.read(broker.records("exports")[0])
        assert isinstance(message, Message)
        async with database.begin() as unit:
            request = ClaimRequest.of(message)
            await unit.claims.lease("exports", request, owner="dead", seconds=0.01)
        runner = Runner(handle, subscription, database, replace(QUICK, mode=Mode.LEASED))

        await asyncio.wait_for(runner.run_until_idle(), 10)

        assert len(asked) == 3
        assert broker.lag("exports", "exports") == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("of_consumer", "of_runner"),
    [(Mode.LEASED, Mode.TRANSACTIONAL), (Mode.LEASED, Mode.BATCHED), (Mode.BATCHED, Mode.LEASED)],
)
def test_a_runner_of_another_mode_than_its_consumers_is_refused(of_consumer, of_runner):
    async def scenario() -> None:
        known = replace(leased([]), mode=of_consumer)
        subscription = await subscribed(MemoryBroker({"exports": 1}))
        with pytest.raises(Misuse, match=f"one of mode {of_consumer}, its runner of mode"):
            Runner(known, subscription, memory_database(), RunnerSettings(mode=of_runner))

    asyncio.run(scenario())


def test_a_broken_exporter_does_not_stop_a_service(caplog):
    broker, handled = MemoryBroker({"exports": 1}), list[str]()

    @consumer("exports", id_from=FromHeader("message-id"))
    async def handle(message: Message, session: Any) -> None:
        handled.append(message.id)

    def export(measured: Measurement) -> None:
        raise OSError("no such collector")

    async def scenario() -> None:
        runner = Runner(handle, await subscribed(broker, 1, 2), memory_database(), QUICK)
        await runner.run_until_idle()
        await runner.subscription.close()

    unsubscribe = EVENTS.subscribe(export, Measurement)
    try:
        asyncio.run(scenario())
    finally:
        unsubscribe()

    assert handled == ["m1", "m2"]
    assert broker.lag("exports", "exports") == 0
    assert "event subscriber failed" in caplog.messages


def test_a_batch_that_stops_handles_nothing_behind_the_message_that_comes_back():
    """In the order of the partition, whatever their keys."""

    async def scenario() -> None:
        seen: list[tuple[str, int]] = []
        once = RetryPolicy(initial_delay_seconds=0.0, max_delay_seconds=0.0, jitter=False)
        settings = ConsumerSettings(retry=once, batch=BatchPolicy.STOP, chunk=1)

        @consumer("exports", policy=settings, id_from=FromHeader("message-id"))
        async def handle(message: Message) -> None:
            seen.append((message.id, message.attempt))
            if message.id == "m1" and message.attempt == 1:
                raise RetryableMessageError("down")

        broker = MemoryBroker({"exports": 1})
        for number, key in enumerate([b"a", b"b", b"a"]):
            headers = {"message-id": f"m{number}".encode()}
            broker.put("exports", b"{}", key=key, headers=headers)
        batched = replace(QUICK, mode=Mode.BATCHED)
        runner = Runner(handle, await subscribed(broker), memory_database(), batched)
        await runner.run_until_idle()

        firsts = list(dict.fromkeys(seen))
        assert firsts == [("m0", 1), ("m1", 1), ("m1", 2), ("m2", 1)]

    asyncio.run(scenario())


def test_more_workers_than_connections_are_refused(tmp_path):
    async def scenario() -> None:
        url = f"sqlite:///{tmp_path}/shop.db"
        small = SqlDatabase(open_engine(url, pool_size=4, max_overflow=1))
        subscription = await MemoryBroker({"t": 1}).subscribe("c", ["t"])

        @consumer("c", id_from=FromHeader("message-id"))
        async def handle(message: Message, session: Any) -> None:
            pass

        with pytest.raises(
            Misuse, match=r"concurrency is 4, which needs 6 connections, and .* has 5"
        ):
            Runner(handle, subscription, small, RunnerSettings(concurrency=4))
        Runner(handle, subscription, small, RunnerSettings(concurrency=3))
        for many in (open_engine(url, pool_size=2, max_overflow=-1), "sqlite://"):
            Runner(handle, subscription, SqlDatabase(many), RunnerSettings(concurrency=99))
        enough = SqlDatabase(url, pool_size=31)
        Runner(handle, subscription, enough, RunnerSettings(concurrency=39))
        with pytest.raises(Misuse, match="has a pool already"):
            SqlDatabase(small.engine, pool_size=31)
        await enough.close()
        await small.close()

    asyncio.run(scenario())
