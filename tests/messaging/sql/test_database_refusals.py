"""A database that refuses for a while delays messages, ends no service, and is told in the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from semel.codec import FromHeader
from semel.memory.broker import MemoryBroker
from semel.message import Message
from semel.messaging.failed.retries import RetryWorker
from semel.messaging.failure import RetryableMessageError
from semel.messaging.handler import Consumer, consumer
from semel.messaging.receive.inbox import Inbox, InboxWorker
from semel.messaging.receive.runner import Runner
from semel.messaging.send.outbox import OutboxEntry
from semel.messaging.send.relay import Relay
from semel.messaging.settings import ConsumerSettings, RetryPolicy, RunnerSettings
from semel.policy.vocabulary import RetryMode
from semel.sql.database import SqlDatabase
from semel.sql.faults import DatabaseUnavailable
from tests.messaging.places import DatabaseScenarios, InPostgres, InSqlite
from tests.messaging.worlds import sql_world

QUICK = RunnerSettings(wait_seconds=0.01, stop_seconds=1.0, member_seconds=0.03, lag_seconds=0.0)
POLICY = ConsumerSettings(
    retry=RetryPolicy(
        initial_delay_seconds=0.01, max_delay_seconds=0.02, mode=RetryMode.RETRY_TABLE
    ),
    held_retry_seconds=0.02,
)


class Refusal(Exception):
    sqlstate = "42P01"


def refuses() -> DBAPIError:
    return DBAPIError("SELECT secret FROM gone", {"id": "somebody"}, Refusal("no such table"))


def remembering(seen: list[str]) -> Consumer:
    @consumer("c", policy=POLICY, id_from=FromHeader("message-id"))
    async def handle(message: Message) -> None:
        if message.id == "later" and message.attempt == 1:
            raise RetryableMessageError("later")
        seen.append(message.id)

    return handle


@asynccontextmanager
async def running(handle: Consumer, database: Any) -> Any:
    """Run the service; the broker to feed it with, and the task that it is."""
    broker = MemoryBroker({"t": 1})
    subscription = await broker.subscribe("g", ["t"])
    await broker.settled("g")
    runner = Runner(handle, subscription, database, QUICK)
    task = asyncio.create_task(runner.run())
    try:
        yield broker, task
    finally:
        runner.stop()
        await asyncio.wait({task}, timeout=5)
        await broker.close()


async def until(holds: Callable[[], bool], task: asyncio.Task[None]) -> None:
    async with asyncio.timeout(15):
        while not holds():
            assert not task.done(), task.result()
            await asyncio.sleep(0.01)


def refuse(database: Any, error: Callable[[], Exception], times: int) -> None:
    """Let so many transactions fail before they begin."""
    begin, left = database.begin, iter(range(times))

    def fails() -> Any:
        if next(left, None) is None:
            database.begin = begin
            return begin()
        raise error()

    database.begin = fails


class _Refusals(DatabaseScenarios):
    def test_a_service_outlives_what_its_database_refuses_and_says_so(self, caplog):
        async def scenario(database: Any) -> None:
            seen: list[str] = []
            async with running(remembering(seen), database) as (broker, task):
                broker.put("t", b"{}", headers={"message-id": b"m1"})
                await until(lambda: seen == ["m1"], task)
                refuse(database, refuses, 20)
                broker.put("t", b"{}", headers={"message-id": b"m2"})
                broker.put("t", b"{}", headers={"message-id": b"later"})
                await until(lambda: sorted(seen) == ["later", "m1", "m2"], task)

        self.run(scenario)

        told = [record for record in caplog.records if "refuses" in record.getMessage()]
        assert {record.levelno for record in told} == {logging.ERROR}
        assert "no such table" in caplog.text
        assert "somebody" not in caplog.text

    def test_a_retry_worker_asks_a_database_again_that_refused(self, caplog):
        async def scenario(database: Any) -> None:
            refuse(database, refuses, 3)
            worker = RetryWorker(remembering([]), database, poll_seconds=0.01)
            task = asyncio.create_task(worker.run())
            await until(lambda: database.begin.__name__ == "begin", task)
            worker.stop()
            await asyncio.wait_for(task, 5)

        self.run(scenario)

        assert "no such table" in caplog.text

    def test_an_inbox_worker_asks_a_database_again_that_refused(self, caplog):
        async def scenario(database: Any) -> None:
            seen: list[str] = []
            handle = remembering(seen)
            await Inbox(handle, database).store(Message("m1", {}, b"{}"))
            refuse(database, refuses, 3)
            worker = InboxWorker(handle, database, poll_seconds=0.01)
            task = asyncio.create_task(worker.run())
            await until(lambda: seen == ["m1"], task)
            worker.stop()
            await asyncio.wait_for(task, 5)

        self.run(scenario)

        assert "no such table" in caplog.text
        assert "somebody" not in caplog.text

    def test_what_is_not_the_databases_own_ends_an_inbox_worker(self):
        async def scenario(database: Any) -> None:
            refuse(database, lambda: ZeroDivisionError("a bug"), 1000)
            worker = InboxWorker(remembering([]), database, poll_seconds=0.01)
            with pytest.raises(ZeroDivisionError):
                await asyncio.wait_for(worker.run(), 5)

        self.run(scenario)

    @pytest.mark.parametrize(
        ("error", "is_raised"),
        [
            (refuses, False),
            (lambda: DatabaseUnavailable("away"), False),
            (lambda: ZeroDivisionError("a bug"), True),
        ],
    )
    def test_a_partition_that_goes_is_let_go_of_whatever_the_database_says(self, error, is_raised):
        """Should it come back, it begins with what the broker has committed."""

        async def scenario(database: Any) -> None:
            broker = MemoryBroker({"t": 1})
            subscription = await broker.subscribe("g", ["t"])
            await broker.settled("g")
            broker.put("t", b"{}", headers={"message-id": b"m1"})
            runner = Runner(remembering([]), subscription, database, QUICK)
            await asyncio.wait_for(runner.run_until_idle(), 10)
            kept = dict(runner._settling._places)
            refuse(database, error, 1)

            with pytest.raises(ZeroDivisionError) if is_raised else nullcontext():
                await runner._revoked(subscription.assignment)

            assert kept
            assert runner._settling._places == {}
            await broker.close()

        self.run(scenario)

    def test_a_relay_asks_a_database_again_that_refused(self, caplog):
        async def scenario(database: Any) -> None:
            broker = MemoryBroker({"t": 1})
            relay = Relay(database, broker.publisher(), lease_seconds=0.3)
            task = asyncio.create_task(relay.run())
            for number in range(3):
                async with database.begin() as unit:
                    await unit.outbox.add([OutboxEntry(f"m{number}", "t", b"{}")])
                refuse(database, refuses, 3)
                await until(lambda number=number: relay.published > number, task)
                await until(lambda: database.begin.__name__ == "begin", task)
            relay.stop()
            await asyncio.wait_for(task, 5)
            await broker.close()

        self.run(scenario)

        assert "no such table" in caplog.text

    def test_a_job_that_empties_an_outbox_ends_with_what_the_database_refuses(self):
        async def scenario(database: Any) -> None:
            broker = MemoryBroker({"t": 1})
            refuse(database, refuses, 3)
            with pytest.raises(DBAPIError):
                await Relay(database, broker.publisher()).run_until_empty()
            await broker.close()

        self.run(scenario)

    def test_what_is_not_the_databases_own_still_ends_the_service(self):
        async def scenario(database: Any) -> None:
            async with running(remembering([]), database) as (_, task):
                refuse(database, lambda: ZeroDivisionError("a bug"), 1000)
                await asyncio.wait({task}, timeout=5)
                assert isinstance(task.exception(), ZeroDivisionError)

        self.run(scenario)


class TestInSqlite(InSqlite, _Refusals):
    def test_a_full_disk_is_nobodys_message(self):
        async def scenario(database: SqlDatabase) -> None:
            def is_small(driver: Any, record: Any) -> None:
                driver.execute("PRAGMA max_page_count=1")  # as many as there are

            event.listen(database.engine.sync_engine, "connect", is_small)
            await database.engine.dispose()
            with pytest.raises(DBAPIError) as full:
                async with database.begin() as unit:
                    await unit.session.execute(text("CREATE TABLE large AS SELECT zeroblob(9999)"))

            assert database.classification.classify(full.value).code == "CONNECTION_LOST"
            with pytest.raises(DatabaseUnavailable):
                async with database.begin() as unit:
                    await unit.outbox.add([OutboxEntry("m", "t", bytes(9999))])

        self.run(scenario)


class TestInPostgres(InPostgres, _Refusals):
    def test_a_service_waits_for_a_standby_that_becomes_the_primary(self):
        url = self.server.create_database("standby")

        async def becomes(database: SqlDatabase, read_only: str) -> None:
            async with database.engine.connect() as one:
                await one.execute(text("SET TRANSACTION READ WRITE"))
                await one.execute(
                    text(f"ALTER DATABASE standby SET default_transaction_read_only = {read_only}")
                )
                await one.commit()

        async def scenario() -> None:
            seen: list[str] = []
            async with sql_world(url, waits_for_locks=True) as world:
                # A connection keeps what it was told when it was opened.
                new_each_time = create_async_engine(world.database.engine.url, poolclass=NullPool)
                database = SqlDatabase(new_each_time)
                async with running(remembering(seen), database) as (broker, task):
                    broker.put("t", b"{}", headers={"message-id": b"m1"})
                    await until(lambda: seen == ["m1"], task)
                    await becomes(database, "on")
                    with pytest.raises(DatabaseUnavailable):
                        async with database.begin() as unit:
                            await unit.members.clear_notes("c", ["m1"])
                    broker.put("t", b"{}", headers={"message-id": b"m2"})
                    await asyncio.sleep(0.3)
                    assert not task.done()
                    await becomes(database, "off")
                    await until(lambda: broker.lag("g", "t") == 0, task)
                async with database.begin() as unit:
                    assert await unit.claims.look_up("c", "m2") is not None
                    assert await unit.dead_letters.get("c", "m2") is None

        asyncio.run(scenario())
