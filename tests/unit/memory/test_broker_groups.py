"""Whatever members do and time does, a partition has one owner and a commit comes from it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.errors import Fenced, Misuse
from semel.memory.broker_groups import Group, Patience, assign
from semel.message import Partition

PATIENCE = Patience(session_seconds=10.0, rebalance_seconds=20.0)
TOPICS = {"left": 3, "right": 2}
PARTITIONS = {Partition(topic, n) for topic, count in TOPICS.items() for n in range(count)}
NAMES = ["a", "b", "c", "d"]

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["join", "leave", "hear", "give_up", "commit", "rebalance", "wait"]),
        st.sampled_from(NAMES),
        st.sampled_from(sorted(PARTITIONS)),
        st.integers(0, 12),
    ),
    max_size=80,
)


@given(steps=STEPS)
def test_a_partition_has_one_owner_whose_commits_alone_count(steps):
    group, now, expected = Group("g"), 0.0, {}

    for step, name, partition, number in steps:
        owned = group.members[name].owned if name in group.members else frozenset()
        match step:
            case "join" if name not in group.members:
                group.join(name, TOPICS, now, PATIENCE)
            case "leave":
                group.leave(name, now, PATIENCE)
            case "hear":
                group.hear([name], now)
            case "give_up":
                group.give_up(name)
            case "rebalance":
                group.rebalance(now, PATIENCE)
            case "wait":
                now += number
            case "commit" if partition in owned:
                group.commit(name, {partition: number})
                expected[partition] = number
            case "commit":
                with pytest.raises(Fenced):
                    group.commit(name, {partition: number})
        group.advance(now, TOPICS, PATIENCE)

        owners = Counter(p for member in group.members.values() for p in member.owned)
        assert all(count == 1 for count in owners.values())
        assert group.committed == expected
        if group.members and not group.is_rebalancing:
            assert owners.keys() == PARTITIONS


@given(steps=STEPS)
def test_a_group_whose_members_follow_comes_to_rest(steps):
    group, now = Group("g"), 0.0
    for step, name, _, number in steps:
        if step == "join" and name not in group.members:
            group.join(name, TOPICS, now, PATIENCE)
        elif step == "leave":
            group.leave(name, now, PATIENCE)
        now += number / 4
        group.advance(now, TOPICS, PATIENCE)

    group.hear(list(group.members), now)
    for name in list(group.members):
        group.give_up(name)
    group.advance(now, TOPICS, PATIENCE)

    assert not group.is_rebalancing


def test_a_member_that_is_not_heard_of_is_put_out():
    group = Group("g")
    group.join("a", ["left"], 0.0, PATIENCE)
    group.join("b", ["left"], 0.0, PATIENCE)
    group.advance(0.0, TOPICS, PATIENCE)

    group.hear(["b"], 9.9)
    group.advance(10.0, TOPICS, PATIENCE)
    assert list(group.members) == ["b"]
    group.give_up("b")
    group.advance(10.0, TOPICS, PATIENCE)

    assert group.members["b"].owned == {Partition("left", n) for n in range(3)}
    assert group.generation == 2


def test_a_member_that_does_not_give_up_is_put_out():
    group = Group("g")
    group.join("slow", ["left"], 0.0, PATIENCE)
    group.advance(0.0, TOPICS, PATIENCE)
    group.join("new", ["left"], 5.0, PATIENCE)

    for now in (10.0, 20.0, 24.9):
        group.hear(["slow", "new"], now)
        group.advance(now, TOPICS, PATIENCE)
        group.commit("slow", {Partition("left", 0): int(now)})
    group.hear(["slow", "new"], 25.0)
    group.advance(25.0, TOPICS, PATIENCE)

    assert list(group.members) == ["new"]
    assert len(group.members["new"].owned) == 3
    with pytest.raises(Fenced, match="left/0 is no longer slow's"):
        group.commit("slow", {Partition("left", 0): 99})
    assert group.committed == {Partition("left", 0): 24}


def test_an_offset_below_zero_is_refused():
    group = Group("g")
    group.join("a", ["left"], 0.0, PATIENCE)
    group.advance(0.0, TOPICS, PATIENCE)

    with pytest.raises(Misuse, match="an offset must be at least 0, got -1"):
        group.commit("a", {Partition("left", 0): 3, Partition("left", 1): -1})

    assert group.committed == {}


@given(
    members=st.dictionaries(st.sampled_from(NAMES), st.sets(st.sampled_from(sorted(TOPICS)))),
    topics=st.dictionaries(st.sampled_from(["left", "right", "other"]), st.integers(1, 7)),
)
def test_shares_are_whole_fair_and_of_the_topics_that_were_asked_for(members, topics):
    shares = assign({name: sorted(wanted) for name, wanted in members.items()}, topics)

    for topic, count in topics.items():
        takers = [name for name, wanted in members.items() if topic in wanted]
        sizes = [sum(p.topic == topic for p in shares[name]) for name in takers]
        assert sum(sizes) == (count if takers else 0)
        assert not sizes or max(sizes) - min(sizes) <= 1
    owned = [partition for share in shares.values() for partition in share]
    assert len(owned) == len(set(owned))
    assert all(p.topic in members[name] for name, share in shares.items() for p in share)
