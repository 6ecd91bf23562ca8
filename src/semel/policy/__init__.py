"""The policy file: what topics promise, how consumers keep it, and what it comes to.

text ──▶ Policy ──▶ Effective ──▶ Guarantee ──▶ findings and answers
         reader      effective     guarantee     lint
"""

from semel.policy.effective import Effective
from semel.policy.guarantee import Guarantee, Promise, guarantee_of
from semel.policy.lint import Linted, Review, lint_policy, review
from semel.policy.model import ConsumerPolicy, Policy, TopicPolicy
from semel.policy.problems import PolicyInvalid, PolicyNameUnknown, PolicyProblem
from semel.policy.questions import Answer, Status
from semel.policy.rules import AntiPattern, Finding, Severity
from semel.policy.schema import policy_schema

__all__ = [
    "Answer",
    "AntiPattern",
    "ConsumerPolicy",
    "Effective",
    "Finding",
    "Guarantee",
    "Linted",
    "Policy",
    "PolicyInvalid",
    "PolicyNameUnknown",
    "PolicyProblem",
    "Promise",
    "Review",
    "Severity",
    "Status",
    "TopicPolicy",
    "guarantee_of",
    "lint_policy",
    "policy_schema",
    "review",
]
