"""The tables of the pages about consuming messages."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final

from docs.markdown import attribute_docs, first_sentence, rules_of, table
from semel.events import LABELS
from semel.messaging.failure import CODES, RETRYABLE_CLASSES, FailureClass
from semel.messaging.outcome import Told
from semel.messaging.records import Waits
from semel.policy.vocabulary import BatchPolicy, GapPolicy, StalePolicy
from semel.postgres.message_statements import STATEMENTS
from semel.testing import BrokerContract, ClaimsContract
from tests.stores.claims_table import CLAIM_TABLE


def metrics() -> str:
    """Every metric with its labels."""
    rows = [
        (f"`{metric}`", ", ".join(f"`{label}`" for label in labels))
        for metric, labels in LABELS.items()
    ]
    return table(("metric", "labels"), rows)


def outcomes() -> str:
    """The outcomes, as metrics and reports name them."""
    return ", ".join(f"`{name}`" for name in Told)


def claim_table() -> str:
    """What a claim finds, answers, and leads to."""
    rows = [
        (found.value, f"`{answer.__name__}`", then) for found, (answer, then) in CLAIM_TABLE.items()
    ]
    return table(("the claim finds", "it answers", "then"), rows)


def failure_codes() -> str:
    """The codes that semel gives, by class."""
    said = attribute_docs(FailureClass)
    rows = [
        (
            f"`{kind}`",
            said[kind.name],
            ", ".join(f"`{code}`" for code, its in CODES.items() if its is kind),
            "yes" if kind in RETRYABLE_CLASSES else "no",
        )
        for kind in FailureClass
    ]
    return table(("class", "meaning", "codes", "tried again"), rows)


def words(kind: type[StrEnum], head: str) -> Callable[[], str]:
    """Make a table of an enum's values and what they mean."""

    def printed() -> str:
        said = attribute_docs(kind)
        return table((head, "meaning"), [(f"`{word}`", said[word.name]) for word in kind])

    return printed


def messaging_rules() -> str:
    """The contracts of what users bring, with their rules, as their own sentences."""
    parts = []
    for contract in (ClaimsContract, BrokerContract):
        rules = rules_of(contract).removeprefix(f"*{first_sentence(contract).rstrip('.')}*").strip()
        parts.append(f"## `{contract.__name__}`\n\n{first_sentence(contract)}\n\n{rules}")
    return "\n\n".join(parts)


def message_statements() -> str:
    """The statements of the messages sink, in their order."""
    rows = [
        (f"`{one.name}`", one.does, "one for each change" if one.is_exact else "any number")
        for one in STATEMENTS
    ]
    return table(("statement", "what it does", "rows that it must change"), rows)


MESSAGING: Final[dict[str, Callable[[], str]]] = {
    "batch-policies": words(BatchPolicy, "policy"),
    "claim-table": claim_table,
    "failure-codes": failure_codes,
    "gap-policies": words(GapPolicy, "policy"),
    "message-statements": message_statements,
    "messaging-rules": messaging_rules,
    "metrics": metrics,
    "outcomes": outcomes,
    "stale-policies": words(StalePolicy, "policy"),
    "waits": words(Waits, "waits"),
}
"""By the name that stands in the page."""
