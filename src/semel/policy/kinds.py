"""The kinds of values that a policy's keys take.

A kind reads a value, says what it expects, writes it back as the file would
have it, and states the same as JSON Schema.  One object does all four, so that
the reader, the editors' schema and the reference cannot drift apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final, Protocol

from semel.codec import FromCoordinates, FromHeader, FromPayload
from semel.policy.document import Items, Node, Notes, Plain, Scalar
from semel.policy.durations import PATTERN, duration_words, parse_duration
from semel.policy.problems import Path, nearest


class Kind(Protocol):
    """One kind of value."""

    @property
    def expects(self) -> str:
        """Say in a few words what may stand here."""
        ...

    @property
    def example(self) -> Any:
        """A value as a file may have it."""
        ...

    def read(self, node: Node, at: Path, notes: Notes) -> Any:
        """Return the value; None, and a problem noted, where *node* is no such value."""
        ...

    def words(self, value: Any) -> str:
        """Write *value* as the file would have it."""
        ...

    def schema(self) -> dict[str, Any]:
        """State the kind as JSON Schema."""
        ...


def found_words(node: Node) -> str:
    """Say what stands in the file instead."""
    match node:
        case Scalar(None):
            return "nothing stands here"
        case Scalar(bool(value)):
            return f"found {str(value).lower()}"
        case Scalar(str(value)):
            return f"found the text {value!r}"
        case Scalar(value):
            return f"found the number {value}"
        case Items():
            return "found a list"
        case _:
            return "found keys and values"


def refuse(kind: Kind, node: Node, at: Path, notes: Notes, suggestion: str = "") -> Any:
    """Note that *node* is not of *kind*, and return None in place of a value."""
    notes.wrong(at, node.line, found_words(node), kind.expects, suggestion)


@dataclass(frozen=True, slots=True)
class Text:
    """Any text that is not empty, or one of a pattern."""

    expects: str = "text"
    example: str = "search-team"
    pattern: str = r"^[\s\S]*\S[\s\S]*$"

    def read(self, node: Node, at: Path, notes: Notes) -> Any:
        """Return the text."""
        if isinstance(node, Scalar) and isinstance(node.value, str):
            if re.fullmatch(self.pattern, node.value):
                return node.value
            return refuse(self, node, at, notes)
        plain = isinstance(node, Scalar) and node.value is not None
        return refuse(self, node, at, notes, "the same in quotes" if plain else "")

    def words(self, value: Any) -> str:
        """Write the text."""
        return str(value)

    def schema(self) -> dict[str, Any]:
        """State the pattern."""
        return {"type": "string", "pattern": self.pattern}


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    expects: str = "true or false"
    example: bool = True

    def read(self, node: Node, at: Path, notes: Notes) -> Any:
        """Return the boolean."""
        if isinstance(node, Scalar) and isinstance(node.value, bool):
            return node.value
        return refuse(self, node, at, notes)

    def words(self, value: Any) -> str:
        """Write ``true`` or ``false``."""
        return str(value).lower()

    def schema(self) -> dict[str, Any]:
        """State a boolean."""
        return {"type": "boolean"}


# Beyond any sense as a number of messages, attempts, seconds or milliseconds, and small enough
# to be multiplied without a thought.
MOST: Final = 10**9


def whole(node: Node) -> int | None:
    """Return a whole number, which may be written ``4.0`` as in JSON Schema; None if it is none."""
    match node:
        case Scalar(bool()):
            return None
        case Scalar(int(value)) if value <= MOST:
            return value
        case Scalar(float(value)) if value.is_integer() and value <= MOST:
            return int(value)
    return None


def refuse_number(kind: Kind, node: Node, at: Path, notes: Notes) -> Any:
    """Note that *node* is not of *kind*, with the upper limit where it is beyond that."""
    number = node.value if isinstance(node, Scalar) else None
    is_too_large = isinstance(number, int | float) and number > MOST
    limit = f", and at most {MOST}" if is_too_large else ""
    notes.wrong(at, node.line, found_words(node), kind.expects + limit, "")


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number from a lowest one on."""

    lowest: int
    example: int = 100

    @property
    def expects(self) -> str:
        """Name the lowest number."""
        return f"a whole number of {self.lowest} or more"

    def read(self, node: Node, at: Path, notes: Notes) -> Any:
        """Return the number."""
        value = whole(node)
        if value is None or value < self.lowest:
            return refuse_number(self, node, at, notes)
        return value

    def words(self, value: Any) -> str:
        """Write the number."""
        return str(value)

    def schema(self) -> dict[str, Any]:
        """State an integer within its limits."""
        return {"type": "integer", "minimum": self.lowest, "maximum": MOST}


@dataclass(frozen=True, slots=True)
class Seconds:
    """A number of seconds, more than none."""

    expects: str = "a number of seconds above 0"
    example: int = 60

    def read(self, node: Node, at: Path, notes: Notes) -> Any:
        """Return the number."""
        match node:
            case Scalar(bool()):
                return refuse_number(self, node, at, notes)
            case Scalar(int(value) | float(value)) if 0 < value <= MOST:
                return value
            case _:
                return refuse_number(self, node, at, notes)

    def words(self, value: Any) -> str:
        """Write the number."""
        return f"{value:g}"

    def schema(self) -> dict[str, Any]:
        """State a number above 0."""
        return {"type": "number", "exclusiveMinimum": 0, "maximum": MOST}


