"""The turn of a message that waits: what changed since it was read, and what cannot be read."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from semel.errors import Retryable
from semel.message import digest_of
from semel.messaging.failed.retries import TAKEN_AT_ONCE
from semel.messaging.failure import RetryableMessageError
from semel.messaging.handle.batch import drain
from semel.messaging.handle.claims import ClaimRequest, ClaimState
from semel.messaging.outcome import Handled, ParkedAway, RetryLater, Skipped
from semel.policy.vocabulary import RetryMode
from semel.sql.bookkeeping import SqlVersions
from tests.messaging import leases
from tests.messaging.handled import Place, message, retrying

STORED = retrying(mode=RetryMode.RETRY_TABLE)


def filled(*messages, settings=STORED):
    """Return a place in which messages failed once, and are due."""
    place = Place(settings)
    place.failures = [RetryableMessageError("down") for _ in messages]
    for one in messages:
        place.deliver(one)
    place.clock.advance(1)
    place.calls.clear()
    return place


def drained(place, *messages):
    async def whole():
        read = {one.id: one for one in messages}
        found = drain(place.consumer, place.database, read, lambda: False)
        return {name: outcome async for one in found for name, outcome in one.items()}

    return asyncio.run(whole())


def revise(place, number, payload):
    async def act(unit):
        await unit.waiting.revise("billing", number, payload, digest_of(payload), number)
        await unit.claims.expect_payload("billing", number, digest_of(payload))

    place.ask(act)


def test_what_was_fixed_since_it_was_read_is_left_to_its_next_turn():
    place = filled(message(1), message(2))
    revise(place, "m1", b'{"fixed": true}')

    outcomes = drained(place, message(1), message(2))

    assert isinstance(outcomes["m1"], RetryLater)
    assert outcomes["m2"] == Handled("paid m2")
    assert place.payments == ["m2"]
    assert [name for name, _ in place.retry()] == ["m1"]
    assert place.calls[-1].payload == {"fixed": True}


def test_what_could_not_be_asked_for_among_many_costs_no_attempt(monkeypatch):
    two = [message(n, "k", version=n) for n in (1, 2)]
    place = filled(*two[:1], settings=replace(STORED, versioned=True))

    async def unanswered(self, consumer, key):
        raise Retryable("no answer")

    monkeypatch.setattr(SqlVersions, "current", unanswered)

    assert drained(place, two[0]) == {}
    row = place.ask(lambda unit: unit.claims.look_up("billing", "m1"))
    assert (row.state, row.attempts) == (ClaimState.FAILED_RETRYABLE, 1)
    assert place.calls == []


def test_what_cannot_be_read_any_more_is_parked():
    place = filled(message(1))
    revise(place, "m1", b"no JSON")

    [(_, outcome)] = place.retry()

    assert isinstance(outcome, ParkedAway)
    assert place.state("m1") is ClaimState.PARKED


def test_what_cannot_be_read_any_more_and_was_handled_leaves_the_room():
    place = filled(message(1))
    revise(place, "m1", b"no JSON")
    place.ask(lambda unit: unit.claims.mark_completed("billing", "m1"))

    [(_, outcome)] = place.retry()

    assert outcome == Skipped()
    assert place.state("m1") is ClaimState.COMPLETED
    assert place.ask(lambda unit: unit.waiting.get("billing", "m1")) is None


def test_what_others_hold_does_not_hide_what_is_due_behind_it():
    """A lease is renewed for as long as its handler runs, and what it is of stays due."""
    held, free = TAKEN_AT_ONCE, 3

    async def scenario():
        is_down = True

        async def work(message, lease):
            if is_down:
                raise RetryableMessageError("down")

        place = leases.Place(work, retry=replace(leases.POLICY, mode=RetryMode.RETRY_TABLE))
        for number in range(held + free):
            await place.deliver(leases.message(number))
        place.clock.advance(60)
        is_down = False
        for number in range(held):
            async with place.database.begin() as unit:
                request = ClaimRequest.of(leases.message(number))
                await unit.claims.lease("exports", request, owner="another", seconds=600)
        return dict(await place.retry())

    outcomes = asyncio.run(scenario())

    handled = [name for name, outcome in outcomes.items() if isinstance(outcome, Handled)]
    assert handled == [f"m{number}" for number in range(held, held + free)]
    assert len(outcomes) == held + free
