"""The policy file as JSON Schema, for editors that complete and check while one types."""

from __future__ import annotations

from typing import Any, Final

from semel.policy.keys import Section
from semel.policy.model import ConsumerPolicy, TopicPolicy
from semel.policy.reader import Document

DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"


def policy_schema() -> dict[str, Any]:
    """Return the schema of a policy file; it has exactly the keys that the reader reads.

    What no schema can say, it does not: keys that contradict each other, topics that do
    not exist, a key that stands twice.
    """
    stated = Section(Document).schema()
    parts = stated["properties"]["deliverySemantics"]["properties"]
    apart = {"topic": TopicPolicy, "consumer": ConsumerPolicy}
    for name in apart:
        parts[f"{name}s"]["additionalProperties"] = {"$ref": f"#/$defs/{name}"}
    return {
        "$schema": DRAFT,
        "title": "semel policy",
        **stated,
        "$defs": {name: Section(section).schema() for name, section in apart.items()},
    }
