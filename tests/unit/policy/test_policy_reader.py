"""A policy file is read exactly, or every problem of it is named with its line."""

from __future__ import annotations

import pickle
from datetime import timedelta

import pytest

from semel.codec import FromCoordinates, FromHeader, FromPayload
from semel.errors import Misuse
from semel.policy.model import Policy
from semel.policy.reader import PolicyInvalid, PolicyNameUnknown, nearest
from semel.policy.sections import (
    ConsumerPolicy,
    Dlq,
    Idempotency,
    LagSlo,
    OffsetCommit,
    Poison,
    ReplaySection,
    Retry,
    SideEffect,
    TopicPolicy,
    duration_words,
    parse_duration,
)
from semel.policy.vocabulary import (
    BackoffShape,
    CommitTiming,
    Duplicates,
    Intent,
    Ordering,
    ReplayAllowed,
    Semantics,
    Strategy,
)
from tests.unit.policy.policy_texts import TEMPLATE


def test_the_template_is_read_exactly():
    policy = Policy.parse(TEMPLATE, "template.yaml")

    assert policy.topics == {
        "case-events": TopicPolicy(
            default_guarantee=Semantics.AT_LEAST_ONCE,
            key="caseId",
            ordering=Ordering.PER_KEY,
            retention=timedelta(days=7),
            replay_allowed=True,
        )
    }
    assert policy.consumers == {
        "search-indexer": ConsumerPolicy(
            idempotency=Idempotency(
                strategy=Strategy.AGGREGATE_VERSION_UPSERT,
                duplicate_handling=Duplicates.SKIP,
            ),
            offset_commit=OffsetCommit(timing=CommitTiming.AFTER_DB_TRANSACTION),
            retry=Retry(max_attempts=5, backoff=BackoffShape.EXPONENTIAL_JITTER),
            dlq=Dlq(enabled=True, topic="case-events.search-indexer.dlq", owner="search-team"),
            poison=Poison(max_attempts_before_park=5),
            lag_slo=LagSlo(max_lag_seconds=60),
        ),
        "notification-sender": ConsumerPolicy(
            idempotency=Idempotency(
                strategy=Strategy.NOTIFICATION_ID, external_provider_idempotency=True
            ),
            replay=ReplaySection(allowed=ReplayAllowed.NOT_FOR_SIDE_EFFECT),
            dlq=Dlq(enabled=True, manual_review_required=True),
        ),
    }


def test_every_key_of_the_template_knows_its_line():
    lines = Policy.parse(TEMPLATE).source.lines

    assert len(lines) == len(TEMPLATE.splitlines())
    assert set(lines.values()) == set(range(1, len(lines) + 1))


def test_the_retry_keys_are_read_by_their_names():
    policy = consumer_of(
        """
      retry:
        maxAttempts: 5
        initialDelayMs: 1000
        maxDelayMs: 60000
        jitter: true
        retryable:
          - DATABASE_TIMEOUT
          - DEPENDENCY_UNAVAILABLE
          - RATE_LIMITED
        nonRetryable:
          - SCHEMA_INVALID
          - AUTHORIZATION_FAILED
          - UNKNOWN_EVENT_TYPE
"""
    )

    assert policy.retry == Retry(
        max_attempts=5,
        initial_delay_ms=1000,
        max_delay_ms=60000,
        jitter=True,
        retryable=("DATABASE_TIMEOUT", "DEPENDENCY_UNAVAILABLE", "RATE_LIMITED"),
        non_retryable=("SCHEMA_INVALID", "AUTHORIZATION_FAILED", "UNKNOWN_EVENT_TYPE"),
    )


HEAD = "deliverySemantics:\n  topics:\n    t: {}\n  consumers:\n    c:\n"


def consumer_of(body: str) -> ConsumerPolicy:
    return Policy.parse(HEAD + body.strip("\n")).consumer("c")


