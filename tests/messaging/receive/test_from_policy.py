"""What a policy file says is what the engine does, or it is refused."""

from __future__ import annotations

import asyncio
from itertools import product
from typing import Any

import pytest

from semel.codec import FromCoordinates, FromHeader, FromPayload, Reading
from semel.errors import Misuse
from semel.message import Message
from semel.messaging.failure import CODES, NonRetryableMessageError
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handler import consumer
from semel.messaging.outcome import DeadLettered, Outcome, ParkedAway, Refused, RetryLater
from semel.messaging.settings import (
    ORDERS,
    ConsumerSettings,
    Order,
    RetryPolicy,
    RunnerSettings,
    id_place_of,
    settings_of,
)
from semel.policy import vocabulary as words
from semel.policy.lint import review
from semel.policy.model import Policy
from semel.policy.reader import PolicyNameUnknown
from semel.policy.rules import CANNOT, KNOWN_CODES
from semel.policy.vocabulary import (
    BatchPolicy,
    Duplicates,
    GapPolicy,
    GiveUp,
    Mode,
    RetryMode,
    StalePolicy,
)
from tests.messaging.worlds import memory_database
from tests.unit.policy.policy_texts import CLEAN_CONSUMER, CLEAN_TOPIC, TEMPLATE, merged, text_of


def policy(topic: dict[str, Any] | None = None, **keys: Any) -> Policy:
    """A policy without findings, with some keys changed."""
    own = merged(CLEAN_CONSUMER, keys)
    return Policy.parse(text_of(own, merged(CLEAN_TOPIC, topic or {})), "policy.yaml")


def chosen(topic: dict[str, Any] | None = None, **keys: Any) -> ConsumerSettings:
    return settings_of(policy(topic, **keys), "c")[0]


def runs(**keys: Any) -> RunnerSettings:
    return settings_of(policy(**keys), "c")[1]


async def handle(message: Any) -> None:
    """Do nothing."""


def test_the_template_that_people_know_becomes_settings():
    settings, runner = settings_of(Policy.parse(TEMPLATE), "search-indexer")

    assert settings == ConsumerSettings(
        retry=RetryPolicy(max_attempts=5, jitter=True, max_poison_attempts=5),
        on_poison=GiveUp.PARK,
        dead_letter_owner="search-team",
        dead_letter_topic="case-events.search-indexer.dlq",
        order=Order.KEY,
        holds_keys=True,
        poison_attempts=5,
    )
    assert runner == RunnerSettings()


def test_poison_is_parked_after_as_many_attempts_as_the_policy_says():
    settings = chosen(
        poison={"maxAttemptsBeforePark": 2},
        retry={"maxAttempts": 3, "initialDelayMs": 0, "maxDelayMs": 0},
    )

    async def tried(error: Exception) -> list[Outcome]:
        database = memory_database()

        @consumer("c", policy=settings, id_from=FromHeader("message-id"))
        async def failing(message: Any, session: Any) -> None:
            raise error

        message = Message("m1", {}, b"{}")
        return [await handle_message(failing, database, message) for _ in range(3)]

    poison = asyncio.run(tried(ValueError("broken")))
    outage = asyncio.run(tried(TimeoutError()))
    hopeless = asyncio.run(tried(NonRetryableMessageError("never")))

    assert list(map(type, poison)) == [RetryLater, ParkedAway, Refused]
    assert list(map(type, outage)) == [RetryLater, RetryLater, DeadLettered]
    assert list(map(type, hopeless)) == [DeadLettered, Refused, Refused]


def test_the_retry_keys_are_taken_exactly():
    retry = {
        "maxAttempts": 7,
        "initialDelayMs": 250,
        "maxDelayMs": 4000,
        "backoff": "exponential",
        "retryable": ["DATABASE_TIMEOUT", "RATE_LIMITED"],
        "nonRetryable": ["SCHEMA_INVALID"],
        "mode": "retry-table",
    }

    assert chosen(retry=retry, poison={"maxAttemptsBeforePark": 2}).retry == RetryPolicy(
        max_attempts=7,
        initial_delay_seconds=0.25,
        max_delay_seconds=4.0,
        jitter=False,
        retryable=frozenset({"DATABASE_TIMEOUT", "RATE_LIMITED"}),
        non_retryable=frozenset({"SCHEMA_INVALID"}),
        mode=RetryMode.RETRY_TABLE,
        max_poison_attempts=2,
    )


def test_the_number_of_attempts_before_parking_holds_for_crashes_too():
    assert chosen(poison={"maxAttemptsBeforePark": 2}).poison_attempts == 2


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"onExhausted": "park"}, GiveUp.PARK),
        ({"onExhausted": "dlq"}, GiveUp.DEAD_LETTER),
        ({}, GiveUp.DEAD_LETTER),
        ({"dlq": {"enabled": False, "owner": None}, "parking": {"owner": "us"}}, GiveUp.PARK),
    ],
)
def test_whatever_is_not_tried_again_goes_where_the_policy_says(keys, expected):
    settings = chosen(**keys)

    assert (settings.on_exhausted, settings.on_hopeless) == (expected, expected)


