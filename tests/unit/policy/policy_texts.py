"""Policies to test with: the template that people know, and one in which nothing is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from semel.policy.lint import Review, review
from semel.policy.model import Policy
from semel.policy.rules import Finding

TEMPLATE = """\
deliverySemantics:
  topics:
    case-events:
      defaultGuarantee: at-least-once
      key: caseId
      ordering: per-key
      retention: 7d
      replayAllowed: true
  consumers:
    search-indexer:
      idempotency:
        strategy: aggregate-version-upsert
        duplicateHandling: skip
      offsetCommit:
        timing: after-db-transaction
      retry:
        maxAttempts: 5
        backoff: exponential-jitter
      dlq:
        enabled: true
        topic: case-events.search-indexer.dlq
        owner: search-team
      poison:
        maxAttemptsBeforePark: 5
      lagSlo:
        maxLagSeconds: 60
    notification-sender:
      idempotency:
        strategy: notification-id
        externalProviderIdempotency: true
      replay:
        allowed: false-for-side-effect
      dlq:
        enabled: true
        manualReviewRequired: true
"""
"""Section 34 of the document that the keys come from, with its indentation."""

CLEAN_TOPIC: Mapping[str, Any] = {
    "defaultGuarantee": "at-least-once",
    "key": "id",
    "ordering": "none",
    "retention": "7d",
    "replayAllowed": True,
}
CLEAN_CONSUMER: Mapping[str, Any] = {
    "messageId": {"from": "header:id"},
    "sideEffects": [],
    "dlq": {"enabled": True, "owner": "a-team"},
    "lagSlo": {"maxLagSeconds": 60},
    "tests": {"duplicates": "test_twice", "crashWindow": "test_crash"},
    "runbook": "runbook.md",
}


def text_of(consumer: Mapping[str, Any], topic: Mapping[str, Any]) -> str:
    """Write the policy of a consumer `c` that reads a topic `t`."""
    document = {"deliverySemantics": {"topics": {"t": topic}, "consumers": {"c": consumer}}}
    return yaml.safe_dump(document, sort_keys=False)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Lay keys over others, section by section; None takes a key away."""
    result = dict(below)
    for key, value in above.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


def policy_with(
    consumer: Mapping[str, Any] | None = None, topic: Mapping[str, Any] | None = None
) -> Policy:
    """Return the clean policy with some keys changed."""
    return Policy.parse(
        text_of(merged(CLEAN_CONSUMER, consumer or {}), merged(CLEAN_TOPIC, topic or {})), "p.yaml"
    )


def reviewed(
    consumer: Mapping[str, Any] | None = None, topic: Mapping[str, Any] | None = None
) -> Review:
    """Lint the clean policy with some keys changed."""
    return review(policy_with(consumer, topic), "c", "t")


def findings_with(
    code: str,
    consumer: Mapping[str, Any] | None = None,
    topic: Mapping[str, Any] | None = None,
) -> list[Finding]:
    """Return the findings of one rule."""
    return [f for f in reviewed(consumer, topic).findings if f.code == code]
