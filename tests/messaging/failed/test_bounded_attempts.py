"""No retry for ever, and no attempt that was none: what counts, and what does not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from semel.codec import FromHeader
from semel.errors import Misuse
from semel.message import Coordinates, Message
from semel.messaging.database import Database
from semel.messaging.failure import RetryableMessageError
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.batch import consume_each, consume_many
from semel.messaging.handle.claims import ClaimState, Locked
from semel.messaging.handler import Consumer, consumer
from semel.messaging.outcome import (
    DeadLettered,
    Handled,
    Nack,
    Outcome,
    RetryLater,
    Skipped,
    settlement,
)
from semel.messaging.settings import ConsumerSettings, RetryPolicy
from semel.policy.vocabulary import BatchPolicy, Duplicates
from tests.messaging.places import DatabaseScenarios, InPostgres, InSqlite
from tests.messaging.worlds import check_foreign_keys

TWICE = RetryPolicy(max_attempts=2, initial_delay_seconds=0, max_delay_seconds=0, jitter=False)
WHOLE = ConsumerSettings(retry=TWICE, batch=BatchPolicy.FAIL_BATCH)


def message(number: int) -> Message:
    return Message(f"m{number}", {}, b"{}", source=Coordinates("t", 0, number))


def handling(
    settings: ConsumerSettings, handler: Callable[..., Awaitable[Any]], **more: Any
) -> Consumer:
    return consumer("c", policy=settings, id_from=FromHeader("message-id"), **more)(handler)


async def one(chosen: Consumer, database: Database, *messages: Message) -> list[Outcome]:
    return [await handle_message(chosen, database, message) for message in messages]


async def many(chosen: Consumer, database: Database, *messages: Message) -> list[Outcome]:
    return await consume_many(chosen, database, messages)


async def whole(chosen: Consumer, database: Database, *messages: Message) -> list[Outcome]:
    settings = replace(chosen.settings, batch=BatchPolicy.FAIL_BATCH)
    return await consume_many(chosen.with_settings(settings), database, messages)


WAYS = pytest.mark.parametrize("deliver", [one, many, whole])


async def until_settled(
    deliver: Callable[[], Awaitable[list[Outcome]]], at_most: int = 12
) -> tuple[int, list[Outcome]]:
    """Deliver a batch until nothing of it comes back; how often that was, and the outcomes."""
    outcomes: list[Outcome] = []
    for number in range(1, at_most + 1):
        outcomes = await deliver()
        if not any(isinstance(settlement(outcome), Nack) for outcome in outcomes):
            return number, outcomes
    return at_most, outcomes


def kinds(outcomes: list[Outcome]) -> list[type]:
    return [type(outcome) for outcome in outcomes]


class _Attempts(DatabaseScenarios):
    @pytest.mark.parametrize("error", [ConnectionError("refused"), TimeoutError(), OSError(5)])
    def test_what_a_handler_lost_that_is_not_the_database_counts_in_a_whole_batch(self, error):
        async def scenario(database: Database) -> None:
            calls: list[str] = []

            async def handle(message: Message) -> None:
                calls.append(message.id)
                if message.id == "m1":
                    raise error

            chosen = handling(WHOLE, handle)
            batch = [message(1), message(2)]

            times, outcomes = await until_settled(lambda: many(chosen, database, *batch))

            assert (times, kinds(outcomes)) == (2, [DeadLettered, Handled])
            assert calls == ["m1", "m1", "m2"]

        self.run(scenario)

    @WAYS
    @pytest.mark.parametrize("error", [RetryableMessageError("down"), ConnectionError("down")])
    def test_an_invoked_duplicate_that_keeps_failing_becomes_a_dead_letter(self, deliver, error):
        async def scenario(database: Database) -> None:
            calls: list[str] = []

            async def handle(message: Message) -> None:
                if message.is_duplicate:
                    calls.append(message.id)
                    raise error

            settings = ConsumerSettings(
                retry=RetryPolicy(max_attempts=3, initial_delay_seconds=1.5, jitter=False),
                duplicates=Duplicates.INVOKE,
            )
            chosen = handling(settings, handle)
            await deliver(chosen, database, message(1))

            found = [(await deliver(chosen, database, message(1)))[0] for _ in range(3)]

            assert kinds(found) == [RetryLater, RetryLater, DeadLettered]
            assert [settlement(outcome) for outcome in found[:2]] == [Nack(1.5), Nack(3.0)]
            assert len(calls) >= 3
            async with database.begin() as unit:
                row = await unit.claims.look_up("c", "m1")
                letter = await unit.dead_letters.get("c", "m1")
                tries = await unit.members.suspect("c", "conflict:duplicate:m1", "?")
            assert row is not None
            assert row.state is ClaimState.COMPLETED
            assert letter is not None
            assert letter.attempts == 3
            assert tries == 4, "what was given up is not tried as often again"

        self.run(scenario)

    @WAYS
    def test_an_invoked_duplicate_that_succeeds_is_counted_from_the_start_again(self, deliver):
        async def scenario(database: Database) -> None:
            fails = iter((False, True, False, True, True))

            async def handle(message: Message) -> None:
                if now:
                    raise RetryableMessageError("down")

            chosen = handling(ConsumerSettings(retry=TWICE, duplicates=Duplicates.INVOKE), handle)
            found: list[Outcome] = []
            while (now := next(fails, None)) is not None:
                found += await deliver(chosen, database, message(1))

            assert kinds(found) == [Handled, RetryLater, Skipped, RetryLater, DeadLettered]

        self.run(scenario)

    @WAYS
    @pytest.mark.parametrize("error", [Locked("a row"), Misuse("not ours"), ValueError("odd")])
    def test_what_fails_before_the_handler_is_nobodys_attempt(self, deliver, error, monkeypatch):
        async def scenario(database: Database) -> None:
            calls: list[str] = []

            async def handle(message: Message) -> None:
                calls.append(message.id)

            settings = ConsumerSettings(retry=RetryPolicy(max_attempts=1), versioned=True)
            chosen = handling(settings, handle)
            versioned = Message("m1", {}, b"{}", "k", version=1)
            async with database.begin() as unit:
                versions = type(unit.versions)

            async def fails(*_: Any) -> int:
                raise error

            with monkeypatch.context() as patched:
                patched.setattr(versions, "current", fails)
                [outcome] = await deliver(chosen, database, versioned)

            assert isinstance(outcome, RetryLater)
            assert calls == []
            async with database.begin() as unit:
                assert await unit.claims.look_up("c", "m1") is None
                assert await unit.dead_letters.get("c", "m1") is None
            assert kinds(await deliver(chosen, database, versioned)) == [Handled]

        self.run(scenario)

    def test_a_handler_of_batches_gets_the_whole_batch_and_then_its_culprit_is_found(self):
        async def scenario(database: Database) -> None:
            calls: list[list[str]] = []

            async def handle(messages: list[Message]) -> None:
                calls.append([message.id for message in messages])
                if any(message.id == "m2" for message in messages):
                    raise RetryableMessageError("later")

            chosen = handling(WHOLE, handle, batches=True)
            batch = [message(number) for number in (1, 2, 3)]

            first = await many(chosen, database, *batch)
            second = await many(chosen, database, *batch)

            assert kinds(first) == [RetryLater] * 3
            assert kinds(second) == [Handled, DeadLettered, Handled]
            once = [["m1", "m2", "m3"], ["m1"], ["m2"]]
            assert calls == [*once, *once, ["m1", "m3"]]

        self.run(scenario)

    def test_a_handler_of_batches_has_no_result_to_be_kept(self):
        async def handle(messages: list[Message]) -> str:
            return "of whom?"

        with pytest.raises(Misuse, match="a handler of batches cannot keep results per message"):
            handling(ConsumerSettings(keeps_results=True), handle, batches=True)


class _SqlAttempts(_Attempts):
    @pytest.mark.parametrize("consume", [consume_many, consume_each])
    @pytest.mark.parametrize("batch_handler", [False, True])
    def test_a_constraint_that_waits_for_the_commit_is_its_messages_failure(
        self, consume, batch_handler
    ):
        async def scenario(database: Any) -> None:
            await check_foreign_keys(database)
            async with database.engine.begin() as connection:
                await connection.execute(text("CREATE TABLE parent (id text PRIMARY KEY)"))
                await connection.execute(
                    text(
                        "CREATE TABLE child (id text, parent text REFERENCES parent (id) "
                        "DEFERRABLE INITIALLY DEFERRED)"
                    )
                )

            async def handle(given: Any, session: Any) -> None:
                for message in given if batch_handler else [given]:
                    insert = "INSERT INTO child VALUES (:id, :parent)"
                    parent = "nobody" if message.id == "m2" else None
                    await session.execute(text(insert), {"id": message.id, "parent": parent})

            chosen = handling(WHOLE, handle, batches=batch_handler)
            batch = [message(number) for number in (1, 2, 3)]

            times, outcomes = await until_settled(lambda: consume(chosen, database, batch))

            assert (times, kinds(outcomes)) == (1, [Handled, DeadLettered, Handled])
            async with database.begin() as unit:
                rows = await unit.session.execute(text("SELECT id FROM child ORDER BY id"))
                assert rows.scalars().all() == ["m1", "m3"]

        self.run(scenario)

    @WAYS
    @pytest.mark.parametrize("state", ["28P01", "28000", "53100", "42P01"])
    def test_a_database_that_cannot_be_asked_makes_no_dead_letter(self, deliver, state):
        class Refuses(Exception):
            sqlstate = state

        async def scenario(database: Any) -> None:
            calls: list[str] = []

            async def handle(message: Message) -> None:
                calls.append(message.id)

            chosen = handling(ConsumerSettings(retry=RetryPolicy(max_attempts=1)), handle)
            begin = database.begin

            def refuses() -> Any:
                database.begin = begin
                raise DBAPIError("connect", None, Refuses("x"))

            database.begin = refuses
            found = await deliver(chosen, database, message(1))
            if kinds(found) == [RetryLater]:
                assert calls == []
                found = await deliver(chosen, database, message(1))

            assert kinds(found) == [Handled]
            assert calls == ["m1"]

        self.run(scenario)


class TestInSqlite(InSqlite, _SqlAttempts):
    pass


class TestInPostgres(InPostgres, _SqlAttempts):
    def test_a_lock_of_another_worker_is_nobodys_attempt_in_a_batch_either(self):
        async def scenario(database: Any) -> None:
            calls: list[str] = []

            async def handle(message: Message) -> None:
                calls.append(message.id)

            settings = ConsumerSettings(retry=RetryPolicy(max_attempts=1), versioned=True)
            chosen = handling(settings, handle)
            async with database.begin() as unit:
                await unit.versions.advance("c", "held", 0)
            batch = [
                Message(f"m-{key}", {}, b"{}", key, version=1) for key in ("first", "held", "last")
            ]

            async with database.engine.connect() as other:
                await other.execute(text("SELECT * FROM aggregate_version FOR UPDATE"))
                while_held = await consume_many(chosen, database, batch)
                await other.rollback()
            afterwards = await consume_many(chosen, database, batch)

            assert kinds(while_held) == [Handled, RetryLater, Handled]
            assert kinds(afterwards) == [Skipped, Handled, Skipped]
            assert calls.count("m-held") == 1

        self.run(scenario)
