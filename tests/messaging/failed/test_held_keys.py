"""A key that is held: what comes again for it, and what becomes of those that waited."""

from __future__ import annotations

from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
from semel.messaging.handle.claims import ClaimState
from semel.messaging.outcome import (
    DeadLettered,
    Handled,
    ParkedAway,
    RetryLater,
    RetryStored,
    Skipped,
)
from semel.messaging.records import Waits
from semel.messaging.settings import ConsumerSettings
from semel.policy.vocabulary import RetryMode
from tests.messaging.handled import Place, held, message, retrying


def waiting(place, number):
    return place.ask(lambda unit: unit.waiting.get("billing", f"m{number}"))


def test_what_was_handled_before_its_key_was_held_is_a_duplicate():
    place = Place(held())
    place.deliver(message(1, "k"))
    place.failures = [NonRetryableMessageError("broken")]
    place.deliver(message(2, "k"))

    again = place.deliver(message(1, "k"))

    assert again == Skipped("duplicate")
    assert waiting(place, 1) is None


def test_the_one_that_holds_its_key_keeps_its_attempts_when_it_comes_again():
    place = Place(held())
    place.failures = [RetryableMessageError("down"), RetryableMessageError("down")]
    place.deliver(message(1, "k"))
    place.clock.advance(1)

    again = place.deliver(message(1, "k"))
    head = waiting(place, 1)
    [(_, last)] = place.retry()

    assert again == RetryStored()
    assert (head.waits, head.attempts) == (Waits.RETRY, 1)
    assert isinstance(last, ParkedAway), "its second attempt is its last"


def test_one_that_waited_behind_others_and_fails_waits_for_its_own_time():
    place = Place(held())
    place.failures = [RetryableMessageError("down")]
    place.deliver(message(1, "k"))
    place.deliver(message(2, "k"))
    place.clock.advance(1)
    place.retry()
    place.failures = [RetryableMessageError("down")]

    [(_, failed)] = place.retry()
    early = place.retry()
    place.clock.advance(1)
    [(_, done)] = place.retry()

    assert isinstance(failed, RetryStored)
    assert failed.attempts == 1
    assert early == []
    assert done == Handled("paid m2")


def test_a_retry_that_is_not_stored_comes_back_from_the_broker():
    """Its consumer got a retry table after the failure: nobody else has its payload."""
    place = Place(retrying())
    place.failures = [RetryableMessageError("down")]
    place.deliver(message())
    retry = retrying(mode=RetryMode.RETRY_TABLE).retry
    place.consumer = place.consumer.with_settings(ConsumerSettings(retry=retry))

    early = place.deliver(message())
    place.clock.advance(1)
    due = place.deliver(message())

    assert isinstance(early, RetryLater)
    assert due == Handled("paid m1")


def test_a_message_without_the_version_that_its_consumer_needs_is_a_dead_letter():
    place = Place(ConsumerSettings(versioned=True))

    without_version = place.deliver(message(1, "k"))
    without_key = place.deliver(message(2, version=1))

    assert isinstance(without_version, DeadLettered)
    assert isinstance(without_key, DeadLettered)
    assert (place.state("m1"), place.payments) == (ClaimState.FAILED_TERMINAL, [])
