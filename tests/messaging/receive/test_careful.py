"""After an unclean stop: who is blamed, for how long, and what is left of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from semel.codec import FromHeader
from semel.crashpoints import CrashPoint
from semel.memory.broker import BrokerFailure, Call, MemoryBroker
from semel.memory.broker_groups import Patience
from semel.message import Message, Partition
from semel.messaging.failed.retries import retry_due
from semel.messaging.failure import RetryableMessageError
from semel.messaging.handle.claims import ClaimState
from semel.messaging.handler import consumer
from semel.messaging.receive.crash import TURNS
from semel.messaging.receive.runner import Runner
from semel.messaging.records import Member
from semel.messaging.settings import ConsumerSettings, RetryPolicy, RunnerSettings
from semel.policy.vocabulary import RetryMode
from semel.sql.store import record_of
from semel.sql.tables import consumer_member
from semel.testing.clock import SimulatedClock
from semel.testing.crash import Crash, crash_at
from tests.messaging.worlds import Effect, effects, memory_database, rows_of

QUICK = RunnerSettings(wait_seconds=0.01, stop_seconds=0.2, max_records=5)
POLICY = ConsumerSettings(
    retry=RetryPolicy(max_attempts=9, initial_delay_seconds=0.0, max_delay_seconds=0.0),
    held_retry_seconds=0.01,
    circuit_failures=0,
    poison_attempts=2,
)
PLACE = Partition("payments", 0)


class Service:
    """A topic whose last reader left its row behind."""

    def __init__(self) -> None:
        self.broker = MemoryBroker({"payments": 1}, patience=Patience(session_seconds=5.0))
        self.database = memory_database()
        self.alone: list[str] = []
        self.act: Callable[[Message], Any] = lambda message: None

        @consumer("billing", policy=POLICY, id_from=FromHeader("message-id"))
        async def handle(message: Message, session: AsyncSession) -> None:
            if message.id in self.suspects:
                self.alone.append(message.id)
            session.add(Effect("paid", message.id))
            done = self.act(message)
            if done is not None:
                await done

        self.consumer = handle

    @property
    def suspects(self) -> list[str]:
        return [id for (id,) in rows_of(self.database, "SELECT message_id FROM crash_suspect")]

    @property
    def members(self) -> list[Member]:
        names = [column.name for column in consumer_member.columns]
        rows = rows_of(self.database, f"SELECT {', '.join(names)} FROM consumer_member")
        found = [dict(zip(names, row, strict=True)) for row in rows]
        return [record_of(consumer_member, SimpleNamespace(_mapping=row), Member) for row in found]

    def send(self, *numbers: int) -> None:
        for number in numbers:
            self.broker.put("payments", b"{}", headers={"message-id": f"m{number}".encode()})

    async def somebody_died(
        self, owner: str = "?", in_flight: int = 3, seconds: float = 0.0
    ) -> None:
        member = Member("billing", "dead", owner, frozenset({PLACE}), in_flight)
        async with self.database.begin() as unit:
            await unit.members.enter(member, seconds)

    async def runner(self, settings: RunnerSettings = QUICK) -> Runner:
        subscription = await self.broker.subscribe("billing", ["payments"])
        await self.broker.settled("billing")
        return Runner(self.consumer, subscription, self.database, settings)

    async def state(self, id: str) -> ClaimState | None:
        async with self.database.begin() as unit:
            row = await unit.claims.look_up("billing", id)
        return None if row is None else row.state


def test_only_what_the_dead_can_have_had_is_handled_alone():
    async def scenario() -> None:
        service = Service()
        await service.somebody_died(in_flight=3)
        service.send(0, 1)
        runner = await service.runner(replace(QUICK, max_records=1))
        await runner.run_until_idle()
        assert service.members != []
        service.send(2, 3)
        await runner.run_until_idle()

        assert service.alone == ["m0", "m1"]
        assert [member.name for member in service.members] == [runner._owner.instance]

    asyncio.run(scenario())


def test_no_more_is_handled_alone_than_the_dead_had_in_flight():
    async def scenario() -> None:
        service = Service()
        await service.somebody_died(in_flight=2)
        service.send(*range(5))
        runner = await service.runner(replace(QUICK, max_records=1))
        await runner.run_until_idle()

        assert service.alone == ["m0", "m1"]
        assert [member.name for member in service.members] == [runner._owner.instance]

    asyncio.run(scenario())


def test_a_row_of_which_nothing_is_left_is_cleared_without_a_message():
    async def scenario() -> None:
        service = Service()
        await service.somebody_died()
        runner = await service.runner()
        await runner.run_until_idle()

        assert [member.name for member in service.members] == [runner._owner.instance]

    asyncio.run(scenario())


def test_a_row_of_another_host_does_not_stay_when_it_has_expired():
    async def scenario() -> None:
        service = Service()
        clock = SimulatedClock()
        service.database = memory_database(clock)
        await service.somebody_died(seconds=60.0)
        runner = await service.runner()
        await runner.run_until_idle()
        worked_off = sorted(member.name for member in service.members)
        clock.advance(61)
        await runner._membership.renew()

        me = runner._owner.instance
        assert worked_off == sorted(["dead", me])
        assert [member.name for member in service.members] == [me]

    asyncio.run(scenario())


def test_failures_that_were_outlived_are_not_counted_as_deaths():
    async def scenario() -> None:
        service = Service()

        def fail(message: Message) -> None:
            if message.attempt < 6:
                raise RetryableMessageError("down")

        service.act = fail
        await service.somebody_died()
        service.send(0)
        runner = await service.runner()
        await runner.run_until_idle()

        assert await service.state("m0") is ClaimState.COMPLETED
        assert service.suspects == []

    asyncio.run(scenario())


def test_a_handler_cancelled_at_a_deadline_is_not_blamed():
    async def scenario() -> None:
        service = Service()
        await service.somebody_died()
        service.send(0)
        began = asyncio.Event()

        async def sleep() -> None:
            began.set()
            await asyncio.sleep(60)

        service.act = lambda message: sleep()
        runner = await service.runner()
        running = asyncio.create_task(runner.run())
        await asyncio.wait_for(began.wait(), 5)
        runner.stop()
        await asyncio.wait_for(running, 5)

        assert service.suspects == []
        assert await service.state("m0") is None

    asyncio.run(scenario())


def test_a_retry_that_was_handled_leaves_no_suspicion_even_if_the_process_dies_behind_it():
    async def scenario() -> None:
        service = Service()
        service.consumer = service.consumer.with_settings(
            replace(POLICY, retry=replace(POLICY.retry, mode=RetryMode.RETRY_TABLE))
        )

        def fail(message: Message) -> None:
            if message.attempt == 1:
                raise RetryableMessageError("down")

        service.act = fail
        service.send(0)
        await (await service.runner()).run_until_idle()
        with crash_at(CrashPoint.MESSAGE_COMMIT_AFTER), pytest.raises(Crash):
            await retry_due(service.consumer, service.database)

        assert service.alone == ["m0"]
        assert await service.state("m0") is ClaimState.COMPLETED
        assert service.suspects == []

    asyncio.run(scenario())


def test_nothing_is_handled_beside_a_suspect_that_somebody_else_tries_here():
    async def scenario() -> None:
        service = Service()
        service.send(0)
        runner = await service.runner()
        async with TURNS.alone():
            running = asyncio.create_task(runner.run_until_idle())
            await asyncio.sleep(0.05)
            meanwhile = effects(service.database, "paid")
        await asyncio.wait_for(running, 5)

        assert meanwhile == []
        assert effects(service.database, "paid") == ["m0"]

    asyncio.run(scenario())


def test_a_suspect_is_not_read_beside_what_runs_here():
    async def scenario() -> None:
        service = Service()
        await service.somebody_died()
        service.send(0)
        runner = await service.runner()
        async with TURNS.beside_others():
            running = asyncio.create_task(runner.run_until_idle())
            await asyncio.sleep(0.05)
            meanwhile = [*service.suspects, *service.alone]
        await asyncio.wait_for(running, 5)

        assert meanwhile == []
        assert service.alone == ["m0"]

    asyncio.run(scenario())


def test_a_row_lasts_as_long_as_its_process_works():
    async def scenario() -> None:
        service, clock = Service(), SimulatedClock()
        service.database = memory_database(clock)
        subscription = await service.broker.subscribe("billing", ["payments"])
        await service.broker.settled("billing")
        runner = Runner(service.consumer, subscription, service.database, QUICK, clock=clock)

        for _ in range(4):
            await runner.run_until_idle()
            [member] = service.members
            assert member.expires_at > clock.now() + QUICK.member_seconds / 2
            clock.advance(QUICK.member_seconds / 2)

    asyncio.run(scenario())


def test_a_clean_rebalance_makes_nobody_careful():
    async def scenario() -> None:
        service = Service()
        first = await service.runner()
        running = asyncio.create_task(first.run())
        async with asyncio.timeout(5):
            while not service.members:
                await asyncio.sleep(0.01)
        subscription = await service.broker.subscribe("billing", ["payments"])
        second = Runner(service.consumer, subscription, service.database, QUICK)
        await service.broker.settled("billing")
        first.stop()
        await asyncio.wait_for(running, 5)
        service.send(0, 1)
        await service.broker.settled("billing")
        await second.run_until_idle()

        assert service.alone == []
        assert len(effects(service.database, "paid")) == 2

    asyncio.run(scenario())


def test_a_clean_stop_removes_the_row_where_the_broker_revokes_nothing_then():
    """As with a client that leaves its group without a word to its listeners."""

    async def scenario() -> None:
        service = Service()
        service.send(0)
        runner = await service.runner()
        runner.subscription._listeners.clear()  # type: ignore[attr-defined]
        running = asyncio.create_task(runner.run())
        while service.broker.lag("billing", "payments"):
            await asyncio.sleep(0.01)
        assert service.members != []
        runner.stop()
        await asyncio.wait_for(running, 5)

        assert service.members == []

    asyncio.run(scenario())


def test_a_partition_is_off_the_row_before_it_goes():
    async def scenario() -> None:
        service = Service()
        service.send(0)
        runner = await service.runner()
        await runner.run_until_idle()
        assert [member.partitions for member in service.members] == [{PLACE}]

        await runner._revoked([PLACE])

        assert service.members == []

    asyncio.run(scenario())


def test_a_partition_that_comes_back_begins_with_what_the_broker_has_committed():
    """Below what was settled, where the last commit before it went had failed."""

    async def scenario() -> None:
        service = Service()
        service.send(0, 1)
        service.broker.fail(BrokerFailure(Call.COMMIT, times=None))
        runner = await service.runner()
        await runner.run_until_idle()
        assert service.broker.lag("billing", "payments") == 2

        service.broker.heal()
        service.broker.rebalance("billing")
        await service.broker.settled("billing")
        await runner.run_until_idle()

        assert service.broker.lag("billing", "payments") == 0
        assert effects(service.database, "paid") == ["m0", "m1"]

    asyncio.run(scenario())


def test_records_that_were_fetched_are_settled_before_their_partition_goes():
    """A rebalance that begins behind the fetch brings nothing below the watermark."""

    async def scenario() -> None:
        service = Service()
        service.send(*range(4))
        runner = await service.runner(replace(QUICK, max_records=2))
        renew = runner._from_time_to_time
        rebalances = iter([True, False])

        async def slow() -> None:
            if next(rebalances, False):
                service.broker.rebalance("billing")
                await asyncio.sleep(0.1)
            await renew()

        runner._from_time_to_time = slow  # type: ignore[method-assign]
        running = asyncio.create_task(runner.run())
        async with asyncio.timeout(5):
            while service.broker.lag("billing", "payments"):
                assert not running.done(), running.exception()
                await asyncio.sleep(0.01)
        runner.stop()
        await asyncio.wait_for(running, 5)

        assert sorted(effects(service.database, "paid")) == [f"m{n}" for n in range(4)]

    asyncio.run(scenario())
