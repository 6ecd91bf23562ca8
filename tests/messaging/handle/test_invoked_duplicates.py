"""Handlers that are invoked for duplicates, and failures that are nobody's attempt."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from semel.codec import FromHeader
from semel.errors import Fenced, InDoubt
from semel.message import Coordinates, Message
from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.batch import consume_many
from semel.messaging.handle.claims import WITHOUT_EFFECT, ClaimState
from semel.messaging.handler import Consumer, consumer
from semel.messaging.outcome import DeadLettered, Handled, RetryLater, Skipped
from semel.messaging.records import BEHIND
from semel.messaging.settings import ConsumerSettings, RetryPolicy
from semel.operate.deadletters import skip_dead_letter
from semel.operate.explain import explain_message
from semel.policy.vocabulary import BatchPolicy, Duplicates
from semel.sql.database import SqlDatabase
from semel.testing.clock import SimulatedClock
from tests.messaging.worlds import Effect, effects, memory_database

POLICY = RetryPolicy(max_attempts=2, jitter=False)
M1 = Message("m1", {}, b"{}", source=Coordinates("t", 0, 1))


def sending(database: SqlDatabase, failures: list[Exception], **settings: Any) -> Consumer:
    chosen = ConsumerSettings(**{"retry": POLICY, "duplicates": Duplicates.INVOKE, **settings})

    @consumer("c", policy=chosen, id_from=FromHeader("message-id"))
    async def handle(message: Message, session: AsyncSession) -> None:
        if not message.is_duplicate:
            session.add(Effect("rows", message.id))
        elif failures:
            raise failures[0]

    return handle


async def one(sender: Consumer, database: SqlDatabase, message: Message) -> Any:
    return await handle_message(sender, database, message)


async def batch(sender: Consumer, database: SqlDatabase, message: Message) -> Any:
    return (await consume_many(sender, database, [message]))[0]


async def whole_batch(sender: Consumer, database: SqlDatabase, message: Message) -> Any:
    failing = sender.with_settings(
        ConsumerSettings(retry=POLICY, duplicates=Duplicates.INVOKE, batch=BatchPolicy.FAIL_BATCH)
    )
    return (await consume_many(failing, database, [message]))[0]


WAYS = pytest.mark.parametrize("deliver", [one, batch, whole_batch])


@WAYS
def test_what_a_duplicate_could_not_send_again_is_a_dead_letter_and_not_lost(deliver):
    async def scenario() -> None:
        database = memory_database()
        sender = sending(database, [NonRetryableMessageError("refused")])
        await handle_message(sender, database, M1)

        outcome = await deliver(sender, database, M1)

        assert isinstance(outcome, DeadLettered)
        async with database.begin() as unit:
            letter = await unit.dead_letters.get("c", "m1")
            row = await unit.claims.look_up("c", "m1")
        assert letter is not None
        assert row is not None
        assert row.state is ClaimState.COMPLETED
        assert effects(database, "rows") == ["m1"]

    asyncio.run(scenario())


@WAYS
@pytest.mark.parametrize(
    "error", [RetryableMessageError("later"), ConnectionError("gone"), ValueError("no broker")]
)
def test_what_a_duplicate_could_not_send_for_now_comes_back(deliver, error):
    async def scenario() -> None:
        database = memory_database()
        failures = [error]
        sender = sending(database, failures)
        await handle_message(sender, database, M1)

        first = await deliver(sender, database, M1)
        failures.clear()
        second = await deliver(sender, database, M1)

        assert isinstance(first, RetryLater)
        assert isinstance(second, Skipped)
        assert effects(database, "rows") == ["m1"]

    asyncio.run(scenario())


class MineIsInDoubt(InDoubt):
    """What a handler raises that calls something with two-phase commits of its own."""


@pytest.mark.parametrize("error", [Fenced("not mine any more"), MineIsInDoubt("who knows")])
def test_a_handler_that_is_fenced_or_in_doubt_every_time_is_not_tried_for_ever(error):
    async def scenario() -> None:
        clock = SimulatedClock()
        database = memory_database(clock)
        chosen = ConsumerSettings(
            retry=RetryPolicy(
                max_attempts=2,
                jitter=False,
                retryable=frozenset({"DATABASE_CONFLICT", "HANDLER_FAILED"}),
            ),
            conflict_tries=1,
        )

        @consumer("c", policy=chosen, id_from=FromHeader("message-id"))
        async def handle(message: Message) -> None:
            raise error

        outcomes = []
        for _ in range(2):
            outcomes.append(await handle_message(handle, database, M1))
            clock.advance(60)

        assert [type(outcome) for outcome in outcomes] == [RetryLater, DeadLettered]

    asyncio.run(scenario())


def test_a_batch_handler_sees_which_attempt_each_message_is_at():
    async def scenario() -> None:
        clock = SimulatedClock()
        database = memory_database(clock)
        calls: list[list[int]] = []

        @consumer(
            "c",
            policy=ConsumerSettings(retry=POLICY),
            id_from=FromHeader("message-id"),
            batches=True,
        )
        async def handle(messages: list[Message], session: AsyncSession) -> None:
            calls.append([message.attempt for message in messages])
            if any(message.attempt == 1 for message in messages):
                raise RetryableMessageError("later")

        await consume_many(handle, database, [M1])
        clock.advance(60)
        [outcome] = await consume_many(handle, database, [M1])

        assert isinstance(outcome, Handled)
        assert calls[-1] == [2]

    asyncio.run(scenario())


@WAYS
def test_what_a_person_decided_to_have_no_effect_is_not_sent_either(deliver):
    async def scenario() -> None:
        database, calls = memory_database(), list[str]()
        chosen = ConsumerSettings(retry=POLICY, duplicates=Duplicates.INVOKE)

        @consumer("c", policy=chosen, id_from=FromHeader("message-id"))
        async def handle(message: Message, session: AsyncSession) -> None:
            calls.append(message.id)
            raise NonRetryableMessageError("no")

        await deliver(handle, database, M1)
        await skip_dead_letter(database, "c", "m1", actor="ann", reason="a test order")
        calls.clear()

        assert isinstance(await deliver(handle, database, M1), Skipped)
        assert calls == []

    asyncio.run(scenario())


@pytest.mark.parametrize("deliver", [one, batch])
def test_what_was_passed_over_as_an_old_version_is_not_sent_later(deliver):
    async def scenario() -> None:
        database, calls = memory_database(), list[str]()
        chosen = ConsumerSettings(retry=POLICY, duplicates=Duplicates.INVOKE, versioned=True)

        @consumer("c", policy=chosen, id_from=FromHeader("message-id"))
        async def handle(message: Message, session: AsyncSession) -> None:
            calls.append(message.id)

        first, old = (Message(id, {}, b"{}", key="k", version=1) for id in ("first", "old"))
        assert isinstance(await deliver(handle, database, first), Handled)
        assert isinstance(await deliver(handle, database, old), Skipped)
        assert isinstance(await deliver(handle, database, old), Skipped)
        assert calls == ["first"]
        story = await explain_message(database, "old")
        assert "without an effect (OLD_VERSION)" in str(story)

    asyncio.run(scenario())


@WAYS
@pytest.mark.parametrize("code", sorted({*WITHOUT_EFFECT, BEHIND}))
def test_a_handlers_own_code_is_never_taken_for_a_marker(deliver, code):
    async def scenario() -> None:
        clock = SimulatedClock()
        database, calls = memory_database(clock), list[bool]()
        chosen = ConsumerSettings(retry=POLICY, duplicates=Duplicates.INVOKE)

        @consumer("c", policy=chosen, id_from=FromHeader("message-id"))
        async def handle(message: Message, session: AsyncSession) -> None:
            calls.append(message.is_duplicate)
            if len(calls) == 1:
                raise RetryableMessageError("later", code)

        await deliver(handle, database, M1)
        clock.advance(60)
        assert isinstance(await deliver(handle, database, M1), Handled)
        assert isinstance(await deliver(handle, database, M1), Skipped)

        assert calls == [False, False, True], "what it sends is sent again"
        async with database.begin() as unit:
            row = await unit.claims.look_up("c", "m1")
        assert row is not None
        assert (row.error_code, row.marker) == ("", "")

    asyncio.run(scenario())
