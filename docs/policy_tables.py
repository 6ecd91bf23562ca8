"""The tables of the reference, as heads and rows: the docs print what the code decides by."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

from docs.markdown import attribute_docs
from semel.policy import vocabulary
from semel.policy.effective import value_words
from semel.policy.guarantee import SEMANTICS, STRATEGIES, AckTime, Repetition, listing
from semel.policy.model import OVERLAPS, consumer_path, key_schema, topic_path
from semel.policy.questions import QUESTIONS
from semel.policy.reader import Schema, expects
from semel.policy.rules import RULES, Rule
from semel.policy.spark import RULES_ON_SPARK
from semel.policy.vocabulary import AntiPattern, Semantics

Rows: TypeAlias = tuple[Sequence[str], Sequence[Sequence[str]]]


def topic_keys() -> Rows:
    """Every key of a topic."""
    return _keys(key_schema(topic_path("*")))


def consumer_keys() -> Rows:
    """Every key of a consumer."""
    return _keys(key_schema(consumer_path("*")))


def words() -> Rows:
    """The words that a consumer's keys take, with their meaning."""
    rows = []
    for path, schema, _ in leaves(key_schema(consumer_path("*"))):
        if "enum" in schema:
            kind = getattr(vocabulary, schema["title"])
            said = attribute_docs(kind)
            members = [kind(value_words(written)) for written in schema["enum"]]
            rows += [(f"`{path}`", f"`{member}`", said[member.name]) for member in members]
    return ("key", "value", "meaning"), rows


def leaves(section: Schema, prefix: str = "") -> Iterator[tuple[str, Schema, bool]]:
    """Yield the keys of a section that hold values: path, schema, and whether it is required."""
    for name, schema in section["properties"].items():
        inner, step = (schema["items"], "[]") if "items" in schema else (schema, "")
        if "properties" in inner:
            yield from leaves(inner, f"{prefix}{name}{step}.")
        else:
            yield f"{prefix}{name}", schema, name in section.get("required", ())


def _keys(section: Schema) -> Rows:
    rows = [
        (f"`{path}`", expects(schema), _default(path, schema, required), _meaning(schema))
        for path, schema, required in leaves(section)
    ]
    return ("key", "value", "default", "meaning"), rows


def _meaning(schema: Schema) -> str:
    return " ".join(schema["description"].split())


def _default(path: str, schema: Schema, required: bool) -> str:
    if required:
        return f"required in `{path.rpartition('.')[0]}`"
    if "x-default" in schema:
        return str(schema["x-default"])
    return f"`{value_words(schema['default'])}`" if "default" in schema else "-"


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
    return ("the message is acknowledged", "a repetition is", "semantics of the effect"), rows


class Publishing(StrEnum):
    """What a producer's repeated publish looks like to consumers."""

    NEW_MESSAGE = "another message"
    """Consumers cannot recognise it as a repetition."""

    ONE_RECORD = "nothing"
    """The broker drops it."""

    SAME_ID = "the same message again"
    """It carries the same id."""


PRODUCER_REPEATS: Final[Mapping[tuple[Publishing, Repetition], bool]] = {
    (Publishing.NEW_MESSAGE, Repetition.APPLIED): True,
    (Publishing.NEW_MESSAGE, Repetition.RECOGNISED): True,
    (Publishing.NEW_MESSAGE, Repetition.ONE_TRANSACTION): True,
    (Publishing.ONE_RECORD, Repetition.APPLIED): False,
    (Publishing.ONE_RECORD, Repetition.RECOGNISED): False,
    (Publishing.ONE_RECORD, Repetition.ONE_TRANSACTION): False,
    (Publishing.SAME_ID, Repetition.APPLIED): True,
    (Publishing.SAME_ID, Repetition.RECOGNISED): False,
    # A transaction does not look at ids.
    (Publishing.SAME_ID, Repetition.ONE_TRANSACTION): True,
}
"""Whether a publish that is repeated has its effect again."""


@dataclass(frozen=True, slots=True)
class SetUp:
    """One row: in words, and as the table sees it."""

    producer: str
    broker: str
    consumer: str
    publishing: Publishing
    ack: AckTime
    repetition: Repetition
    effect: str

    @property
    def semantics(self) -> Semantics:
        """What the effect has in the end; a producer's own repetitions weaken it."""
        found = SEMANTICS[self.ack, self.repetition]
        if found is Semantics.AT_MOST_ONCE or not self.producer_repeats:
            return found
        return Semantics.AT_LEAST_ONCE

    @property
    def producer_repeats(self) -> bool:
        """Return whether a repeated publish has its effect again."""
        return PRODUCER_REPEATS[self.publishing, self.repetition]

    @property
    def repeated_by(self) -> tuple[str, ...]:
        """Return which side can cause the effect to happen twice."""
        consumer = SEMANTICS[self.ack, self.repetition] is Semantics.AT_LEAST_ONCE
        return (("the producer",) if self.producer_repeats else ()) + (
            ("the consumer",) if consumer else ()
        )

    @property
    def final_effect(self) -> str:
        """Say it in one clause, with its scope."""
        words = f"{self.semantics} for {self.effect}"
        if self.repeated_by:
            words += f": duplicates by {listing(self.repeated_by)}"
        return words


MATRIX: Final = (
    SetUp(
        "not idempotent",
        "at-least-once",
        "not idempotent",
        Publishing.NEW_MESSAGE,
        AckTime.AFTER,
        Repetition.APPLIED,
        "every effect",
    ),
    SetUp(
        "idempotent producer",
        "at-least-once",
        "not idempotent",
        Publishing.ONE_RECORD,
        AckTime.AFTER,
        Repetition.APPLIED,
        "every effect",
    ),
    SetUp(
        "outbox",
        "durable publish",
        "idempotent: claim and rows in one transaction",
        Publishing.SAME_ID,
        AckTime.AFTER,
        Repetition.RECOGNISED,
        "rows in the handler's database",
    ),
    SetUp(
        "transactional Kafka pipeline",
        "transactions configured",
        "output to Kafka only",
        Publishing.ONE_RECORD,
        AckTime.WITHIN,
        Repetition.ONE_TRANSACTION,
        "records in Kafka, within the broker's transaction",
    ),
    SetUp(
        "outbox",
        "durable publish",
        "sends an e-mail, without a key",
        Publishing.SAME_ID,
        AckTime.AFTER,
        Repetition.APPLIED,
        "the e-mail",
    ),
    SetUp(
        "outbox",
        "durable publish",
        "sends a notification with its id, which the provider recognises",
        Publishing.SAME_ID,
        AckTime.AFTER,
        Repetition.RECOGNISED,
        "the notification",
    ),
)
"""The six rows."""


def matrix() -> Rows:
    """The delivery matrix."""
    rows = [(row.producer, row.broker, row.consumer, row.final_effect) for row in MATRIX]
    return ("producer", "broker", "consumer", "final effect"), rows


def rules() -> Rows:
    """Everything that the lint looks for."""
    return _rules(RULES)


def rules_on_spark() -> Rows:
    """What the lint looks for beside that, where a pipeline runs the consumer."""
    return _rules(RULES_ON_SPARK)


def _rules(of: Iterable[Rule]) -> Rows:
    rows = [(f"`{rule.code}`", _severity(rule), _said(rule.says), _said(rule.fix)) for rule in of]
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
    "policy-rules-on-spark": rules_on_spark,
    "policy-semantics": semantics,
    "policy-strategies": strategies,
    "policy-topic-keys": topic_keys,
    "policy-words": words,
}
"""By the name that stands in the page."""
