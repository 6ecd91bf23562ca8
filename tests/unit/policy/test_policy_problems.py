"""A policy file that is wrong is refused with every problem, its line, its key and the way out."""

from __future__ import annotations

import pytest

from semel.policy.model import Policy
from semel.policy.reader import PolicyInvalid
from semel.policy.sections import ConsumerPolicy

HEAD = "deliverySemantics:\n  topics:\n    t: {}\n  consumers:\n    c:\n"


def consumer_of(body: str) -> ConsumerPolicy:
    return Policy.parse(HEAD + body.strip("\n")).consumer("c")


def problems_of(text: str) -> list[str]:
    with pytest.raises(PolicyInvalid) as caught:
        Policy.parse(text, "p.yaml")
    return str(caught.value).splitlines()


def problem_of(body: str) -> str:
    """Return the only problem of a consumer, whose first line is line 6."""
    (problem,) = problems_of(HEAD + body)
    return problem


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            "      retry: {maxAtempts: 5}",
            "p.yaml:6: deliverySemantics.consumers.c.retry.maxAtempts: unknown key; expected one "
            "of maxAttempts, backoff, initialDelayMs, maxDelayMs, jitter, retryable, "
            "nonRetryable, mode, topic; did you mean maxAttempts?",
        ),
        (
            "      idempotency:\n        strategy: notification-ids",
            "p.yaml:7: deliverySemantics.consumers.c.idempotency.strategy: found the text "
            "'notification-ids'; expected one of processed-message, aggregate-version-upsert, "
            "unique-event-id, state-version-check, deterministic-document-id, overwrite-by-key, "
            "notification-id, provider-idempotency-key, none; did you mean notification-id?",
        ),
        (
            "      dlq:\n        enabled: 'true'",
            "p.yaml:7: deliverySemantics.consumers.c.dlq.enabled: found the text 'true'; expected "
            "true or false",
        ),
        (
            "      dlq:\n        owner: 17",
            "p.yaml:7: deliverySemantics.consumers.c.dlq.owner: found the number 17; expected "
            "text; did you mean the same in quotes?",
        ),
        (
            "      concurrency: 0",
            "p.yaml:6: deliverySemantics.consumers.c.concurrency: found the number 0; expected a "
            "whole number of 1 or more",
        ),
        (
            "      concurrency: true",
            "p.yaml:6: deliverySemantics.consumers.c.concurrency: found true; expected a whole "
            "number of 1 or more",
        ),
        (
            "      claims: {ttl: 7}",
            "p.yaml:6: deliverySemantics.consumers.c.claims.ttl: found the number 7; expected a "
            "duration such as 7d, 36h or 90s; did you mean 7s or 7d?",
        ),
        (
            "      claims: {ttl: 7 days}",
            "p.yaml:6: deliverySemantics.consumers.c.claims.ttl: found the text '7 days'; expected "
            "a duration such as 7d, 36h or 90s",
        ),
        (
            "      lagSlo: {maxLagSeconds: .inf}",
            "p.yaml:6: deliverySemantics.consumers.c.lagSlo.maxLagSeconds: found the number inf; "
            "expected a number of seconds above 0, and at most 1000000000",
        ),
        (
            "      lagSlo: {maxLagSeconds: 6000000000}",
            "p.yaml:6: deliverySemantics.consumers.c.lagSlo.maxLagSeconds: found the number "
            "6000000000; expected a number of seconds above 0, and at most 1000000000",
        ),
        (
            "      lagSlo: {maxLagSeconds: 0}",
            "p.yaml:6: deliverySemantics.consumers.c.lagSlo.maxLagSeconds: found the number 0; "
            "expected a number of seconds above 0",
        ),
        (
            "      concurrency: 6000000000",
            "p.yaml:6: deliverySemantics.consumers.c.concurrency: found the number 6000000000; "
            "expected a whole number of 1 or more, and at most 1000000000",
        ),
        (
            "      retry: {maxAttempts: 6000000000}",
            "p.yaml:6: deliverySemantics.consumers.c.retry.maxAttempts: found the number "
            "6000000000; expected a whole number of attempts of 1 or more, and at most 1000000000",
        ),
        (
            "      retry: {maxAttempts: 2.5}",
            "p.yaml:6: deliverySemantics.consumers.c.retry.maxAttempts: found the number 2.5; "
            "expected a whole number of attempts of 1 or more",
        ),
        (
            "      replay: {allowed: false-for-side-effects}",
            "p.yaml:6: deliverySemantics.consumers.c.replay.allowed: found the text "
            "'false-for-side-effects'; expected one of true, false, false-for-side-effect; did you "
            "mean false-for-side-effect?",
        ),
        (
            "      replay: {allowed: 1}",
            "p.yaml:6: deliverySemantics.consumers.c.replay.allowed: found the number 1; expected "
            "one of true, false, false-for-side-effect",
        ),
        (
            "      messageId: {from: headers:id}",
            "p.yaml:6: deliverySemantics.consumers.c.messageId.from: found the text 'headers:id'; "
            "expected header:NAME, payload:PATH or coordinates; did you mean header:?",
        ),
        (
            "      messageId: {}",
            "p.yaml:6: deliverySemantics.consumers.c.messageId.from: the key is missing; expected "
            "header:NAME, payload:PATH or coordinates",
        ),
        (
            "      dlq:",
            "p.yaml:6: deliverySemantics.consumers.c.dlq: nothing stands here; expected the keys "
            "enabled, topic, unreadableTopic, owner, manualReviewRequired, keep, expire",
        ),
        (
            "      dlq: [a-team]",
            "p.yaml:6: deliverySemantics.consumers.c.dlq: found a list; expected the keys enabled, "
            "topic, unreadableTopic, owner, manualReviewRequired, keep, expire",
        ),
        (
            "      sideEffects: {name: mail}",
            "p.yaml:6: deliverySemantics.consumers.c.sideEffects: found keys and values; expected "
            "a list, each item the keys name, idempotencyKey, intent",
        ),
        (
            "      retry:\n        retryable:\n          - TIMEOUT\n          - TIMEOUT",
            "p.yaml:9: deliverySemantics.consumers.c.retry.retryable[1]: the item stands in the "
            "list already",
        ),
        (
            "      retry: {retryable: [timeout]}",
            "p.yaml:6: deliverySemantics.consumers.c.retry.retryable[0]: found the text 'timeout'; "
            "expected a code such as DATABASE_TIMEOUT",
        ),
        (
            "      topics: [u]",
            "p.yaml:6: deliverySemantics.consumers.c.topics[0]: there is no topic 'u'; expected "
            "one of t",
        ),
        (
            "      runbook: a.md\n      runbook: b.md",
            "p.yaml:7: deliverySemantics.consumers.c.runbook: the key stands in line 6 already",
        ),
        (
            "      runbook: !secret a.md",
            "p.yaml:6: deliverySemantics.consumers.c.runbook: the tag !secret is not read here; "
            "expected a plain value",
        ),
    ],
)
def test_a_problem_names_file_line_and_key_and_what_was_expected(body, expected):
    assert problem_of(body) == expected


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("      retry: {initialDelayMs: 5, maxDelayMs: 4}", "longer than the longest, 4 ms"),
        ("      retry: {jitter: false}", "use backoff exponential"),
        ("      retry: {retryable: [A], nonRetryable: [A]}", "A is in retryable, too"),
        ("      onExhausted: dlq\n      dlq: {enabled: false}", "which are not enabled"),
    ],
)
def test_keys_that_contradict_each_other_are_a_problem(body, words):
    assert words in problem_of(body)


