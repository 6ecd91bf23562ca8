"""Which entries may go, and what answers mean: no broker, no database, no clock."""

from __future__ import annotations

from semel.errors import Permanent, Retryable
from semel.messaging.failure import (
    CLASSIFICATION,
    NonRetryableMessageError,
    RetryableMessageError,
)
from semel.messaging.send.outbox import OutboxEntry, lane_of
from semel.messaging.send.publish import Sending
from semel.messaging.settings import RetryPolicy

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


DENIED = PermissionError("denied")


def test_a_topic_that_may_not_be_written_to_waits_as_a_whole():
    ours = sending()
    entries = [entry(1, "a"), entry(2, topic="refunds"), entry(3)]

    settled = ours.settle(entries, [DENIED, None, DENIED], 10.0)

    assert places(settled.failed) == [1, 3]
    assert (places(settled.delivered), settled.parked) == ([2], [])
    assert settled.refused["payments"].reason == "PermissionError: denied"
    assert places(ours.sendable([entry(4, "b"), entry(5, topic="refunds")])) == [5]
    assert ours.next_due == 11.0


def test_after_the_pause_the_first_messages_of_a_few_keys_go_ahead():
    ours = sending()
    ours.settle([entry(1, "a")], [DENIED], 0.0)
    ours.begin_sweep(frozenset(), 1.0)

    first = ours.sendable([entry(1, "a"), entry(2, "a"), entry(3), entry(4, "b")])
    rest = ours.sendable([entry(5, "a"), *(entry(n, f"k{n}") for n in range(6, 30))])

    assert places(first) == [1, 3, 4]
    assert places(rest) == list(range(6, 13))


def test_what_is_taken_frees_the_topic_for_the_next_sweep_and_not_before():
    ours = sending()
    ours.settle([entry(1, "a")], [DENIED], 0.0)
    ours.begin_sweep(frozenset(), 1.0)
    waiting = [entry(n, f"k{n % 15}") for n in range(2, 40)]
    ahead = ours.sendable([entry(1, "a"), *waiting])
    ours.settle(ahead, [None] * len(ahead), 1.0)

    assert ours.sendable(waiting) == []
    assert ours.next_due == 1.0
    ours.begin_sweep(frozenset(), 1.0)
    assert ours.sendable(waiting) == waiting
    assert ours.next_due is None


def test_a_refused_topic_waits_longer_every_time_and_its_messages_are_tried_a_few_times():
    ours = sending()
    due, failed = [], []
    for now in (0.0, 10.0, 20.0):
        ours.begin_sweep(frozenset(), now)
        settled = ours.settle([entry(1, "a")], [DENIED], now)
        due.append(ours.next_due - now)
        failed.append(settled.failed)
    last = ours.settle([entry(2, "b", attempts=1)], [DENIED], 30.0)

    assert due == [1.0, 2.0, 4.0]
    assert all(failed)
    assert [parking.entry.place for parking in last.parked] == [2]


def test_many_keys_that_are_refused_together_are_the_topics_failure():
    many = [entry(n, f"k{n}") for n in range(5)]
    no = Permanent("no such topic")

    together = sending().settle(many, [no] * 5, 0.0)
    with_one_taken = sending().settle([*many, entry(9)], [*[no] * 5, None], 0.0)
    few = sending().settle(many[:4], [no] * 4, 0.0)

    assert (len(together.failed), len(together.parked)) == (5, 0)
    assert (len(with_one_taken.failed), len(with_one_taken.parked)) == (0, 5)
    assert (len(few.failed), len(few.parked)) == (0, 4)


def test_a_refused_topic_is_forgotten_when_a_sweep_that_could_try_it_met_nothing_to_try():
    ours = sending()
    ours.settle([entry(1, "a")], [DENIED], 0.0)

    ours.begin_sweep(frozenset(), 0.5)
    ours.end_sweep()
    assert ours.next_due == 1.0
    ours.begin_sweep(frozenset(), 1.0)
    ours.sendable([entry(1, "a")])
    ours.end_sweep()
    assert ours.next_due == 1.0
    ours.begin_sweep(frozenset({("payments", "a")}), 1.0)
    assert ours.sendable([entry(2, "a")]) == []
    ours.end_sweep()
    assert ours.next_due is None


def test_a_sweep_that_did_not_come_to_the_end_forgets_no_topic():
    ours = sending()
    ours.settle([entry(1, "a")], [DENIED], 0.0)
    ours.begin_sweep(frozenset(), 1.0)

    ours.begin_sweep(frozenset(), 1.0)

    assert ours.next_due == 1.0


def test_a_publisher_says_by_class_what_is_hopeless_unless_the_policy_lists_the_code():
    policy = RetryPolicy(retryable=frozenset({"BUSY"}), jitter=False)
    ours = Sending(policy, CLASSIFICATION)
    ours.begin_sweep(frozenset(), 0.0)
    answers = [
        RetryableMessageError("later", "OF_ITS_OWN"),
        NonRetryableMessageError("never", "TIMEOUT"),
        NonRetryableMessageError("never", "BUSY"),
        None,
    ]

    settled = ours.settle([entry(1), entry(2), entry(3), entry(4)], answers, 0.0)

    assert places(settled.failed) == [1, 3]
    assert [parking.entry.place for parking in settled.parked] == [2]
