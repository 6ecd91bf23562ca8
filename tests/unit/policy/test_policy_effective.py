"""What holds for a consumer on a topic: the stricter of both, and defaults that follow."""

from __future__ import annotations

from datetime import timedelta
from itertools import product

import pytest

from semel.policy.model import OVERLAPS, SAFETY, USUAL_RETENTION, Effective, Policy, strictest
from semel.policy.reader import PolicyNameUnknown, path_words
from semel.policy.sections import ConsumerPolicy, ReplaySection, TopicPolicy
from semel.policy.vocabulary import (
    GiveUp,
    Ordering,
    ReplayAllowed,
    Semantics,
)
from tests.unit.policy.policy_texts import TEMPLATE, policy_with

DAY = timedelta(days=1)
SAID = {
    "guarantee": [None, *Semantics],
    "ordering": [None, *Ordering],
    "replay": [None, *ReplayAllowed],
    "replay_window": [None, DAY, 7 * DAY, 30 * DAY],
}


def test_every_matter_of_both_is_tested():
    assert SAID.keys() == OVERLAPS.keys()


@pytest.mark.parametrize(
    ("matter", "one", "other"),
    [(matter, *pair) for matter, values in SAID.items() for pair in product(values, repeat=2)],
)
def test_the_stricter_wins_whoever_says_it(matter, one, other):
    overlap = OVERLAPS[matter]
    found = strictest(overlap, one, other)
    spoken = [value for value in (one, other) if value is not None]

    assert found == strictest(overlap, other, one)
    assert found in (spoken or [None])
    assert all(overlap.strictness(found) >= overlap.strictness(value) for value in spoken)


TOPIC_REPLAY = {None: None, True: ReplayAllowed.YES, False: ReplayAllowed.NO}


@pytest.mark.parametrize(
    ("topic", "consumer"), [*product([None, True, False], [None, *ReplayAllowed])]
)
def test_replay_is_allowed_only_if_both_allow_it(topic, consumer):
    policy = Policy(
        topics={"t": TopicPolicy(replay_allowed=topic)},
        consumers={"c": ConsumerPolicy(replay=ReplaySection(allowed=consumer))},
    )

    found = policy.effective("c", "t").replay

    assert found == (
        strictest(OVERLAPS["replay"], TOPIC_REPLAY[topic], consumer) or ReplayAllowed.YES
    )


@pytest.mark.parametrize(("topic", "consumer"), [*product([None, *Ordering], repeat=2)])
def test_an_order_is_settled_for_every_pair(topic, consumer):
    policy = Policy(
        topics={"t": TopicPolicy(ordering=topic)},
        consumers={"c": ConsumerPolicy(ordering=consumer)},
    )

    found = policy.effective("c", "t")

    assert isinstance(found.ordering, Ordering)
    assert ("ordering" in found.decided_by) == ((topic, consumer) != (None, None))


def effective(consumer=None, topic=None) -> Effective:
    return policy_with(consumer, topic).effective("c", "t")


def test_the_winner_is_named_by_its_path():
    found = effective({"ordering": "none", "replay": {"window": "3d"}}, {"ordering": "per-key"})

    by = {matter: path_words(path) for matter, path in found.decided_by.items()}
    assert by == {
        "guarantee": "deliverySemantics.topics.t.defaultGuarantee",
        "ordering": "deliverySemantics.topics.t.ordering",
        "replay": "deliverySemantics.topics.t.replayAllowed",
        "replay_window": "deliverySemantics.consumers.c.replay.window",
    }


def test_a_replay_reaches_as_far_as_the_shorter_window():
    assert effective({"replay": {"window": "30d"}}, {"replayWindow": "7d"}).replay_window == 7 * DAY
    assert effective({}, {"retention": "5d"}).replay_window == 5 * DAY
    assert effective({}, {"retention": None}).replay_window is None


@pytest.mark.parametrize(
    ("said", "attempts", "poison_attempts"),
    [
        ({}, 5, 5),
        ({"retry": {"maxAttempts": 9}}, 9, 9),
        ({"retry": {"maxAttempts": 9}, "poison": {"maxAttemptsBeforePark": 3}}, 9, 3),
        ({"retry": {"maxAttempts": 2}, "poison": {"maxAttemptsBeforePark": 3}}, 2, 2),
        ({"retry": {"maxAttempts": 0}, "poison": {"maxAttemptsBeforePark": 3}}, None, 3),
        ({"retry": {"maxAttempts": 0}}, None, None),
    ],
)
def test_a_poison_message_is_never_tried_more_often_than_others(said, attempts, poison_attempts):
    found = effective(said)

    assert (found.attempts, found.poison_attempts) == (attempts, poison_attempts)


@pytest.mark.parametrize(
    ("said", "jitter"),
    [
        ({}, True),
        ({"backoff": "exponential"}, False),
        ({"backoff": "exponential", "jitter": True}, True),
        ({"backoff": "exponential", "jitter": False}, False),
    ],
)
def test_jitter_follows_from_the_backoff_unless_it_is_said(said, jitter):
    assert effective({"retry": said}).jitter is jitter


@pytest.mark.parametrize(
    ("said", "where"),
    [
        ({}, GiveUp.DEAD_LETTER),
        ({"dlq": {"enabled": False}}, GiveUp.PARK),
        ({"onExhausted": "park"}, GiveUp.PARK),
    ],
)
def test_exhausted_messages_go_to_the_dead_letters_where_there_are_any(said, where):
    assert effective(said).on_exhausted is where