def test_keys_are_held_with_order_per_key_unless_the_policy_says_otherwise():
    ordered = {"ordering": "per-key"}

    assert chosen(ordered).holds_keys
    assert not chosen(ordered, parking={"perKey": False}).holds_keys
    assert not chosen().holds_keys
    assert not chosen(parking={"perKey": True}).holds_keys


def test_the_stricter_of_topic_and_consumer_decides_the_order():
    assert chosen({"ordering": "per-key"}, ordering="none").order is Order.KEY
    assert chosen({"ordering": "none"}, ordering="per-key").order is Order.KEY
    assert chosen({"ordering": "none"}).order is Order.NONE


def test_of_several_topics_the_strictest_order_holds():
    text = TEMPLATE.replace(
        "  consumers:",
        "    audit-events: {key: id, ordering: none, retention: 7d}\n  consumers:",
        1,
    )
    both = Policy.parse(text)

    assert settings_of(both, "search-indexer")[0].order is Order.KEY
    assert settings_of(both, "search-indexer", ["audit-events"])[0].order is Order.NONE


def test_the_other_keys_of_a_consumer_are_taken_exactly():
    settings = chosen(
        idempotency={"duplicateHandling": "invoke"},
        versioned=True,
        gaps="park-key",
        parking={"owner": "us"},
        keepResult=True,
    )

    assert settings.duplicates is Duplicates.INVOKE
    assert (settings.versioned, settings.gaps) == (True, GapPolicy.PARK_KEY)
    assert settings.keeps_results
    assert settings.dead_letter_owner == "a-team"


def test_the_time_limit_of_a_handler_and_the_circuit_are_taken_exactly():
    found = chosen(handlerSeconds=12, circuit={"failures": 5, "share": 0.8})

    assert (found.handler_seconds, found.circuit_failures, found.circuit_share) == (12.0, 5, 0.8)
    assert chosen(circuit={"enabled": False}).circuit_failures == 0
    leased = chosen(mode="leased", handlerSeconds=12, lease={"seconds": 15})
    assert (found.leased_handler_seconds, leased.leased_handler_seconds) == (12.0, 12.0)
    assert chosen(mode="leased", lease={"seconds": 15}).leased_handler_seconds is None


def test_a_lease_is_taken_exactly():
    leased = {"mode": "leased", "lease": {"seconds": 15, "stale": "inspect"}}
    settings, runner = settings_of(policy(**leased), "c")

    assert (settings.lease_seconds, settings.stale) == (15.0, StalePolicy.INSPECT)
    assert runner.mode is Mode.LEASED


def test_a_batch_and_its_size_become_the_runners():
    batch = {"size": 50, "policy": "dead-letter"}
    settings, runner = settings_of(policy(batch=batch, concurrency=3), "c")

    assert settings.batch is BatchPolicy.DEAD_LETTER
    assert (runner.mode, runner.max_records, runner.concurrency) == (Mode.BATCHED, 50, 3)
    assert chosen(batch={"policy": "stop"}).batch is BatchPolicy.STOP
    assert runs().mode is Mode.TRANSACTIONAL


@pytest.mark.parametrize(
    ("keys", "finding"),
    [
        ({"dlq": {"enabled": True, "owner": None}, "critical": True}, "dlq-without-owner"),
        ({"retry": {"maxAttempts": 0}}, "retries-forever"),
        ({"claims": {"ttl": "1h"}}, "claims-ttl-too-short"),
        ({"ordering": "global"}, "global-ordering"),
        (
            {"ordering": "per-key", "retry": {"mode": "retry-topic"}, "parking": {"perKey": False}},
            "retry-breaks-order",
        ),
        ({"sideEffects": [{"name": "email"}]}, "side-effect-unprotected"),
    ],
)
def test_what_the_lint_refuses_is_refused_with_its_finding_and_line(keys, finding):
    with pytest.raises(Misuse, match=finding) as refused:
        settings_of(policy(**keys), "c")

    assert str(refused.value).startswith("policy.yaml")


