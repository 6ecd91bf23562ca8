"""Leased mode: a handler takes its time, and nobody else's work is ever overwritten."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from semel.errors import Misuse
from semel.message import Message
from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
from semel.messaging.handle.claims import Claimed, ClaimLost, ClaimRequest, ClaimState, Failure
from semel.messaging.handle.lease import Lease
from semel.messaging.outcome import (
    DeadLettered,
    Handled,
    ParkedAway,
    Refused,
    RetryLater,
    Skipped,
)
from semel.policy.vocabulary import StalePolicy
from tests.messaging.leases import Place, message
from tests.messaging.worlds import Effect, effects


def test_a_message_is_handled_under_a_lease_and_its_second_delivery_is_a_duplicate():
    async def scenario() -> None:
        seen: list[Any] = []

        async def work(message: Message, lease: Lease) -> str:
            seen.append((await place.row(), lease.owner))
            return "exported"

        place = Place(work, keeps_results=True)

        first = await place.deliver(message())
        second = await place.deliver(message())

        assert first == Handled("exported")
        assert second == Skipped("duplicate", '"exported"')
        [(during, owner)] = seen
        assert during.state is ClaimState.IN_PROGRESS
        assert (during.owner, owner) == ("a", "a")
        assert during.lease_until == place.clock.now() + 30
        assert await place.state() is ClaimState.COMPLETED

    asyncio.run(scenario())


def test_a_live_lease_is_held_elsewhere_and_not_acknowledged():
    async def scenario() -> None:
        place = Place()
        await place.die(message())

        outcome = await place.deliver(message(), "b")

        assert isinstance(outcome, RetryLater)
        assert place.calls == []

    asyncio.run(scenario())


def test_an_expired_lease_is_reclaimed_by_the_next_delivery():
    async def scenario() -> None:
        place = Place()
        await place.die(message())
        place.clock.advance(31)

        outcome = await place.deliver(message(), "b")

        assert outcome == Handled(None)
        assert place.calls == [2]

    asyncio.run(scenario())


def test_a_message_that_takes_every_owner_with_it_is_parked_in_the_end():
    async def scenario() -> None:
        place = Place(poison_attempts=2)
        for number in range(3):
            await place.die(message(), f"owner {number}")
            place.clock.advance(31)

        outcome = await place.deliver(message(), "the fourth")

        assert isinstance(outcome, ParkedAway)
        assert "owner 2" in outcome.why
        row = await place.row()
        assert (row.state, row.attempts) == (ClaimState.PARKED, 3)
        assert place.calls == []
        assert await place.deliver(message()) == Refused("parked")

    asyncio.run(scenario())


def test_a_message_that_only_failed_often_is_no_killer():
    """More often than now allowed: its policy became stricter meanwhile."""

    async def scenario() -> None:
        place = Place(poison_attempts=2)
        async with place.database.begin() as unit:
            failure = Failure(ClaimState.FAILED_RETRYABLE, 9, "DOWN")
            assert await unit.claims.mark_failed("exports", "m1", failure)

        outcome = await place.deliver(message())

        assert isinstance(outcome, Handled)
        assert place.calls == [10]

    asyncio.run(scenario())


def test_the_policy_wait_leaves_a_stale_lease_alone_for_a_while_and_then_parks_it():
    async def scenario() -> None:
        place = Place(stale=StalePolicy.WAIT, stale_grace_seconds=100)
        await place.die(message())
        place.clock.advance(31)

        early = await place.deliver(message(), "b")
        place.clock.advance(100)
        late = await place.deliver(message(), "b")

        assert isinstance(early, RetryLater)
        assert isinstance(late, ParkedAway)
        assert await place.state() is ClaimState.PARKED
        assert place.calls == []

    asyncio.run(scenario())


def test_an_owner_that_is_only_slow_may_finish_while_the_policy_waits():
    async def scenario() -> None:
        async def work(message: Message, lease: Lease) -> None:
            place.clock.advance(31)
            assert isinstance(await place.deliver(message, "b"), RetryLater)

        place = Place(work, stale=StalePolicy.WAIT)

        assert isinstance(await place.deliver(message()), Handled)
        assert place.calls == [1]

    asyncio.run(scenario())


def test_the_policy_abandon_parks_a_stale_lease_at_once():
    async def scenario() -> None:
        place = Place(stale=StalePolicy.ABANDON)
        await place.die(message())
        place.clock.advance(31)

        outcome = await place.deliver(message(), "b")

        assert isinstance(outcome, ParkedAway)
        assert outcome.failure is not None
        assert outcome.failure.code == "ABANDONED"
        assert await place.state() is ClaimState.PARKED

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("answer", "expected", "state"),
    [
        (True, Skipped, ClaimState.COMPLETED),
        (False, RetryLater, ClaimState.FAILED_RETRYABLE),
        (None, ParkedAway, ClaimState.PARKED),
    ],
)
def test_the_policy_inspect_asks_the_consumer_whether_the_effect_happened(answer, expected, state):
    async def scenario() -> None:
        async def inspect(message: Message) -> bool | None:
            return answer

        place = Place(stale=StalePolicy.INSPECT, inspect=inspect)
        await place.die(message())
        place.clock.advance(31)

        outcome = await place.deliver(message(), "b")

        assert isinstance(outcome, expected)
        assert await place.state() is state
        assert place.calls == []

    asyncio.run(scenario())


def test_what_did_not_happen_by_inspection_is_handled_by_the_next_delivery():
    async def scenario() -> None:
        async def inspect(message: Message) -> bool | None:
            return False

        place = Place(stale=StalePolicy.INSPECT, inspect=inspect)
        await place.die(message())
        place.clock.advance(31)
        await place.deliver(message(), "b")

        assert isinstance(await place.deliver(message(), "b"), Handled)

    asyncio.run(scenario())


def test_an_inspection_that_fails_is_repeated_and_not_for_ever():
    async def scenario() -> None:
        async def inspect(message: Message) -> bool | None:
            raise ConnectionError("the provider does not answer")

        place = Place(stale=StalePolicy.INSPECT, inspect=inspect, stale_grace_seconds=100)
        await place.die(message())
        place.clock.advance(31)

        early = await place.deliver(message(), "b")
        place.clock.advance(100)
        late = await place.deliver(message(), "b")

        assert isinstance(early, RetryLater)
        assert isinstance(late, ParkedAway)

    asyncio.run(scenario())


def test_a_policy_that_inspects_needs_somebody_to_ask():
    with pytest.raises(Misuse, match="needs inspect="):
        Place(stale=StalePolicy.INSPECT)


def test_the_completion_of_a_stale_owner_is_refused_and_changes_nothing():
    async def scenario() -> None:
        async def work(message: Message, lease: Lease) -> str:
            if lease.owner == "a":
                place.clock.advance(31)
                assert isinstance(await place.deliver(message, "b"), Handled)
            return f"by {lease.owner}"

        place = Place(work, keeps_results=True)

        outcome = await place.deliver(message(), "a")

        assert isinstance(outcome, RetryLater)
        assert outcome.failure is not None
        assert outcome.failure.exception.endswith("ClaimLost")
        row = await place.row()
        assert (row.state, row.result) == (ClaimState.COMPLETED, '"by b"')

    asyncio.run(scenario())


def test_the_failure_of_a_stale_owner_does_not_overwrite_its_successors_lease():
    async def scenario() -> None:
        async def work(message: Message, lease: Lease) -> None:
            place.clock.advance(31)
            async with place.database.begin() as unit:
                taken = await unit.claims.lease(
                    "exports", ClaimRequest.of(message), owner="b", seconds=30
                )
            assert isinstance(taken, Claimed)
            raise RetryableMessageError("down")

        place = Place(work)

        await place.deliver(message(), "a")

        row = await place.row()
        assert (row.state, row.owner) == (ClaimState.IN_PROGRESS, "b")

    asyncio.run(scenario())


def test_an_effect_inside_completing_is_durable_with_the_completion():
    async def scenario() -> None:
        async def work(message: Message, lease: Lease) -> str:
            async with lease.completing() as session:
                session.add(Effect("exported", message.id))
            return "done"

        place = Place(work)

        assert await place.deliver(message()) == Handled("done")
        assert effects(place.database, "exported") == ["m1"]
        assert await place.state() is ClaimState.COMPLETED

    asyncio.run(scenario())


def test_an_effect_inside_completing_is_taken_back_where_the_lease_was_lost():
    async def scenario() -> None:
        lost: list[bool] = []

        async def work(message: Message, lease: Lease) -> None:
            place.clock.advance(31)
            async with place.database.begin() as unit:
                await unit.claims.lease("exports", ClaimRequest.of(message), owner="b", seconds=30)
            try:
                async with lease.completing() as session:
                    session.add(Effect("exported", message.id))
            except ClaimLost:
                lost.append(True)
                raise

        place = Place(work)

        outcome = await place.deliver(message(), "a")

        assert isinstance(outcome, RetryLater)
        assert lost == [True]
        assert effects(place.database, "exported") == []

    asyncio.run(scenario())


def test_a_handler_that_fails_behind_its_completion_has_been_handled():
    async def scenario() -> None:
        async def work(message: Message, lease: Lease) -> None:
            async with lease.completing() as session:
                session.add(Effect("exported", message.id))
            raise ValueError("too late")

        place = Place(work)

        assert isinstance(await place.deliver(message()), Handled)
        assert await place.state() is ClaimState.COMPLETED

    asyncio.run(scenario())


def test_a_handler_that_fails_is_tried_again_when_it_is_due_and_not_for_ever():
    async def scenario() -> None:
        async def work(message: Message, lease: Lease) -> None:
            raise RetryableMessageError("down")

        place = Place(work)
        outcomes = []
        for _ in range(3):
            outcomes.append(await place.deliver(message()))
            place.clock.advance(60)

        assert [type(outcome) for outcome in outcomes] == [RetryLater, RetryLater, DeadLettered]
        assert place.calls == [1, 2, 3]
        assert await place.state() is ClaimState.FAILED_TERMINAL

    asyncio.run(scenario())


def test_a_hopeless_message_is_a_dead_letter_at_once():
    async def scenario() -> None:
        async def work(message: Message, lease: Lease) -> None:
            raise NonRetryableMessageError("no such account")

        place = Place(work)

        assert isinstance(await place.deliver(message()), DeadLettered)
        async with place.database.begin() as unit:
            letter = await unit.dead_letters.get("exports", "m1")
        assert letter is not None
        assert letter.reason == "no such account"

    asyncio.run(scenario())
