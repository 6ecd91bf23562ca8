"""The gap policy ``alert``: somebody is told of a gap, once, and when it is durable."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import pytest

from semel.codec import FromHeader, FromPayload, Reading
from semel.crashpoints import CrashPoint
from semel.events import EVENTS, Event, GapCrossed
from semel.message import Message
from semel.messaging.database import Database, Unit
from semel.messaging.failed.retries import retry_due
from semel.messaging.failure import Classification, RetryableMessageError
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.batch import consume_many
from semel.messaging.handler import Consumer, Handler, consumer
from semel.messaging.outcome import Handled, RetryStored, Skipped
from semel.messaging.settings import ConsumerSettings, RetryPolicy
from semel.operate.dryrun import dry_run
from semel.operate.explain import open_gaps
from semel.policy.vocabulary import BatchPolicy, GapPolicy, RetryMode
from semel.testing.crash import Crash, crash_at
from tests.messaging.places import DatabaseScenarios, InSqlite

READING = Reading(FromHeader("id"), version_from=FromPayload("v"))
AT_ONCE = RetryPolicy(initial_delay_seconds=0, max_delay_seconds=0, jitter=False)
ALERT = ConsumerSettings(retry=AT_ONCE, versioned=True, gaps=GapPolicy.ALERT)

Deliver: TypeAlias = Callable[..., Awaitable[list[Any]]]


def version(number: int, key: str = "case") -> Message:
    raw = f'{{"v": {number}}}'.encode()
    headers = {"id": f"{key}-{number}".encode()}
    return Message(f"{key}-{number}", {"v": number}, raw, key, headers=headers, version=number)


def applying(settings: ConsumerSettings, handler: Handler | None = None) -> Consumer:
    async def handle(message: Message, session: Any) -> None:
        """Apply it."""

    return consumer("cases", policy=settings, reading=READING)(handler or handle)


def of(expected: int, found: int, key: str = "case") -> GapCrossed:
    return GapCrossed("cases", "cases", key, expected, found)


async def one(chosen: Consumer, database: Database, *messages: Message) -> list[Any]:
    return [await handle_message(chosen, database, message) for message in messages]


async def many(chosen: Consumer, database: Database, *messages: Message) -> list[Any]:
    return await consume_many(chosen, database, messages)


async def whole(chosen: Consumer, database: Database, *messages: Message) -> list[Any]:
    settings = replace(chosen.settings, batch=BatchPolicy.FAIL_BATCH)
    return await consume_many(chosen.with_settings(settings), database, messages)


WAYS = pytest.mark.parametrize("deliver", [one, many, whole])


@dataclass
class Unkept:
    """A database that commits nothing, or only so many transactions."""

    database: Database
    keeps: int = 0

    @property
    def classification(self) -> Classification:
        return self.database.classification

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Unit]:
        async with self.database.begin() as unit:
            yield unit
            self.keeps -= 1
            if self.keeps < 0:
                raise ConnectionError("gone at the commit")

    async def close(self) -> None:
        """Nothing to give back."""


class _Alerts(DatabaseScenarios):
    @pytest.fixture(autouse=True)
    def _subscribed(self) -> Iterator[None]:
        self.told: list[Event] = []
        stop = EVENTS.subscribe(self.told.append)
        yield
        stop()

    @WAYS
    def test_a_gap_is_told_of_once_and_not_with_the_messages_behind_it(self, deliver: Deliver):
        async def scenario(database: Database) -> None:
            chosen = applying(ALERT)

            await deliver(chosen, database, version(1), version(4), version(5), version(4))
            await deliver(chosen, database, version(6), version(3))

            assert self.told == [of(2, 4)]

        self.run(scenario)

    @WAYS
    def test_every_gap_of_every_key_is_told_of(self, deliver: Deliver):
        async def scenario(database: Database) -> None:
            batch = [version(2), version(2, "other"), version(3), version(9), version(1)]

            await deliver(applying(ALERT), database, *batch)

            assert self.told == [of(1, 2), of(1, 2, "other"), of(4, 9)]

        self.run(scenario)

    @WAYS
    def test_nobody_is_told_of_what_was_not_committed(self, deliver: Deliver):
        async def scenario(database: Database) -> None:
            await deliver(applying(ALERT), Unkept(database), version(3))

            assert self.told == []
            assert await open_gaps(database, "cases", 10) == []

        self.run(scenario)

    @WAYS
    def test_when_somebody_is_told_it_is_committed(self, deliver: Deliver):
        async def scenario(database: Database) -> None:
            with crash_at(CrashPoint.MESSAGE_COMMIT_AFTER), pytest.raises(Crash):
                await deliver(applying(ALERT), database, version(3))

            again = await deliver(applying(ALERT), database, version(3))

            assert again == [Skipped("duplicate")]
            assert self.told == [of(1, 3)]

        self.run(scenario)

    @WAYS
    def test_a_handler_that_fails_across_a_gap_is_no_reason_to_tell(self, deliver: Deliver):
        async def scenario(database: Database) -> None:
            failures = [RetryableMessageError("down")] * 2

            async def handle(message: Message) -> None:
                if failures:
                    raise failures.pop()

            chosen = applying(ALERT, handle)
            told = []
            for _ in range(3):
                await deliver(chosen, database, version(3))
                told.append(list(self.told))

            assert told[0] == []
            assert told[-1] == [of(1, 3)]

        self.run(scenario)

    @pytest.mark.parametrize("keys", [["a"], ["a", "b", "c"]])
    def test_messages_out_of_the_retry_table_tell_too(self, keys):
        async def scenario(database: Database) -> None:
            failures = [RetryableMessageError("down") for _ in keys]

            async def handle(message: Message) -> None:
                if failures:
                    raise failures.pop()

            retry = replace(AT_ONCE, mode=RetryMode.RETRY_TABLE)
            chosen = applying(replace(ALERT, retry=retry), handle)
            stored = await one(chosen, database, *(version(3, key) for key in keys))
            await retry_due(chosen, Unkept(database, keeps=1))
            before = list(self.told)
            outcomes = await retry_due(chosen, database)

            assert {type(outcome) for outcome in stored} == {RetryStored}
            assert {type(outcome) for _, outcome in outcomes} == {Handled}
            assert (before, self.told) == ([], [of(1, 3, key) for key in keys])

        self.run(scenario)

    def test_a_dry_run_tells_nobody(self):
        async def scenario(database: Database) -> None:
            found = await dry_run(applying(ALERT), database, version(3))

            assert isinstance(found.outcome, Handled)
            assert self.told == []

        self.run(scenario)

    def test_no_other_policy_tells(self):
        async def repair(message: Message, session: Any, gap: Any) -> None:
            """Do what it can."""

        async def scenario(database: Database) -> None:
            for policy in set(GapPolicy) - {GapPolicy.ALERT}:
                settings = replace(ALERT, gaps=policy)
                chosen = applying(ConsumerSettings())
                chosen = replace(chosen, fetch_missing=repair, rebuild=repair)
                await one(chosen.with_settings(settings), database, version(3, policy))

            assert self.told == []

        self.run(scenario)

    @WAYS
    def test_a_gap_that_was_crossed_stays_listed_behind_the_versions_that_follow(
        self, deliver: Deliver
    ):
        async def scenario(database: Database) -> None:
            await deliver(applying(ALERT), database, version(1), version(4), version(5), version(6))
            await deliver(applying(replace(ALERT, gaps=GapPolicy.RETRY)), database, version(7))

            listed = await open_gaps(database, "cases", 10)

            assert [(gap.expected, gap.found) for gap in listed] == [(2, 4)]

        self.run(scenario)

    def test_whoever_makes_the_aggregate_anew_closes_what_was_crossed_before(self):
        async def rebuild(message: Message, session: Any, gap: Any) -> None:
            """Make it anew."""

        async def scenario(database: Database) -> None:
            chosen = replace(applying(ALERT), rebuild=rebuild)
            await one(chosen, database, version(3))
            await one(
                chosen.with_settings(replace(ALERT, gaps=GapPolicy.REBUILD)), database, version(7)
            )

            assert await open_gaps(database, "cases", 10) == []

        self.run(scenario)

    def test_the_log_warns_with_consumer_key_and_versions(self, caplog):
        async def scenario(database: Database) -> None:
            with caplog.at_level(logging.WARNING, "semel"):
                await one(applying(ALERT), database, version(3))

            [line] = [record for record in caplog.records if hasattr(record, "expected")]
            said = (line.consumer, line.key, line.expected, line.found)
            assert said == ("cases", "case", 1, 3)
            assert line.levelno == logging.WARNING
            assert "expected version 1, got 3" in line.getMessage()

        self.run(scenario)

    def test_a_subscriber_that_fails_costs_no_message(self):
        async def scenario(database: Database) -> None:
            stop = EVENTS.subscribe(lambda event: 1 // 0)
            try:
                [outcome] = await one(applying(ALERT), database, version(3))
            finally:
                stop()

            assert isinstance(outcome, Handled)

        self.run(scenario)


class TestInSqlite(InSqlite, _Alerts):
    pass
