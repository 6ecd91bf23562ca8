"""The tables of the reference, as heads and rows: the docs print what the code decides by."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from semel.policy.effective import OVERLAPS
from semel.policy.guarantee import SEMANTICS, STRATEGIES
from semel.policy.keys import Section, Spec, keys_of
from semel.policy.kinds import Kind, ListOf
from semel.policy.lint import RULES
from semel.policy.matrix import MATRIX
from semel.policy.model import ConsumerPolicy, TopicPolicy
from semel.policy.questions import QUESTIONS
from semel.policy.rules import AntiPattern, Rule

Rows: TypeAlias = tuple[Sequence[str], Sequence[Sequence[str]]]


def topic_keys() -> Rows:
    """Every key of a topic."""
    return _keys(TopicPolicy)


def consumer_keys() -> Rows:
    """Every key of a consumer."""
    return _keys(ConsumerPolicy)


def leaves(section: type, prefix: str = "") -> Iterator[tuple[str, Spec]]:
    """Yield the keys of a section that hold values, with their paths."""
    for name, spec in keys_of(section).items():
        inner, step = _inside(spec.kind)
        if inner is None:
            yield f"{prefix}{name}", spec
        else:
            yield from leaves(inner, f"{prefix}{name}{step}.")


def _inside(kind: Kind) -> tuple[type | None, str]:
    if isinstance(kind, ListOf):
        return _inside(kind.each)[0], "[]"
    return (kind.of if isinstance(kind, Section) else None), ""


def _keys(section: type) -> Rows:
    rows = [
        (f"`{path}`", spec.kind.expects, _default(path, spec), spec.meaning)
        for path, spec in leaves(section)
    ]
    return ("key", "value", "default", "meaning"), rows


def _default(path: str, spec: Spec) -> str:
    if spec.required:
        return f"required in `{path.rpartition('.')[0]}`"
    plain = spec.default_words or spec.default is None
    return spec.default_shown if plain else f"`{spec.default_shown}`"


def overlaps() -> Rows:
    """Who wins where topic and consumer both speak."""
    rows = [(f"`{o.topic_key}`", f"`{o.consumer_key}`", o.wins) for o in OVERLAPS.values()]
    return ("the topic's", "the consumer's", "wins"), rows


def strategies() -> Rows:
    """What each strategy does for the handler's rows."""
    said = {True: "yes", False: "no"}
    rows = [
        (f"`{name}`", said[f.claims], said[f.at_target], said[f.outlives_claims])
        for name, f in STRATEGIES.items()
    ]
    head = ("strategy", "takes a claim", "rows refuse a repetition", "however old it is")
    return head, rows


def semantics() -> Rows:
    """From the ack and the repetition to the semantics."""
    rows = [(ack, repetition, found) for (ack, repetition), found in SEMANTICS.items()]
    return ("the broker is told", "a repetition is", "semantics of the effect"), rows


def matrix() -> Rows:
    """The delivery matrix."""
    rows = [(row.producer, row.broker, row.consumer, row.final_effect) for row in MATRIX]
    return ("producer", "broker", "consumer", "final effect"), rows


def rules() -> Rows:
    """Everything that the lint looks for."""
    rows = [
        (f"`{rule.code}`", _severity(rule), _said(rule.says), _said(rule.fix)) for rule in RULES
    ]
    return ("finding", "severity", "what it says", "the way out"), rows


def _severity(rule: Rule) -> str:
    if rule.if_critical is None:
        return rule.severity
    return f"{rule.severity}; {rule.if_critical} where critical"


def _said(template: str) -> str:
    return re.sub(r"\{(\w+)\}", r"*\1*", template)


def anti_patterns() -> Rows:
    """The ten anti-patterns, and the findings that name them."""
    rows = [
        (pattern, ", ".join(f"`{rule.code}`" for rule in RULES if rule.anti_pattern is pattern))
        for pattern in AntiPattern
    ]
    return ("anti-pattern", "named by"), rows


def questions() -> Rows:
    """The twenty questions, and the key that decides each."""
    rows = [
        (str(number), one.text, f"`{one.key.removeprefix('topic:')}`")
        for number, one in enumerate(QUESTIONS, 1)
    ]
    return ("", "question", "decided by"), rows


REFERENCE: Final[Mapping[str, Callable[[], Rows]]] = {
    "delivery-matrix": matrix,
    "policy-anti-patterns": anti_patterns,
    "policy-consumer-keys": consumer_keys,
    "policy-overlaps": overlaps,
    "policy-questions": questions,
    "policy-rules": rules,
    "policy-semantics": semantics,
    "policy-strategies": strategies,
    "policy-topic-keys": topic_keys,
}
"""By the name that stands in the page."""
