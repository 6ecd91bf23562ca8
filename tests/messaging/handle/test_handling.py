"""One message, one transaction: what becomes of it, and what is durable then."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from semel.codec import FromHeader, Reading, Unread, Unreadable
from semel.message import Coordinates, Message, Record
from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
from semel.messaging.handle.attempt import handle_message, handle_unreadable
from semel.messaging.handle.claims import ClaimState
from semel.messaging.outcome import (
    Conflicted,
    DeadLettered,
    Handled,
    ParkedAway,
    Refused,
    RetryLater,
    RetryStored,
    Skipped,
    Told,
)
from semel.messaging.records import DeadLetterFilter, WaitingFilter, WaitingMessage, Waits
from semel.messaging.settings import ConsumerSettings, RetryPolicy
from semel.policy.vocabulary import Duplicates, RetryMode
from tests.messaging.handled import Place, held, message, retrying
from tests.messaging.worlds import Effect

WAITS = WaitingMessage("billing", "m1", Waits.RETRY, payload=None)


def test_a_message_is_handled_once_and_its_second_delivery_is_a_duplicate():
    place = Place()

    first, second = place.deliver(message()), place.deliver(message())

    assert first == Handled("paid m1")
    assert second == Skipped("duplicate")
    assert place.payments == ["m1"]
    assert place.state("m1") is ClaimState.COMPLETED


def test_a_failed_handler_leaves_nothing_but_its_failure():
    place = Place(retrying())
    place.failures = [RetryableMessageError("down")]

    outcome = place.deliver(message())

    assert isinstance(outcome, RetryLater)
    assert (outcome.seconds, outcome.attempts) == (1.0, 1)
    assert place.payments == []
    assert place.state("m1") is ClaimState.FAILED_RETRYABLE


def test_a_failed_message_is_not_handled_before_it_is_due_and_then_it_is():
    place = Place(retrying())
    place.failures = [RetryableMessageError("down")]
    place.deliver(message())

    early = place.deliver(message())
    place.clock.advance(1)
    due = place.deliver(message())

    assert isinstance(early, RetryLater)
    assert due == Handled("paid m1")
    assert [call.attempt for call in place.calls] == [1, 2]


def test_attempts_are_bounded_and_then_there_is_one_dead_letter_with_its_fields():
    place = Place(retrying())
    place.failures = [RetryableMessageError(f"down {n}") for n in range(3)]

    outcomes = []
    for _ in range(3):
        outcomes.append(place.deliver(message(key="k", correlation_id="c", schema_version="2")))
        place.clock.advance(60)

    assert [type(o) for o in outcomes] == [RetryLater, RetryLater, DeadLettered]
    letter = place.ask(lambda unit: unit.dead_letters.get("billing", "m1"))
    assert (letter.topic, letter.partition, letter.offset, letter.key) == ("payments", 0, 1, "k")
    assert (letter.attempts, letter.reason, letter.error_code) == (
        3,
        "down 2",
        "DEPENDENCY_UNAVAILABLE",
    )
    assert letter.last_failed_at - letter.first_failed_at == 120
    assert (letter.correlation_id, letter.schema_version) == ("c", "2")
    assert letter.payload == message().raw
    assert letter.headers == {"message-id": b"m1"}
    assert letter.exception.endswith("RetryableMessageError")
    assert place.deliver(message(key="k")) == Refused("dead letter (DEPENDENCY_UNAVAILABLE)")


def test_a_hopeless_message_is_a_dead_letter_at_once():
    place = Place(retrying())
    place.failures = [NonRetryableMessageError("no such account")]

    outcome = place.deliver(message())

    assert isinstance(outcome, DeadLettered)
    assert place.state("m1") is ClaimState.FAILED_TERMINAL


def test_an_exception_nobody_knows_is_tried_again_a_few_times():
    place = Place(retrying(attempts=2))
    place.failures = [KeyError("x"), KeyError("x")]

    first = place.deliver(message())
    place.clock.advance(60)
    second = place.deliver(message())

    assert isinstance(first, RetryLater)
    assert isinstance(second, DeadLettered)
    assert second.failure.code == "HANDLER_FAILED"


def test_the_same_id_with_another_payload_is_a_conflict_that_keeps_both_hashes():
    place = Place()
    place.deliver(message())

    outcome = place.deliver(message(raw=b'{"n": 99}'))

    assert isinstance(outcome, Conflicted)
    assert outcome.expected == message().digest
    assert outcome.found == message(raw=b'{"n": 99}').digest
    assert place.payments == ["m1"]
    assert place.state("m1") is ClaimState.COMPLETED
    [letter] = place.ask(lambda unit: unit.dead_letters.find(DeadLetterFilter(), 10))
    assert (letter.outcome, letter.expected_hash) == ("conflict", message().digest)


def test_a_consumer_that_is_invoked_for_duplicates_gets_a_real_boolean():
    place = Place(ConsumerSettings(duplicates=Duplicates.INVOKE))

    place.deliver(message())
    place.deliver(message())

    assert [call.is_duplicate for call in place.calls] == [False, True]
    assert place.payments == ["m1"]


def test_a_result_that_is_kept_is_given_to_duplicates():
    place = Place(ConsumerSettings(keeps_results=True))
    place.deliver(message())

    assert place.deliver(message()) == Skipped("duplicate", '"paid m1"')


@pytest.mark.parametrize("end", ["commit", "rollback", "close"])
def test_a_handler_cannot_end_the_transaction(end):
    place = Place(retrying())

    async def handle(message: Message, session: AsyncSession) -> None:
        session.add(Effect("payments", message.id))
        await getattr(session, end)()

    object.__setattr__(place.consumer, "handler", handle)
    outcome = place.deliver(message())

    assert isinstance(outcome, DeadLettered)
    assert outcome.failure.code == "HANDLER_MISUSE"
    assert place.payments == []


def test_a_record_without_an_id_is_a_dead_letter_with_its_bytes():
    place = Place()
    record = Record(Coordinates("payments", 0, 7), b'{"n": 1}', b"k")
    unread = Reading(FromHeader("message-id")).read(record)

    assert isinstance(unread, Unreadable)
    outcome = asyncio.run(handle_unreadable(place.consumer, place.database, unread))

    assert unread.why is Unread.NO_ID
    assert isinstance(outcome, DeadLettered)
    assert outcome.told is Told.DESERIALIZATION_FAILURE
    [letter] = place.ask(lambda unit: unit.dead_letters.find(DeadLetterFilter(), 10))
    assert (letter.payload, letter.offset) == (b'{"n": 1}', 7)


def test_a_stored_retry_is_acknowledged_and_handled_when_it_is_due():
    settings = ConsumerSettings(retry=RetryPolicy(jitter=False, mode=RetryMode.RETRY_TABLE))
    place = Place(settings)
    place.failures = [RetryableMessageError("down")]

    assert isinstance(place.deliver(message()), RetryStored)
    assert isinstance(place.deliver(message()), RetryStored)
    assert place.retry() == []
    place.clock.advance(1)

    assert place.retry() == [("m1", Handled("paid m1"))]
    assert place.ask(lambda unit: unit.waiting.count(WaitingFilter())) == 0
    assert place.payments == ["m1"]


def test_a_worker_with_the_old_payload_leaves_a_message_that_was_fixed_alone():
    settings = ConsumerSettings(retry=RetryPolicy(jitter=False, mode=RetryMode.RETRY_TABLE))
    place = Place(settings)
    place.failures = [RetryableMessageError("down")]
    place.deliver(message())
    place.clock.advance(1)
    fixed = message(raw=b'{"n": 7}')

    async def fix(unit: Any) -> None:
        await unit.waiting.revise("billing", "m1", fixed.raw, fixed.digest, "m1")
        await unit.claims.expect_payload("billing", "m1", fixed.digest)

    place.ask(fix)
    old = asyncio.run(handle_message(place.consumer, place.database, message(), WAITS))
    done = place.retry()

    assert isinstance(old, RetryLater)
    assert done == [("m1", Handled("paid m1"))]
    assert place.calls[-1].payload == {"n": 7}


def test_messages_behind_a_waiting_one_of_their_key_are_handled_after_it_in_order():
    place = Place(held())
    place.failures = [RetryableMessageError("down")]

    place.deliver(message(1, "k"))
    behind = [place.deliver(message(n, "k")) for n in (2, 3)]
    other = place.deliver(message(4, "other"))
    place.clock.advance(1)
    while place.retry():
        pass

    assert all(isinstance(outcome, ParkedAway) for outcome in behind)
    assert isinstance(other, Handled)
    assert place.payments == ["m4", "m1", "m2", "m3"]
    assert isinstance(place.deliver(message(5, "k")), Handled)


def test_a_parked_message_holds_its_key_until_somebody_lets_it_go():
    place = Place(held())
    place.failures = [NonRetryableMessageError("broken")]

    place.deliver(message(1, "k"))
    place.deliver(message(2, "k"))
    place.clock.advance(3600)

    assert place.retry() == []
    assert place.state("m1") is ClaimState.PARKED
    assert place.state("m2") is ClaimState.PARKED
    assert place.payments == []
