"""Which entries may go, and what answers mean: no broker, no database, no clock."""

from __future__ import annotations

from semel.errors import Permanent, Retryable
from semel.messaging.failure import CLASSIFICATION
from semel.messaging.outbox import OutboxEntry
from semel.messaging.retry import RetryPolicy
from semel.messaging.sending import Sending, lane_of

RETRY = RetryPolicy(max_attempts=2, initial_delay_seconds=1.0, max_delay_seconds=4.0, jitter=False)


def entry(place, key=None, attempts=0, topic="payments"):
    return OutboxEntry(f"id-{place}", topic, b"", key, place=place, attempts=attempts)


def sending(parked=frozenset(), now=0.0):
    begun = Sending(RETRY, CLASSIFICATION)
    begun.begin_sweep(parked, now)
    return begun


def places(entries):
    return [one.place for one in entries]


def test_an_order_is_kept_within_a_key_of_a_topic_and_nowhere_else():
    assert lane_of(entry(1, "a")) == lane_of(entry(2, "a"))
    assert lane_of(entry(1, "a")) != lane_of(entry(2, "b"))
    assert lane_of(entry(1, "a")) != lane_of(entry(2, "a", topic="refunds"))
    assert lane_of(entry(1)) != lane_of(entry(2))


def test_what_was_taken_is_delivered():
    settled = sending().settle([entry(1, "a"), entry(2)], [None, None], 0.0)

    assert places(settled.delivered) == [1, 2]
    assert settled.failed == settled.parked == []


def test_of_a_failed_key_only_the_first_failure_counts():
    entries = [entry(1, "a"), entry(2, "a"), entry(3, "b")]

    settled = sending().settle(entries, [Retryable("no"), Permanent("behind"), None], 0.0)

    assert places(settled.failed) == [1]
    assert places(settled.delivered) == [3]
    assert settled.parked == []


def test_a_failed_key_waits_for_its_pause_and_for_the_next_sweep():
    ours = sending()
    ours.settle([entry(1, "a"), entry(2)], [Retryable("no"), Retryable("no")], 10.0)
    others = [entry(1, "a"), entry(2), entry(3, "a"), entry(4, "b")]

    assert places(ours.sendable(others)) == [4]
    assert ours.next_due == 11.0
    ours.begin_sweep(frozenset(), 10.9)
    assert places(ours.sendable(others)) == [4]
    ours.begin_sweep(frozenset(), 11.0)
    assert places(ours.sendable(others)) == [1, 2, 3, 4]
    assert ours.next_due is None


def test_pauses_double_with_every_failure_and_end_at_the_longest():
    due = []
    for attempts in range(5):
        ours = sending()
        ours.settle([entry(1, attempts=attempts)], [Retryable("no")], 0.0)
        due.append(ours.next_due)

    assert due == [1.0, 2.0, 4.0, 4.0, 4.0]


def test_keys_of_parked_messages_wait():
    ours = sending(frozenset({("payments", "a")}))
    others = [entry(1, "a"), entry(2, "b"), entry(3, "a", topic="refunds"), entry(4)]

    assert places(ours.sendable(others)) == [2, 3, 4]


def test_what_is_refused_for_good_is_parked_and_its_key_waits_within_the_sweep():
    ours = sending()

    settled = ours.settle([entry(1, "a"), entry(2)], [Permanent("too large")] * 2, 0.0)

    assert [(p.entry.place, p.reason) for p in settled.parked] == [
        (1, "too large"),
        (2, "too large"),
    ]
    assert places(ours.sendable([entry(3, "a"), entry(4)])) == [4]


def test_only_errors_that_nobody_knows_come_to_an_end():
    first = sending().settle([entry(1)], [KeyError("?")], 0.0)
    second = sending().settle([entry(1, attempts=1)], [KeyError("?")], 0.0)
    known = sending().settle([entry(1, attempts=50)], [ConnectionError()], 0.0)

    assert places(first.failed) == [1]
    assert [parking.entry.place for parking in second.parked] == [1]
    assert places(known.failed) == [1]
