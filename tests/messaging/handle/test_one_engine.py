"""A consumer has one engine: while a pipeline on Spark runs it, no service can claim for it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError

from semel.messaging import claim_sync
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.batch import consume_many
from semel.messaging.handle.claims import (
    Claimed,
    ClaimRequest,
    ClaimState,
    Duplicate,
    Failure,
    RunByPipeline,
)
from semel.messaging.handler import consumer
from semel.messaging.outcome import Handled, Nack, RetryLater, Skipped, settlement
from semel.messaging.records import WaitingMessage, Waits
from tests.messaging.engines import give_back, take_over
from tests.messaging.handled import message, retrying
from tests.messaging.outgoing import run
from tests.messaging.served import Service
from tests.messaging.worlds import sqlite_world

FAILED = Failure(ClaimState.FAILED_RETRYABLE, 1, "TIMEOUT")
LOCK = text("LOCK TABLE processed_message IN SHARE MODE")


async def claims_of(world, message_id):
    async with world.database.begin() as unit:
        return await unit.claims.look_up("billing", message_id)


async def made(world, message_id, failure=FAILED):
    """Leave a failed claim behind, of the time when a service ran the consumer."""
    async with world.database.begin() as unit:
        await unit.claims.mark_failed("billing", message_id, failure)


ASKED = {
    "a claim": lambda claims, id: claims.try_claim("billing", ClaimRequest(id)),
    "a batch of claims": lambda claims, id: claims.try_claim_many("billing", [ClaimRequest(id)]),
    "a lease": lambda claims, id: claims.lease(
        "billing", ClaimRequest(id), owner="me", seconds=60.0
    ),
    "a failure": lambda claims, id: claims.mark_failed("billing", id, FAILED),
    "a later failure": lambda claims, id: claims.mark_failed(
        "billing", id, replace(FAILED, attempts=2)
    ),
    "a completion": lambda claims, id: claims.mark_completed("billing", id),
    "the plain claim": lambda claims, id: claims.claim(consumer_name="billing", event_id=id),
}


@pytest.mark.parametrize("known", ["new", "failed", "handled"])
@pytest.mark.parametrize("asked", ASKED)
def test_nothing_is_claimed_while_a_pipeline_runs_the_consumer(database, asked, known):
    async def test(world):
        if known == "failed":
            await made(world, "m1")
        if known == "handled":
            async with world.database.begin() as unit:
                await unit.claims.mark_completed("billing", "m1")
        before = await claims_of(world, "m1")
        await take_over(world.database)

        with pytest.raises(RunByPipeline) as refused:
            async with world.database.begin() as unit:
                await ASKED[asked](unit.claims, "m1")

        assert str(refused.value) == (
            "consumer billing is run by Spark (payments/main), and nothing was claimed: stop this "
            "service, or hand the consumer over with `semel consumer hand-over billing`"
        )
        assert await claims_of(world, "m1") == before
        async with world.database.begin() as unit:
            assert isinstance(await unit.claims.try_claim("shipping", ClaimRequest("m1")), Claimed)

    run(database, test)


def test_after_the_hand_over_services_claim_again_and_find_what_was_handled(database):
    async def test(world):
        await take_over(world.database)
        async with world.database.begin() as unit:
            done = Failure(ClaimState.COMPLETED, 1, "")
            assert await unit.claims.decide("billing", "m1", done)
        await give_back(world.database)

        async with world.database.begin() as unit:
            old = await unit.claims.try_claim("billing", ClaimRequest("m1"))
            new = await unit.claims.try_claim("billing", ClaimRequest("m2"))

        assert (old, new) == (Duplicate(), Claimed())

    run(database, test)


def test_an_owner_may_end_its_lease_and_may_not_renew_it_once_it_has_run_out(database):
    async def test(world):
        async with world.database.begin() as unit:
            first, second = [
                await unit.claims.lease("billing", ClaimRequest(id), owner="me", seconds=60.0)
                for id in ("m1", "m2")
            ]
        await take_over(world.database)

        async with world.database.begin() as unit:
            assert await unit.claims.mark_completed("billing", "m1", first.fence)
        await world.age(90)
        async with world.database.begin() as unit:
            claims, fence = unit.claims, second.fence
            assert not await claims.renew("billing", "m2", fence, 60.0)
            assert not await claims.lock_expired("billing", "m2", fence)
            assert not await claims.mark_failed("billing", "m2", FAILED, fence)
            assert not await claims.mark_completed("billing", "m2", fence)

    run(database, test)


def test_no_delivery_is_acknowledged_while_a_pipeline_runs_the_consumer(database):
    async def test(world):
        calls = []

        @consumer("billing", policy=retrying())
        async def handle(message, session):
            calls.append(message.id)

        handled = await handle_message(handle, world.database, message(1, key="a"))
        first = message(2, key="b")
        async with world.database.begin() as unit:
            parked = Failure(ClaimState.PARKED, 1, "X", payload_hash=first.digest)
            await unit.claims.mark_failed("billing", first.id, parked)
            waits = WaitingMessage.of("billing", first, Waits.PARKED, held=True)
            await unit.waiting.put(waits)
        again = await handle_message(handle, world.database, message(1, key="a"))
        await take_over(world.database)

        refused = [
            await handle_message(handle, world.database, message(1, key="a")),
            await handle_message(handle, world.database, first),
            await handle_message(handle, world.database, message(3, key="b")),
            *await consume_many(handle, world.database, [message(1, key="a"), message(4)]),
        ]

        assert (handled, again) == (Handled(), Skipped("duplicate"))
        assert calls == ["m1"]
        assert all(isinstance(settlement(outcome), Nack) for outcome in refused), refused
        assert all(isinstance(one, RetryLater) for one in refused)
        assert "run by Spark (payments/main)" in refused[0].failure.reason

    run(database, test)


class TakenOverBetween:
    """A database whose consumer is taken over after its first transaction."""

    def __init__(self, database):
        self.database = database
        self.classification = database.classification
        self.begun = 0

    @asynccontextmanager
    async def begin(self):
        self.begun += 1
        if self.begun == 2:
            await take_over(self.database)
        async with self.database.begin() as unit:
            yield unit


def test_a_failure_is_not_written_once_a_pipeline_runs_the_consumer(database):
    async def test(world):
        @consumer("billing", policy=retrying())
        async def handle(message, session):
            raise OSError("no answer")

        between = TakenOverBetween(world.database)
        outcome = await handle_message(handle, between, message(1))

        assert between.begun == 2
        assert isinstance(settlement(outcome), Nack)
        assert await claims_of(world, "m1") is None

    run(database, test)


@pytest.mark.postgres
def test_a_claim_reads_the_registry_after_it_has_locked_the_table(postgres):
    """What the start of a pipeline relies on: its row, then a lock of the table for a moment."""

    async def test(world):
        async with world.database.begin() as claiming:
            assert await claiming.claims.try_claim("billing", ClaimRequest("m1")) == Claimed()
            with pytest.raises(DBAPIError, match="lock timeout"):
                async with world.database.begin() as starting:
                    await starting.session.execute(LOCK)
        async with world.database.begin() as starting:
            await starting.session.execute(LOCK)
            waits = asyncio.create_task(claim(world, "m2"))
            await asyncio.wait({waits}, timeout=0.1)
            await take_over(world.database)
        with pytest.raises(RunByPipeline):
            await waits

    run(postgres, test)


async def claim(world, message_id):
    async with world.database.begin() as unit:
        return await unit.claims.try_claim("billing", ClaimRequest(message_id))


def test_a_service_is_refused_at_its_start_and_leaves_no_row_of_itself(memory):
    async def test(world):
        service = Service()
        service.send(1)
        await take_over(service.database)
        runner = await service.runner()

        with pytest.raises(RunByPipeline, match="hand-over billing"):
            await runner.run()

        async with service.database.begin() as unit:
            assert await unit.members.running("billing") == []
        assert service.paid == []
        assert service.committed == {}

    run(memory, test)


def test_a_service_that_is_given_partitions_later_is_refused_then(memory):
    async def test(world):
        service = Service()
        service.send(1)
        runner = await service.runner()
        await take_over(service.database)

        with pytest.raises(RunByPipeline):
            await runner.run_until_idle()

        async with service.database.begin() as unit:
            assert await unit.members.running("billing") == []
        assert service.committed == {}
        await runner.subscription.close()

    run(memory, test)


def test_a_program_without_asyncio_is_refused_too(tmp_path):
    async def test(world):
        await take_over(world.database)
        with (
            create_engine(f"sqlite:///{world.database.engine.url.database}").begin() as connection,
            pytest.raises(RunByPipeline),
        ):
            claim_sync(connection, consumer="billing", message_id="m1")

    run(lambda: sqlite_world(tmp_path), test)
