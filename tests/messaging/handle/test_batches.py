"""A batch in one transaction ends in the state of one transaction per message."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from semel.codec import FromHeader
from semel.message import Message
from semel.messaging.failure import NonRetryableMessageError
from semel.messaging.handle.batch import consume_each, consume_many
from semel.messaging.handler import consumer
from semel.messaging.outcome import Handled, Outcome, RetryLater, Skipped
from semel.messaging.settings import ConsumerSettings, RetryPolicy
from semel.policy.vocabulary import BatchPolicy, Duplicates, GiveUp
from tests.messaging.batch_plans import (
    PLANS,
    Behaviour,
    Planned,
    behaviours,
    billing,
    kinds,
    messages,
    paid_ids,
    prepared,
    run_with,
)
from tests.messaging.worlds import Effect, effects, memory_world, postgres_world

quick = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def ends_alike(make: Any, behaviour: Behaviour, batches: list[list[Planned]]) -> None:
    together = run_with(make, consume_many, behaviour, batches)
    alone = run_with(make, consume_each, behaviour, batches)

    assert together == alone


@given(behaviour=behaviours(), batches=PLANS)
@settings(quick, max_examples=40)
def test_any_batch_on_sqlite_ends_as_one_transaction_per_message(behaviour, batches):
    ends_alike(memory_world, behaviour, batches)


@pytest.mark.postgres
@given(behaviour=behaviours(), batches=PLANS)
@settings(quick, max_examples=30)
def test_any_batch_on_postgres_ends_as_one_transaction_per_message(
    quick_postgres_server, behaviour, batches
):
    ends_alike(lambda: postgres_world(quick_postgres_server), behaviour, batches)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@given(behaviour=behaviours(), batches=PLANS)
@settings(quick, max_examples=5_000)
def test_many_batches_on_sqlite_end_as_one_transaction_per_message(behaviour, batches):
    ends_alike(memory_world, behaviour, batches)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.postgres
@given(behaviour=behaviours(), batches=PLANS)
@settings(quick, max_examples=500)
def test_many_batches_on_postgres_end_as_one_transaction_per_message(
    quick_postgres_server, behaviour, batches
):
    ends_alike(lambda: postgres_world(quick_postgres_server), behaviour, batches)


def test_a_batch_that_may_not_be_split_is_kept_whole_or_not_at_all():
    policy = RetryPolicy(max_attempts=2, initial_delay_seconds=0, jitter=False)
    chosen = ConsumerSettings(retry=policy, batch=BatchPolicy.FAIL_BATCH)
    batch = [Planned(n, "retry" if n == 2 else "no", 0) for n in range(4)]

    async def whole() -> tuple[list[Outcome], Any, list[Outcome], Any]:
        async with memory_world() as world:
            database = await prepared(world)
            first = await consume_many(billing(chosen), database, messages(batch))
            between = await paid_ids(database)
            second = await consume_many(billing(chosen), database, messages(batch))
            return first, between, second, await paid_ids(database)

    first, between, second, after = asyncio.run(whole())

    assert kinds(first) == ["RetryLater"] * 4
    assert between == []
    assert kinds(second) == ["Handled", "Handled", "DeadLettered", "Handled"]
    assert after == ["m0", "m1", "m3"]


def test_what_a_whole_batch_gives_up_does_not_overtake_those_of_its_key_before_it():
    policy = RetryPolicy(max_attempts=1)
    chosen = ConsumerSettings(
        retry=policy, batch=BatchPolicy.FAIL_BATCH, on_exhausted=GiveUp.PARK, conflict_tries=2
    )
    for fails in ("retry", "fenced"):
        of_one_key = [Planned(0, "no"), Planned(4, fails), Planned(8, "no")]

        async def whole(batch: list[Planned] = of_one_key) -> tuple[list[Outcome], Any]:
            async with memory_world() as world:
                database = await prepared(world)
                found = await consume_many(billing(chosen), database, messages(batch))
                return found, await paid_ids(database)

        outcomes, rows = asyncio.run(whole())

        assert kinds(outcomes) == ["Handled", "ParkedAway", "ParkedAway"]
        assert rows == ["m0"]


def test_a_handler_may_take_the_whole_batch_and_is_given_single_ones_when_it_fails():
    calls: list[list[str]] = []

    @consumer("billing", id_from=FromHeader("message-id"), batches=True)
    async def handle(batch: list[Message], session: Any) -> None:
        calls.append([m.id for m in batch])
        for m in batch:
            if m.payload["fails"] == "never":
                raise NonRetryableMessageError("never")
            session.add(Effect("paid", m.id))

    plan = [Planned(n, "never" if n == 1 else "no", 0) for n in range(3)]

    async def whole() -> tuple[list[Outcome], list[Outcome], Any]:
        async with memory_world() as world:
            good = [Planned(n, "no", 0) for n in (7, 8)]
            first = await consume_many(handle, world.database, messages(good))
            second = await consume_many(handle, world.database, messages(plan))
            return first, second, effects(world.database, "paid")

    first, second, rows = asyncio.run(whole())

    assert kinds(first) == ["Handled", "Handled"]
    assert kinds(second) == ["Handled", "DeadLettered", "Handled"]
    assert calls == [["m7", "m8"], ["m0", "m1", "m2"], ["m0"], ["m1"], ["m2"]]
    assert rows == ["m7", "m8", "m0", "m2"]


def test_a_handler_of_batches_is_invoked_for_a_duplicate_before_newer_messages():
    calls: list[list[str]] = []

    async def handle(batch: list[Message]) -> None:
        calls.append([m.id for m in batch])

    chosen = ConsumerSettings(duplicates=Duplicates.INVOKE)
    made = consumer("billing", policy=chosen, id_from=FromHeader("message-id"), batches=True)

    async def whole() -> None:
        async with memory_world() as world:
            by = made(handle)
            await consume_many(by, world.database, messages([Planned(0, "no")]))
            plan = [Planned(n, "no") for n in (1, 0, 4, 8)]
            await consume_many(by, world.database, messages(plan))

    asyncio.run(whole())

    assert calls == [["m0"], ["m1"], ["m0"], ["m4", "m8"]]


def test_a_batch_without_failures_calls_each_handler_once():
    calls: list[str] = []

    @consumer("billing", id_from=FromHeader("message-id"))
    async def handle(message: Message) -> None:
        calls.append(message.id)

    async def whole() -> list[Outcome]:
        async with memory_world() as world:
            plan = [Planned(n % 5, "no", 0) for n in range(8)]
            return await consume_many(handle, world.database, messages(plan))

    outcomes = asyncio.run(whole())

    assert [type(o) for o in outcomes] == [Handled] * 5 + [Skipped] * 3
    assert calls == ["m0", "m1", "m2", "m3", "m4"]
    assert not any(isinstance(o, RetryLater) for o in outcomes)


def test_a_handler_of_batches_is_not_called_for_what_stands_behind_a_late_claim():
    """The first m4 of the batch has another payload, and the second is claimed on its turn."""
    settings = ConsumerSettings(
        retry=RetryPolicy(max_attempts=1, initial_delay_seconds=0.0, jitter=False),
        held_retry_seconds=0.0,
    )
    repeated = [Planned(4, "no", 1, 1), Planned(4, "no", 0, 1), Planned(0, "no", 0, 1)]

    ends_alike(
        memory_world,
        Behaviour(settings, takes_batches=True, went_well=0),
        [[Planned(4, "let go", 0, 1)], repeated],
    )
