"""Cancellations: nothing runs on behind a runner's back, and none ends it but its caller's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from semel.codec import FromHeader
from semel.memory.broker import MemoryBroker
from semel.memory.broker_groups import Patience
from semel.message import Message
from semel.messaging.failure import RetryableMessageError
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.cancel import called, end, owned, rung
from semel.messaging.handle.claims import ClaimState
from semel.messaging.handler import Consumer, consumer
from semel.messaging.outcome import RetryLater
from semel.messaging.receive.runner import Runner
from semel.messaging.settings import ConsumerSettings, RetryPolicy, RunnerSettings
from semel.policy.vocabulary import GapPolicy, Mode
from semel.sql.database import SqlDatabase
from tests.messaging.places import InPostgres, InSqlite
from tests.messaging.worlds import memory_database, rows_of

QUICK = RunnerSettings(wait_seconds=0.01, stop_seconds=0.1, cancel_seconds=0.1)
POLICY = ConsumerSettings(
    retry=RetryPolicy(max_attempts=2, initial_delay_seconds=0.0, max_delay_seconds=0.0),
    held_retry_seconds=0.01,
)
SOON = 10.0
"""Seconds after which a test that waits has failed."""


def consuming(handle: Callable[[Message, Any], Awaitable[Any]], **settings: Any) -> Consumer:
    policy = replace(POLICY, **settings)
    return consumer("billing", policy=policy, id_from=FromHeader("message-id"))(handle)


def broker_with(*ids: str) -> MemoryBroker:
    broker = MemoryBroker({"payments": 1}, patience=Patience(session_seconds=0.15))
    for id in ids:
        broker.put("payments", b"{}", key=b"k", headers={"message-id": id.encode()})
    return broker


async def started(
    broker: MemoryBroker, handler: Consumer, database: Any, settings: RunnerSettings = QUICK
) -> Runner:
    subscription = await broker.subscribe("billing", ["payments"])
    await broker.settled("billing")
    return Runner(handler, subscription, database, settings)


async def members(database: SqlDatabase) -> int:
    return len(rows_of(database, "SELECT 1 FROM consumer_member"))


async def a_cancelled_library() -> None:
    task = asyncio.create_task(asyncio.Event().wait())
    task.cancel()
    await task


async def itself() -> None:
    itself_and_goes_on()
    await asyncio.Event().wait()


def itself_and_goes_on() -> None:
    me = asyncio.current_task()
    assert me is not None
    me.cancel()


async def itself_and_returns() -> None:
    itself_and_goes_on()


CANCELLATIONS = [a_cancelled_library, itself, itself_and_returns]


class CancelledHandlers:
    """A handler out of which a cancellation comes that nobody asked for."""

    world: Callable[[], Any]

    @pytest.mark.parametrize("cancelled", CANCELLATIONS, ids=lambda one: one.__name__)
    @pytest.mark.parametrize("mode", Mode)
    def test_a_cancellation_out_of_a_handler_is_its_failure_and_the_runner_goes_on(
        self, mode, cancelled
    ):
        calls: list[str] = []

        async def handle(message: Message, session: Any) -> None:
            calls.append(message.id)
            if message.id == "m1":
                await cancelled()

        async def scenario() -> None:
            async with self.world() as world:
                broker = broker_with("m1", "m2")
                settings = replace(QUICK, mode=mode)
                runner = await started(broker, consuming(handle), world.database, settings)
                running = asyncio.create_task(runner.run_until_idle())

                await asyncio.wait_for(running, SOON)

                await runner.subscription.close()
                async with world.database.begin() as unit:
                    claim = await unit.claims.look_up("billing", "m1")
                    letter = await unit.dead_letters.get("billing", "m1")
                assert calls.count("m1") >= 2
                assert calls[-1] == "m2"
                assert claim is not None
                assert (claim.state, claim.attempts) == (ClaimState.FAILED_TERMINAL, 2)
                assert letter is not None
                assert letter.error_code == "HANDLER_CANCELLED"
                assert list(broker.committed("billing").values()) == [2]

        asyncio.run(scenario())


class TestCancelledHandlersInSqlite(InSqlite, CancelledHandlers):
    pass


class TestCancelledHandlersInPostgres(InPostgres, CancelledHandlers):
    pass


def test_a_cancellation_of_the_caller_is_not_a_failure_of_the_handler():
    async def scenario() -> None:
        began = asyncio.Event()

        async def handle() -> None:
            began.set()
            await asyncio.Event().wait()

        running = asyncio.create_task(called(handle()))
        await began.wait()
        running.cancel()

        await asyncio.wait({running}, timeout=SOON)
        assert running.cancelled()
        with pytest.raises(RetryableMessageError):
            await called(a_cancelled_library())

    asyncio.run(scenario())


def test_a_cancellation_that_a_handler_has_taken_care_of_is_none():
    async def handle() -> str:
        with suppress(asyncio.CancelledError):
            await itself()
        return "done"

    async def scenario() -> None:
        work = owned(called(handle()))

        assert await work == "done"
        assert work.cancelling() == 0

    asyncio.run(scenario())


def test_work_that_is_cancelled_together_with_its_owner_has_not_failed():
    """As `asyncio.run` does at its end."""

    async def scenario() -> None:
        began: asyncio.Future[asyncio.Task[Any]] = asyncio.get_running_loop().create_future()

        async def own() -> None:
            work = owned(called(asyncio.Event().wait()))
            await asyncio.sleep(0)
            began.set_result(work)
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.wait({work}, timeout=SOON)

        owner = asyncio.create_task(own())
        work = await began
        owner.cancel()
        work.cancel()
        await asyncio.wait({owner, work}, timeout=SOON)

        assert work.cancelled()

    asyncio.run(scenario())


@pytest.mark.parametrize("policy", [GapPolicy.FETCH, GapPolicy.REBUILD])
def test_a_cancellation_out_of_a_repair_is_a_failure_too(policy):
    async def handle(message: Message, session: Any) -> None:
        pass

    async def repair(message: Message, session: Any, gap: Any) -> None:
        await a_cancelled_library()

    async def scenario() -> None:
        settings = replace(POLICY, versioned=True, gaps=policy)
        repaired = consumer("billing", policy=settings, fetch_missing=repair, rebuild=repair)
        message = Message("m2", {}, key="k", version=2)

        outcome = await handle_message(repaired(handle), memory_database(), message)

        assert isinstance(outcome, RetryLater)
        assert outcome.failure is not None
        assert outcome.failure.code == "HANDLER_CANCELLED"

    asyncio.run(scenario())


def test_a_timeout_around_a_handler_stays_one():
    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await called(asyncio.Event().wait())

    asyncio.run(scenario())


def test_whoever_ends_tasks_waits_for_their_end_and_then_passes_its_own_cancellation_on():
    async def scenario() -> None:
        cleaning, clean = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cleaning.set()
                await clean.wait()
                raise

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        ending = asyncio.create_task(end([task]))
        await asyncio.wait_for(cleaning.wait(), SOON)
        ending.cancel()
        await asyncio.sleep(0)

        assert not ending.done()
        clean.set()
        await asyncio.wait({ending}, timeout=SOON)
        assert ending.cancelled()
        assert task.cancelled()

    asyncio.run(scenario())


@pytest.mark.parametrize("mode", Mode)
def test_nothing_is_handled_behind_a_run_that_was_cancelled(mode):
    async def scenario() -> None:
        began = asyncio.Event()
        log: list[str] = []

        async def handle(message: Message, session: Any) -> None:
            log.append(message.id)
            began.set()
            await asyncio.sleep(0.02)
            log.append(f"{message.id} ended")

        database = memory_database()
        broker = broker_with("m0", "m1", "m2")
        before = asyncio.all_tasks()
        runner = await started(broker, consuming(handle), database, replace(QUICK, mode=mode))
        running = asyncio.create_task(runner.run())
        await asyncio.wait_for(began.wait(), SOON)
        running.cancel()
        await asyncio.wait({running}, timeout=SOON)

        left = asyncio.all_tasks() - before
        await asyncio.sleep(0.1)

        assert running.cancelled()
        assert left == set()
        assert log == ["m0"]

    asyncio.run(scenario())


def test_a_cancelled_handler_may_clean_up_and_the_stop_is_clean():
    async def scenario() -> None:
        began, cleaned = asyncio.Event(), asyncio.Event()

        async def handle(message: Message, session: Any) -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.02)
                cleaned.set()

        database = memory_database()
        runner = await started(broker_with("m1"), consuming(handle), database)
        running = asyncio.create_task(runner.run())
        await asyncio.wait_for(began.wait(), SOON)
        runner.stop()
        await asyncio.wait_for(running, SOON)

        assert cleaned.is_set()
        assert await members(database) == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("how", ["stopped", "cancelled"])
def test_a_handler_that_ignores_its_cancellation_cannot_keep_a_runner_from_its_end(mode, how):
    async def scenario() -> None:
        began, ended = asyncio.Event(), asyncio.Event()

        async def handle(message: Message, session: Any) -> None:
            began.set()
            while not ended.is_set():
                try:
                    await ended.wait()
                except asyncio.CancelledError:
                    continue

        database = memory_database()
        broker = broker_with("m1")
        runner = await started(broker, consuming(handle), database, replace(QUICK, mode=mode))
        running = asyncio.create_task(runner.run())
        await asyncio.wait_for(began.wait(), SOON)
        if how == "stopped":
            runner.stop()
        else:
            running.cancel()
        await asyncio.wait({running}, timeout=SOON)

        assert running.done()
        assert await members(database) == 1, "whoever comes next must be careful"
        assert broker.committed("billing") == {}
        ended.set()
        await asyncio.sleep(0.05)

    asyncio.run(scenario())


def test_a_cancellation_is_not_lost_where_a_bell_rings_at_the_same_moment():
    async def scenario() -> None:
        bell = asyncio.Event()

        async def watch() -> None:
            while True:
                await rung(bell, 60)
                bell.clear()

        watching = asyncio.create_task(watch())
        await asyncio.sleep(0)
        bell.set()
        await asyncio.sleep(0)
        watching.cancel()
        done, _ = await asyncio.wait([watching], timeout=5)

        assert done == {watching}
        assert watching.cancelled()

    asyncio.run(scenario())


def test_whoever_waits_for_a_bell_hears_whether_it_rang():
    async def scenario() -> None:
        bell = asyncio.Event()
        assert not await rung(bell, 0.01)
        bell.set()
        assert await rung(bell, 60)

    asyncio.run(scenario())
