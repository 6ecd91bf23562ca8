"""Row changes that a transaction made, as people may read them: for dry runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from semel.secrets import HIDDEN

LONGEST_SHOWN: Final = 200

SECRET: Final = re.compile(
    r"passw|secret|token|api_?key|credential|private_?key|cvv|cvc|card_?number|iban|ssn",
    re.IGNORECASE,
)
"""Columns and parameters whose values are not shown."""


class Change(StrEnum):
    """What was done with a row."""

    INSERT = "insert"
    UPDATE = "update"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class RowChange:
    """One row that was changed, or the rows that one statement changed."""

    change: Change
    table: str
    key: str = ""
    """The row's key, where it is known."""

    before: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Any] = field(default_factory=dict)
    """New values; of a statement, its parameters."""

    rows: int | None = 1
    """How many rows; None where the database does not say."""

    statement: str = ""
    """The SQL, where it was not an object's change."""


def shown(name: str, value: Any) -> Any:
    """Return a value as JSON can say it, without secrets and not too long."""
    if SECRET.search(name) and value is not None:
        return HIDDEN
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(bytes(value))} bytes>"
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): shown(str(key), one) for key, one in value.items()}
    text = str(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}… ({len(text)} long)"


def all_shown(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by name, as JSON can say them."""
    return {name: shown(name, value) for name, value in values.items()}
