"""The lint answers twenty questions about every consumer, on every topic that it reads."""

from __future__ import annotations

import pytest

from semel.policy.lint import lint_policy
from semel.policy.model import Policy
from semel.policy.reader import PolicyNameUnknown
from semel.policy.vocabulary import PolicyStatus as Status
from semel.policy.vocabulary import Severity
from tests.unit.policy.policy_texts import policy_with, reviewed

MAIL = [{"name": "mail"}]
KEYED = [{"name": "mail", "idempotencyKey": True}]
INTENT = [{"name": "mail", "intent": "outbox"}]
PER_KEY = {"ordering": "per-key"}


def test_nothing_is_found_in_a_policy_in_which_nothing_is_wrong():
    found = reviewed()

    assert found.findings == ()
    assert not found.refused
    assert {answer.status for answer in found.answers} == {Status.OK}


def test_there_are_twenty_questions_and_each_has_an_answer():
    found = reviewed().answers

    assert [answer.number for answer in found] == [*range(1, 21)]
    assert all(answer.text and answer.question.endswith("?") for answer in found)


def test_what_a_policy_does_not_say_is_unknown_and_not_fine():
    policy = Policy.parse("deliverySemantics: {topics: {t: {}}, consumers: {c: {}}}")
    (review,) = lint_policy(policy).reviews

    unknown = {a.number for a in review.answers if a.status is Status.UNKNOWN}
    assert unknown == {3, 5, 6, 9, 10, 11, 18, 19, 20}


@pytest.mark.parametrize(
    ("consumer", "topic", "number", "status", "words"),
    [
        ({}, {}, 1, Status.OK, "at-least-once delivery; effectively-once for rows"),
        (
            {"offsetCommit": {"timing": "before-processing"}},
            {"defaultGuarantee": None},
            1,
            Status.REFUSED,
            "at-most-once delivery",
        ),
        ({}, {"defaultGuarantee": "exactly-once"}, 1, Status.REFUSED, "without a scope"),
        ({"messageId": {"from": "payload:a.b"}}, {}, 3, Status.OK, "payload:a.b"),
        ({"idempotency": {"strategy": "none"}}, {}, 4, Status.WARN, "no; c does not recognise"),
        ({"sideEffects": KEYED}, {}, 6, Status.OK, "mail: key"),
        ({"sideEffects": MAIL}, {"replayAllowed": False}, 6, Status.REFUSED, "mail: no; "),
        ({"offsetCommit": {"timing": "after-side-effect"}}, {}, 7, Status.OK, "after-side-effect"),
        ({}, {}, 8, Status.OK, "only the ack is made up"),
        ({"idempotency": {"strategy": "none"}}, {}, 8, Status.WARN, "is handled again"),
        (
            {"offsetCommit": {"timing": "in-output-transaction"}},
            {},
            8,
            Status.OK,
            "the broker aborts the transaction",
        ),
        (
            {"offsetCommit": {"timing": "before-processing"}, "critical": True},
            {},
            8,
            Status.REFUSED,
            "the ack comes first",
        ),
        ({"sideEffects": INTENT}, {}, 9, Status.OK, "only the intent is written"),
        ({"sideEffects": MAIL}, {"replayAllowed": False}, 9, Status.REFUSED, "mail: repeated"),
        ({}, PER_KEY, 10, Status.OK, "per-key; retries: blocking; later messages"),
        ({}, {}, 11, Status.OK, "id"),
        ({"onExhausted": "park"}, {}, 12, Status.OK, "after 5 attempts: into the parking lot"),
        ({"retry": {"maxAttempts": 0}}, {}, 12, Status.REFUSED, "never set aside"),
        ({"retry": {"maxAttempts": 0}}, {}, 13, Status.REFUSED, "no; c retries without a limit"),
        ({}, {}, 14, Status.OK, "by a-team"),
        ({"dlq": {"owner": None}}, {}, 14, Status.WARN, "have no owner"),
        ({}, {}, 15, Status.OK, "allowed; recognised: replay within 14d"),
        ({}, {"replayAllowed": False}, 15, Status.OK, "replay is not allowed"),
        ({"sideEffects": MAIL}, {}, 15, Status.REFUSED, "would repeat side effect 'mail'"),
        ({"dlq": {"enabled": False}}, {}, 16, Status.WARN, "has no place"),
        ({"lagSlo": None}, {}, 17, Status.WARN, "falls behind"),
        ({"tests": None, "critical": True}, {}, 18, Status.WARN, "no test is named"),
        ({"tests": None}, {}, 19, Status.UNKNOWN, "the policy does not say"),
        ({}, {}, 20, Status.OK, "runbook.md"),
    ],
)
def test_a_question_is_answered_from_the_policy(consumer, topic, number, status, words):
    answer = reviewed(consumer, topic).answers[number - 1]

    assert words in answer.text
    assert answer.status is status


def test_an_answer_names_the_key_that_decides_it():
    answers = reviewed({"ordering": "per-key"}).answers

    assert answers[9].key == "deliverySemantics.consumers.c.ordering"
    assert answers[10].key == "deliverySemantics.topics.t.key"
    assert answers[14].key == "deliverySemantics.topics.t.replayAllowed"
    assert answers[16].key == "deliverySemantics.consumers.c.lagSlo.maxLagSeconds"


def test_a_consumer_is_reviewed_on_every_topic_that_it_reads():
    text = "deliverySemantics: {topics: {a: {}, b: {}}, consumers: {c: {}, d: {topics: [b]}}}"

    found = lint_policy(Policy.parse(text))

    assert [(r.consumer, r.topic) for r in found.reviews] == [("c", "a"), ("c", "b"), ("d", "b")]


def test_a_consumer_can_be_linted_alone_and_without_topics():
    policy = Policy.parse("deliverySemantics: {consumers: {c: {}, d: {}}}")

    assert [(r.consumer, r.topic) for r in lint_policy(policy, "d").reviews] == [("d", None)]
    with pytest.raises(PolicyNameUnknown):
        lint_policy(policy, "e")


def test_a_topic_that_nobody_reads_is_noted():
    text = "deliverySemantics: {topics: {a: {}, b: {}}, consumers: {d: {topics: [b]}}}"

    (found,) = lint_policy(Policy.parse(text)).findings

    assert (found.code, found.severity) == ("topic-unread", Severity.NOTE)
    assert "topic a" in found.sentence


def test_a_policy_that_was_made_in_python_can_be_linted_too():
    policy = policy_with()
    made = Policy(topics=policy.topics, consumers=policy.consumers)

    assert lint_policy(made).every_finding == ()