UNBOUNDED: Final = 0
"""The number of attempts that means: without end."""

# The largest number that is not infinite; JSON has no word for those that are.
_LARGEST: Final = 1.7976931348623157e308


@dataclass(frozen=True, slots=True)
class Attempts:
    """A number of attempts; 0, -1 and .inf all mean `UNBOUNDED`, which the lint refuses."""

    expects: str = "a whole number of attempts of 1 or more"
    example: int = 5

    def read(self, node: Node, at: Path, notes: Notes) -> Any:
        """Return the number, or `UNBOUNDED`."""
        value = whole(node)
        if isinstance(node, Scalar) and node.value == math.inf:
            value = UNBOUNDED
        if value is None or value < -1:
            return refuse_number(self, node, at, notes)
        return max(value, UNBOUNDED)

    def words(self, value: Any) -> str:
        """Write the number."""
        return str(value) if value != UNBOUNDED else "without end"

    def schema(self) -> dict[str, Any]:
        """State an integer; an infinite number is one that is above the largest."""
        return {
            "anyOf": [
                {"type": "integer", "minimum": -1, "maximum": MOST},
                {"type": "number", "exclusiveMinimum": _LARGEST},
            ]
        }


@dataclass(frozen=True, slots=True)
class Duration:
    """A duration with its unit."""

    expects: str = "a duration such as 7d, 36h or 90s"
    example: str = "14d"

    def read(self, node: Node, at: Path, notes: Notes) -> Any:
        """Return the duration as a timedelta."""
        if isinstance(node, Scalar):
            if isinstance(node.value, str) and (found := parse_duration(node.value)):
                return found
            if type(node.value) is int:
                return refuse(self, node, at, notes, f"{node.value}s or {node.value}d")
        return refuse(self, node, at, notes)

    def words(self, value: timedelta) -> str:
        """Write the duration."""
        return duration_words(value)

    def schema(self) -> dict[str, Any]:
        """State the pattern."""
        return {"type": "string", "pattern": PATTERN}


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    choices: Mapping[Plain, StrEnum]
    """By what stands in the file."""

    @property
    def expects(self) -> str:
        """Name all of them."""
        return f"one of {', '.join(self._texts())}"

    @property
    def example(self) -> Any:
        """The first of them."""
        return next(iter(self.choices))

    def read(self, node: Node, at: Path, notes: Notes) -> Any:
        """Return the enum's member."""
        if not isinstance(node, Scalar):
            return refuse(self, node, at, notes)
        for written, meant in self.choices.items():
            # By type, too: to Python 1 is True.
            if type(written) is type(node.value) and written == node.value:
                return meant
        near = nearest(node.value, self._texts()) if isinstance(node.value, str) else ""
        return refuse(self, node, at, notes, near)

    def words(self, value: Any) -> str:
        """Write the word."""
        return str(value)

    def schema(self) -> dict[str, Any]:
        """List the words."""
        return {"enum": list(self.choices)}

    def _texts(self) -> list[str]:
        return [str(member) for member in self.choices.values()]


@dataclass(frozen=True, slots=True)
class IdPlace:
    """Where a message's id comes from."""

    expects: str = "header:NAME, payload:PATH or coordinates"
    example: str = "header:message-id"

    def read(self, node: Node, at: Path, notes: Notes) -> Any:
        """Return the place."""
        value = node.value if isinstance(node, Scalar) else None
        if value == "coordinates":
            return FromCoordinates()
        if isinstance(value, str) and re.fullmatch(_PLACE, value):
            kind, _, name = value.partition(":")
            return FromHeader(name) if kind == "header" else FromPayload(name)
        near = nearest(str(value).partition(":")[0], ("header:", "payload:", "coordinates"))
        return refuse(self, node, at, notes, near)

    def words(self, value: FromHeader | FromPayload | FromCoordinates) -> str:
        """Write the place."""
        match value:
            case FromHeader(name):
                return f"header:{name}"
            case FromPayload(path):
                return f"payload:{path}"
            case _:
                return "coordinates"

    def schema(self) -> dict[str, Any]:
        """State the pattern."""
        return {"type": "string", "pattern": _PLACE}


_PLACE: Final = r"^((header|payload):\S+|coordinates)$"


@dataclass(frozen=True, slots=True)
class ListOf:
    """Values of one kind, none of them twice."""

    each: Kind

    @property
    def expects(self) -> str:
        """Say what the items are."""
        return f"a list, each item {self.each.expects}"

    @property
    def example(self) -> Any:
        """A list of one."""
        return [self.each.example]

    def read(self, node: Node, at: Path, notes: Notes) -> Any:
        """Return a tuple."""
        if not isinstance(node, Items):
            return refuse(self, node, at, notes)
        values = []
        for number, item in enumerate(node.items):
            place = (*at, number)
            notes.lines[place] = item.line
            value = self.each.read(item, place, notes)
            if value is not None and value in values:
                notes.wrong(place, item.line, "the item stands in the list already")
            values.append(value)
        return tuple(values)

    def words(self, value: Any) -> str:
        """Write the items."""
        return ", ".join(self.each.words(one) for one in value) or "none"

    def schema(self) -> dict[str, Any]:
        """State an array."""
        return {"type": "array", "items": self.each.schema(), "uniqueItems": True}