@pytest.mark.parametrize(
    ("written", "place"),
    [
        ("header:message-id", FromHeader("message-id")),
        ("payload:event.id", FromPayload("event.id")),
        ("coordinates", FromCoordinates()),
    ],
)
def test_an_id_comes_from_a_declared_place(written, place):
    found = consumer_of(f"      messageId: {{from: {written}}}").message_id

    assert found is not None
    assert found.place == place


@pytest.mark.parametrize("written", ["0", "-1", ".inf"])
def test_all_ways_to_say_without_end_are_read_as_one(written):
    assert consumer_of(f"      retry: {{maxAttempts: {written}}}").retry.max_attempts == 0


def test_side_effects_are_a_list():
    found = consumer_of(
        """
      sideEffects:
        - {name: letter, intent: outbox}
        - {name: push, idempotencyKey: true}
"""
    )

    assert found.side_effects == (
        SideEffect(name="letter", intent=Intent.OUTBOX),
        SideEffect(name="push", idempotency_key=True),
    )


def test_sections_can_be_shared_by_aliases_and_merged():
    policy = Policy.parse(
        """
deliverySemantics:
  consumers:
    a: &usual
      dlq: &ours {owner: a-team}
      runbook: a.md
    b:
      <<: *usual
      runbook: b.md
    c:
      dlq: *ours
    d:
      <<: [{runbook: d.md}, *usual]
"""
    )

    assert policy.consumer("b") == ConsumerPolicy(dlq=Dlq(owner="a-team"), runbook="b.md")
    assert policy.consumer("c").dlq == policy.consumer("a").dlq
    assert policy.consumer("d").runbook == "d.md"


def test_a_tag_constructs_nothing():
    text = "deliverySemantics: !!python/object/apply:os.system {consumers: {}}"

    assert Policy.parse(text) == Policy()


def test_a_file_is_read_with_its_name(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text("\ufeff" + TEMPLATE)

    assert Policy.load(path) == Policy.parse(TEMPLATE)
    assert Policy.load(str(path)).source.name == str(path)


def test_a_file_that_cannot_be_read_is_an_invalid_policy(tmp_path):
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"a: 1\nb: \xe9\n")

    with pytest.raises(PolicyInvalid, match=r"none\.yaml: the file cannot be read: No such file"):
        Policy.load(tmp_path / "none.yaml")
    with pytest.raises(PolicyInvalid, match=r"latin\.yaml:2: the file is not UTF-8"):
        Policy.load(latin)


def test_the_error_is_a_misuse_that_survives_pickling():
    with pytest.raises(Misuse) as caught:
        Policy.parse("a: 1")

    again = pickle.loads(pickle.dumps(caught.value))

    assert str(again) == str(caught.value)
    assert again.problems == caught.value.problems


def test_unknown_names_are_answered_with_the_nearest():
    policy = Policy.parse(TEMPLATE)

    with pytest.raises(PolicyNameUnknown, match="did you mean search-indexer"):
        policy.consumer("search_indexer")
    with pytest.raises(PolicyNameUnknown, match="did you mean case-events"):
        policy.topic("case-event")
    with pytest.raises(PolicyNameUnknown, match="known are none"):
        Policy().consumer("x")


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("7d", timedelta(days=7)),
        ("36h", timedelta(hours=36)),
        ("90s", timedelta(seconds=90)),
        ("5m", timedelta(minutes=5)),
        ("2w", timedelta(days=14)),
        ("250ms", timedelta(milliseconds=250)),
    ],
)
def test_durations_have_a_unit(text, duration):
    assert parse_duration(text) == duration
    assert parse_duration(duration_words(duration)) == duration


@pytest.mark.parametrize("text", ["", "7", "d", "0d", "-1d", "1.5h", "7 d", "7D", "07d", "7d\n"])
def test_anything_else_is_no_duration(text):
    assert parse_duration(text) is None


def test_the_nearest_word_ignores_case_and_style():
    assert nearest("max_attempts", ["mode", "maxAttempts"]) == "maxAttempts"
    assert nearest("zzz", ["mode", "maxAttempts"]) == ""
