"""Each rule of the lint finds what it is for, and leaves what is near it alone."""

from __future__ import annotations

from itertools import product

import pytest

from semel.messaging.failure import CODES, FailureClass
from semel.policy.lint import lint_policy
from semel.policy.model import Policy
from semel.policy.questions import QUESTIONS
from semel.policy.rules import RULES, UNREADABLE_CODES
from semel.policy.vocabulary import AntiPattern, BatchPolicy, RetryMode, Severity
from tests.unit.policy.policy_cases import CASES, PER_KEY
from tests.unit.policy.policy_texts import TEMPLATE, findings_with, reviewed

IDS = [f"{code}-{number}" for number, (code, *_) in enumerate(CASES)]


def test_a_misspelt_code_is_told_the_nearest_one():
    (finding,) = findings_with("code-unknown", {"retry": {"retryable": ["DATABSE_TIMEOUT"]}})

    assert "did you mean DATABASE_TIMEOUT?" in finding.sentence
    assert finding.key.endswith("retry.retryable")


@pytest.mark.parametrize(("code", "severity", "trigger", "near"), CASES, ids=IDS)
def test_a_rule_finds_what_it_is_for(code, severity, trigger, near):
    found = findings_with(code, *trigger)

    assert [finding.severity for finding in found] == [severity] * len(found)
    assert len(found) == 1
    assert found[0].line is not None
    assert found[0].key.startswith("deliverySemantics.")
    assert "{" not in found[0].sentence + found[0].fix


@pytest.mark.parametrize(("code", "severity", "trigger", "near"), CASES, ids=IDS)
def test_a_rule_leaves_what_is_near_alone(code, severity, trigger, near):
    assert findings_with(code, *near) == []


def test_every_rule_is_tested_and_belongs_to_a_question():
    codes = [rule.code for rule in RULES]
    asked = {code for question in QUESTIONS for code in question.codes}

    assert len({*codes}) == len(codes)
    assert {code for code, *_ in CASES} == {*codes} == asked


def test_every_anti_pattern_is_named_by_a_rule():
    assert len(AntiPattern) == 10
    assert {rule.anti_pattern for rule in RULES} == {None, *AntiPattern}


def test_a_finding_stands_at_the_line_that_decides():
    policy = Policy.parse(TEMPLATE.replace("per-key", "global"))
    (found, *_) = (f for f in lint_policy(policy).every_finding if f.code == "global-ordering")

    assert (found.line, found.key) == (6, "deliverySemantics.topics.case-events.ordering")


def test_a_finding_about_a_missing_key_stands_at_the_nearest_line_around_it():
    reviews = lint_policy(Policy.parse(TEMPLATE)).reviews
    (found,) = (f for f in reviews[1].findings if f.code == "dlq-without-owner")

    assert found.line == TEMPLATE.splitlines().index("        manualReviewRequired: true") - 1
    assert found.key == "deliverySemantics.consumers.notification-sender.dlq.owner"


def test_side_effects_are_found_one_by_one():
    effects = [{"name": "mail"}, {"name": "push", "idempotencyKey": True}, {"name": "sms"}]
    found = findings_with(
        "side-effect-unprotected", {"sideEffects": effects}, {"replayAllowed": None}
    )

    assert [finding.key.rpartition(".")[2] for finding in found] == [
        "sideEffects[0]",
        "sideEffects[2]",
    ]


def test_findings_come_with_the_worst_first():
    found = reviewed({"dlq": {"owner": None}, "lagSlo": None}, PER_KEY).findings

    order = [*Severity]
    ranks = [order.index(finding.severity) for finding in found]
    assert ranks == sorted(ranks, reverse=True)


@pytest.mark.parametrize(("mode", "holds"), [*product(RetryMode, [True, False])])
def test_a_retry_beside_the_partition_keeps_order_only_where_keys_are_held(mode, holds):
    own = {"retry": {"mode": str(mode)}, "parking": {"perKey": holds}}
    is_passed = mode is not RetryMode.BLOCKING and not holds

    assert bool(findings_with("retry-breaks-order", own, PER_KEY)) is is_passed


@pytest.mark.parametrize(("policy", "holds"), [*product(BatchPolicy, [True, False])])
def test_an_independent_batch_keeps_order_only_where_keys_are_held(policy, holds):
    own = {"batch": {"policy": str(policy)}, "parking": {"perKey": holds}}
    is_passed = policy is BatchPolicy.INDEPENDENT and not holds

    assert bool(findings_with("batch-breaks-order", own, PER_KEY)) is is_passed


def test_the_codes_of_unreadable_messages_are_the_consumers_own():
    assert {code for code, kind in CODES.items() if kind is FailureClass.SCHEMA} == UNREADABLE_CODES


@pytest.mark.parametrize(
    ("retry", "words"),
    [
        # 1+2+4+8+16+32 s, then a minute each
        ({"maxAttempts": 1_000_000}, "1,000,000 times, with waits of 694 days in all"),
        ({"maxAttempts": 10**9, "maxDelayMs": 10**9}, "waits of 11,574,073,"),
        ({"maxAttempts": 2000, "initialDelayMs": 0, "maxDelayMs": 0}, "waits of 0 s in all"),
        ({"maxAttempts": 2000, "initialDelayMs": 0}, "waits of 0 s in all"),
        ({"maxAttempts": 1447}, "waits of 24.0 h in all"),
        (
            {"maxAttempts": 200, "maxDelayMs": 3_600_000, "mode": "retry-table"},
            "waits of 8 days in all",
        ),
    ],
)
def test_attempts_that_only_look_bounded_are_told_with_their_time(retry, words):
    (found,) = findings_with("retries-too-long", {"retry": retry, "lagSlo": None})

    assert words in found.sentence


ROUND = """
deliverySemantics:
  topics: {t: {}, t.dlq: {}, t.lost: {}}
  consumers:
    c: {topics: [t], dlq: {enabled: true, topic: t.dlq, owner: a-team}}
    d: {topics: [t.dlq], dlq: {enabled: true, topic: t.lost, owner: a-team}}
    e: {topics: [t.lost], dlq: {enabled: true, topic: t, owner: a-team}}
"""


def letters_that_come_back(text):
    reviews = lint_policy(Policy.parse(text)).reviews
    found = {
        (review.consumer, finding.severity): finding.sentence
        for review in reviews
        for finding in review.findings
        if finding.code == "dlq-topic-is-read"
    }
    assert len(found) == len({consumer for consumer, _ in found})
    return found


def test_dead_letters_that_go_round_over_several_consumers_are_found_at_each_of_them():
    found = letters_that_come_back(ROUND)

    assert found.keys() == {(name, Severity.REFUSED) for name in "cde"}
    assert (
        "published to t.dlq, and from there to t again, as dead letters of d and e"
        in (found["c", Severity.REFUSED])
    )


def test_dead_letters_go_round_over_two_consumers_too():
    found = letters_that_come_back(ROUND.replace("topic: t.lost", "topic: t"))

    assert {consumer for consumer, _ in found} == {"c", "d"}


@pytest.mark.parametrize("end", ["t.rest", "t.lost.dlq"])
def test_dead_letters_of_dead_letters_are_fine_where_they_end(end):
    assert letters_that_come_back(ROUND.replace("topic: t,", f"topic: {end},")) == {}


def test_dead_letters_that_are_not_enabled_go_nowhere():
    silent = ROUND.replace("[t.dlq], dlq: {enabled: true", "[t.dlq], dlq: {enabled: false")

    assert letters_that_come_back(silent) == {}
