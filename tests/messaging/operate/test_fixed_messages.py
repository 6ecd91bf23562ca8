"""What was fixed is handled, wherever it waited, and whoever is at it."""

from __future__ import annotations

import pytest

from semel.messaging.failed.retries import retry_due
from semel.messaging.handle.lease import handle_leased
from semel.messaging.handler import consumer, message_of
from semel.messaging.records import WaitingFilter
from semel.operate.audit import NotPossible
from semel.operate.deadletters import retry_dead_letter
from semel.operate.deletion import approve_delete, ask_to_delete
from semel.operate.parking import KeepId, NewId, fix, release, skip
from semel.policy.vocabulary import Mode
from tests.messaging.act_world import ANN, BILLING, queue
from tests.messaging.places import InPostgres, InSqlite
from tests.messaging.replay_world import DEAD, PARKS, Service, dead, pay, payload
from tests.stores.world import in_world


class Fixing:
    @in_world
    async def test_a_message_that_waits_for_the_retry_worker_may_get_another_id(self, world):
        service = await dead(world, 1)
        await retry_dead_letter(world.database, BILLING, "m0", **ANN)

        await fix(world.database, BILLING, "m0", payload("b"), ids=NewId("b"), **ANN)
        await retry_due(service.consumer, world.database)

        assert await service.paid() == ["b"]
        assert await queue(world) == []

    @in_world
    async def test_a_message_that_waits_behind_another_may_get_another_id(self, world):
        service = await Service(world, PARKS).open()
        service.refuse("m1")
        await service.deliver("m1", "m2", key="k")
        service.heal()

        await fix(world.database, BILLING, "m2", payload("b", "k"), ids=NewId("b"), **ANN)
        await release(world.database, BILLING, "m1", **ANN)
        for _ in range(2):
            await retry_due(service.consumer, world.database)

        assert await service.paid() == ["m1", "b"]
        assert await queue(world) == []

    @in_world
    async def test_what_somebody_handles_under_a_lease_is_neither_fixed_nor_ended(self, world):
        service = await dead(world, 1)
        await retry_dead_letter(world.database, BILLING, "m0", **ANN)
        request = await ask_to_delete(world.database, BILLING, "m0", **ANN)
        refused = []

        @consumer("billing", policy=DEAD, reading=service.consumer.reading, mode=Mode.LEASED)
        async def export(message, lease):
            for act in (
                fix(world.database, BILLING, "m0", payload("b"), ids=KeepId(), **ANN),
                fix(world.database, BILLING, "m0", payload("b"), ids=NewId("b"), **ANN),
                skip(world.database, BILLING, "m0", **ANN),
                approve_delete(world.database, request.number, actor="bob"),
            ):
                with pytest.raises(NotPossible, match="worker-1 handles it now"):
                    await act
                refused.append(act)
            async with lease.completing() as session:
                await pay(session, message.id)

        (waiting,) = await waiting_messages(world)
        message = message_of(export, waiting)
        await handle_leased(export, world.database, message, "worker-1", waiting=waiting)

        assert len(refused) == 4
        assert await service.paid() == ["m0"]
        assert await queue(world) == []


async def waiting_messages(world):
    async with world.database.begin() as unit:
        return await unit.waiting.find(WaitingFilter(BILLING), 10)


class TestInSqlite(InSqlite, Fixing):
    pass


class TestInPostgres(InPostgres, Fixing):
    pass
