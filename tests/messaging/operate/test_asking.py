"""What is about asking the database is no attempt of the message; what the handler does is one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from semel.codec import Unread, Unreadable
from semel.errors import Fenced, InDoubt, Retryable
from semel.message import Coordinates, Record
from semel.messaging.failure import RetryableMessageError
from semel.messaging.handle.attempt import handle_unreadable
from semel.messaging.handle.claims import ClaimState
from semel.messaging.outcome import DeadLettered, Handled, RetryLater, Skipped
from semel.messaging.settings import ConsumerSettings
from tests.messaging.handled import Place, message, retrying


class Failing:
    """A database whose transactions fail as planned: when they begin, or instead of a commit."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside
        self.classification = inside.classification
        self.before: dict[int, Exception] = {}
        self.instead: dict[int, Exception] = {}
        self.after: dict[int, Exception] = {}
        self.begun = 0

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        self.begun += 1
        number = self.begun
        if number in self.before:
            raise self.before[number]
        async with self.inside.begin() as unit:
            yield unit
            if number in self.instead:
                raise self.instead[number]
        if number in self.after:
            raise self.after[number]

    @property
    def engine(self) -> Any:
        return self.inside.engine


class Asked(Place):
    """A place whose database can be told to fail."""

    def __init__(self, settings: ConsumerSettings | None = None, **options: Any) -> None:
        super().__init__(settings, **options)
        self.failing = self.database = Failing(self.database)  # type: ignore[assignment]


def test_a_database_that_cannot_be_asked_costs_no_attempt():
    place = Asked(retrying(attempts=1))
    place.failing.before = {1: Retryable("away"), 2: ValueError("nobody knows this one")}

    outcomes = [place.deliver(message()) for _ in range(3)]

    assert [type(outcome) for outcome in outcomes] == [RetryLater, RetryLater, Handled]
    assert [call.attempt for call in place.calls] == [1]


@pytest.mark.parametrize("error", [InDoubt("no answer"), Fenced("the session is gone")])
def test_a_commit_that_may_not_have_happened_is_found_out_and_costs_no_attempt(error):
    settings = ConsumerSettings(retry=retrying(attempts=1).retry, conflict_tries=1)
    lost, kept = Asked(settings), Asked(settings)
    lost.failing.instead = {1: error}
    kept.failing.after = {1: error}

    outcomes = [[place.deliver(message()) for _ in range(2)] for place in (lost, kept)]

    assert [[type(one) for one in two] for two in outcomes] == [
        [RetryLater, Handled],
        [RetryLater, Skipped],
    ]
    assert (lost.payments, kept.payments) == (["m1"], ["m1"])


@pytest.mark.parametrize("error", [InDoubt("no answer"), Fenced("somebody else has it")])
def test_a_handler_that_is_in_doubt_itself_is_not_tried_without_end(error):
    place = Place(ConsumerSettings(retry=retrying(attempts=2).retry, conflict_tries=1))
    place.failures = [error, error]

    first = place.deliver(message())
    place.clock.advance(60)
    second = place.deliver(message())

    assert isinstance(first, RetryLater)
    assert isinstance(second, DeadLettered)


class Clash(Exception):
    """Two transactions that cannot both be."""


def test_a_transaction_that_clashed_is_run_again_as_the_same_attempt():
    settings = ConsumerSettings(retry=retrying(attempts=2).retry, conflict_tries=3)
    place = Place(settings, rules={Clash: "DATABASE_CONFLICT"})
    place.failures = [Clash(), Clash()]

    outcome = place.deliver(message())

    assert outcome == Handled("paid m1")
    assert [call.attempt for call in place.calls] == [1, 1, 1]
    assert place.payments == ["m1"]


def test_a_transaction_that_clashes_for_ever_counts_as_a_failed_attempt():
    settings = ConsumerSettings(retry=retrying(attempts=2).retry, conflict_tries=3)
    place = Place(settings, rules={Clash: "DATABASE_CONFLICT"})
    place.failures = [Clash(), Clash(), Clash()]

    outcome = place.deliver(message())

    assert isinstance(outcome, RetryLater)
    assert (outcome.attempts, len(place.calls)) == (1, 3)


def test_a_failure_that_cannot_be_written_brings_the_message_back():
    place = Asked(retrying(attempts=1))
    place.failures = [RetryableMessageError("down")]
    place.failing.before = {2: Retryable("away")}

    outcome = place.deliver(message())

    assert isinstance(outcome, RetryLater)
    assert place.state("m1") is None
    assert place.deliver(message()) == Handled("paid m1")


def test_an_unreadable_record_that_cannot_be_buried_comes_back():
    place = Asked()
    place.failing.before = {1: Retryable("away")}
    record = Unreadable(Record(Coordinates("payments", 0, 7), b"{"), Unread.UNDECODABLE, "no JSON")

    outcomes = [
        asyncio.run(handle_unreadable(place.consumer, place.database, record)) for _ in range(2)
    ]

    assert [type(outcome) for outcome in outcomes] == [RetryLater, DeadLettered]
    assert place.state(record.id) is ClaimState.FAILED_TERMINAL