@pytest.mark.parametrize(
    ("ordering", "mode", "said", "holds"),
    [
        ("per-key", "blocking", None, True),
        ("per-key", "retry-table", None, True),
        ("per-key", "retry-topic", None, False),
        ("per-key", "retry-topic", True, True),
        ("per-key", "retry-table", False, False),
        ("none", "retry-table", None, False),
        ("none", "retry-table", True, True),
    ],
)
def test_keys_are_held_with_order_per_key_but_for_a_retry_topic_it_must_be_said(
    ordering, mode, said, holds
):
    parking = {} if said is None else {"parking": {"perKey": said}}

    found = effective({"retry": {"mode": mode}, **parking}, {"ordering": ordering})

    assert found.holds_keys is holds


def test_parked_messages_belong_to_the_dead_letters_owner_unless_somebody_else_is_named():
    assert effective().parking_owner == "a-team"
    assert effective({"parking": {"owner": "b-team"}}).parking_owner == "b-team"


@pytest.mark.parametrize(
    ("said", "effects"),
    [
        ({"sideEffects": []}, []),
        ({"sideEffects": None}, []),
        ({"sideEffects": None, "idempotency": {"strategy": "notification-id"}}, ["notification"]),
        (
            {"sideEffects": None, "idempotency": {"externalProviderIdempotency": False}},
            ["external call"],
        ),
        ({"sideEffects": None, "replay": {"allowed": "false-for-side-effect"}}, ["external call"]),
        ({"sideEffects": [], "replay": {"allowed": "false-for-side-effect"}}, []),
        ({"sideEffects": [{"name": "mail"}]}, ["mail"]),
    ],
)
def test_a_side_effect_that_other_keys_speak_of_is_one(said, effects):
    assert [effect.name for effect in effective(said).side_effects] == effects


@pytest.mark.parametrize(
    ("idempotency", "effect", "keyed"),
    [
        ({}, {}, False),
        ({"externalProviderIdempotency": True}, {}, True),
        ({"externalProviderIdempotency": True}, {"idempotencyKey": False}, False),
        ({"strategy": "provider-idempotency-key"}, {}, True),
        (
            {"strategy": "provider-idempotency-key", "externalProviderIdempotency": False},
            {},
            False,
        ),
        ({"strategy": "notification-id"}, {}, False),
    ],
)
def test_a_side_effect_has_a_key_if_anybody_says_so_for_it(idempotency, effect, keyed):
    said = {"idempotency": idempotency, "sideEffects": [{"name": "mail", **effect}]}

    assert effective(said).side_effects[0].idempotency_key is keyed


@pytest.mark.parametrize(
    ("topic", "effects", "replay", "refused"),
    [
        (None, [], ReplayAllowed.YES, None),
        (None, [{"name": "m", "intent": "outbox"}], ReplayAllowed.YES, None),
        (None, [{"name": "m"}], ReplayAllowed.NOT_FOR_SIDE_EFFECT, "and it has: m"),
        (True, [{"name": "m"}], ReplayAllowed.YES, None),
        (False, [], ReplayAllowed.NO, "replay is not allowed"),
    ],
)
def test_replay_is_refused_with_its_reason(topic, effects, replay, refused):
    found = effective({"sideEffects": effects}, {"replayAllowed": topic})

    assert found.replay is replay
    assert (found.replay_refusal or "").endswith(refused or "")
    assert (found.replay_refusal is None) == (refused is None)


@pytest.mark.parametrize(
    ("consumer", "topic", "ttl"),
    [
        ({}, {}, 7 * SAFETY),
        ({}, {"retention": "30d"}, 30 * SAFETY),
        ({}, {"replayWindow": "90d"}, 90 * SAFETY),
        ({}, {"replayWindow": "90d", "replayAllowed": False}, 7 * SAFETY),
        ({"replay": {"window": "3d"}}, {"replayWindow": "90d"}, 7 * SAFETY),
        ({"dlq": {"keep": "30d"}}, {}, 30 * SAFETY),
        ({"parking": {"keep": "60d"}}, {}, 60 * SAFETY),
        ({"claims": {"ttl": "1d"}}, {}, 1),
    ],
)
def test_claims_are_kept_for_twice_the_longest_window(consumer, topic, ttl):
    assert effective(consumer, topic).claims_ttl == ttl * DAY


@pytest.mark.parametrize("consumer", [{}, {"dlq": {"keep": "1d"}}])
def test_a_retention_that_is_not_stated_is_taken_for_the_brokers_usual_week(consumer):
    found = effective(consumer, {"retention": None})

    assert max(window.length for window in found.windows) == USUAL_RETENTION
    assert found.claims_ttl == SAFETY * USUAL_RETENTION == 14 * DAY


def test_a_consumer_reads_all_topics_unless_it_names_them():
    text = "deliverySemantics: {topics: {a: {}, b: {}}, consumers: {c: {}, d: {topics: [b]}}}"
    policy = Policy.parse(text)

    assert policy.topics_of("c") == ("a", "b")
    assert policy.topics_of("d") == ("b",)
    with pytest.raises(PolicyNameUnknown, match="consumer d does not read topic 'a'"):
        policy.effective("d", "a")


def test_without_a_topic_the_consumers_own_policy_holds():
    found = Policy.parse(TEMPLATE).effective("search-indexer")

    assert found.topic_name is None
    assert found.ordering is Ordering.NONE