@pytest.mark.parametrize(
    ("key", "keys"),
    [
        ("idempotency.strategy", {"idempotency": {"strategy": "none"}}),
        ("offsetCommit.timing", {"offsetCommit": {"timing": "in-output-transaction"}}),
        ("batch", {"mode": "leased", "batch": {"size": 10}}),
        ("batch.policy", {"batch": {"policy": "stop"}, "concurrency": 2}),
        ("batch.policy", {"batch": {"policy": "fail-batch"}, "concurrency": 2}),
        (
            "parking.perKey",
            {"ordering": "per-key", "onExhausted": "park", "parking": {"perKey": False}},
        ),
        (
            "parking.perKey",
            {
                "ordering": "per-key",
                "batch": {"policy": "dead-letter"},
                "parking": {"perKey": False},
            },
        ),
        ("versioned", {"mode": "leased", "versioned": True}),
        (
            "idempotency.duplicateHandling",
            {"mode": "leased", "idempotency": {"duplicateHandling": "invoke"}},
        ),
    ],
)
def test_what_the_engine_does_otherwise_is_refused_by_its_key(key, keys):
    given = policy({"defaultGuarantee": "at-most-once"}, **keys)

    assert key in CANNOT
    with pytest.raises(Misuse, match=f"{key} cannot be carried out"):
        settings_of(given, "c")
    refused = [f for f in review(given, "c", "t").findings if f.code == "not-carried-out"]
    assert [finding.key.endswith(key) for finding in refused] == [True]
    assert refused[0].fix == CANNOT[key].way_out


def test_every_refusal_of_the_engine_is_tried_here():
    tried = test_what_the_engine_does_otherwise_is_refused_by_its_key.pytestmark[0].args[1]

    assert {key for key, _ in tried} == set(CANNOT)


def test_the_codes_that_the_lint_knows_are_those_that_the_engine_gives():
    assert set(KNOWN_CODES) == set(CODES)


def test_a_policy_that_acknowledges_first_is_refused():
    before = policy(
        {"defaultGuarantee": "at-most-once"}, offsetCommit={"timing": "before-processing"}
    )

    with pytest.raises(Misuse, match=r"offsetCommit\.timing cannot be carried out"):
        settings_of(before, "c")


def test_every_order_of_a_policy_has_a_meaning_for_the_engine():
    assert set(ORDERS) == set(words.Ordering)


@pytest.mark.parametrize(("mode", "gaps"), list(product(words.RetryMode, words.GapPolicy)))
def test_every_mode_and_gap_policy_gives_settings(mode, gaps):
    given = policy(retry={"mode": mode.value}, versioned=True, gaps=gaps.value)

    settings = settings_of(given, "c")[0]

    assert (settings.retry.mode, settings.gaps) == (mode, gaps)


def test_a_retry_topic_has_a_name_and_needs_held_keys_to_keep_their_order():
    topic = {"mode": "retry-topic", "topic": "later"}
    given = policy(ordering="per-key", retry=topic, parking={"perKey": True})

    settings = settings_of(given, "c")[0]

    assert settings.retry_topic == "later"
    assert settings.holds_waiting_keys
    with pytest.raises(Misuse, match="retry-breaks-order"):
        settings_of(policy(ordering="per-key", retry=topic), "c")


def test_a_name_that_the_policy_does_not_know_is_refused():
    with pytest.raises(PolicyNameUnknown):
        settings_of(policy(), "nobody")
    with pytest.raises(PolicyNameUnknown):
        settings_of(policy(), "c", ["another-topic"])


@pytest.mark.parametrize(
    ("written", "place"),
    [
        ("header:id", FromHeader("id")),
        ("payload:meta.id", FromPayload("meta.id")),
        ("coordinates", FromCoordinates()),
    ],
)
def test_the_declared_place_of_the_id_is_where_it_is_read(written, place):
    given = policy(messageId={"from": written})

    assert id_place_of(given, "c") == place
    assert consumer("c", policy=given)(handle).reading.id_from == place


def test_a_consumer_takes_its_settings_from_a_policy():
    made = consumer("c", policy=policy(retry={"maxAttempts": 2}))(handle)

    assert made.settings.retry.max_attempts == 2
    assert made.settings.dead_letter_owner == "a-team"


def test_a_consumer_whose_code_contradicts_its_policy_is_refused():
    with pytest.raises(Misuse, match="the code from the header 'other'"):
        consumer("c", policy=policy(), id_from=FromHeader("other"))
    with pytest.raises(Misuse, match="must say where one is"):
        consumer("c", policy=policy(versioned=True))


def test_a_versioned_policy_needs_a_reading_that_finds_versions():
    reading = Reading(FromHeader("id"), version_from=FromPayload("version"))

    made = consumer("c", policy=policy(versioned=True), reading=reading)(handle)

    assert made.settings.versioned


@pytest.mark.parametrize(("gaps", "needed"), [("fetch", "fetch_missing"), ("rebuild", "rebuild")])
def test_a_gap_policy_without_its_function_is_refused(gaps, needed):
    reading = Reading(FromHeader("id"), version_from=FromPayload("version"))

    with pytest.raises(Misuse, match=f"needs {needed}="):
        consumer("c", policy=policy(versioned=True, gaps=gaps), reading=reading)(handle)
