"""Lanes keep the order that matters, and the watermark never passes what is not settled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.codec import Unread, Unreadable
from semel.errors import Misuse
from semel.message import Coordinates, Message, Partition, Record
from semel.messaging.receive.lanes import Lanes, Watermark, where_of
from semel.messaging.settings import Order


def record(offset, key=None, partition=0):
    return Record(Coordinates("t", partition, offset), b"", None if key is None else key.encode())


def offsets_of(found):
    return [[item.at.offset for item in lane] for lane in found]


class NaiveWatermark:
    """Everything that ever was delivered, looked through each time."""

    def __init__(self, start):
        self.next = start
        self.known = []

    def deliver(self, offset):
        self.known.append([offset, False])

    def settle(self, offset):
        for entry in self.known:
            if entry[0] == offset:
                entry[1] = True
        for known, is_settled in self.known:
            if not is_settled:
                break
            self.next = max(self.next, known + 1)

    def reset(self, offset):
        self.known = [entry for entry in self.known if entry[0] < offset]
        self.next = min(self.next, offset)

    def unsettled(self):
        return tuple(known for known, is_settled in self.known if not is_settled)

    def due(self):
        return max([self.next, *(known + 1 for known, _ in self.known)])


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("deliver"), st.integers(0, 3)),
        st.tuples(st.just("settle"), st.integers(0, 40)),
        st.tuples(st.just("reset"), st.integers(0, 40)),
    ),
    max_size=60,
)


@given(start=st.integers(0, 5), steps=STEPS)
def test_the_watermark_is_what_a_look_at_everything_would_say(start, steps):
    watermark, naive = Watermark(start), NaiveWatermark(start)
    seek_to = 0

    for step, number in steps:
        match step:
            case "deliver":
                offset = max(naive.due(), seek_to) + number
                watermark.deliver(offset)
                naive.deliver(offset)
            case "settle":
                watermark.settle(number)
                naive.settle(number)
            case "reset":
                watermark.reset(number)
                naive.reset(number)
                seek_to = number

        assert watermark.next_offset == naive.next
        assert watermark.unsettled == naive.unsettled()
        assert all(watermark.next_offset <= offset for offset in watermark.unsettled)


def test_holes_between_delivered_offsets_do_not_hold_the_watermark_back():
    watermark = Watermark(3)
    for offset in (3, 7, 8):
        watermark.deliver(offset)

    watermark.settle(3)
    watermark.settle(7)

    assert watermark.next_offset == 8
    assert watermark.unsettled == (8,)


def test_nothing_is_committed_past_the_first_unsettled_record():
    watermark = Watermark(0)
    for offset in range(8):
        watermark.deliver(offset)

    for offset in (0, 1, 2, 3, 4, 6, 7):
        watermark.settle(offset)

    assert watermark.next_offset == 5
    assert watermark.unsettled == (5,)


def test_a_seek_brings_records_again_and_what_was_before_it_still_counts():
    watermark = Watermark(0)
    for offset in range(6):
        watermark.deliver(offset)
    watermark.settle(0)
    watermark.settle(4)

    watermark.reset(2)
    for offset in (2, 3, 4, 5):
        watermark.deliver(offset)
        watermark.settle(offset)

    assert watermark.unsettled == (1,)
    assert watermark.next_offset == 1
    watermark.settle(1)
    assert watermark.next_offset == 6


def test_a_seek_behind_the_watermark_takes_it_back():
    watermark = Watermark(0)
    watermark.deliver(0)
    watermark.settle(0)

    watermark.reset(0)

    assert watermark.next_offset == 0


def test_a_record_that_goes_back_without_a_seek_is_refused():
    watermark = Watermark(0)
    watermark.deliver(4)

    with pytest.raises(Misuse, match="offset 4 was delivered, expected 5 or a later one"):
        watermark.deliver(4)


def lanes(batch, order):
    """Split a batch: each lane is taken when the one before is done."""
    found = Lanes(order)
    found.add(batch)
    split = []
    while found.is_ready:
        lane = found.take(1)
        rest = found._waiting.get(found._lane(lane[0]), ())
        split.append([*lane, *rest])
        found.done(lane, coming_back=lane)
    return split


def test_with_order_per_key_a_lane_holds_one_key_of_one_partition():
    batch = [
        record(0, "a"),
        record(1, "b"),
        record(0, "a", partition=1),
        record(2, "a"),
        record(3),
        record(4),
    ]

    assert offsets_of(lanes(batch, Order.KEY)) == [[0, 2], [1], [0], [3], [4]]


def test_with_order_per_partition_a_lane_holds_a_partition():
    batch = [record(0, "a"), record(0, "a", partition=1), record(1), record(2, "b")]

    assert offsets_of(lanes(batch, Order.PARTITION)) == [[0, 1, 2], [0]]


def test_without_an_order_every_message_has_its_lane():
    batch = [record(0, "a"), record(1, "a")]

    assert offsets_of(lanes(batch, Order.NONE)) == [[0], [1]]


@given(
    keys=st.lists(st.sampled_from([None, "a", "b", "c"]), max_size=30), order=st.sampled_from(Order)
)
def test_lanes_hold_the_whole_batch_each_in_its_order(keys, order):
    batch = [record(offset, key) for offset, key in enumerate(keys)]

    found = offsets_of(lanes(batch, order))

    assert sorted(offset for lane in found for offset in lane) == list(range(len(batch)))
    assert all(lane == sorted(lane) for lane in found)


def test_records_messages_and_unreadable_records_know_their_lane():
    at = Coordinates("t", 3, 9)
    come = Record(at, b"", b"k")

    assert where_of(come) == (Partition("t", 3), b"k")
    assert where_of(Message("m", {}, key="k", source=at)) == (Partition("t", 3), "k")
    assert where_of(Message("m", {})) == (None, None)
    assert where_of(Unreadable(come, Unread.NO_ID, "")) == (Partition("t", 3), "k")


def named(*items, order=Order.KEY):
    """Make lanes of texts: the first letter is the key, of partition 0."""
    found = Lanes(order, lambda item: (Partition("t", 0), item[0]))
    found.add(items)
    return found


def test_of_a_lane_one_message_runs_after_the_other():
    found = named("a1", "b1", "a2")

    assert found.take(1) == ["a1"]
    assert found.take(1) == ["b1"]
    assert found.take(1) == []
    found.done(["a1"])
    assert found.take(1) == ["a2"]


def test_messages_of_a_lane_are_taken_together_in_their_order():
    found = named("a1", "b1", "a2", "a3")

    assert found.take(2) == ["a1", "a2"]
    assert found.take(9) == ["b1"]
    found.done(["a1", "a2"])
    assert found.take(9) == ["a3"]


def test_a_lane_stops_at_a_message_that_comes_back_and_the_others_go_on():
    found = named("a1", "a2", "b1")
    found.take(1)

    found.done(["a1"], coming_back=["a1"])
    found.add(["a3", "b2"])

    assert found.take(9) == ["b1", "b2"]
    found.done(["b1", "b2"])
    found.drop({Partition("t", 0)})
    found.add(["a1"])
    assert found.take(9) == ["a1"]


def test_a_closed_partition_takes_nothing_until_it_is_dropped():
    found = named("a1", "b1")

    found.close({Partition("t", 0)})
    found.add(["c1"])

    assert not found.is_busy
    found.drop({Partition("t", 0)})
    found.add(["c1"])
    assert found.take(9) == ["c1"]


def test_what_runs_is_still_known_after_its_partition_was_dropped():
    found = named("a1", "a2")
    found.take(1)

    found.drop({Partition("t", 0)})

    assert found.runs({Partition("t", 0)})
    assert found.holds(Partition("t", 0))
    found.done(["a1"])
    assert not found.is_busy