@pytest.mark.parametrize(
    "body",
    [
        "      retry: {initialDelayMs: 4, maxDelayMs: 4}",
        "      retry: {jitter: false, backoff: exponential}",
        "      retry: {retryable: [A], nonRetryable: [B]}",
        "      onExhausted: park\n      dlq: {enabled: false}",
    ],
)
def test_keys_that_nearly_contradict_each_other_are_none(body):
    assert consumer_of(body)


def test_a_key_on_the_wrong_level_is_sent_to_its_own():
    assert "did you mean retry.maxAttempts?" in problem_of("      maxAttempts: 5")


def test_every_problem_is_named_at_once_in_the_order_of_the_file():
    lines = problems_of(
        """\
deliverySemantics:
  topics:
    t: {ordering: perkey}
    7: {}
  consumers:
    c:
      topics: [tt]
      dlq: {ownr: x}
    d:
  unknown: 1
"""
    )

    assert [line.split(": ")[0] for line in lines] == [f"p.yaml:{n}" for n in (3, 4, 7, 8, 9, 10)]
    assert "did you mean per-key?" in lines[0]
    assert 'did you mean "7"?' in lines[1]
    assert "did you mean t?" in lines[2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "p.yaml: the file is empty; expected the key deliverySemantics"),
        ("- 1", "p.yaml:1: found a list; expected the keys deliverySemantics"),
        ("a: [", "p.yaml:1: not YAML"),
        ("a: 1\nb: {", "p.yaml:2: not YAML"),
        ("--- 1\n--- 2", "p.yaml:2: not YAML: expected a single document"),
        ("deliverySemantics: &a {topics: *a}", "an alias contains itself"),
        ("deliverySemantics: {consumers: {c: {<<: 1}}}", "<< has nothing to merge"),
        ("? [a]\n: 1\n", "a key is a list or a mapping"),
        ("\x00", "p.yaml:1: not YAML"),
        ("[" * 5000, "not"),
    ],
)
def test_a_text_that_is_no_policy_is_one_kind_of_error(text, words):
    assert words in "\n".join(problems_of(text))
