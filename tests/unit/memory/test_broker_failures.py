"""Failures on demand: what the memory broker refuses, and what it does without saying so."""

from __future__ import annotations

import pytest

from semel.errors import Misuse, Permanent, Retryable
from semel.memory.broker import BrokerFailure, Call, Failing, MemoryBroker
from semel.messaging.receive.broker import Outgoing
from tests.stores.world import asynchronous
from tests.unit.memory.filled_broker import P0, filled, values


@asynchronous
async def test_a_lost_reply_of_a_commit_leaves_it_committed():
    broker = filled("a")
    member = await broker.subscribe("g", ["t"])
    broker.fail(BrokerFailure(Call.COMMIT, Failing.LOST_REPLY))

    with pytest.raises(Retryable):
        await member.commit({P0: 1})

    assert broker.committed("g") == {P0: 1}


@asynchronous
async def test_a_refused_commit_commits_nothing_and_the_next_one_works():
    broker = filled("a")
    member = await broker.subscribe("g", ["t"])
    broker.fail(BrokerFailure(Call.COMMIT))

    with pytest.raises(Retryable, match="the broker does not answer"):
        await member.commit({P0: 1})
    assert broker.committed("g") == {}
    await member.commit({P0: 1})

    assert broker.committed("g") == {P0: 1}


@asynchronous
async def test_failures_strike_as_often_as_said_and_after_as_many_calls():
    broker = filled("a", "b", "c", "d")
    member = await broker.subscribe("g", ["t"])
    broker.fail(BrokerFailure(Call.FETCH, after=1, times=2))

    found = []
    for _ in range(6):
        try:
            found += values(await member.fetch(1, 0))
        except Retryable:
            found.append("failed")

    assert found == ["a", "failed", "failed", "b", "c", "d"]


@asynchronous
async def test_a_broker_that_is_down_answers_again_when_it_is_healed():
    broker = filled("a")
    member = await broker.subscribe("g", ["t"])
    broker.fail(*(BrokerFailure(call, times=None) for call in Call))

    for call in (
        member.fetch(1, 0),
        member.commit({P0: 1}),
        member.committed(P0),
        member.end(P0),
        broker.reader().read(P0, 0, 0),
        broker.publisher().publish([Outgoing("t", b"b")]),
    ):
        with pytest.raises(Retryable):
            await call
    broker.heal()

    assert values(await member.fetch(10, 0)) == ["a"]


@asynchronous
async def test_a_message_can_be_refused_by_its_topic_and_key():
    broker = MemoryBroker({"t": 1, "u": 1})
    refusal = Permanent("not with us")
    broker.fail(BrokerFailure(Call.MESSAGE, error=refusal, topic="t", key=b"k"))

    answers = await broker.publisher().publish(
        [Outgoing("u", b"1", b"k"), Outgoing("t", b"2", b"x"), Outgoing("t", b"3", b"k")]
    )

    assert answers == [None, None, refusal]
    assert values([*broker.records("t"), *broker.records("u")]) == ["2", "1"]


@asynchronous
async def test_a_message_whose_answer_is_lost_is_in_the_log_and_holds_back_its_key():
    broker = filled()
    broker.fail(BrokerFailure(Call.MESSAGE, Failing.LOST_REPLY))

    first, second = await broker.publisher().publish(
        [Outgoing("t", b"1", b"k"), Outgoing("t", b"2", b"k")]
    )

    assert isinstance(first, Retryable)
    assert isinstance(second, Retryable)
    assert values(broker.records("t")) == ["1"]


@asynchronous
async def test_what_the_publisher_repeats_is_in_the_log_once():
    broker = filled()
    broker.fail(BrokerFailure(Call.APPEND, Failing.LOST_REPLY, times=3))

    answers = await broker.publisher().publish([Outgoing("t", b"1", b"k"), Outgoing("t", b"2")])

    assert answers == [None, None]
    assert values(broker.records("t")) == ["1", "2"]


@asynchronous
async def test_what_the_caller_sends_again_is_in_the_log_again():
    broker = filled()
    broker.fail(BrokerFailure(Call.PUBLISH, Failing.LOST_REPLY))
    publisher, batch = broker.publisher(), [Outgoing("t", b"1", b"k")]

    with pytest.raises(Retryable):
        await publisher.publish(batch)
    assert await publisher.publish(batch) == [None]

    assert values(broker.records("t")) == ["1", "1"]


@asynchronous
async def test_a_publisher_that_never_gets_an_answer_gives_up():
    broker = filled()
    broker.fail(BrokerFailure(Call.APPEND, times=None))

    with pytest.raises(Retryable):
        await broker.publisher().publish([Outgoing("t", b"1")])


@asynchronous
async def test_a_topic_that_does_not_exist_is_refused():
    broker = filled()

    (answer,) = await broker.publisher().publish([Outgoing("nowhere", b"1")])

    assert isinstance(answer, Permanent)
    with pytest.raises(Misuse, match="there is no topic 'nowhere'"):
        await broker.subscribe("g", ["t", "nowhere"])
    with pytest.raises(Misuse, match="there is no partition nowhere/0"):
        broker.put("nowhere", b"1")
