"""The policy file: what topics promise, how consumers keep it, and the real guarantee.

    text ──▶ Policy ──▶ Effective ──▶ Guarantee ──▶ findings ──▶ answers
             model      model         guarantee     rules        questions
                                                    └─── lint ───┘

`reader` reads the YAML, `sections` has the keys of the file, `vocabulary` the words that
they take, and `effective` says where each value comes from.  Only using a name imports
pydantic: the engine takes its enums from `semel.policy.vocabulary`, and needs neither
pydantic nor YAML for them.
"""

from typing import TYPE_CHECKING

from semel.lazy import lazily

if TYPE_CHECKING:
    from semel.policy.effective import EffectivePolicies, effective_policies
    from semel.policy.guarantee import ConsumerGuarantee, Promise, guarantee_of
    from semel.policy.lint import Linted, Review, lint_policy, review
    from semel.policy.model import Effective, Policy, policy_schema
    from semel.policy.questions import PolicyAnswer
    from semel.policy.reader import PolicyInvalid, PolicyNameUnknown, PolicyProblem
    from semel.policy.rules import Finding
    from semel.policy.sections import ConsumerPolicy, TopicPolicy
    from semel.policy.vocabulary import AntiPattern, PolicyStatus, Severity

__all__ = [
    "AntiPattern",
    "ConsumerGuarantee",
    "ConsumerPolicy",
    "Effective",
    "EffectivePolicies",
    "Finding",
    "Linted",
    "Policy",
    "PolicyAnswer",
    "PolicyInvalid",
    "PolicyNameUnknown",
    "PolicyProblem",
    "PolicyStatus",
    "Promise",
    "Review",
    "Severity",
    "TopicPolicy",
    "effective_policies",
    "guarantee_of",
    "lint_policy",
    "policy_schema",
    "review",
]

_HOMES = {
    "effective": ("EffectivePolicies", "effective_policies"),
    "guarantee": ("ConsumerGuarantee", "Promise", "guarantee_of"),
    "lint": ("Linted", "Review", "lint_policy", "review"),
    "model": ("Effective", "Policy", "policy_schema"),
    "questions": ("PolicyAnswer",),
    "reader": ("PolicyInvalid", "PolicyNameUnknown", "PolicyProblem"),
    "rules": ("Finding",),
    "sections": ("ConsumerPolicy", "TopicPolicy"),
    "vocabulary": ("AntiPattern", "Severity", "PolicyStatus"),
}

__getattr__ = lazily(
    __name__, {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names}
)
