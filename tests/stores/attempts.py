"""The executable contract of failed attempts."""

from __future__ import annotations

from dataclasses import replace

from semel.messaging.handle.claims import ClaimState, Failure
from semel.messaging.records import (
    FIRST_KEPT,
    LATEST_KEPT,
    MOST_KEPT,
    FailedAttempt,
    InboxMessage,
    MessageFilter,
)
from tests.stores.claims_world import rolled_back
from tests.stores.deadletters import LETTER
from tests.stores.world import DatabaseContract, DatabaseWorld, in_world

DAY = 86_400.0
ATTEMPT = FailedAttempt(
    "billing",
    "m1",
    1,
    "DEPENDENCY_UNAVAILABLE",
    "dependency_outage",
    "the bank is closed",
    "BankClosed",
    "process 7 on worker-1",
    "customer-7",
)


class AttemptsContract(DatabaseContract):
    """Everything a `semel.messaging.database.FailedAttempts` must do."""

    @in_world
    async def test_every_attempt_is_kept_as_it_was_in_order(self, world: DatabaseWorld) -> None:
        codes = ("TIMEOUT", "RATE_LIMITED", "DATABASE_CONFLICT", "TIMEOUT")
        given = [
            replace(ATTEMPT, number=number, error_code=code, reason=f"failure {number}")
            for number, code in enumerate(codes, 1)
        ]
        for attempt in given:
            await add(world, attempt)

        found = await of(world, "m1")

        assert [replace(attempt, at=0.0) for attempt in found] == given

    @in_world
    async def test_the_time_is_the_databases_unless_the_claim_has_one(
        self, world: DatabaseWorld
    ) -> None:
        async with world.database.begin() as unit:
            before = await unit.now()
        await add(world, ATTEMPT)
        await add(world, replace(ATTEMPT, at=1_700_000_000.123456))

        now, given = await of(world, "m1")

        async with world.database.begin() as unit:
            assert before <= now.at <= await unit.now()
        assert given.at == 1_700_000_000.123456

    @in_world
    async def test_a_number_that_comes_again_is_another_attempt(self, world: DatabaseWorld) -> None:
        for number in (1, 2, 1):
            await add(world, replace(ATTEMPT, number=number))

        assert [attempt.number for attempt in await of(world, "m1")] == [1, 2, 1]

    @in_world
    async def test_each_message_of_each_consumer_has_its_own(self, world: DatabaseWorld) -> None:
        strange = replace(ATTEMPT, message_id="x" * 5000, key="nul\0", reason="\0", error_code="\0")
        for attempt in (ATTEMPT, replace(ATTEMPT, consumer="shipping"), strange):
            await add(world, attempt)

        assert len(await of(world, "m1")) == 1
        (found,) = await of(world, "x" * 5000)
        assert (found.message_id, found.key) == ("x" * 5000, "nul\0")

    @in_world
    async def test_an_attempt_is_durable_with_its_transaction_alone(
        self, world: DatabaseWorld
    ) -> None:
        async with rolled_back(world) as unit:
            await unit.attempts.add(ATTEMPT)

        assert await of(world, "m1") == []

    @in_world
    async def test_of_very_many_the_first_and_the_latest_stay(self, world: DatabaseWorld) -> None:
        await add(world, replace(ATTEMPT, message_id="other"))
        async with world.database.begin() as unit:
            for number in range(1, MOST_KEPT + 1):
                await unit.attempts.add(replace(ATTEMPT, number=number))
        full = await of(world, "m1")
        for number in range(MOST_KEPT + 1, MOST_KEPT + 11):
            await add(world, replace(ATTEMPT, number=number))

        found = [attempt.number for attempt in await of(world, "m1")]

        assert len(full) == MOST_KEPT
        last = MOST_KEPT + 10
        first = range(1, FIRST_KEPT + 1)
        assert found == [*first, *range(last - LATEST_KEPT + 1, last + 1)]
        assert len(await of(world, "other")) == 1

    @in_world
    async def test_erasing_takes_the_reason_and_leaves_the_code(self, world: DatabaseWorld) -> None:
        for attempt in (ATTEMPT, replace(ATTEMPT, message_id="m2", key="customer-8")):
            await add(world, attempt)
            await add(world, replace(attempt, consumer="shipping"))
        before = await of(world, "m1")

        async with world.database.begin() as unit:
            assert await unit.attempts.erase(MessageFilter(key="customer-7")) == 2
            assert await unit.attempts.erase(MessageFilter(message_id="m1")) == 0
            assert await unit.attempts.erase(MessageFilter("shipping", "m2")) == 1

        assert await of(world, "m1") == [replace(attempt, reason="") for attempt in before]
        assert [attempt.reason for attempt in await of(world, "m2")] == [ATTEMPT.reason]

    @in_world
    async def test_attempts_go_when_they_are_old_and_their_message_is_gone(
        self, world: DatabaseWorld
    ) -> None:
        for attempt in (ATTEMPT, ATTEMPT, replace(ATTEMPT, consumer="shipping")):
            await add(world, attempt)
        young = await delete_gone(world)
        await world.age(2 * DAY)
        await add(world, replace(ATTEMPT, message_id="new"))

        deleted = [await delete_gone(world, limit=1) for _ in range(3)]

        assert (young, deleted) == (0, [1, 1, 0])
        assert await of(world, "m1") == []
        assert len(await of(world, "new")) == 1
        assert len(await of(world, "m1", "shipping")) == 1

    @in_world
    async def test_attempts_stay_while_anything_else_of_their_message_does(
        self, world: DatabaseWorld
    ) -> None:
        async with world.database.begin() as unit:
            for name in ("claimed", "stored", "dead", "x" * 5000):
                await unit.attempts.add(replace(ATTEMPT, message_id=name))
            for name in ("claimed", "x" * 5000):
                failure = Failure(ClaimState.FAILED_RETRYABLE, 1, "TIMEOUT")
                await unit.claims.mark_failed("billing", name, failure)
            await unit.inbox.store(InboxMessage("billing", "stored", payload=b"{}"))
            await unit.dead_letters.put(replace(LETTER, consumer="billing", message_id="dead"))
        await world.age(2 * DAY)

        assert await delete_gone(world) == 0


async def add(world: DatabaseWorld, attempt: FailedAttempt) -> None:
    """Write an attempt in a transaction of its own."""
    async with world.database.begin() as unit:
        await unit.attempts.add(attempt)


async def of(
    world: DatabaseWorld, message_id: str, consumer: str = "billing"
) -> list[FailedAttempt]:
    """Read a message's committed attempts."""
    async with world.database.begin() as unit:
        return list(await unit.attempts.of(consumer, message_id))


async def delete_gone(world: DatabaseWorld, limit: int = 100) -> int:
    """Delete what is a day old, of one consumer."""
    async with world.database.begin() as unit:
        return await unit.attempts.delete_gone("billing", DAY, limit)
