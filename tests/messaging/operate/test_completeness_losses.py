"""What is kept and lost past the engine is missing in the audit, and nothing else is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from semel.messaging.handle.attempt import handle_message
from semel.messaging.outcome import Mark, OutcomeRange
from semel.messaging.records import WaitingMessage, Waits
from semel.operate.completeness import Stretch, audit_completeness
from semel.operate.deadletters import skip_dead_letter
from semel.operate.parking import skip
from semel.policy.vocabulary import Duplicates
from tests.messaging.audited import ANN, BILLING, PLACE, TABLE, Service, dead, down, lose, with_one
from tests.messaging.places import InMemory, InPostgres, InSqlite, Scenarios
from tests.stores.world import DatabaseContract, DatabaseWorld, in_world


class Twins(DatabaseContract):
    """The same message at several offsets is kept once, and no offset is missing for it."""

    @in_world
    async def test_a_twin_of_a_message_that_waits_is_refused_not_lost(self, world):
        slow = replace(TABLE, initial_delay_seconds=60, max_delay_seconds=60)
        service = Service(world, retry=slow)
        service.failures = {"m0": down()}
        service.send("m0", "m0")
        await service.work()
        assert await service.stands() == {"waiting": 1, "refused": 1}

        await skip(service.database, BILLING, "m0", **ANN)

        assert await service.stands() == {"skipped": 1, "refused": 1}

    @in_world
    async def test_so_is_a_twin_that_fails_while_the_first_one_waits(self, world):
        service = Service(world, retry=replace(TABLE, max_attempts=3))
        service.failures = {"m0": down()}
        service.send("m0", "m0")
        await service.work()
        assert await service.stands() == {"waiting": 1, "refused": 1}
        service.failures = {}

        await service.retry()

        assert await service.stands() == {"handled": 1, "refused": 1}

    @in_world
    async def test_a_twin_that_is_handled_first_makes_the_waiting_one_a_duplicate(self, world):
        service = Service(world)
        service.failures = {"m0": down()}
        service.send("m0")
        await service.work()
        service.failures = {}
        service.send("m0")
        await service.work()

        await service.retry()

        assert await service.stands() == {"handled": 1, "duplicate": 1}

    @in_world
    async def test_a_twin_that_dies_first_makes_the_waiting_one_refused(self, world):
        service = Service(world)
        service.failures = {"m0": down()}
        service.send("m0", "m0")
        await service.work()
        await service.retry()

        assert await service.stands() == {"dead": 1, "refused": 1}

    @in_world
    async def test_conflicts_with_one_payload_share_a_dead_letter(self, world):
        service = Service(world)
        service.send("m0")
        service.send("m0", "m0", value=b'{"other": 1}')
        await service.work()

        assert await service.stands() == {"handled": 1, "dead": 1, "refused": 1}

    @in_world
    async def test_a_repetition_that_fails_is_a_dead_letter_once(self, world):
        service = Service(world, duplicates=Duplicates.INVOKE)
        service.send("m0")
        await service.work()
        service.failures = {"m0": dead()}
        service.send("m0", "m0")
        await service.work()

        assert await service.stands() == {"handled": 1, "dead": 1, "refused": 1}


class Losses(DatabaseContract):
    """What goes past the engine is missing."""

    @in_world
    async def test_a_loss_behind_the_broker_is_named(self, world):
        service = Service(world)
        service.failures = {"m1": dead(), "m3": down(), "m5": dead()}
        service.send(*(f"m{number}" for number in range(7)))
        await service.work()
        await skip_dead_letter(service.database, BILLING, "m5", **ANN)
        assert await service.stands() == {"handled": 4, "dead": 1, "waiting": 1, "skipped": 1}

        await lose(service.database, "m1", "m3")

        found = await service.audit()
        assert found.missing == found.lost == (Stretch(1, 1), Stretch(3, 3))
        assert not found.is_complete

    @in_world
    async def test_a_loss_is_no_hole_even_where_the_broker_has_no_record_any_more(self, world):
        service = await with_one(world, dead())
        service.send("m3")
        await service.work()
        await lose(service.database, "m1")
        service.broker.trim(PLACE, 2)

        (found,) = await audit_completeness(
            service.database, BILLING, None, service.broker.reader()
        )

        assert (found.lost, found.holes) == ((Stretch(1, 1),), ())

    @in_world
    async def test_a_loss_is_found_though_no_delivery_could_note_the_outcome(self, world):
        slow = replace(TABLE, initial_delay_seconds=60, max_delay_seconds=60)
        service = Service(world, retry=slow)
        service.failures = {"m0": dead(), "m1": down()}
        service.send("m0", "m1")
        for record in service.broker.records("payments"):
            read = service.consumer.reading.read(record)
            await handle_message(service.consumer, service.database, read)
        await service.work()
        assert await service.stands() == {"dead": 1, "waiting": 1}

        await lose(service.database, "m0", "m1")

        assert (await service.audit()).lost == (Stretch(0, 1),)

    @in_world
    async def test_a_loss_in_the_middle_of_a_large_range_is_found_in_pages(self, world):
        lost, number = 1_537, 2_500
        messages = [
            WaitingMessage(
                BILLING, f"m{n}", Waits.PARKED, payload=b"", topic="payments", partition=0, offset=n
            )
            for n in range(number)
            if n != lost
        ]
        async with world.database.begin() as unit:
            await unit.outcomes.record(BILLING, [OutcomeRange(PLACE, 0, number - 1, "parked")])
            await unit.outcomes.record(BILLING, [OutcomeRange(PLACE, 9, 9, Mark.HANDLED.value)])
            for message in messages:
                if message.offset != 9:
                    await unit.waiting.put(message)

        (found,) = await audit_completeness(world.database, BILLING)

        assert found.lost == (Stretch(lost, lost),)
        assert {s.value: n for s, n in found.counts.items() if n} == {
            "handled": 1,
            "parked": number - 2,
        }


@dataclass
class Meanwhile:
    """A database in which something happens before one of its transactions."""

    database: Any
    before: int
    act: Callable[[], Awaitable[None]]
    begun: int = 0

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        self.begun += 1
        if self.begun == self.before:
            await self.act()
        async with self.database.begin() as unit:
            yield unit


class Moves(Scenarios):
    """Nobody stops the consumers while the audit looks."""

    @pytest.mark.parametrize("before", range(1, 5))
    def test_what_moves_or_ends_meanwhile_is_not_lost(self, before):
        async def scenario(world: DatabaseWorld) -> None:
            service = Service(world)
            service.failures = {"moves": down(), "ends": down()}
            service.send("m0", *service.failures)
            await service.work()
            service.failures = {"moves": dead()}

            database = Meanwhile(world.database, before, service.retry)
            (found,) = await audit_completeness(database, BILLING)

            assert found.is_complete
            assert await service.stands() == {"handled": 2, "dead": 1}

        self.run(scenario)


class TestTwinsInSqlite(InSqlite, Twins):
    pass


class TestTwinsInPostgres(InPostgres, Twins):
    pass


class TestLossesInSqlite(InSqlite, Losses):
    pass


class TestLossesInPostgres(InPostgres, Losses):
    pass


class TestMovesInMemory(InMemory, Moves):
    pass


class TestMovesInPostgres(InPostgres, Moves):
    pass
