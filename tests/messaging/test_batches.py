"""A batch in one transaction ends in the state of one transaction per message."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Column, MetaData, Table, Text, insert, select

from semel.codec import FromHeader
from semel.message import Coordinates, Message
from semel.messaging.batch import consume_each, consume_many
from semel.messaging.consumer import Consumer, consumer
from semel.messaging.database import Database
from semel.messaging.deadletters import DeadLetterFilter
from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
from semel.messaging.lanes import Order
from semel.messaging.outcome import Handled, Outcome, RetryLater, Skipped
from semel.messaging.retry import GiveUp, RetryMode, RetryPolicy
from semel.messaging.settings import BatchPolicy, ConsumerSettings
from semel.messaging.waiting import WaitingFilter
from semel.sqlalchemy.database import SqlDatabase
from semel.testing.contracts.messaging_world import DatabaseWorld
from tests.messaging.worlds import memory_world, postgres_world, sqlite_world

effects = MetaData()
paid = Table("paid", effects, Column("id", Text, primary_key=True), Column("how", Text))


@dataclass(frozen=True, slots=True)
class Planned:
    """One delivery of a random batch."""

    id: int
    fails: str
    payload: int

    @property
    def key(self) -> str | None:
        """A message has the same key in every delivery."""
        return None if self.id % 4 == 3 else f"k{self.id % 4}"


DELIVERIES = st.builds(
    Planned,
    id=st.integers(0, 9),
    fails=st.sampled_from(["no", "no", "no", "no", "retry", "never", "sql"]),
    payload=st.sampled_from([0, 0, 0, 0, 1]),
)
SETTINGS = st.builds(
    ConsumerSettings,
    retry=st.builds(
        RetryPolicy,
        max_attempts=st.sampled_from([1, 2, 3]),
        initial_delay_seconds=st.sampled_from([0.0, 100.0]),
        max_delay_seconds=st.just(100.0),
        jitter=st.just(False),
        mode=st.sampled_from(RetryMode),
    ),
    on_exhausted=st.sampled_from(GiveUp),
    on_hopeless=st.sampled_from(GiveUp),
    order=st.sampled_from([Order.KEY, Order.NONE]),
    chunk=st.sampled_from([1, 3, 20]),
    batch=st.sampled_from([BatchPolicy.INDEPENDENT, BatchPolicy.STOP, BatchPolicy.DEAD_LETTER]),
)


def messages(plan: list[Planned]) -> list[Message]:
    return [
        Message(
            f"m{p.id}",
            {"fails": p.fails},
            f"{p.id}:{p.payload}".encode(),
            p.key,
            headers={"message-id": f"m{p.id}".encode()},
            source=Coordinates("t", 0, offset),
        )
        for offset, p in enumerate(plan)
    ]


def billing(chosen: ConsumerSettings) -> Consumer:
    @consumer("billing", policy=chosen, id_from=FromHeader("message-id"))
    async def handle(message: Message, session: Any) -> None:
        if hasattr(session, "execute"):
            await session.execute(insert(paid).values(id=message.id, how="handled"))
            if message.payload["fails"] == "sql":
                await session.execute(insert(paid).values(id=message.id, how="again"))
        else:
            session.add("paid", (message.id, "handled"))
            if message.payload["fails"] == "sql":
                raise ValueError("as a broken statement would")
        if message.payload["fails"] == "retry":
            raise RetryableMessageError("later")
        if message.payload["fails"] == "never":
            raise NonRetryableMessageError("never")

    return handle


async def state_of(database: Any) -> dict[str, Any]:
    """Everything that is durable, without times."""
    found: dict[str, Any] = {}
    async with database.begin() as unit:
        for number in range(10):
            row = await unit.claims.look_up("billing", f"m{number}")
            if row is not None:
                code = row.error_code
                found[f"m{number}"] = (row.state, row.attempts, code, row.payload_hash)
        letters = await unit.dead_letters.find(DeadLetterFilter(), 100)
        found["letters"] = sorted((x.message_id, x.attempts, x.error_code) for x in letters)
        waiting = await unit.waiting.find(WaitingFilter(), 100)
        # The order counts per key; what waits for different keys may have come in any order.
        found["waiting"] = sorted(
            ((w.key or w.message_id), number, w.message_id, w.waits, w.attempts)
            for key in {w.key for w in waiting}
            for number, w in enumerate(w for w in waiting if w.key == key and key is not None)
        ) + sorted((w.message_id, w.waits, w.attempts) for w in waiting if w.key is None)
        if isinstance(database, SqlDatabase):
            rows = (await unit.session.execute(select(paid))).all()
            found["paid"] = sorted((row.id, row.how) for row in rows)
    if not isinstance(database, SqlDatabase):
        found["paid"] = sorted(database.rows("paid"))
    return found


async def prepared(world: DatabaseWorld) -> Database:
    if isinstance(world.database, SqlDatabase):
        async with world.database.engine.begin() as connection:
            await connection.run_sync(effects.create_all)
    return world.database


def run_both(
    make: Any, chosen: ConsumerSettings, batches: list[list[Planned]]
) -> tuple[dict[str, Any], dict[str, Any], list[Outcome], list[Outcome]]:
    async def one(consume: Any) -> tuple[dict[str, Any], list[Outcome]]:
        opened: AbstractAsyncContextManager[DatabaseWorld] = make()
        async with opened as world:
            database = await prepared(world)
            outcomes: list[Outcome] = []
            for batch in batches:
                outcomes += await consume(billing(chosen), database, messages(batch))
            return await state_of(database), outcomes

    together, many = asyncio.run(one(consume_many))
    alone, each = asyncio.run(one(consume_each))
    return together, alone, many, each


def kinds(outcomes: list[Outcome]) -> list[str]:
    return [type(outcome).__name__ for outcome in outcomes]


PLANS = st.lists(st.lists(DELIVERIES, min_size=1, max_size=12), min_size=1, max_size=3)


@given(chosen=SETTINGS, holds=st.booleans(), batches=PLANS)
@settings(max_examples=300, deadline=None)
def test_any_batch_in_memory_ends_as_one_transaction_per_message(chosen, holds, batches):
    chosen = replace(chosen, holds_keys=(holds or None) if chosen.order is Order.KEY else None)

    together, alone, many, each = run_both(memory_world, chosen, batches)

    assert together == alone
    assert kinds(many) == kinds(each)


@given(chosen=SETTINGS, holds=st.booleans(), batches=PLANS)
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_batch_on_sqlite_ends_as_one_transaction_per_message(tmp_path, chosen, holds, batches):
    chosen = replace(chosen, holds_keys=(holds or None) if chosen.order is Order.KEY else None)

    together, alone, many, each = run_both(lambda: sqlite_world(tmp_path), chosen, batches)

    assert together == alone
    assert kinds(many) == kinds(each)


@pytest.mark.postgres
@given(chosen=SETTINGS, holds=st.booleans(), batches=PLANS)
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_batch_on_postgres_ends_as_one_transaction_per_message(
    quick_postgres_server, chosen, holds, batches
):
    chosen = replace(chosen, holds_keys=(holds or None) if chosen.order is Order.KEY else None)

    together, alone, many, each = run_both(
        lambda: postgres_world(quick_postgres_server), chosen, batches
    )

    assert together == alone
    assert kinds(many) == kinds(each)


def test_a_batch_that_may_not_be_split_is_kept_whole_or_not_at_all():
    policy = RetryPolicy(max_attempts=2, initial_delay_seconds=0, jitter=False)
    chosen = ConsumerSettings(retry=policy, batch=BatchPolicy.FAIL_BATCH)
    batch = [Planned(n, "retry" if n == 2 else "no", 0) for n in range(4)]

    async def whole() -> tuple[list[Outcome], Any, list[Outcome], Any]:
        async with memory_world() as world:
            first = await consume_many(billing(chosen), world.database, messages(batch))
            between = world.database.rows("paid")
            second = await consume_many(billing(chosen), world.database, messages(batch))
            return first, between, second, world.database.rows("paid")

    first, between, second, after = asyncio.run(whole())

    assert kinds(first) == ["RetryLater"] * 4
    assert between == []
    assert kinds(second) == ["Handled", "Handled", "DeadLettered", "Handled"]
    assert [row[0] for row in after] == ["m0", "m1", "m3"]


def test_a_handler_may_take_the_whole_batch_and_is_given_single_ones_when_it_fails():
    calls: list[list[str]] = []

    @consumer("billing", id_from=FromHeader("message-id"), batches=True)
    async def handle(batch: list[Message], session: Any) -> None:
        calls.append([m.id for m in batch])
        for m in batch:
            if m.payload["fails"] == "never":
                raise NonRetryableMessageError("never")
            session.add("paid", m.id)

    plan = [Planned(n, "never" if n == 1 else "no", 0) for n in range(3)]

    async def whole() -> tuple[list[Outcome], list[Outcome], Any]:
        async with memory_world() as world:
            good = [Planned(n, "no", 0) for n in (7, 8)]
            first = await consume_many(handle, world.database, messages(good))
            second = await consume_many(handle, world.database, messages(plan))
            return first, second, world.database.rows("paid")

    first, second, rows = asyncio.run(whole())

    assert kinds(first) == ["Handled", "Handled"]
    assert kinds(second) == ["Handled", "DeadLettered", "Handled"]
    assert calls == [["m7", "m8"], ["m0", "m1", "m2"], ["m0"], ["m1"], ["m2"]]
    assert rows == ["m7", "m8", "m0", "m2"]


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
