"""What the lint says of a consumer that a pipeline on Spark runs."""

from __future__ import annotations

import pytest

from semel.operate import Engine, review
from semel.policy.lint import lint_policy
from semel.policy.model import Policy
from semel.policy.rules import RULES
from semel.policy.spark import OF_SERVICES, RULES_ON_SPARK
from semel.policy.vocabulary import Semantics, Severity
from tests.unit.policy.policy_texts import TEMPLATE, policy_with

NOTE, WARN, REFUSED = Severity.NOTE, Severity.WARN, Severity.REFUSED
TABLE = {"retry": {"mode": "retry-table"}}
CALLS = {"sideEffects": [{"name": "mail"}], "guarantee": "effectively-once"}
KEYED = {"sideEffects": [{"name": "mail", "idempotencyKey": True}]}
WRITTEN = {"sideEffects": [{"name": "mail", "intent": "outbox"}]}
CASES = [
    ("waits-in-retry-table", NOTE, {"retry": {"mode": "blocking"}}, TABLE),
    ("call-from-a-task", NOTE, KEYED, WRITTEN),
    ("call-repeats", REFUSED, CALLS, {**KEYED, "guarantee": "effectively-once"}),
    (
        "rows-for-a-duplicate",
        WARN,
        {"idempotency": {"duplicateHandling": "invoke"}},
        {"idempotency": {"duplicateHandling": "skip"}},
    ),
    ("only-for-services", WARN, {"mode": "leased"}, {"mode": "transactional"}),
    (
        "only-for-services",
        WARN,
        {"batch": {"size": 10, "policy": "independent"}},
        {"concurrency": 4},
    ),
]


def found(code, consumer, engine=Engine.SPARK):
    findings = review(policy_with(consumer), "c", "t", engine).findings
    return [one for one in findings if one.code == code]


@pytest.mark.parametrize(("code", "severity", "trigger", "near"), CASES)
def test_a_rule_of_spark_finds_what_it_is_for_and_leaves_services_alone(
    code, severity, trigger, near
):
    (finding,) = found(code, trigger)

    assert finding.severity is severity
    assert "{" not in finding.sentence + finding.fix
    assert found(code, near) == []
    assert found(code, trigger, Engine.SERVICE) == []


def test_every_rule_of_spark_is_tested_and_has_a_code_of_its_own():
    codes = {rule.code for rule in RULES_ON_SPARK}

    assert {code for code, *_ in CASES} == codes
    assert not codes & {rule.code for rule in RULES}
    assert {rule.code for rule in RULES} >= OF_SERVICES


def test_blocking_retries_are_told_where_a_message_waits_on_spark():
    (finding,) = found("waits-in-retry-table", {"retry": {"mode": "blocking"}})

    assert "waits in the retry table and holds its key" in finding.sentence


def test_what_only_services_do_is_not_found_on_spark():
    policy = policy_with({"mode": "leased"})
    in_services = {one.code for one in review(policy, "c", "t").findings}
    on_spark = {one.code for one in review(policy, "c", "t", Engine.SPARK).findings}

    assert "lease-repeats-work" in in_services
    assert not on_spark & OF_SERVICES


def test_the_guarantee_on_spark_is_that_of_the_pipeline():
    policy = policy_with({"mode": "leased", "offsetCommit": {"timing": "before-processing"}})
    rows, *_ = review(policy, "c", "t", Engine.SPARK).guarantee.promises

    assert rows.semantics is Semantics.EFFECTIVELY_ONCE
    assert rows.what == "rows of the pipeline's sinks, decided together with its claims and offsets"
    assert "handler's database" in review(policy, "c", "t").guarantee.sentence


def test_one_order_over_a_whole_topic_is_refused_on_spark_too():
    policy = Policy.parse(TEMPLATE.replace("per-key", "global"))
    found = {one.code for one in lint_policy(policy, None, Engine.SPARK).every_finding}

    assert "global-ordering" in found
